"""``specflow-llm chat``: a conversation at the prompt."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from specflow.errors import SpecflowError

from ..config import SamplingParams
from ..display import console, generation_summary, show_error
from . import options
from .options import ModelChoice, speculation

if TYPE_CHECKING:
    from ..llm import LLM

HELP = "/reset starts over, /stats shows figures, /exit leaves (so does Ctrl-D); Ctrl-C ends an answer."


@dataclass(slots=True)
class Totals:
    """Figures of a whole conversation."""

    turns: int = 0
    tokens: int = 0
    rounds: int = 0
    forwards: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """One line."""
        line = generation_summary(tokens=self.tokens, seconds=self.seconds, rounds=self.rounds, forwards=self.forwards)
        return f"{self.turns} answers | {line}"


@dataclass(slots=True)
class Conversation:
    """Messages so far, and the model that answers."""

    llm: LLM
    params: SamplingParams
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        """Begin with the system message."""
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def ask(self, text: str, write: Callable[[str], None]) -> bool:
        """Answer a message piece by piece; the conversation goes on from what was written.

        Args:
            text: the person's message.
            write: given each piece of the answer.

        Returns:
            False if Ctrl-C cut the answer short; what was written until then stays in the conversation.

        Raises:
            SpecflowError: the conversation cannot be answered, because it is too long for example. It is then as it
                was before.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        started = time.perf_counter()
        finished = True
        try:
            with self.llm.stream(self.messages, self.params) as chunks:
                for chunk in chunks:
                    if chunk.completion is not None:  # an answer that was cut short counts for nothing
                        self.totals.tokens += len(chunk.completion.token_ids)
                        self.totals.rounds += chunk.completion.metrics.rounds
                        self.totals.forwards += chunk.completion.metrics.target_forwards
                        self.totals.seconds += time.perf_counter() - started
                    write(chunk.text)
                    pieces.append(chunk.text)
        except KeyboardInterrupt:
            finished = False
        except SpecflowError:
            self.messages.pop()
            raise
        self.totals.turns += 1
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        return finished


def converse(
    conversation: Conversation,
    read: Callable[[], str | None],
    write: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Read and answer until there is nothing more to read.

    Args:
        conversation: whom to ask.
        read: the next line; None at the end. May raise KeyboardInterrupt, which drops the line.
        write: takes pieces of answers.
        note: takes everything that is no answer.
    """
    while True:
        try:
            line = read()
        except KeyboardInterrupt:
            note(HELP)
            continue
        if line is None or line.strip() == "/exit":
            return
        text = line.strip()
        if text.startswith("/"):
            note(_command(conversation, text))
        elif text:
            _answer(conversation, text, write, note)


def _command(conversation: Conversation, text: str) -> str:
    if text == "/reset":
        conversation.reset()
        return "the conversation starts over"
    if text == "/stats":
        return str(conversation.totals)
    return HELP if text == "/help" else f"unknown command {text}: {HELP}"


def _answer(conversation: Conversation, text: str, write: Callable[[str], None], note: Callable[[str], None]) -> None:
    try:
        finished = conversation.ask(text, write)
    except SpecflowError as error:
        note(f"error: {error} (/reset starts over)")
        return
    write("\n")
    if not finished:
        note("(interrupted)")


def chat(  # noqa: PLR0913 - one argument per option
    *,
    system: options.System = None,
    model: options.Model = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    drafter: options.Drafter = "ngram",
    draft_tokens: options.DraftTokens = 8,
    tree: options.Tree = True,
    policy: options.Policy = "adaptive",
    verification: options.VerificationRule = "auto",
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
) -> None:
    """Talk to a model. /reset starts over, /stats shows figures, /exit leaves; Ctrl-C ends an answer.

    Lines may be piped in, one message each.
    """
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop or (),
    )
    choice = ModelChoice(
        model=model,
        dtype=dtype,
        device=device,
        threads=threads,
        speculation=speculation(drafter, draft_tokens, policy, verification, tree=tree),
        max_batch_size=1,
    )
    from .session import has_chat_template, open_llm  # noqa: PLC0415 - loads torch

    err = console(stderr=True)
    llm = open_llm(choice, err)
    if not has_chat_template(llm):
        show_error(err, f"{llm.name} has no chat template, so it cannot hold a conversation; use generate instead")
        raise typer.Exit(2)
    interactive = sys.stdin.isatty()
    if interactive:
        err.print(f"{llm.name}. {HELP}", style="dim")

    def note(text: str) -> None:
        err.print(text, style="dim", soft_wrap=True)

    def write(text: str) -> None:
        typer.echo(text, nl=False)

    converse(Conversation(llm, params, system), _ask_line if interactive else _next_line, write, note)


def _ask_line() -> str | None:
    """A line typed at the prompt, with the editing that the terminal offers."""
    try:
        return input("> ")
    except EOFError:
        return None


def _next_line() -> str | None:
    """A line of piped input."""
    return sys.stdin.readline() or None
