"""Options that several commands share. Light: nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import typer

from ..config import Speculation, Verification

_MODEL = "Model"
_SPECULATION = "Speculation"
_SAMPLING = "Sampling"
_OUTPUT = "Output"

Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", show_default="the demo model", help="Built-in name, folder, .gguf file or hub id.",
        rich_help_panel=_MODEL,
    ),
]  # fmt: skip
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=_MODEL)]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_MODEL)]
Threads = Annotated[
    int | None,
    typer.Option(min=1, show_default="torch's choice", help="CPU threads.", rich_help_panel=_MODEL),
]
Drafter = Annotated[
    str,
    typer.Option(
        help="ngram, dspark, none, a trained drafter's folder, or the path or id of a smaller model.",
        rich_help_panel=_SPECULATION,
    ),
]
DraftTokens = Annotated[
    int, typer.Option(help="Most tokens drafted per round; 0 decodes plainly.", rich_help_panel=_SPECULATION)
]
Tree = Annotated[
    bool,
    typer.Option(
        "--tree/--chains", help="Let drafts branch where drafter and model can.", rich_help_panel=_SPECULATION
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        help="adaptive (draft as far as it pays, zero included), fixed, cost_scheduled or pid.",
        rich_help_panel=_SPECULATION,
    ),
]  # fmt: skip
VerificationRule = Annotated[
    str,
    typer.Option(
        "--verification", help="auto, token, block, one_hot or coupled; for sampled output.",
        rich_help_panel=_SPECULATION,
    ),
]  # fmt: skip
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.", rich_help_panel=_SAMPLING)]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.", rich_help_panel=_SAMPLING)]
TopP = Annotated[float, typer.Option(help="Keep the smallest set with this mass.", rich_help_panel=_SAMPLING)]
MinP = Annotated[
    float,
    typer.Option(help="Drop tokens below this fraction of the most probable one.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option(show_default="random", help="The same seed gives the same tokens.", rich_help_panel=_SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End before this text; may be given several times.", rich_help_panel=_SAMPLING),
]
System = Annotated[str | None, typer.Option(help="System message of the conversation.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=_OUTPUT)
]
PromptFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompt-file", "-f", exists=True, dir_okay=False, allow_dash=True,
        help="File that holds one prompt; may be given several times.",
    ),
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """Which model decodes, where, and how it speculates."""

    model: str | None
    """None is the demo model."""
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    speculation: Speculation | None = None
    max_batch_size: int = 32


def speculation(
    drafter: str, draft_tokens: int, policy: str, verification: str, *, tree: bool = True
) -> Speculation | None:
    """The setting that the options ask for; None where nothing is drafted.

    Raises:
        InvalidSettingError: an option has a value that cannot work.
    """
    rule = cast("Verification", verification)  # Speculation validates it
    setting = Speculation(
        drafter=None if drafter == "none" else drafter,
        max_draft_tokens=draft_tokens,
        tree=tree,
        policy=policy,
        verification=rule,
    )
    return None if setting.drafter is None else setting
