"""The program and its table of commands. A command's module is imported when it is called: ``--help`` is instant.

Exit codes: 0 done; 1 a check failed, or something unexpected went wrong; 2 the request cannot work as given; 130
interrupted.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from specflow.errors import SpecflowError

from ..display import console, show_error

PROGRAM = "specflow-llm"
DISTRIBUTION = "specflow-engine"

UNUSABLE = 2
"""Exit code of a request that cannot work as given."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""


class LazyCommand(NamedTuple):
    """Where a command lives."""

    module: str
    """Module, relative to this package."""
    function: str
    """Function with typer annotations."""
    help: str
    """Its line in the list of commands."""


COMMANDS: dict[str, LazyCommand] = {
    "generate": LazyCommand(".generate", "generate", "Complete prompts, as text or JSON."),
    "chat": LazyCommand(".chat", "chat", "Talk to a model, turn by turn."),
    "models": LazyCommand(".models", "models", "List the built-in models, or fetch one."),
    "demo": LazyCommand(".demo", "demo", "Watch a model decode with and without speculation, and compare."),
    "check-drafter": LazyCommand(".check_drafter", "check_drafter", "Is a drafter exact, and what does it gain?"),
    "train": LazyCommand(".train", "train", "Train a drafter for a model, from nothing but the model."),
    "evaluate": LazyCommand(".evaluate", "evaluate", "Measure drafters: acceptance, calibration and speed."),
    "calibrate": LazyCommand(".calibrate", "calibrate", "Make a drafter's confidences keep their word."),
    "bench": LazyCommand("..bench", "bench_command", "Measure decoding speed against transformers."),
    "profile": LazyCommand(".profile", "profile", "Measure what rounds cost here, per batch size and draft length."),
    "simulate": LazyCommand(".simulate", "simulate", "What would each policy achieve at each load? Replays records."),
}


def guarded(function: Callable[..., Any], *, debug: bool) -> Callable[..., Any]:
    """A command whose errors become one line on standard error and an exit code.

    Args:
        function: the command.
        debug: show the traceback too.
    """

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:  # noqa: BLE001 - the last line of defence: a person reads what happened
            out = console(stderr=True)
            if debug:
                out.print(traceback.format_exc(), soft_wrap=True)
            if isinstance(error, SpecflowError):
                show_error(out, str(error))
                raise typer.Exit(UNUSABLE) from None
            hint = "" if debug else "(not foreseen; --debug shows where)"
            show_error(out, f"{type(error).__name__}: {error}", hint=hint)
            raise typer.Exit(1) from None

    return run


class CommandGroup(TyperGroup):
    """Finds commands in :data:`COMMANDS` and imports them one at a time."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the table's order."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command; while commands are only listed, its name and help."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        if self._listing:
            return TyperCommand(name=cmd_name, help=entry.help)
        function = getattr(importlib.import_module(entry.module, __package__), entry.function)
        single = typer.Typer(add_completion=False)
        single.command(cmd_name)(guarded(function, debug=bool(ctx.params.get("debug"))))
        return typer.main.get_command(single)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Let ``--debug`` stand anywhere: people add it to the end of the line that failed."""
        own = args[: args.index("--")] if "--" in args else args
        if "--debug" in own:
            args = ["--debug", *(word for word in own if word != "--debug"), *args[len(own) :]]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Help that imports no command."""
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Exact speculative decoding: the same output as plain decoding, in fewer steps.",
)


def _show_version(value: bool) -> None:  # noqa: FBT001 - typer calls it
    if value:
        try:
            typer.echo(importlib.metadata.version(DISTRIBUTION))
        except importlib.metadata.PackageNotFoundError:
            typer.echo("unknown (run from a checkout that is not installed)")
        raise typer.Exit


@app.callback()
def common(
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options of every command; what they do is done where commands are built."""
    del debug, version


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and leave with its exit code.

    Args:
        arguments: words of the command line; None takes the process's own.
    """
    app(args=None if arguments is None else list(arguments), prog_name=PROGRAM)
