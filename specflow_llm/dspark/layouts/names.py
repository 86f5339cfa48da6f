"""What the two layouts call the tensors of a drafter. Backbone names are the same everywhere; the heads' differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from specflow.errors import InvalidSettingError

from ...errors import CheckpointError
from ..adapter import TargetAdapter
from ..checkpoint import check_fits, check_tensors, load_tensors
from ..config import DSparkConfig
from ..model import DSparkModel
from .checks import EMBEDDING, HEAD, Statements, check_copies, check_finite
from .files import TensorFiles

_HEADS = (
    ("markov_head.previous.", "markov_head.markov_w1."),
    ("markov_head.output.", "markov_head.markov_w2."),
    ("markov_head.gate.", "markov_head.gate_proj."),
    ("markov_head.cell.", "markov_head.joint_proj."),
    ("confidence_head.linear.", "confidence_head.proj."),
)
_NORMED_QUERIES = "layers.0.self_attn.q_norm.weight"


def their_name(name: str) -> str:
    """Our name of a tensor -> theirs."""
    for ours, theirs in _HEADS:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def our_name(name: str) -> str:
    """Their name of a tensor -> ours."""
    for ours, theirs in _HEADS:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def normalises_queries(files: TensorFiles) -> bool:
    """Whether queries and keys are normalised, told by the tensors: no field says it."""
    return _NORMED_QUERIES in files.names


def build_config(values: Mapping[str, object], origin: object) -> DSparkConfig:
    """A drafter's config from what a layout says.

    Raises:
        CheckpointError: a field has a value that cannot work.
    """
    try:
        return DSparkConfig.from_dict(values)
    except InvalidSettingError as error:
        raise CheckpointError(origin, f"its config cannot work ({error})", "correct config.json") from error


def build_model(
    config: DSparkConfig,
    files: TensorFiles,
    adapter: TargetAdapter,
    statements: Statements,
    *,
    draft_ids: torch.Tensor | None = None,
    left_out: frozenset[str] = frozenset(),
    verifiers: tuple[str, ...] = (),
) -> DSparkModel:
    """A drafter with the checkpoint's weights, in float32.

    Args:
        config: what it is made of.
        files: the checkpoint.
        adapter: the target.
        statements: what the caller vouches for.
        draft_ids: [Vd] target ids in the order of the draft vocabulary.
        left_out: tensors that the layout has for other purposes.
        verifiers: architectures of the target it was made for, as far as the file says.

    Raises:
        CheckpointError: it was not made for this target, or tensors are absent, unknown, damaged or misshapen.
    """
    origin = files.folder
    check_fits(config, adapter, origin)
    compared = check_copies(files, adapter, config, draft_ids, statements, origin)
    found = type(adapter.model).__name__
    if not compared and verifiers and found not in verifiers:
        raise CheckpointError(
            origin,
            f"it was made for a {' or '.join(verifiers)}, the target is a {found}, and it holds no copy of "
            "embedding or head to compare",
            "use the target it was trained for",
        )
    tensors = {
        our_name(name): files.tensor(name) for name in sorted(files.names - left_out - frozenset((EMBEDDING, HEAD)))
    }
    check_finite(tensors, origin)
    if draft_ids is not None:
        tensors["draft_ids"] = draft_ids
    with torch.device("meta"):  # shapes first: a wrong size may ask for more memory than there is
        check_tensors(DSparkModel(config), tensors, origin)
    model = DSparkModel(config, draft_ids)
    load_tensors(model, tensors, origin)
    return model
