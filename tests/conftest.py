"""What every test can rely on: no network, one thread, explicit generators, both event loops.

The settings below are read when torch, transformers and tokenizers are imported, so they stand before anything that
could import them. Each can be overridden from the shell.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the network is not a test of this project
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forked workers would print warnings
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a forward of a tiny model costs less than waking a second thread

if TYPE_CHECKING:
    import torch


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run every test marked ``anyio`` under asyncio and under trio."""
    backend: str = request.param
    return backend


@pytest.fixture
def make_generator() -> Callable[[int], torch.Generator]:
    """Build CPU generators from seeds: ``make_generator(7)``; equal seeds draw equal numbers."""
    import torch  # noqa: PLC0415 -- tests of the core run without torch

    return lambda seed: torch.Generator().manual_seed(seed)


@pytest.fixture
def generator(make_generator: Callable[[int], torch.Generator]) -> torch.Generator:
    """One generator with a fixed seed, for tests that need some randomness and do not care which."""
    return make_generator(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is no GPU, with the reason in the summary."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # noqa: PLC0415 -- only where a test asks for a GPU

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
