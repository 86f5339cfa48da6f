"""The ``speculators`` layout (vllm-project/speculators), DSpark and DFlash: read and written.

Its conventions, where they differ from those here: layer ids index the list of hidden states that begins with the
embeddings, so id i is decoder layer i - 1; ``block_size`` counts slots, the anchor's included; ``sample_from_anchor``
says whether the anchor's slot predicts; a draft vocabulary is stored as offsets (``d2t``: target id minus column) and
as a mask over the target's ids (``t2d``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ...errors import CheckpointError
from ..adapter import TargetAdapter
from ..checkpoint import CONFIG_FILE, WEIGHTS_FILE, check_fits, write_whole
from ..config import DSparkConfig, Layout
from ..model import DSparkModel
from .backbone import read_backbone
from .checks import EMBEDDING, HEAD, Statements, check_layers, check_mask, check_parts, check_plain
from .deepspec import read_heads
from .files import TensorFiles, flag, list_of, part_of, required, whole_number, whole_numbers
from .names import build_config, build_model, normalises_queries, their_name

TYPES = ("dspark", "dflash")
OFFSETS = "d2t"
MASK = "t2d"
_TRAINING_ONLY = frozenset(("verifier_lm_head.weight", "verifier_norm.weight"))
_NO_HEADS = {"markov": "none", "markov_rank": 1, "confidence": False, "confidence_with_markov": False}


def is_speculators(described: Mapping[str, Any]) -> bool:
    """True for a config of this layout, whether its type can be used here or not."""
    return "speculators_model_type" in described


def read_speculators(
    described: Mapping[str, Any], files: TensorFiles, adapter: TargetAdapter, statements: Statements
) -> DSparkModel:
    """A drafter from its config and tensors.

    Raises:
        CheckpointError: it cannot draft for this target as it is; the message says why and what to do.
    """
    origin = files.folder
    kind = described["speculators_model_type"]
    if kind not in TYPES:
        raise CheckpointError(
            origin,
            f"it is a speculator of type {kind!r}; {' and '.join(TYPES)} are supported",
            "use another checkpoint, or train a drafter here: specflow-llm train",
        )
    slots = whole_number(described, "block_size", origin)
    layout = _layout(described, slots, statements, origin)
    heads = read_heads(described, origin) if kind == "dspark" else dict(_NO_HEADS)
    if heads["markov"] == "rnn" and layout == "mask_predicts":
        raise CheckpointError(
            origin,
            "its recurrent Markov head starts at the anchor's slot, which does not predict; here it starts at the "
            "first slot that does",
            "use a checkpoint with sample_from_anchor, or with another Markov head",
        )
    check_parts(files, origin, frozenset((OFFSETS, MASK)))
    check_plain(adapter, origin)
    backbone = read_backbone(
        part_of(described, "transformer_layer_config", origin),
        adapter,
        own_rope=statements.own_rope,
        origin=origin,
        window_non_causal=flag(described, "sliding_window_non_causal", origin) is True,
    )
    stated = whole_numbers(described, "aux_hidden_state_layer_ids", origin)
    layers = tuple(layer - 1 for layer in stated)
    said = f"aux_hidden_state_layer_ids {stated}: id i is decoder layer i - 1"
    check_layers(layers, adapter.num_layers, said, origin)
    mask = required(described, "mask_token_id", origin)
    check_mask(mask, adapter, statements.tokenizer, origin)
    verifier = part_of(part_of(described, "speculators_config", origin), "verifier", origin)
    vocabulary, size = int(backbone["vocab_size"]), whole_number(described, "draft_vocab_size", origin)
    config = build_config(
        {
            **backbone,
            "target": str(verifier.get("name_or_path") or adapter.name),
            "num_target_layers": adapter.num_layers,
            "target_layer_ids": layers,
            "mask_token_id": mask,
            "block_size": slots if layout == "anchor_predicts" else slots - 1,
            "layout": layout,
            "draft_vocab_size": None if size == vocabulary else size,
            "qk_norm": normalises_queries(files),
            **heads,
        },
        origin,
    )
    return build_model(
        config,
        files,
        adapter,
        statements,
        draft_ids=_draft_ids(files, size, vocabulary),
        left_out=_TRAINING_ONLY | {OFFSETS, MASK},
        verifiers=tuple(str(name) for name in list_of(verifier, "architectures", origin)),
    )


def _layout(described: Mapping[str, Any], slots: int, statements: Statements, origin: object) -> Layout:
    """Which slots predict: what the file says, or what the caller says where it is silent."""
    from_anchor, stated = flag(described, "sample_from_anchor", origin), statements.layout
    proposals = list_of(part_of(described, "speculators_config", origin), "proposal_methods", origin)
    counts = [entry.get("speculative_tokens") for entry in proposals if isinstance(entry, Mapping)]
    tokens = next((count for count in counts if isinstance(count, int)), None)
    if from_anchor is None and stated is None:
        if described["speculators_model_type"] == "dflash":
            from_anchor = False  # the flag came later; until then there was no other way for DFlash
        else:
            hint = {slots: "anchor_predicts", slots - 1: "mask_predicts"}.get(tokens or 0)
            hinted = f" (it proposes {tokens} tokens from {slots} slots, which speaks for {hint!r})" if hint else ""
            raise CheckpointError(
                origin,
                "it does not say whether the anchor's slot predicts (sample_from_anchor): first versions of its "
                f"trainer knew only 'mask_predicts', later ones default to 'anchor_predicts'{hinted}",
                "state it: layout='anchor_predicts' or layout='mask_predicts', or add the field to config.json",
            )
    said: Layout = "anchor_predicts" if from_anchor else "mask_predicts"
    if from_anchor is not None and stated is not None and stated != said:
        raise CheckpointError(
            origin,
            f"its sample_from_anchor is {str(from_anchor).lower()}, that is {said!r}, and the caller states {stated!r}",
            "leave layout out, or correct config.json",
        )
    layout = said if stated is None else stated
    most = slots if layout == "anchor_predicts" else slots - 1
    if tokens is not None and tokens > most:
        raise CheckpointError(
            origin,
            f"it proposes {tokens} tokens per block, but its {slots} slots were trained for {most} ({layout!r})",
            "correct speculative_tokens, block_size or sample_from_anchor in config.json",
        )
    if tokens == slots - 1 < most and stated is None:
        raise CheckpointError(
            origin,
            f"it proposes {tokens} tokens from {slots} slots, as if only masks predicted, but says sample_from_anchor",
            "state which is right: layout='anchor_predicts', or correct config.json",
        )
    return layout


def _draft_ids(files: TensorFiles, size: int, vocabulary: int) -> torch.Tensor | None:
    """[Vd] target ids of the draft vocabulary, from offsets; None for the whole vocabulary."""
    origin = files.folder
    if OFFSETS not in files.names:
        if size == vocabulary:
            return None
        raise CheckpointError(
            origin,
            f"it drafts {size} of {vocabulary} ids, and {OFFSETS}, which says which, is absent",
            f"add the tensor {OFFSETS} it was trained with",
        )
    offsets = files.tensor(OFFSETS)
    if offsets.is_floating_point() or tuple(offsets.shape) != (size,):
        raise CheckpointError(
            origin,
            f"{OFFSETS} is {offsets.dtype} of shape {tuple(offsets.shape)}, not {size} whole numbers",
            "check that config and weights belong together",
        )
    offsets = offsets.to(torch.int64)
    columns = torch.arange(size)
    ids = columns + offsets
    chosen = None
    if MASK in files.names:
        flags = files.tensor(MASK)
        if tuple(flags.shape) != (vocabulary,):
            raise CheckpointError(
                origin,
                f"{MASK} has shape {tuple(flags.shape)}, the vocabulary has {vocabulary} ids",
                "check that config and weights belong together",
            )
        chosen = flags.bool().nonzero().squeeze(-1)
    rising = bool((ids[1:] > ids[:-1]).all())
    in_range = bool(((ids >= 0) & (ids < vocabulary)).all())
    if rising and in_range and (chosen is None or torch.equal(chosen, ids)):
        return None if size == vocabulary else ids
    absolute = bool((offsets[1:] > offsets[:-1]).all()) and bool(((offsets >= 0) & (offsets < vocabulary)).all())
    if absolute and (chosen is None or torch.equal(chosen, offsets)):
        raise CheckpointError(
            origin,
            f"{OFFSETS} holds target ids; this layout stores offsets, target id minus column",
            f"store {OFFSETS} - arange({size}) instead",
        )
    problem = "column and offset do not add up to rising ids of the target's vocabulary"
    if rising and in_range:
        problem = f"the ids of its offsets are not those that {MASK} marks"
    raise CheckpointError(origin, f"{OFFSETS} is wrong: {problem}", "use the maps it was trained with")


def export_speculators(
    model: DSparkModel, folder: Path, adapter: TargetAdapter, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a drafter in this layout, with copies of the target's embedding and head.

    ``markov_top_k`` and ``context_bias`` are settings of drafting and have no place there; calibration tables neither.

    Args:
        model: what to write.
        folder: made if absent.
        adapter: the target it was trained for.
        dtype: of the stored weights.

    Raises:
        CheckpointError: the drafter has parts that the layout cannot express, or is not for this target.
    """
    config = model.config
    check_fits(config, adapter, folder)
    check_plain(adapter, folder)
    for odd, what, remedy in (
        (not config.qk_norm, "its queries and keys are not normalised", "train one with qk_norm=True"),
        (
            config.markov == "rnn" and config.layout == "mask_predicts",
            "its recurrent Markov head starts after the anchor's slot",
            "train one with layout='anchor_predicts'",
        ),
    ):
        if odd:
            raise CheckpointError(folder, f"the speculators layout cannot express this drafter: {what}", remedy)
    tensors = {
        their_name(name): tensor.to(dtype)
        for name, tensor in model.state_dict().items()
        if tensor is not None and name != "draft_ids"
    }
    everything = torch.arange(config.vocab_size, device=adapter.device)
    tensors[EMBEDDING] = adapter.embed(everything).detach().to(dtype)
    tensors[HEAD] = adapter.head_rows(model.draft_ids)[0].to(dtype)
    if model.draft_ids is not None:
        ids = model.draft_ids.to(torch.int64).cpu()
        tensors[OFFSETS] = ids - torch.arange(len(ids))
        tensors[MASK] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, value=True)
    stored = {name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / WEIGHTS_FILE, lambda path: save_file(stored, path, metadata={"format": "pt"}))
    text = json.dumps(_described(config, adapter, dtype), indent=2) + "\n"
    write_whole(folder / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def _described(config: DSparkConfig, adapter: TargetAdapter, dtype: torch.dtype) -> dict[str, Any]:
    kind = "dflash" if config.markov == "none" and not config.confidence else "dspark"
    window = config.sliding_window
    heads = {
        "markov_rank": config.previous_size,
        "markov_head_type": "vanilla" if config.markov == "none" else config.markov,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov and config.previous_size > 0,
    }
    return {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": config.num_slots,
        "sample_from_anchor": config.layout == "anchor_predicts",
        "draft_vocab_size": config.head_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": window is not None,
        "tie_word_embeddings": False,
        **(heads if kind == "dspark" else {}),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size}],
            "verifier": {"name_or_path": config.target, "architectures": [type(adapter.model).__name__]},
        },
        "transformer_layer_config": {
            "model_type": "qwen3",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": config.activation,
            "rms_norm_eps": config.norm_eps,
            "max_position_embeddings": config.max_positions,
            "rope_parameters": dict(config.rope),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": ["full_attention" if window is None else "sliding_attention"] * config.num_layers,
            "tie_word_embeddings": False,
        },
    }
