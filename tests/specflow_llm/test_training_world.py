"""One process alone, and what several would share."""

from __future__ import annotations

import pytest
import torch

from specflow_llm.training.world import World


def test_alone_everything_is_a_no_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``torchrun`` there is one process, it is the first, it has the whole batch, and sums are itself."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = World.join(torch.device("cpu"))
    assert world == World()
    assert world.is_first
    assert world.share([3, 1, 2]) == [3, 1, 2]
    assert world.sum(torch.tensor(5.0)).item() == 5.0
    parameter = torch.nn.Parameter(torch.zeros(2))
    world.sum_gradients([parameter])
    assert parameter.grad is None
    world.wait()
    world.leave()


def test_shares_of_a_batch_are_the_batch() -> None:
    """Every number belongs to one process; a process may have none."""
    batch = [9, 4, 7, 1, 3]
    for size in (1, 2, 3, 7):
        shares = [World(rank, size).share(batch) for rank in range(size)]
        assert sorted(number for share in shares for number in share) == sorted(batch)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert [World(rank, 2).is_first for rank in range(2)] == [True, False]
