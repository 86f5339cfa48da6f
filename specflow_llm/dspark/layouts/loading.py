"""Which layout a folder has, and reading a drafter of any of them for a target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ...errors import CheckpointError
from ..adapter import TargetAdapter
from ..checkpoint import FORMAT, check_fits, load_drafter
from ..config import Layout
from ..model import DSparkModel
from .checks import COPIES_WITHIN, Statements
from .deepspec import is_deepspec, read_deepspec
from .files import TensorFiles, read_config
from .speculators import is_speculators, read_speculators

FileLayout = Literal["specflow", "speculators", "deepspec"]


def file_layout(folder: Path) -> FileLayout | None:
    """Which project's layout a folder has, by its ``config.json``; None where it holds no drafter of any."""
    try:
        return _recognised(read_config(folder))
    except CheckpointError:
        return None


def _recognised(described: Mapping[str, Any]) -> FileLayout | None:
    if described.get("format") == FORMAT:
        return "specflow"
    if is_speculators(described):
        return "speculators"
    return "deepspec" if is_deepspec(described) else None


def load_for_target(
    folder: str | Path,
    adapter: TargetAdapter,
    *,
    layout: Layout | None = None,
    own_rope: bool = False,
    copies_within: float = COPIES_WITHIN,
    tokenizer: Any = None,
) -> DSparkModel:
    """Read a drafter of any known layout, in float32 on the CPU, and refuse it where it would draft in vain.

    Args:
        folder: holds ``config.json`` and weights.
        adapter: the target it will serve.
        layout: which slots predict, for files that do not say it.
        own_rope: the drafter was trained with rotary parameters other than the target's, on purpose.
        copies_within: relative difference allowed between the checkpoint's copies of embedding and head and the
            target's. The default allows for rounding; a target quantised to few bits needs more.
        tokenizer: the target's; with it, a mask id that stands for text is refused.

    Raises:
        CheckpointError: the folder holds no drafter, or none that can serve this target as it is.
    """
    place = Path(folder)
    described = read_config(place)
    found = _recognised(described)
    if found is None and "dflash_config" in described:
        raise CheckpointError(
            place,
            "it is in a DFlash layout with a dflash_config, which is not read here",
            "convert it with the speculators library first; that layout is read",
        )
    if found is None:
        raise CheckpointError(
            place,
            "its config.json is of no known layout",
            "give a drafter of this library, of speculators (DSpark, DFlash) or of DeepSpec",
        )
    if found == "specflow":
        model = load_drafter(place)
        check_fits(model.config, adapter, place)
        if layout is not None and layout != model.config.layout:
            raise CheckpointError(
                place, f"it is {model.config.layout!r}, and the caller states {layout!r}", "leave layout out"
            )
        return model
    statements = Statements(layout=layout, own_rope=own_rope, copies_within=copies_within, tokenizer=tokenizer)
    read = read_speculators if found == "speculators" else read_deepspec
    return read(described, TensorFiles(place), adapter, statements)
