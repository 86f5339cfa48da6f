"""Replay recorded agent moves in virtual time: seconds saved and money wasted under each run-ahead policy.

The trace holds games played by a slow actor (a large model) while a fast guesser (a small one) named its likeliest next
moves: sample trajectories of Ye et al. 2025, "Speculative Actions" (arXiv:2510.04371). No model runs here, and no time
passes: everything follows from the recorded times.

    python benchmarks/chess_actions.py                          # reads ../shared/data/chess_speculation.jsonl
    python benchmarks/chess_actions.py --trace moves.jsonl --actor-price 0.05 --json > result.json

**The model.** A game is a chain of actor calls: call i + 1 needs the result of call i. Depth is 1: at most one guess is
unresolved. Let A[i] be the recorded seconds of actor call i, G[i] those of the guesser when asked for as many guesses
as the policy is wide, and F[-1] = 0.

* Call i is *authoritative* from F[i-1] on, when the result before it is known. Its attempt began at B[i] <= F[i-1].
* Its result is known at F[i] = max(F[i-1], B[i] + A[i]). The game takes F[last]; a run takes the sum over its games.
* Where F[i] > F[i-1] the guesser is asked at F[i-1] and answers at R = F[i-1] + G[i]. An answer that comes no earlier
  than F[i] is dropped and not scored. Guesses that repeat an earlier one are dropped.
* At R the policy is asked about each guess, likeliest first. For each one it allows, actor call i + 1 starts at once.
* At F[i] the guesses are resolved and the policy learns from all of them, started or not. If the right one was
  started, B[i+1] = R: the call has a head start of F[i] - R seconds, which is A[i] - G[i] where call i had none itself.
  Otherwise B[i+1] = F[i].
* The other started calls are wasted: each costs its full price and F[i] - R attempt-seconds.
* The last call of a game has no successor in the trace, so nothing is guessed there.

What a policy is told: the mean of earlier actor calls (how long the next one takes), the mean rest of those earlier
calls that lasted longer than the running one has by now (how long it still takes), the price, and what is running and
spent. The recorded guesser states no confidence, so each rank is given its hit rate so far, (hits + 1) / (guesses + 2).
Nothing is known before it happened, and policies see the games in order.

Rows with other guessers: *oracle* names the right move in the recorded guesser's time, the most that depth 1 can save;
*adversary* names wrong moves and claims certainty. Speculation is free of interference here: a real run that shares
its machines or rate limits with wrong attempts loses more. Prices are assumptions, not recorded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from specflow.effects import Effect
from specflow.policies import CircuitBreaker, ExpectedValue, Fixed, Shadow, Threshold
from specflow.protocols import RunAheadPolicy
from specflow.speculation import Assumption, Opportunity, Resolution, Spent

TRACE = Path(__file__).parents[1] / "../shared/data/chess_speculation.jsonl"
MAX_WIDTH = 3
ACTOR = "actor"


@dataclass(frozen=True, slots=True)
class Move:
    """One recorded actor call and what the guesser said meanwhile."""

    actual: str
    actor_seconds: float
    guesses: tuple[tuple[str, ...], ...]
    """By width - 1; likeliest first, without repetitions."""
    guess_seconds: tuple[float, ...]
    """By width - 1."""


Game = Sequence[Move]
Guess = tuple[str, float]
"""A move and the confidence in it."""


class Guesser(Protocol):
    """**Protocol:** names the likeliest results of an actor call."""

    name: str

    def guesses(self, move: Move, width: int) -> Sequence[Guess]:
        """Distinct guesses, likeliest first."""
        ...

    def observe(self, rank: int, *, hit: bool) -> None:
        """Learn how a guess turned out."""
        ...


class Recorded:
    """What the recorded guesser said, with its hit rates so far as confidences."""

    def __init__(self) -> None:
        self.name = "recorded"
        self._hits = [0] * MAX_WIDTH
        self._seen = [0] * MAX_WIDTH

    def guesses(self, move: Move, width: int) -> Sequence[Guess]:
        """The answer to the question for ``width`` guesses."""
        return [
            (guess, (self._hits[rank] + 1) / (self._seen[rank] + 2))
            for rank, guess in enumerate(move.guesses[width - 1])
        ]

    def observe(self, rank: int, *, hit: bool) -> None:
        """Count."""
        self._hits[rank] += hit
        self._seen[rank] += 1


class Oracle:
    """Names the right move."""

    name = "oracle"

    def guesses(self, move: Move, width: int) -> Sequence[Guess]:
        """One guess, right."""
        del width
        return [(move.actual, 1.0)]

    def observe(self, rank: int, *, hit: bool) -> None:
        """Learns nothing."""


class Adversary:
    """Names as many wrong moves as it may, and is sure of each."""

    name = "adversary"

    def guesses(self, move: Move, width: int) -> Sequence[Guess]:
        """All wrong."""
        return [(f"not {move.actual} ({rank})", 1.0) for rank in range(width)]

    def observe(self, rank: int, *, hit: bool) -> None:
        """Learns nothing."""


@dataclass(slots=True)
class Tally:
    """What a replay counted."""

    seconds: float = 0.0
    """Virtual seconds of all games, one after another."""
    guess_calls: int = 0
    speculative_calls: int = 0
    wasted_calls: int = 0
    wasted_seconds: float = 0.0
    """Attempt-seconds of the wasted calls."""
    hits: int = 0
    """Calls that had a head start."""
    durations: list[float] = field(default_factory=list)
    """Actor calls seen so far, for the estimates."""

    def rest(self, elapsed: float) -> float | None:
        """Mean seconds that earlier calls longer than ``elapsed`` still took from there; None if there were none."""
        rests = [duration - elapsed for duration in self.durations if duration > elapsed]
        return sum(rests) / len(rests) if rests else None


@dataclass(frozen=True, slots=True)
class Attempt:
    """The actor call that is being waited for."""

    begun: float
    authoritative: float
    known: float

    @classmethod
    def of(cls, move: Move, begun: float, authoritative: float) -> Attempt:
        """By the recurrence of the model."""
        return cls(begun, authoritative, max(authoritative, begun + move.actor_seconds))


def replay(games: Sequence[Game], policy: RunAheadPolicy, guesser: Guesser, actor_price: float) -> Tally:
    """Play all games under a policy, in order."""
    tally = Tally()
    for game in games:
        attempt = Attempt.of(game[0], 0.0, 0.0)
        for number, move in enumerate(game):
            begun = attempt.known
            if number + 1 < len(game) and policy.depth > 0:
                begun = follow_guesses(tally, (number,), move, attempt, policy, guesser, actor_price)
            tally.durations.append(move.actor_seconds)
            if number + 1 < len(game):
                attempt = Attempt.of(game[number + 1], begun, attempt.known)
        tally.seconds += attempt.known
    return tally


def follow_guesses(
    tally: Tally,
    position: tuple[int, ...],
    move: Move,
    attempt: Attempt,
    policy: RunAheadPolicy,
    guesser: Guesser,
    actor_price: float,
) -> float:
    """Guess the result of one call and start the next one on the guesses; returns when its kept attempt began."""
    if attempt.known <= attempt.authoritative:
        return attempt.known
    tally.guess_calls += 1
    ready = attempt.authoritative + move.guess_seconds[policy.width - 1]
    if ready >= attempt.known:
        return attempt.known
    head_start = attempt.known - ready
    begun = attempt.known
    resolutions: list[Resolution] = []
    running = 0
    for rank, (guess, confidence) in enumerate(guesser.guesses(move, policy.width)):
        assumption = Assumption(ACTOR, position, guesser.name, rank, confidence)
        wasted = tally.wasted_calls + running
        opportunity = Opportunity(
            step=ACTOR,
            effect=Effect.READONLY,
            assumptions=(assumption,),
            wait_seconds=tally.rest(ready - attempt.begun),
            step_seconds=tally.rest(0.0),
            money=actor_price,
            tokens=0.0,
            running=running,
            spent=Spent(wasted, tally.wasted_seconds, wasted * actor_price),
        )
        started = policy.allows(opportunity)
        hit = guess == move.actual
        running += started
        if started and hit:
            begun = ready
        lost = head_start if started and not hit else 0.0
        resolutions.append(Resolution(assumption, hit, head_start if started and hit else 0.0, lost))
    kept = begun < attempt.known
    tally.speculative_calls += running
    tally.hits += kept
    tally.wasted_calls += running - kept
    for rank, resolution in enumerate(resolutions):
        tally.wasted_seconds += resolution.wasted_seconds
        policy.learn(resolution)
        guesser.observe(rank, hit=resolution.hit)
    return begun


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    name: str
    policy: Callable[[], RunAheadPolicy]
    guesser: Callable[[], Guesser] = Recorded


@dataclass(frozen=True, slots=True)
class Result:
    """What a row came to."""

    policy: str
    guesser: str
    seconds: float
    saved: float
    """Fraction of the seconds without speculation."""
    guess_calls: int
    speculative_calls: int
    hits: int
    wasted_calls: int
    wasted_seconds: float
    wasted_money: float
    extra_money: float
    """Wasted calls and guesses together."""
    money_per_saved_second: float | None
    """The value of a second from which on the row pays; None where nothing was saved."""
    on_frontier: bool
    """No row with the recorded guesser is both faster and cheaper, or as good in one and better in the other."""


def settings(values_of_second: Sequence[float]) -> list[Setting]:
    """Everything that is compared."""
    rows = [Setting("none", partial(Fixed, 0))]
    rows += [Setting(f"Fixed(1, width={width})", partial(Fixed, 1, width=width)) for width in (1, 2, 3)]
    rows += [
        Setting(f"Threshold(1, {least}, width=3)", partial(Threshold, 1, least, width=3))
        for least in (0.05, 0.1, 0.25, 0.4)
    ]
    rows += [
        Setting(f"ExpectedValue({value:g}/s)", partial(ExpectedValue, value_of_second=value, depth=1))
        for value in values_of_second
    ]
    dearest = max(values_of_second)

    expected_value = partial(ExpectedValue, value_of_second=dearest, depth=1)

    def breaker() -> CircuitBreaker:
        return CircuitBreaker(Fixed(1, width=3))

    return [
        *rows,
        Setting("CircuitBreaker(Fixed(1, width=3))", breaker),
        Setting(f"Shadow(ExpectedValue({dearest:g}/s))", lambda: Shadow(expected_value())),
        Setting("Fixed(1)", partial(Fixed, 1), Oracle),
        Setting(f"ExpectedValue({dearest:g}/s)", expected_value, Oracle),
        Setting("Fixed(1, width=3)", partial(Fixed, 1, width=3), Adversary),
        Setting("Threshold(1, 0.4, width=3)", partial(Threshold, 1, 0.4, width=3), Adversary),
        Setting(f"ExpectedValue({dearest:g}/s)", expected_value, Adversary),
        Setting("CircuitBreaker(Fixed(1, width=3))", breaker, Adversary),
    ]


def measure(
    games: Sequence[Game], values_of_second: Sequence[float], actor_price: float, guess_price: float
) -> list[Result]:
    """One result per setting, losing ones included."""
    runs = [
        (setting, guesser.name, replay(games, setting.policy(), guesser, actor_price))
        for setting in settings(values_of_second)
        for guesser in [setting.guesser()]
    ]
    plain = replay(games, Fixed(0), Recorded(), actor_price).seconds

    def costs(tally: Tally) -> tuple[float, float]:
        return tally.seconds, tally.wasted_calls * actor_price + tally.guess_calls * guess_price

    recorded = [costs(tally) for _, name, tally in runs if name == "recorded"]
    results = []
    for setting, name, tally in runs:
        seconds, money = own = costs(tally)
        beaten = any(other != own and other[0] <= seconds and other[1] <= money for other in recorded)
        results.append(
            Result(
                policy=setting.name,
                guesser=name,
                seconds=seconds,
                saved=1.0 - seconds / plain,
                guess_calls=tally.guess_calls,
                speculative_calls=tally.speculative_calls,
                hits=tally.hits,
                wasted_calls=tally.wasted_calls,
                wasted_seconds=tally.wasted_seconds,
                wasted_money=tally.wasted_calls * actor_price,
                extra_money=money,
                money_per_saved_second=money / (plain - seconds) if seconds < plain else None,
                on_frontier=name == "recorded" and not beaten,
            )
        )
    return results


def read_games(path: Path) -> list[Game]:
    """Games of a trace, one JSON object per line and move.

    Raises:
        ValueError: a line is not a recorded move; names it.
    """
    games: dict[int, list[Move]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            widths = range(1, MAX_WIDTH + 1)
            move = Move(
                actual=row["actual"],
                actor_seconds=float(row["actor_s"]),
                guesses=tuple([tuple(dict.fromkeys(row[f"guess{width}"])) for width in widths]),
                guess_seconds=tuple([float(row[f"guess{width}_s"]) for width in widths]),
            )
            games.setdefault(row["game"], []).append(move)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path.name}, line {number} is not a recorded move: {error!r}") from error
    if not games:
        raise ValueError(f"{path.name} holds no moves")
    return list(games.values())


def provenance(trace: Path) -> dict[str, Any]:
    """What someone needs to repeat this run."""
    commit = ""
    if (git := shutil.which("git")) is not None:
        root = Path(__file__).resolve().parents[1]
        done = subprocess.run([git, "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)  # noqa: S603 -- fixed arguments
        commit = done.stdout.strip()
    return {
        "argv": sys.argv[1:],
        "commit": commit or None,
        "python": platform.python_version(),
        "trace": trace.name,
        "sha256": hashlib.sha256(trace.read_bytes()).hexdigest(),
    }


def show(results: Sequence[Result]) -> None:
    """Print one table."""
    print(
        f"{'guesser':10} {'policy':34} {'seconds':>8} {'saved':>6} {'guesses':>7} {'started':>7} {'hits':>5} "
        f"{'wasted':>6} {'wasted s':>9} {'wasted $':>8} {'extra $':>8} {'$/saved s':>9} frontier"
    )
    for row in results:
        price = "-" if row.money_per_saved_second is None else f"{row.money_per_saved_second:.5f}"
        print(
            f"{row.guesser:10} {row.policy:34} {row.seconds:8.0f} {row.saved:6.1%} {row.guess_calls:7} "
            f"{row.speculative_calls:7} {row.hits:5} {row.wasted_calls:6} {row.wasted_seconds:9.0f} "
            f"{row.wasted_money:8.2f} {row.extra_money:8.2f} {price:>9} {'yes' if row.on_frontier else ''}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay the trace under every policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, help="recorded moves (JSON lines)")
    parser.add_argument("--actor-price", type=float, default=0.05, help="money per actor call (assumed)")
    parser.add_argument("--guess-price", type=float, default=0.001, help="money per question to the guesser (assumed)")
    parser.add_argument(
        "--values",
        type=float,
        nargs="+",
        default=[0.0001, 0.0003, 0.001, 0.003, 0.01],
        help="what a second is worth, in the same money, one ExpectedValue row each",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if not options.trace.is_file():
        parser.error(f"there is no trace at {options.trace}; give the path of a recorded one with --trace")
    if min(options.actor_price, options.guess_price, *options.values) < 0.0:
        parser.error("prices and values must not be negative")
    try:
        games = read_games(options.trace)
    except ValueError as error:
        parser.error(str(error))
    results = measure(games, options.values, options.actor_price, options.guess_price)
    if options.json:
        report = {
            "provenance": provenance(options.trace),
            "games": len(games),
            "moves": sum(map(len, games)),
            "actor_price": options.actor_price,
            "guess_price": options.guess_price,
            "results": [asdict(result) for result in results],
        }
        print(json.dumps(report, indent=2))
        return
    print(
        f"{len(games)} games, {sum(map(len, games))} actor calls at {options.actor_price:g} each (assumed), "
        f"guesses at {options.guess_price:g} a question (assumed)\n"
    )
    show(results)


if __name__ == "__main__":
    main()
