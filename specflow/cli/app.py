"""The parser, and what happens to errors.

Exit codes: 0 done; 1 something went wrong, or a test found something; 2 the command line cannot be read; 130
interrupted. With ``--json`` standard output holds exactly one JSON object, also when something went wrong; what a
person should read is on standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from ..errors import SpecflowError
from . import commands
from .output import Answer, as_json, write
from .specs import POLICY_HELP, PREDICTOR_HELP

DISTRIBUTION = "specflow-engine"
DESCRIPTION = "Look at stored runs, go on with them, ask what if, and test programs."
FAILED = 1
"""Exit code when something went wrong."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""

_LONGEST = 2000
"""Characters of an error: some hold values of the program."""

Command = Callable[[argparse.Namespace], Answer]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after ``specflow``; default: those of the process.

    Returns:
        The exit code.

    Raises:
        SystemExit: the command line cannot be read (code 2), or asked for help (code 0).
    """
    arguments = make_parser().parse_args(argv)
    command: Command = arguments.command
    try:
        with _folder_importable():
            answer = command(arguments)
        write(as_json(answer.data) if arguments.json else answer.text)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read has gone. Nothing more may be written, not even by the interpreter as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except SpecflowError as error:
        return _fail(error, str(error), as_object=arguments.json)
    except Exception as error:  # noqa: BLE001 - the last line of defence: a person reads what happened
        return _fail(error, f"{type(error).__name__}: {error}", as_object=arguments.json)
    return answer.code


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser("specflow", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    adder = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Command, line: str, description: str = "") -> argparse.ArgumentParser:
        one = adder.add_parser(name, help=line, description=description or line, allow_abbrev=False)
        one.add_argument("--json", action="store_true", help="print one JSON object")
        one.set_defaults(command=command)
        return one

    _add_testing(add("synctest", commands.synctest, "Run a program with wrong guesses forced on it, and compare."))
    _add_looking(add)
    replay = add(
        "replay",
        commands.replay,
        "What would another policy or predictor have made of a recorded run? Nothing is run.",
        "Follow a recorded run in virtual time under other policies and predictors. Steps return what is on record and "
        "take the recorded seconds; calls on wrong guesses that are not on record take their step's median and come to "
        "nothing.",
    )
    _add_replay(replay)
    resume = add("resume", commands.resume, "Go on with a run after a crash.")
    _add_resume(resume)
    fork = add("fork", commands.fork, "Make a new run that shares another one's history up to a version.")
    _add_run(fork)
    fork.add_argument("version", type=int, metavar="VERSION", help="number of entries to keep")
    fork.add_argument("--effects", choices=["replay", "resend"], help="what to do about effects that were sent later")
    fork.add_argument("--run-id", metavar="NEW", help="name of the new run (default: a new UUID)")
    return parser


def _add_testing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", metavar="MODULE:PROGRAM", help="a @workflow or a Pipeline")
    parser.add_argument(
        "--args",
        default="[]",
        metavar="JSON",
        help="its arguments: a list for positional ones, an object for named ones, anything else for a single one",
    )
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="runs with guesses at random (default: 20)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="decides the random choices (default: 0)")
    parser.add_argument(
        "--allow-effects", action="store_true", help="run steps that change the outside world for real, once"
    )
    parser.add_argument(
        "--stub",
        action="append",
        default=[],
        metavar="STEP=MODULE:FUNCTION",
        help="run a function in place of a step (repeatable)",
    )
    parser.add_argument(
        "--unstable",
        action="append",
        default=[],
        metavar="STEP",
        help="a READONLY step that may return something else at every call (repeatable)",
    )
    _add_backend(parser)


def _add_looking(add: Callable[..., argparse.ArgumentParser]) -> None:
    _add_store(add("runs", commands.runs, "List the runs of a store."))
    show = add("show", commands.show, "Show a run: its history, its state, its effects.")
    _add_run(show)
    show.add_argument("--version", type=int, metavar="N", help="the history up to a version, and the state at it")
    show.add_argument("--state", action="store_true", help="show the state")
    show.add_argument("--effects", action="store_true", help="show the effects on the outside world")
    stats = add(
        "stats",
        commands.stats,
        "Calls, seconds and predictability of each step.",
        "Calls, median seconds and, for several predictors that learn as they go, how often each would have guessed "
        "the step's results right.",
    )
    _add_run(stats, optional=True)
    _add_run(add("gc", commands.gc, "Drop states and entries that nobody can ask for any more."), optional=True)
    draw = add("draw", commands.draw, "Draw a pipeline as a Mermaid flowchart.")
    draw.add_argument("pipeline", metavar="MODULE:PIPELINE")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--policy",
        action="append",
        metavar="POLICY",
        help=f"{POLICY_HELP} (repeatable, to compare; default: fixed:1)",
    )
    parser.add_argument(
        "--predictor",
        action="append",
        default=[],
        metavar="PREDICTOR",
        help=f"{PREDICTOR_HELP} (repeatable; default: as declared)",
    )
    parser.add_argument(
        "--train", action="store_true", help="let the predictors learn from the earlier runs of the program first"
    )
    parser.add_argument(
        "--money",
        action="append",
        default=[],
        metavar="STEP=PRICE",
        help="price of one call of a step (repeatable; default: as declared)",
    )
    _add_limit(parser)
    parser.add_argument("--program", metavar="MODULE:PROGRAM", help="what the run ran (default: as recorded)")
    parser.add_argument("--allow-changed", action="store_true", help="go on although the program's code has changed")


def _add_resume(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--program", metavar="MODULE:PROGRAM", help="what the run runs (default: as recorded)")
    parser.add_argument("--policy", metavar="POLICY", help=f"{POLICY_HELP} (default: fixed:1)")
    _add_limit(parser)
    parser.add_argument(
        "--sent",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="the unknown effect of this key did happen, with this result (repeatable)",
    )
    parser.add_argument(
        "--wrote",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="what that effect wrote to the state: an object of values, {} for nothing (repeatable)",
    )
    parser.add_argument(
        "--not-sent", action="append", default=[], metavar="KEY", help="the unknown effect of this key did not happen"
    )
    parser.add_argument("--take-over", action="store_true", help="go on although its owner seems alive")
    parser.add_argument("--allow-changed", action="store_true", help="go on although the program's code has changed")
    _add_backend(parser)


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE.db", help="file of a SQLiteStore")


def _add_run(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    _add_store(parser)
    if optional:
        parser.add_argument("run", metavar="RUN", nargs="?", help="id of the run (default: all runs)")
    else:
        parser.add_argument("run", metavar="RUN", help="id of the run")


def _add_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="RESOURCE=N",
        help="most attempts at a time of a resource class (repeatable)",
    )


def _add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", choices=["asyncio", "trio"], default="asyncio", help="event loop of async steps (default: asyncio)"
    )


class _Version(argparse.Action):
    """Looks the version up only when it is asked for: that takes longer than all the rest of the parser."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import importlib.metadata  # noqa: PLC0415 - as above

        try:
            version = importlib.metadata.version(DISTRIBUTION)
        except importlib.metadata.PackageNotFoundError:
            version = "unknown (run from a checkout that is not installed)"
        write(version)
        parser.exit()


def _fail(error: BaseException, message: str, *, as_object: bool) -> int:
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]}..."
    if as_object:
        write(as_json({"error": {"type": type(error).__name__, "message": message}}))
    write(f"specflow: {message}", sys.stderr)
    return FAILED


@contextmanager
def _folder_importable() -> Generator[None]:
    """Programs are found in the current folder, as ``python -m`` finds them."""
    folder = os.getcwd()  # noqa: PTH109 - an entry of the path is text
    if folder in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


__all__ = ["main", "make_parser"]
