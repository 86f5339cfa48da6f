"""What one benchmark run is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..config import Speculation
from ..errors import require
from ..hub import DEMO_MODEL

BASELINES = ("generate", "prompt-lookup", "assisted", "generate-again")
"""What can be compared with. ``generate`` is the reference and always runs; ``generate-again`` is the same once more,
which shows how far two equal things differ on this machine."""
TREES = ("on", "off", "both")
"""Whether drafts may branch."""

_QUICK_CATEGORIES = 3
_QUICK_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Settings of a benchmark run.

    Raises:
        InvalidSettingError: a field has a value that cannot work; the message names it.
    """

    model: str = DEMO_MODEL
    data: Path | None = None
    """Prompts, one JSON object a line; None takes the prompts that the package carries."""
    per_category: int = 4
    max_categories: int | None = None
    """Only the first so many categories; None takes all."""
    max_tokens: int = 128
    repeats: int = 1
    """Timed runs of every candidate on every prompt; their median counts."""
    drafters: tuple[str, ...] = ("ngram",)
    """Built-in names, paths or ids, as :class:`~specflow_llm.config.Speculation` takes them."""
    draft_tokens: int = Speculation().max_draft_tokens
    tree: str = "on"
    """Whether drafts may branch, for drafters that do so: ``on``, ``off``, or ``both`` for a row of each. Built-in
    drafters do not branch and get one row."""
    policy: str = Speculation().policy
    baselines: tuple[str, ...] = ("generate", "prompt-lookup")
    lookup_tokens: tuple[int, ...] = (3, 5, 10)
    """Settings of transformers' ``prompt_lookup_num_tokens``."""
    ablations: bool = True
    """Also run the rows that separate packing from speculation: transformers with packed layers, ours without them."""
    assistant: str | None = None
    """Smaller model for transformers' assisted generation."""
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    seed: int = 0
    """Chooses the prompts within each category."""
    cost_widths: int = 16
    """Forward costs are measured for blocks of 1..this many tokens."""
    cost_repeats: int = 7

    def __post_init__(self) -> None:
        """Validate every field."""
        for name in ("per_category", "max_tokens", "repeats", "cost_widths", "cost_repeats"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "an integer >= 1")
        for name in ("max_categories", "threads"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "an integer >= 1, or None")
        require(self.tree in TREES, "tree", self.tree, f"one of {', '.join(TREES)}")
        unknown = sorted(set(self.baselines) - set(BASELINES))
        require(not unknown, "baselines", self.baselines, f"names among {', '.join(BASELINES)}")
        require(all(size >= 1 for size in self.lookup_tokens), "lookup_tokens", self.lookup_tokens, "integers >= 1")
        wants = "assisted" in self.baselines
        require(
            not wants or self.assistant is not None,
            "assistant",
            self.assistant,
            "a model, because baselines asks for 'assisted'",
        )
        for drafter in self.drafters:
            Speculation(drafter=drafter, max_draft_tokens=self.draft_tokens, policy=self.policy)

    def quick(self) -> BenchSettings:
        """The same comparison with few prompts, few tokens and one lookup setting. Too small to conclude from."""
        return replace(
            self,
            per_category=1,
            max_categories=_QUICK_CATEGORIES,
            max_tokens=min(self.max_tokens, _QUICK_TOKENS),
            lookup_tokens=self.lookup_tokens[-1:],
            cost_widths=min(self.cost_widths, self.draft_tokens + 1),
            cost_repeats=3,
        )
