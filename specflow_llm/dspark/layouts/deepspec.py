"""DeepSpec's layout (deepseek-ai/DeepSpec): a flat config like the target's own, every slot predicts, whole vocabulary.

Layer ids count decoder layers from 0, as here. Embedding and head are stored as copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointError
from ..adapter import TargetAdapter
from ..config import MARKOV_KINDS
from ..model import DSparkModel
from .backbone import read_backbone
from .checks import Statements, check_layers, check_mask, check_parts, check_plain
from .files import TensorFiles, flag, list_of, required, whole_number, whole_numbers
from .names import build_config, build_model, normalises_queries

ARCHITECTURES = ("Qwen3DSparkModel",)
_SWITCHES = ("dflash_query_causal", "log_snr_conditioning", "enable_qwen35_gated_q_proj", "attn_output_gate")


def is_deepspec(described: Mapping[str, Any]) -> bool:
    """True for a config that this project's trainer wrote, whether it can be used here or not."""
    names = described.get("architectures")
    if isinstance(names, list) and any(str(name).endswith(("DSparkModel", "Eagle3Model")) for name in names):
        return True
    return {"target_layer_ids", "mask_token_id", "num_anchors", "block_size"} <= set(described)


def read_deepspec(
    described: Mapping[str, Any], files: TensorFiles, adapter: TargetAdapter, statements: Statements
) -> DSparkModel:
    """A drafter from its config and tensors.

    Raises:
        CheckpointError: it cannot draft for this target as it is; the message says why and what to do.
    """
    origin = files.folder
    names = [str(name) for name in list_of(described, "architectures", origin)]
    if not any(name in ARCHITECTURES for name in names):
        raise CheckpointError(
            origin,
            f"its architecture {' or '.join(names) or '(none)'} is not supported; of DeepSpec's, "
            f"{', '.join(ARCHITECTURES)} is (Gemma 4 drafters have layers with four norms, Eagle3 is another method)",
            "use another checkpoint, or train a drafter here: specflow-llm train",
        )
    if statements.layout == "mask_predicts" or flag(described, "sample_from_anchor", origin) is False:
        raise CheckpointError(
            origin,
            "only its masks are said to predict, but in DeepSpec's layout the anchor's slot always does",
            "leave layout out; if another trainer wrote this file, convert it to the speculators layout, which says it",
        )
    _check_origin(described, statements, origin)
    check_parts(files, origin)
    check_plain(adapter, origin)
    backbone = read_backbone(described, adapter, own_rope=statements.own_rope, origin=origin)
    layers = tuple(whole_numbers(described, "target_layer_ids", origin))
    check_layers(layers, adapter.num_layers, f"target_layer_ids {list(layers)}", origin)
    mask = required(described, "mask_token_id", origin)
    check_mask(mask, adapter, statements.tokenizer, origin)
    config = build_config(
        {
            **backbone,
            "target": adapter.name,
            "num_target_layers": whole_number(described, "num_target_layers", origin),
            "target_layer_ids": layers,
            "mask_token_id": mask,
            "block_size": whole_number(described, "block_size", origin),
            "layout": "anchor_predicts",
            "qk_norm": normalises_queries(files),
            **read_heads(described, origin),
        },
        origin,
    )
    return build_model(config, files, adapter, statements)


def _check_origin(described: Mapping[str, Any], statements: Statements, origin: object) -> None:
    """Other trainers borrow this layout's names and change what the layers do, or which slots predict."""
    if described.get("dflash_config") is not None and statements.layout is None:
        raise CheckpointError(
            origin,
            "it has a dflash_config, which DeepSpec does not write: another trainer's file, whose anchor may not "
            "predict",
            "ask its makers; if the anchor's slot predicts, say so with layout='anchor_predicts'",
        )
    switched = [name for name in _SWITCHES if described.get(name)]
    if switched:
        raise CheckpointError(
            origin, f"it sets {', '.join(switched)}, which drafters here do not have", "use another checkpoint"
        )


def read_heads(described: Mapping[str, Any], origin: object) -> dict[str, Any]:
    """Fields of :class:`DSparkConfig` for the heads; both layouts name them alike.

    Raises:
        CheckpointError: the combination cannot work.
    """
    rank = whole_number(described, "markov_rank", origin)
    kind = str(required(described, "markov_head_type", origin)).lower() if rank else "none"
    if kind not in MARKOV_KINDS:
        raise CheckpointError(
            origin,
            f"its Markov head is of kind {kind!r}; drafters here have {', '.join(MARKOV_KINDS[1:])}",
            "use another checkpoint",
        )
    required(described, "enable_confidence_head", origin)
    confidence = bool(flag(described, "enable_confidence_head", origin))
    if confidence:
        required(described, "confidence_head_with_markov", origin)
    with_markov = confidence and bool(flag(described, "confidence_head_with_markov", origin))
    if with_markov and not rank:
        raise CheckpointError(
            origin,
            "its confidence head reads the Markov head's embedding, and markov_rank is 0: there is none",
            "correct confidence_head_with_markov or markov_rank in config.json",
        )
    return {
        "markov": kind,
        "markov_rank": max(1, rank),
        "confidence": confidence,
        "confidence_with_markov": with_markov,
    }
