"""What must hold before a drafter of another project may draft here: each check refuses by name and says what to do.

A drafter that is read wrongly never fails by itself. It drafts, nothing is accepted, and the output is right but slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ...errors import CheckpointError
from ..adapter import TargetAdapter
from ..config import DSparkConfig, Layout
from .files import FLOATING, TensorFiles

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
COPIES_WITHIN = 1 / 64
"""Largest relative difference between a row of a copy and the target's: bfloat16 rounds by 1/256."""

_SAMPLED_ROWS = 64
_PROBE = (-60.0, -0.5, 0.25, 60.0)

_UNSUPPORTED = (
    ("pre_feedforward_layernorm", "layers with four norms (the Gemma 'sandwich')"),
    ("post_feedforward_layernorm", "layers with four norms (the Gemma 'sandwich')"),
    (".v_norm.", "normalised values"),
    ("layer_scalar", "scaled layers"),
    (".experts.", "a mixture of experts"),
    ("mlp.gate.", "a mixture of experts"),
    (".router.", "a mixture of experts"),
    ("hc_", "hyper-connections"),
    ("qkv_proj", "fused query-key-value projections"),
    ("gate_up_proj", "fused gate and up projections"),
    (".g_proj.", "gated attention"),
    ("kv_a_proj", "latent attention"),
    ("aux_hidden_norms", "a norm per target layer before the fusion"),
    ("_proj.bias", "projections with biases"),
    ("weight_scale", "quantised weights"),
    ("weight_packed", "quantised weights"),
    ("weight_zero_point", "quantised weights"),
    ("qweight", "quantised weights"),
    ("qzeros", "quantised weights"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statements:
    """What the caller vouches for, where a checkpoint is silent or unusual."""

    layout: Layout | None = None
    """Which slots predict, for files that do not say it."""
    own_rope: bool = False
    """The drafter was trained with rotary parameters other than the target's, on purpose."""
    copies_within: float = COPIES_WITHIN
    """Relative difference allowed between the checkpoint's copies of embedding and head and the target's."""
    tokenizer: Any = None
    """The target's; with it, a mask id that stands for text is refused."""


def check_parts(files: TensorFiles, origin: object, allowed: frozenset[str] = frozenset()) -> None:
    """Refuse tensors of parts that the drafter here does not have, and weights that are not plain numbers.

    Args:
        files: the checkpoint.
        origin: for messages.
        allowed: tensors of other types that the layout defines (vocabulary maps).

    Raises:
        CheckpointError: naming the part.
    """
    heads = ("markov_head.", "confidence_head.")
    for name in sorted(files.names - allowed):
        for mark, part in _UNSUPPORTED:
            if mark in name and not (mark == "_proj.bias" and name.startswith(heads)):
                raise CheckpointError(
                    origin,
                    f"it has {part} ({name}), which this library's drafters do not have",
                    "use another checkpoint, or train a drafter here: specflow-llm train",
                )
        if files.stored_type(name) not in FLOATING:
            raise CheckpointError(
                origin,
                f"{name} is stored as {files.stored_type(name)}: quantised weights need their quantiser",
                "use the checkpoint in bfloat16, float16 or float32",
            )


def check_finite(tensors: Mapping[str, torch.Tensor], origin: object) -> None:
    """Refuse weights that were never filled: some trainers start them as NaN to notice.

    Raises:
        CheckpointError: naming the tensor.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                origin, f"{name} holds NaN or infinity: it was never filled, or training diverged", "save it again"
            )


def check_layers(layers: tuple[int, ...], num_target_layers: int, said: str, origin: object) -> None:
    """Refuse feature layers that the target cannot hand over, or whose features would mean something else.

    Args:
        layers: decoder layers, 0 the first.
        num_target_layers: of the target.
        said: how the file puts it, for the message.
        origin: for messages.

    Raises:
        CheckpointError: naming the layer.
    """
    if -1 in layers:
        raise CheckpointError(
            origin,
            f"it reads the target's embeddings as features ({said}), which are not handed to drafters here",
            "use a checkpoint that reads decoder layers only",
        )
    if any(layer == num_target_layers - 1 for layer in layers):
        raise CheckpointError(
            origin,
            f"it reads the target's last layer ({said}): some trainers take that output after the final norm and some "
            "before it, and the file does not say which",
            "use a checkpoint that reads earlier layers only",
        )
    rising = all(first < second for first, second in pairwise(layers))
    if not layers or not rising or layers[0] < 0 or layers[-1] >= num_target_layers:
        raise CheckpointError(
            origin,
            f"its feature layers ({said}) are not in rising order within the target's {num_target_layers} layers",
            "use the target it was trained for",
        )


def check_mask(mask: int, adapter: TargetAdapter, tokenizer: Any, origin: object) -> None:
    """Refuse a mask that is no id, or that occurs in text: slots to be filled would look like tokens.

    Raises:
        CheckpointError: saying what the id stands for.
    """
    remedy = "set mask_token_id to the id it was trained with"
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < adapter.vocab_size:
        raise CheckpointError(
            origin,
            f"mask_token_id {mask!r} is no id of the target's vocabulary (0 to {adapter.vocab_size - 1})",
            remedy,
        )
    for role in ("bos", "eos"):
        known = [getattr(adapter.config, f"{role}_token_id", None), getattr(tokenizer, f"{role}_token_id", None)]
        if any(mask == found or (isinstance(found, (list, tuple)) and mask in found) for found in known):
            raise CheckpointError(
                origin, f"mask_token_id {mask} is the target's {role} token, which texts have", remedy
            )
    if tokenizer is None:
        return
    added = getattr(tokenizer, "added_tokens_decoder", {})
    if mask in added and added[mask].special:
        content = str(added[mask].content)
        used = content in str(getattr(tokenizer, "chat_template", None) or "")
        special = "a special token that the chat template writes"
    else:
        names = {number: token for token, number in tokenizer.get_vocab().items()}
        used, content, special = mask in names, str(names.get(mask)), "text"
    if used:
        raise CheckpointError(origin, f"mask_token_id {mask} stands for {content!r}, {special}", remedy)


def check_plain(adapter: TargetAdapter, origin: object) -> None:
    """Refuse targets that do more to embeddings or logits than look them up: these layouts' drafters do not.

    Raises:
        CheckpointError: saying what the target does.
    """
    ids = _spread(adapter.vocab_size)
    plain: Any = adapter.model.get_input_embeddings().weight
    embedded = adapter.embed(torch.tensor(ids, device=adapter.device)).detach().float()
    probe = torch.tensor(_PROBE)
    _, bias = adapter.head_rows(torch.tensor([0], device=adapter.device))
    for odd, what in (
        (not torch.allclose(embedded, plain[ids].detach().float(), rtol=1e-2), "scales its embeddings"),
        (not torch.equal(adapter.finish(probe), probe), "scales or caps its logits"),
        (bias is not None, "has an output head with a bias"),
    ):
        if odd:
            raise CheckpointError(
                origin,
                f"the target {what}, and drafters of this layout use plain embeddings and a plain head",
                "train a drafter here, which shares the target's own: specflow-llm train",
            )


def check_copies(
    files: TensorFiles,
    adapter: TargetAdapter,
    config: DSparkConfig,
    draft_ids: torch.Tensor | None,
    statements: Statements,
    origin: object,
) -> bool:
    """Compare some rows of the checkpoint's copies of embedding and head with the target's.

    Args:
        files: the checkpoint.
        adapter: the target.
        config: of the drafter.
        draft_ids: [Vd] target ids of the head's rows; None for all.
        statements: what the caller vouches for.
        origin: for messages.

    Returns:
        whether there was anything to compare.

    Raises:
        CheckpointError: a copy has another shape or other rows.
    """
    rows = sorted({*_spread(config.vocab_size), config.mask_token_id})
    columns = _spread(config.head_size)
    ids = columns if draft_ids is None else draft_ids[columns].tolist()
    ours = adapter.embed(torch.tensor(rows, device=adapter.device))
    weight, _ = adapter.head_rows(torch.tensor(ids, device=adapter.device))
    compared = False
    for name, height, picked, theirs, meant in (
        (EMBEDDING, config.vocab_size, rows, ours, rows),
        (HEAD, config.head_size, columns, weight, ids),
    ):
        if name not in files.names:
            continue
        compared = True
        shape = (height, config.hidden_size)
        if files.shape(name) != shape:
            raise CheckpointError(
                origin,
                f"{name} has shape {files.shape(name)}, vocabulary and hidden size say {shape}",
                "check that config and weights belong together",
            )
        copied, own = files.rows(name, picked), theirs.detach().float().cpu()
        apart = (copied - own).norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-12)
        apart = apart.nan_to_num(nan=float("inf"))
        worst = int(apart.argmax())
        if float(apart[worst]) > statements.copies_within:
            raise CheckpointError(
                origin,
                f"its copy {name} differs from the target's: the row of token {meant[worst]} by "
                f"{float(apart[worst]):.0%} (allowed: {statements.copies_within:.1%})",
                "use the target it was trained for; if the target is a quantised copy of that one, say so with "
                "copies_within=0.2; a drafter with an embedding or head of its own cannot be used here",
            )
    return compared


def _spread(size: int) -> list[int]:
    count = min(size, _SAMPLED_ROWS)
    return sorted({round(index * (size - 1) / max(1, count - 1)) for index in range(count)})
