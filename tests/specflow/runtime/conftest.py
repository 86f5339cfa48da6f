"""Event loops for tests of the runtime."""

from __future__ import annotations

from typing import Any

import pytest
import trio.testing


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Both event loops; trio with a clock that jumps to the next deadline for tests marked ``jumping``."""
    if request.param == "jumping":
        return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}
    return request.param
