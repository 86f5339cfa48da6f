"""Model cards: what a drafter is for, how it was made, what it does, what it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def model_card(target: str, what: str, trained: Mapping[str, Any]) -> str:
    """A short description of a drafter, in Markdown.

    Args:
        target: name of its target.
        what: one paragraph on what it is made of.
        trained: how it was trained, as noted in ``config.json``.
    """
    held = trained.get("held_out")
    rows = ""
    if held is not None:
        cells = " | ".join(f"{rate:.2f}" for rate in held["accept"])
        matches = " | ".join(f"{rate:.2f}" for rate in held["match"])
        head = " | ".join(str(slot) for slot in range(1, len(held["accept"]) + 1))
        rows = (
            f"\n| held-out text, by slot | {head} |\n|{'---|' * (len(held['accept']) + 1)}\n"
            f"| accepted at temperature 1 | {cells} |\n| accepted at temperature 0 | {matches} |\n\n"
            f"Estimated emitted tokens per round: {held['sampled_length']:.2f} at temperature 1, "
            f"{held['greedy_length']:.2f} at temperature 0, along the target's own text.\n"
        )
    return (
        f"# Drafter for {Path(target).name}\n\n{what}\n\n"
        f"Trained on conversations that the target wrote itself: {trained['samples']} of {trained['tokens']} tokens, "
        f"{trained['held_out_samples']} of them held out; {trained['steps']} steps; every setting is in `config.json`."
        f"\n{rows}\n"
        "It serves this target only. Output never depends on it: drafts are verified exactly; a drafter decides about "
        "speed alone. Text unlike the training text is drafted worse.\n"
    )
