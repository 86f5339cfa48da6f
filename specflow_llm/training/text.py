"""The training text of a run: made where it is absent, read, and parted into what is learned and what is held out.

``samples.jsonl`` holds it, ``samples-1.jsonl`` and so on what other processes wrote; ``samples.json`` is the recipe.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..architecture import inspect_model
from ..dspark.adapter import target_name
from ..dspark.checkpoint import write_whole
from ..engine import require_prompt
from ..errors import TrainingError
from ..llm import LLM
from .plan import TrainingPlan
from .samples import OPENERS, ChatShape, Sample, plain_ids, read_entries, read_samples
from .trainer import STATE_FILE
from .world import World
from .writer import KeptFeatures, SampleMaker, Tried

SAMPLES_FILE = "samples.jsonl"
RECIPE_FILE = "samples.json"
_PART = re.compile(r"samples(-[1-9]\d*)?\.jsonl")
_LEAST_ANSWER = 14  # conversations in which less is to be learned are left out, as DeepSpec does


@dataclass(frozen=True, slots=True)
class Written:
    """Progress of one process in its part of the text."""

    made: int
    """Conversations there are."""
    tried: int
    """With those that came to nothing."""
    wanted: int
    tokens_per_second: float
    """Written or read since this process began."""
    seconds_left: float


@dataclass(frozen=True, slots=True)
class TrainingText:
    """Conversations long enough to learn from."""

    samples: Sequence[Sample]
    """Those held out for measuring come last."""
    num_held: int

    @property
    def num_tokens(self) -> int:
        """Of all conversations."""
        return sum(len(sample.token_ids) for sample in self.samples)


class TextStage:
    """Makes and reads the text of a plan.

    Args:
        llm: the target.
        plan: what to do.
        world: the processes that share the work.
        notify: told what begins.
        on_written: told about progress of this process's part.
    """

    def __init__(
        self,
        llm: LLM,
        plan: TrainingPlan,
        world: World,
        *,
        notify: Callable[[str], None] = lambda _message: None,
        on_written: Callable[[Written], None] = lambda _written: None,
    ) -> None:
        self._llm, self._plan, self._world = llm, plan, world
        self._notify, self._on_written = notify, on_written
        self._architecture = inspect_model(llm.model)

    # --- Reading ------------------------------------------------------------------------------------------------------

    def read(self) -> TrainingText:
        """The text there is.

        Of every file the same share at its end is held out, so that going on with more files does not train on what was
        held out before. With more of the same file, or another share, it does.

        Raises:
            TrainingError: text cannot be read or belongs to another target, or nothing is left to learn from.
        """
        places = self._plan.samples or [self._plan.out]
        files = [self._usable(place) for place in places]
        if not any(files):
            names = ", ".join(map(str, places))
            raise TrainingError(f"{names} holds no conversation long enough to learn from", "make more samples")
        learned: list[Sample] = []
        held: list[Sequence[Sample]] = []
        for samples in files:
            count = len(samples) - round(len(samples) * self._plan.training.held_out)
            learned += samples[:count]
            held.append(samples[count:])
        aside = _in_turns(held)
        return TrainingText([*learned, *aside], len(aside))

    def _usable(self, place: Path) -> Sequence[Sample]:
        """By index, the conversations of a file, or of all files of text in a folder, that are long enough."""
        found: dict[int, Sample] = {}
        for path in parts(place) if place.is_dir() else [place]:
            samples = read_samples(path)
            if any(max(sample.token_ids) >= self._architecture.vocab_size for sample in samples):
                raise TrainingError(f"{path} holds token ids that this target does not know", "make the text anew")
            found.update({sample.index: sample for sample in samples})
        # More may lie there: text that was made for a plan with more conversations.
        most = math.inf if self._plan.samples else self._plan.data.num_samples
        chosen = [found[index] for index in sorted(found) if index < most]
        return [sample for sample in chosen if len(sample.token_ids) - sample.first_own >= _LEAST_ANSWER]

    # --- Making -------------------------------------------------------------------------------------------------------

    def make(
        self,
        keep: Callable[[int], KeptFeatures | None] = lambda _tokens: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make this process's part of what is absent in the plan's folder.

        Args:
            keep: where features go meanwhile, asked for with the most tokens there can be.
            clock: seconds.

        Raises:
            TrainingError: prompts cannot be read, the target cannot ask itself, or the folder's text has another
                recipe.
            PromptError: a prompt cannot be answered; it is named by its line.
            ContextLengthError: it is too long.
        """
        plan, world = self._plan, self._world
        prompts = None if plan.prompts is None else self._read_prompts(plan.prompts)
        recipe = self._recipe(prompts)
        self._check_recipe(recipe)
        wanted = plan.data.num_samples if prompts is None else min(plan.data.num_samples, len(prompts))
        path = plan.out / (SAMPLES_FILE if world.is_first else f"samples-{world.rank}.jsonl")
        mine = set(range(world.rank, wanted, world.size))
        there = {part: dict(read_entries(part)) for part in parts(plan.out)}
        entries = {index: sample for found in there.values() for index, sample in found.items() if index in mine}
        if len(entries) == len(mine):
            return
        if (plan.out / STATE_FILE).exists():
            raise TrainingError(
                f"training in {plan.out} has begun on the text that is there, which more text would change",
                "use another --out folder with --text for this text, or --start-from this drafter",
            )
        shape = ChatShape.of(self._llm.tokenizer) if prompts is None else None
        features = keep(self._most_tokens(wanted, prompts, shape))
        maker = SampleMaker(self._llm, plan.data, prompts=prompts, features=features, part=(world.rank, world.size))
        plan.out.mkdir(parents=True, exist_ok=True)  # now that nothing can be refused any more
        described = json.dumps(recipe, indent=2) + "\n"
        write_whole(plan.out / RECIPE_FILE, lambda place: place.write_text(described, encoding="utf-8"))
        made = sum(sample is not None for sample in entries.values())
        self._notify(f"making training text: {made} of {len(mine)} conversations are there")
        elsewhere = {index for part, found in there.items() if part != path for index in found}
        progress = _Progress(made, len(entries), len(mine), clock)
        for tried in maker.run(path, elsewhere=elsewhere):
            self._on_written(progress.after(tried, maker.num_tokens))

    def _most_tokens(self, wanted: int, prompts: Sequence[Sequence[int]] | None, shape: ChatShape | None) -> int:
        data = self._plan.data
        if prompts is not None:
            return sum(map(len, prompts[:wanted])) + wanted * data.max_answer_tokens
        longest = max(len(plain_ids(self._llm.tokenizer, opener)) for opener in OPENERS) if data.opened_fraction else 0
        fixed = 0 if shape is None else len(shape.before) + len(shape.after)
        return wanted * (fixed + longest + data.max_prompt_tokens + data.max_answer_tokens)

    def _recipe(self, prompts: Sequence[Sequence[int]] | None) -> Mapping[str, Any]:
        data = self._plan.data
        return {
            "target": target_name(self._llm.model),
            "vocab_size": self._architecture.vocab_size,
            "prompts": None if prompts is None else hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
            "openers": hashlib.sha256("\0".join(OPENERS).encode()).hexdigest() if prompts is None else None,
            **{name: value for name, value in asdict(data).items() if name != "num_samples"},
            "temperatures": list(data.temperatures),
        }

    def _check_recipe(self, recipe: Mapping[str, Any]) -> None:
        """Text of two recipes must not end up in one file."""
        path = self._plan.out / RECIPE_FILE
        if not path.exists() or not parts(self._plan.out):
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        differing = sorted(name for name in recipe if found.get(name) != recipe[name])
        if differing:
            raise TrainingError(
                f"the text in {self._plan.out} was made with other {', '.join(differing)}",
                "use another --out folder, or the settings it was made with",
            )

    def _read_prompts(self, path: Path) -> list[list[int]]:
        prompts: list[list[int]] = []
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise TrainingError(f"{path} cannot be read ({error})", "give a UTF-8 file with JSON lines") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                text = entry["prompt"] if "prompt" in entry else entry["turns"][0]
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise TrainingError(
                    f"line {number} of {path} has no prompt ({error})", 'write {"prompt": "..."} on every line'
                ) from error
            if not isinstance(text, str) or not text.strip():
                raise TrainingError(
                    f"line {number} of {path} has {text!r} for a prompt", 'write {"prompt": "some text"} on every line'
                )
            chat = getattr(self._llm.tokenizer, "chat_template", None)
            prompts.append(self._llm.encode([{"role": "user", "content": text}] if chat else text, number))
            require_prompt(prompts[-1], number, self._architecture)  # before any work; named by its line
        if not prompts:
            raise TrainingError(f"{path} holds no prompts", 'write {"prompt": "..."} on every line')
        return prompts


class _Progress:
    """Counts what a process made, and guesses when it will be done."""

    def __init__(self, made: int, tried: int, wanted: int, clock: Callable[[], float]) -> None:
        self._made, self._tried, self._before, self._wanted = made, tried, tried, wanted
        self._clock, self._begun, self._length = clock, clock(), 0

    def after(self, tried: Tried, num_tokens: int) -> Written:
        """What is known after one more conversation, with so many tokens written in all."""
        self._tried += 1
        self._made += tried.sample is not None
        self._length += tried.num_tokens
        rate = num_tokens / max(self._clock() - self._begun, 1e-9)
        # Tokens of conversations under way are written already.
        mean, under_way = self._length / (self._tried - self._before), max(0, num_tokens - self._length)
        left = max(0.0, mean * (self._wanted - self._tried) - under_way)
        return Written(self._made, self._tried, self._wanted, rate, left / max(rate, 1e-9))


def parts(folder: Path) -> Sequence[Path]:
    """The files of text in a folder: one of each process that ever wrote there."""
    return sorted(path for path in folder.glob("samples*.jsonl") if _PART.fullmatch(path.name))


def _in_turns(lists: Iterable[Sequence[Sample]]) -> list[Sample]:
    """All items, those of each list evenly spread."""
    placed = [((place + 0.5) / len(items), item) for items in lists for place, item in enumerate(items)]
    return [item for _share, item in sorted(placed, key=lambda entry: entry[0])]
