"""What is compared: transformers' own ways to generate, and this library's, over the same model objects."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from specflow.types import RoundReport

from ..config import SamplingParams, Speculation
from ..drafters import BUILTIN_DRAFTERS
from ..hub import LoadedModel, load_model
from ..llm import LLM
from ..metrics import RequestMetrics
from ..packing import can_pack, pack_linears
from ..provenance import available_memory
from .settings import BenchSettings

REFERENCE = "generate"


@dataclass(frozen=True, slots=True)
class Output:
    """What one candidate made of one prompt."""

    token_ids: tuple[int, ...]
    target_forwards: int
    metrics: RequestMetrics | None = None
    """Figures of this library's own decoding."""
    block_widths: Mapping[int, int] = field(default_factory=dict)
    """Tokens per verification forward -> number of such forwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateInfo:
    """What a row of the tables stands for."""

    name: str
    is_ours: bool
    """True for this library, False for transformers."""
    is_packed: bool
    """True when the linear layers are in the CPU's blocked layout (:mod:`specflow_llm.packing`)."""
    speculates: bool
    baseline: str | None = None
    """The row this one would be without speculation."""


class Candidate(Protocol):
    """**Protocol:** one way to decode a prompt greedily."""

    @property
    def info(self) -> CandidateInfo:
        """What it is."""
        ...

    def run(self, prompt: Sequence[int], max_tokens: int) -> Output:
        """Decode. The caller takes the time."""
        ...


class GenerateCandidate:
    """``model.generate`` of transformers, greedy.

    Args:
        info: what it is.
        model: the model object.
        tokenizer: asked for an end-of-sequence token where the model names none, as this library does.
        options: further arguments of ``generate``.
    """

    def __init__(self, info: CandidateInfo, model: PreTrainedModel, tokenizer: Any, options: Mapping[str, Any]) -> None:
        self.info = info
        self._model = model
        settings = model.generation_config
        eos = settings.eos_token_id
        if eos is None:
            eos = getattr(model.config, "eos_token_id", None)
        if eos is None and tokenizer is not None:
            eos = tokenizer.eos_token_id
        first = eos[0] if isinstance(eos, (list, tuple)) else eos
        # A checkpoint may ask for sampling or penalties; the comparison is about plain greedy decoding.
        self._options = {
            "do_sample": False,
            "num_beams": 1,
            "repetition_penalty": 1.0,
            "eos_token_id": eos,
            "pad_token_id": first
            if settings.pad_token_id is None and first is not None
            else settings.pad_token_id or 0,
            **options,
        }

    def run(self, prompt: Sequence[int], max_tokens: int) -> Output:
        """See :class:`Candidate`. A hook counts the forwards; it costs a microsecond a call."""
        forwards = 0

        def count(_module: object, _arguments: object) -> None:
            nonlocal forwards
            forwards += 1

        handle = self._model.register_forward_pre_hook(count)
        try:
            ids = torch.tensor([list(prompt)], device=self._model.device)
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **self._options
            )
            tokens = output[0, len(prompt) :].tolist()
        finally:
            handle.remove()
        return Output(tuple(tokens), forwards)


class _WidthObserver:
    """Counts how many tokens each verification forward ran."""

    def __init__(self) -> None:
        self.widths: Counter[int] = Counter()

    def on_round(self, report: RoundReport) -> None:
        """See :class:`specflow.protocols.Observer`."""
        self.widths[1 + report.admitted[0]] += 1


class EngineCandidate:
    """This library's :class:`~specflow_llm.llm.LLM`, greedy.

    Its text is decoded too, which ``generate`` leaves to the caller.

    Args:
        info: what it is.
        model: the model object, packed or not; used as it is.
        tokenizer: the model's, or None.
        speculation: see :class:`~specflow_llm.config.Speculation`.
    """

    def __init__(
        self, info: CandidateInfo, model: PreTrainedModel, tokenizer: Any, speculation: Speculation | None
    ) -> None:
        self.info = info
        self._observer = _WidthObserver()
        self.llm = LLM(model, tokenizer=tokenizer, speculation=speculation, observers=[self._observer])

    def run(self, prompt: Sequence[int], max_tokens: int) -> Output:
        """See :class:`Candidate`."""
        self._observer.widths.clear()
        done = self.llm.generate([list(prompt)], SamplingParams(max_tokens=max_tokens))[0]
        return Output(done.token_ids, done.metrics.target_forwards, done.metrics, dict(self._observer.widths))


@dataclass(frozen=True, slots=True)
class Lineup:
    """Everything that is compared."""

    candidates: Sequence[Candidate]
    models: Mapping[str, PreTrainedModel]
    """``"plain"``, and ``"packed"`` where packing applies."""
    loaded: LoadedModel
    notes: tuple[str, ...]
    """What was left out, and why."""


def line_up(
    settings: BenchSettings, loaded: LoadedModel, notify: Callable[[str], None] = lambda _message: None
) -> Lineup:
    """Build all candidates, over at most two copies of the target: the model as loaded, and one with packed layers.

    Args:
        settings: what is asked for.
        loaded: the target, not packed.
        notify: told about steps that take long.
    """
    notes: list[str] = []
    models = {"plain": loaded.model}
    problem = _cannot_copy(loaded.model)
    if problem is None:
        notify("packing a copy of the model")
        packed = copy.deepcopy(loaded.model)
        pack_linears(packed)
        models["packed"] = packed
    else:
        notes.append(problem)
    candidates = [*_transformers(settings, loaded, models, notify), *_ours(settings, loaded, models, notify)]
    return Lineup(candidates, models, loaded, tuple(notes))


def _cannot_copy(model: PreTrainedModel) -> str | None:
    if not can_pack(model):
        return "no packed rows: packing is for float32 weights on a CPU, and bfloat16 where it has instructions for it"
    needed = 2 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    available = available_memory()
    if available is not None and needed > available:
        gib = 2**30
        return f"no packed rows: a second copy needs up to {needed / gib:.1f} GiB, {available / gib:.1f} GiB are free"
    return None


def _transformers(
    settings: BenchSettings, loaded: LoadedModel, models: Mapping[str, PreTrainedModel], notify: Callable[[str], None]
) -> list[Candidate]:
    def row(name: str, model: str = "plain", *, speculates: bool = False, **options: Any) -> Candidate:
        info = CandidateInfo(
            name=name,
            is_ours=False,
            is_packed=model == "packed",
            speculates=speculates,
            baseline=(f"{REFERENCE} + packing" if model == "packed" else REFERENCE) if speculates else None,
        )
        return GenerateCandidate(info, models[model], loaded.tokenizer, options)

    rows = [row(REFERENCE)]
    if "generate-again" in settings.baselines:
        rows.append(row("generate again"))
    if "prompt-lookup" in settings.baselines:
        rows += [
            row(f"prompt lookup {size}", speculates=True, prompt_lookup_num_tokens=size)
            for size in settings.lookup_tokens
        ]
    if "assisted" in settings.baselines and settings.assistant is not None:
        assistant = load_model(
            settings.assistant, dtype=loaded.model.dtype, device=loaded.model.device, pack=False, notify=notify
        )
        rows.append(row(f"assisted {settings.assistant}", speculates=True, assistant_model=assistant.model))
    if settings.ablations and "packed" in models:
        rows.append(row(f"{REFERENCE} + packing", "packed"))
        if "prompt-lookup" in settings.baselines:
            rows += [
                row(f"prompt lookup {size} + packing", "packed", speculates=True, prompt_lookup_num_tokens=size)
                for size in settings.lookup_tokens
            ]
    return rows


def _ours(
    settings: BenchSettings, loaded: LoadedModel, models: Mapping[str, PreTrainedModel], notify: Callable[[str], None]
) -> list[Candidate]:
    speculations: dict[str, Speculation | None] = {"plain": None}
    for drafter in settings.drafters:
        for tree in (True, False) if settings.tree == "both" else (settings.tree == "on",):
            if settings.tree == "both" and not tree and drafter in BUILTIN_DRAFTERS:
                continue
            label = drafter if tree or settings.tree == "off" else f"{drafter}, chains"
            speculations[label] = Speculation(
                drafter=drafter, max_draft_tokens=settings.draft_tokens, tree=tree, policy=settings.policy
            )
    if not settings.ablations and "packed" in models:
        models = {"packed": models["packed"]}
    rows: list[Candidate] = []
    for label, speculation in speculations.items():
        for kind, model in models.items():
            suffix = " + packing" if kind == "packed" else ""
            notify(f"preparing specflow {label}{suffix}")
            info = CandidateInfo(
                name=f"specflow {label}{suffix}",
                is_ours=True,
                is_packed=kind == "packed",
                speculates=speculation is not None,
                baseline=f"specflow plain{suffix}" if speculation is not None else None,
            )
            rows.append(EngineCandidate(info, model, loaded.tokenizer, speculation))
    return rows
