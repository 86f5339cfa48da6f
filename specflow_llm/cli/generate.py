"""``specflow-llm generate``: complete one or many prompts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..config import SamplingParams
from ..display import console, counting, generation_summary, plain_table
from . import options
from .options import ModelChoice, speculation

if TYPE_CHECKING:
    from ..engine import Completion, Update
    from ..llm import LLM, Prompt


def generate(  # noqa: PLR0913 - one argument per option
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", show_default=False, help="Texts to complete; - reads standard input."),
    ] = None,
    *,
    prompt_file: options.PromptFiles = None,
    system: options.System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the text itself, without the model's chat template.")
    ] = False,
    model: options.Model = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    drafter: options.Drafter = "ngram",
    draft_tokens: options.DraftTokens = 8,
    tree: options.Tree = True,
    policy: options.Policy = "adaptive",
    verification: options.VerificationRule = "auto",
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    logprobs: Annotated[
        int | None,
        typer.Option(help="Show each token's log-probability and those of this many alternatives."),
    ] = None,
    as_json: options.AsJson = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the answer when it is complete.")] = False,
) -> None:
    """Complete prompts. One prompt is shown as it is generated; several are decoded together."""
    texts = read_prompts(prompts or [], prompt_file or [])
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop or (),
        logprobs=logprobs,
    )
    choice = ModelChoice(
        model=model,
        dtype=dtype,
        device=device,
        threads=threads,
        speculation=speculation(drafter, draft_tokens, policy, verification, tree=tree),
    )
    from .session import as_prompts, completion_data, environment, open_llm  # noqa: PLC0415 - loads torch

    err = console(stderr=True)
    llm = open_llm(choice, err)
    batch = as_prompts(llm, texts, raw=raw, system=system)
    started = time.perf_counter()
    if len(batch) == 1 and not as_json and not no_stream:
        completions = [stream_answer(llm, batch[0], params)]
    else:
        completions = complete_all(llm, batch, params, err)
    seconds = time.perf_counter() - started
    if as_json:
        answers = [completion_data(completion, text) for completion, text in zip(completions, texts, strict=True)]
        typer.echo(json.dumps({"environment": environment(llm), "seconds": seconds, "completions": answers}))
        return
    if len(batch) > 1 or no_stream:
        show_answers(texts, completions)
    if logprobs is not None:
        for completion in completions:
            show_logprobs(llm, completion)
    err.print(summary(llm, completions, seconds), style="dim", soft_wrap=True)


def read_prompts(arguments: Sequence[str], files: Sequence[Path]) -> list[str]:
    """The texts of arguments and files, in order; ``-`` stands for standard input.

    Raises:
        typer.BadParameter: there is no text, an empty one, or one that is not UTF-8.
    """
    texts = [sys.stdin.read() if argument == "-" else argument for argument in arguments]
    for file in files:
        try:
            texts.append(sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise typer.BadParameter(f"{file} is not UTF-8 text") from None
    if not texts:
        raise typer.BadParameter("no prompt: give text, --prompt-file FILE, or - to read standard input")
    empty = next((number for number, text in enumerate(texts, start=1) if not text), None)
    if empty is not None:
        raise typer.BadParameter(f"prompt {empty} is empty")
    return texts


def stream_answer(llm: LLM, prompt: Prompt, params: SamplingParams) -> Completion:
    """Print one answer while it is generated."""
    completion = None
    try:
        with llm.stream(prompt, params) as chunks:
            for chunk in chunks:
                typer.echo(chunk.text, nl=False)
                completion = chunk.completion or completion
    finally:
        typer.echo()  # also after Ctrl-C: the shell's next line starts on a line of its own
    assert completion is not None  # noqa: S101 - the last chunk of a stream carries it
    return completion


def complete_all(llm: LLM, batch: Sequence[Prompt], params: SamplingParams, err: Console) -> list[Completion]:
    """Decode prompts together, with a bar on standard error."""
    done = tokens = 0
    started = time.perf_counter()
    with counting(err, "generating", len(batch)) as progress:

        def show(update: Update) -> None:
            nonlocal done, tokens
            done += update.completion is not None
            tokens += len(update.token_ids)
            progress(done, f"{tokens} tokens, {tokens / (time.perf_counter() - started):.1f} tokens/s")

        return llm.generate(list(batch), params, on_update=show)


def show_answers(texts: Sequence[str], completions: Sequence[Completion]) -> None:
    """Print answers, each under the first line of its prompt where there are several."""
    for number, (text, completion) in enumerate(zip(texts, completions, strict=True), start=1):
        if len(completions) > 1:
            first_line = text.strip().partition("\n")[0]
            typer.echo(f"[{number}/{len(completions)}] {first_line}")
        typer.echo(completion.text)
        if number < len(completions):
            typer.echo()


def show_logprobs(llm: LLM, completion: Completion) -> None:
    """Print a table of tokens with their log-probabilities."""
    table = plain_table("token", "id", "logprob", "most probable", right=("id", "logprob"))
    for entry in completion.logprobs or ():
        best = "  ".join(f"{_token_text(llm, token)} {value:.3f}" for token, value in entry.top)
        table.add_row(_token_text(llm, entry.token_id), str(entry.token_id), f"{entry.logprob:.4f}", best)
    console().print(table)


def _token_text(llm: LLM, token: int) -> str:
    return repr(llm.tokenizer.decode([token])) if llm.tokenizer is not None else str(token)


def summary(llm: LLM, completions: Sequence[Completion], seconds: float) -> str:
    """One line about a finished command."""
    metrics = [completion.metrics for completion in completions]
    tokens = sum(entry.emitted for entry in metrics)
    line = generation_summary(
        tokens=tokens,
        seconds=seconds,
        rounds=sum(entry.rounds for entry in metrics),
        # Rows of a batch share their forwards.
        forwards=llm.engine.backend.target.num_forwards if len(metrics) > 1 else metrics[0].target_forwards,
    )
    return f"{line} | {completions[0].finish_reason}" if len(completions) == 1 else line
