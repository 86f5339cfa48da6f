"""A drafter of other sizes that begins with what a trained one knows.

Every weight is kept. Blocks of another size have other slots to look at; but for that, and for what a smaller Markov
rank cannot hold, it computes at first what the trained one computed. More layers are put in front and begin as the
identity (function-preserving growth, Chen et al. 2016, "Net2Net", 1511.05641); a Markov head of lower rank is the
closest one (Eckart and Young 1936), one of higher rank the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specflow.errors import InvalidSettingError

from ..dspark.adapter import TargetAdapter
from ..dspark.model import DSparkModel
from .design import start_from_target, target_layers_to_copy

RESIZABLE = ("block_size", "context_bias", "markov_rank", "markov_top_k", "num_layers", "sliding_window")
"""Fields of a config that may differ from the trained drafter's."""


@torch.no_grad()
def resized(
    trained: DSparkModel, changes: Mapping[str, Any], adapter: TargetAdapter, *, seed: int = 0, fresh: bool = False
) -> DSparkModel:
    """A drafter with some sizes changed and the weights of a trained one.

    Args:
        trained: where weights come from, in float32; left as it is.
        changes: fields to set otherwise, of :data:`RESIZABLE`.
        adapter: the target, whose layers new ones are copied from where sizes allow.
        seed: of the weights that are new.
        fresh: make new layers of random weights even where the target's could be copied.

    Raises:
        InvalidSettingError: a field cannot change, or cannot have that value.
    """
    old = trained.config
    fixed = sorted(name for name in changes if name not in RESIZABLE and changes[name] != getattr(old, name, None))
    if fixed:
        raise InvalidSettingError("drafter", fixed, f"of a drafter to go on from, no fields but {', '.join(RESIZABLE)}")
    config = old.with_(**{name: value for name, value in changes.items() if name in RESIZABLE})
    if config == old:
        return trained
    if config.num_layers < old.num_layers:
        raise InvalidSettingError(
            "num_layers", config.num_layers, f"at least {old.num_layers}, the trained drafter's layers"
        )
    if config.markov_rank != old.markov_rank and old.markov != "vanilla":
        raise InvalidSettingError(
            "markov_rank", config.markov_rank, f"{old.markov_rank}: only a vanilla Markov head can change its rank"
        )
    with torch.random.fork_rng(devices=[]):  # several processes must make the same weights
        torch.manual_seed(seed)
        model = DSparkModel(config, trained.draft_ids).to(adapter.device)
    skipped = {"layers", "markov_head", "confidence_head"} if config.markov_rank != old.markov_rank else {"layers"}
    weights = {name: tensor for name, tensor in trained.state_dict().items() if name.split(".")[0] not in skipped}
    more = config.num_layers - old.num_layers
    if more:
        _put_in_front(model, more, adapter, fresh=fresh)
    model.load_state_dict(weights, strict=False)
    for index, layer in enumerate(trained.layers):
        model.layers[index + more].load_state_dict(layer.state_dict())
    if "markov_head" in skipped:
        _change_rank(trained, model)
    return model


def _put_in_front(model: DSparkModel, count: int, adapter: TargetAdapter, *, fresh: bool) -> None:
    """Let the first layers add nothing to what passes through them, until they have learned to."""
    numbers = () if fresh else target_layers_to_copy(model.config, adapter)
    if numbers:
        start_from_target(model, adapter, numbers)
    for index in range(count):
        layer: Any = model.layers[index]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def _change_rank(trained: DSparkModel, model: DSparkModel) -> None:
    """The Markov bias W1 W2^T with another number of columns, and the confidence head's view of W1 with it."""
    theirs, mine = trained.markov_head, model.markov_head
    if theirs is None or mine is None:
        return
    first, second = theirs.previous.weight, theirs.output.weight  # [V, r], [Vd, r]
    rank, wanted = first.shape[1], model.config.markov_rank
    if wanted < rank:
        # The singular vectors of a product of thin matrices are those of its small core.
        first_basis, first_core = torch.linalg.qr(first)
        second_basis, second_core = torch.linalg.qr(second)
        left, sizes, right = torch.linalg.svd(first_core @ second_core.T)
        scale = sizes[:wanted].sqrt()
        first, second = first_basis @ left[:, : len(scale)] * scale, second_basis @ right[: len(scale)].T * scale
    # Columns beyond stay random in W2 alone: they say nothing yet, and zeros on both sides would never learn.
    mine.previous.weight.zero_()
    mine.previous.weight[:, : first.shape[1]] = first
    mine.output.weight[:, : second.shape[1]] = second
    _copy_confidence(trained, model)


def _copy_confidence(trained: DSparkModel, model: DSparkModel) -> None:
    theirs, mine = trained.confidence_head, model.confidence_head
    if theirs is None or mine is None or trained.markov_head is None or model.markov_head is None:
        return
    mine.linear.bias.copy_(theirs.linear.bias)
    width = model.config.hidden_size
    mine.linear.weight[:, :width] = theirs.linear.weight[:, :width]
    if theirs.with_previous:
        # In float64 on the CPU, where a table may have fewer ranks than columns.
        says = trained.markov_head.previous.weight.double() @ theirs.linear.weight[:, width:].double().T
        table = model.markov_head.previous.weight.cpu().double()
        mine.linear.weight[:, width:] = torch.linalg.lstsq(table, says.cpu(), driver="gelsd").solution.T


__all__ = ["RESIZABLE", "resized"]
