"""Several processes that train one drafter together, as ``torchrun`` starts them; alone, everything is a no-op."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed


@dataclass(frozen=True, slots=True)
class World:
    """Which process this is."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """True in the process that talks, and writes what one process writes."""
        return self.rank == 0

    @classmethod
    def join(cls, device: torch.device) -> World:
        """Join the processes that ``torchrun`` started (it sets ``RANK`` and ``WORLD_SIZE``); alone without it."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not distributed.is_initialized():
            # One process may still make text or features for hours while the others wait for it.
            distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=7))
        return cls(distributed.get_rank(), size)

    def share(self, items: list[int]) -> list[int]:
        """This process's part of a batch."""
        return items[self.rank :: self.size]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over all processes, in place."""
        if self.size > 1:
            distributed.all_reduce(tensor)
        return tensor

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add up gradients over all processes; parameters that this process did not use count as zero."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(parameter.grad)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            distributed.barrier()

    def leave(self) -> None:
        """End the group."""
        if self.size > 1 and distributed.is_initialized():
            distributed.destroy_process_group()


def local_device(device: str) -> str:
    """This process's own GPU where ``torchrun`` started one process per GPU; else what was asked for."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is None or device not in {"auto", "cuda"} or not torch.cuda.is_available():
        return device
    return f"cuda:{rank}"
