"""Random programs that die, or are cancelled, at random commits and ticks, again and again, end as if undisturbed.

Every program, guess, duration and death comes from a seed. What a run leaves is compared with the plain run of the same
program: history, state, outcome, and what the outside world saw. A fault that shows in one of a hundred runs stays
unseen by all default runs together (640) with probability 0.2 %.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from specflow.definitions import Attempt, step, workflow
from specflow.effects import RUN_AHEAD, Effect
from specflow.errors import StoreUnavailableError
from specflow.graph import Pipeline
from specflow.history import Commit, EffectStatus, Lease, RunStatus
from specflow.policies import Fixed
from specflow.replay import Context
from specflow.runtime import NotSent, Sent, fork, resume, run
from specflow.speculation import Call, Prediction
from specflow.state import State
from specflow.stores import MemoryStore
from tests.specflow.runtime.support import DyingStore, PowerCutError, WrappedStore, history, values_of

pytestmark = pytest.mark.anyio

REVERSIBLE = RUN_AHEAD | {Effect.IDEMPOTENT, Effect.COMPENSABLE}
POLICIES = [Fixed(0), Fixed(1), Fixed(3, width=2), Fixed(4, width=3, effects=REVERSIBLE), Fixed(2, effects=REVERSIBLE)]
OPERATIONS = (
    "ask ask ask look look think put save tell tell pay book book write draw sleep fail gather gather nested emit"
)


def make_tree(generator: random.Random, depth: int, *, in_branch: bool = False) -> list[Any]:
    """A random program: a list of operations, some of which hold programs."""
    tree: list[Any] = []
    for _ in range(generator.randrange(2, 6)):
        name = generator.choice(OPERATIONS.split())
        if name in ("gather", "nested"):
            if depth == 0:
                continue
            number = generator.randrange(1, 4) if name == "gather" else 1
            inside = in_branch or name == "gather"
            tree.append((name, [make_tree(generator, depth - 1, in_branch=inside) for _ in range(number)]))
        else:
            tree.append((name, generator.randrange(3)))
    return tree


class Guesser:
    """Right, wrong, or silent, by the place of the call; it knows what the step computes."""

    def __init__(self, seed: int, answer: Any) -> None:
        self._seed = seed
        self._answer = answer

    def predict(self, call: Call) -> Sequence[Prediction]:
        """Up to three guesses, the right one anywhere among them or missing."""
        generator = random.Random(f"{self._seed} {call.position} guess")
        right = self._answer(*call.arguments)
        guesses = [right, right + 1, right + 2]
        generator.shuffle(guesses)
        return [Prediction(value, 0.5) for value in guesses[: generator.randrange(4)]]


class Case:
    """One random program with its outside world."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        generator = random.Random(seed)
        self.tree = make_tree(generator, 2)
        self.fails = generator.random() < 0.3
        self.seen: list[tuple[str, str, Any]] = []
        self.busy = 0
        self._define()

    async def work(self, name: str, *args: Any) -> None:
        """Take some ticks, as the seed says."""
        self.busy += 1
        try:
            for _ in range(random.Random(f"{self.seed} {name} {args}").randrange(6)):
                await anyio.lowlevel.checkpoint()
        finally:
            self.busy -= 1

    async def affect(self, name: str, key: str, *args: Any) -> None:
        """Change the outside world, somewhere in between."""
        await self.work(f"before {name}", *args)
        self.seen.append((name, key, args))
        await self.work(f"after {name}", *args)

    async def probe(self, key: str, *args: Any) -> Sent | NotSent:
        """Ask the outside world; only ``book`` has a result that is not None or its argument."""
        await anyio.lowlevel.checkpoint()
        found = [entry for entry in self.seen if entry[1] == key]
        if not found:
            return NotSent()
        name, _key, arguments = found[0]
        return Sent({"pay": arguments[0], "tell": None, "book": key}[name])

    def _define(self) -> None:  # noqa: C901, PLR0915 -- one step of each kind
        def answer(kind: int, value: int) -> int:
            return (value * 7 + kind) % 11

        @step(effect=Effect.READONLY, predict=Guesser(self.seed, answer), name="ask")
        async def ask(kind: int, value: int) -> int:
            await self.work("ask", kind, value)
            return answer(kind, value)

        @step(effect=Effect.READONLY, predict=Guesser(self.seed + 1, answer), name="look")
        async def look(kind: int, value: int, state: State) -> int:
            state.append("log", value)
            await self.work("look", kind, value)
            state.add("sum", kind)
            return answer(kind, value)

        @step(effect=Effect.PURE, name="think")
        async def think(kind: int, value: int) -> int:
            await self.work("think", kind, value)
            return value + kind

        @step(effect=Effect.IDEMPOTENT, name="store")
        async def save(value: int, attempt: Attempt, state: State) -> int:
            state.append("saved", value)
            await self.affect("put", attempt.idempotency_key, value)
            return value + 2

        @step(effect=Effect.IDEMPOTENT, name="put")
        async def put(kind: int, value: int, attempt: Attempt) -> int:
            await self.affect("put", attempt.idempotency_key, kind, value)
            return value + 1

        @step(effect=Effect.BUFFERED, resource="mail", probe=self.probe, name="tell")
        async def tell(value: int, attempt: Attempt) -> None:
            await self.affect("tell", attempt.idempotency_key, value)

        @step(probe=self.probe, resource="bank", name="pay")
        async def pay(value: int, attempt: Attempt) -> int:
            await self.affect("pay", attempt.idempotency_key, value)
            return value

        async def unbook(result: str, kind: int, value: int) -> None:
            await self.affect("unbook", result, kind, value)

        @step(effect=Effect.COMPENSABLE, undo=unbook, probe=self.probe, name="book")
        async def book(kind: int, value: int, attempt: Attempt) -> str:
            await self.affect("book", attempt.idempotency_key, kind, value)
            return attempt.idempotency_key

        @step(effect=Effect.READONLY, name="fail")
        async def fail(value: int) -> int:
            await self.work("fail", value)
            raise LookupError(value)

        async def one(ctx: Context, name: str, content: Any, value: int) -> int:  # noqa: C901, PLR0911, PLR0912 -- a table
            match name:
                case "ask" | "look" | "think" | "put":
                    target = {"ask": ask, "look": look, "think": think, "put": put}[name]
                    return await ctx.call(target, content, value)
                case "tell":
                    await ctx.call(tell, value)
                case "save":
                    return await ctx.call(save, value)
                case "pay":
                    return await ctx.call(pay, value)
                case "book":
                    return int(await ctx.call(book, content, value), 16) % 1000
                case "write":
                    ctx.state.append("log", -value)
                    ctx.state.add(f"key {content}", 1)
                case "draw":
                    return ctx.random().randrange(100)
                case "sleep":
                    await ctx.sleep(0)
                case "emit":
                    ctx.emit(value)
                case "fail":
                    try:
                        return await ctx.call(fail, value)
                    except LookupError as error:
                        return int(error.args[0]) + 5
                case "nested":
                    return await ctx.call(nested, content[0], value)
                case "gather":
                    return sum(await ctx.gather(*[ctx.call(nested, tree, value) for tree in content]))
            return value + 3

        @workflow
        async def nested(ctx: Context, tree: list[Any], value: int) -> int:
            for name, content in tree:
                value = (value + await one(ctx, name, content, value)) % 1000
            return value

        @workflow
        async def program(ctx: Context, tree: list[Any]) -> Any:
            value = await ctx.call(nested, tree, 1)
            if self.fails:
                raise ValueError(f"no {value}")
            return value, ctx.state.get("log"), ctx.state.get("sum")

        self.program = program

    async def begin(self, **settings: Any) -> Any:
        """Run the program."""
        return await self.outcome(run(self.program, self.tree, run_id="r", **settings))

    async def outcome(self, coroutine: Any) -> Any:
        """What a run returns, or the program's own error."""
        try:
            return (await coroutine).value
        except ValueError as error:
            if type(error) is not ValueError:
                raise
            return str(error)

    def net(self) -> Counter[Any]:
        """Effects that were not undone; repetitions of ``put`` and of undos count once."""
        undone = {key for name, key, _args in self.seen if name == "unbook"}
        net: Counter[Any] = Counter()
        for entry in self.seen:
            if entry[1] not in undone and not (entry[0] == "put" and net[entry]):
                net[entry] += 1
        return net

    def order(self, names: set[str]) -> list[Any]:
        """Effects of some kinds in the order they were seen."""
        return list(dict.fromkeys((name, args) for name, _key, args in self.seen if name in names))


class GraphCase(Case):
    """One random pipeline: every step reads some of those before it, and some have effects."""

    def _define(self) -> None:
        generator = random.Random(f"{self.seed} graph")
        self.program = Pipeline("graph")
        for index in range(generator.randrange(3, 9)):
            reads = sorted(generator.sample(range(index), min(index, generator.randrange(4))))
            kind = generator.choice(["ask", "ask", "look", "put", "tell", "pay", "book", "think"])
            self._add(kind, f"node{index}", [f"node{read}" for read in reads], generator.randrange(5))

    def _add(self, kind: str, name: str, reads: list[str], number: int) -> None:
        def answer(inputs: dict[str, Any]) -> int:
            return (
                sum(7 if value is None else int(str(value), 16) % 1000 for value in inputs.values()) * 3 % 11 + number
            )

        async def node(**given: Any) -> Any:
            attempt, state = given.pop("attempt", None), given.pop("state", None)
            value = answer(given)
            if kind in ("put", "tell", "pay", "book"):
                await self.affect(kind, attempt.idempotency_key, value, name)
            else:
                await self.work(name, value)
            if state is not None:
                state.add("sum", value)
            return {"tell": None, "book": attempt and attempt.idempotency_key}.get(kind, value)

        async def unbook(result: str, **given: Any) -> None:
            await self.affect("unbook", result)

        async def probe(key: str, **given: Any) -> Sent | NotSent:
            return await self.probe(key)

        class Predictor:
            """Sometimes right."""

            def predict(self, call: Call) -> list[Prediction]:
                """One guess or two."""
                generator = random.Random(f"{name} {call.position}")
                right = answer(dict(call.keywords))
                return [Prediction(right + generator.randrange(2), 0.5), Prediction(right, 0.5)]

        extra: dict[str, Any] = {"look": {"state": State}}.get(kind, {})
        if kind in ("put", "tell", "pay", "book"):
            extra = {"attempt": Attempt}
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(one, kinds) for one in (*reads, *([] if reads else ["value"]))]
        parameters += [inspect.Parameter(one, kinds, annotation=value) for one, value in extra.items()]
        node.__name__ = name
        node.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        settings: dict[str, Any] = {
            "ask": {"effect": Effect.READONLY, "predict": Predictor()},
            "look": {"effect": Effect.READONLY, "predict": Predictor()},
            "think": {"effect": Effect.PURE},
            "put": {"effect": Effect.IDEMPOTENT},
            "tell": {"effect": Effect.BUFFERED, "resource": "mail", "probe": probe},
            "pay": {"probe": probe, "resource": "bank"},
            "book": {"effect": Effect.COMPENSABLE, "undo": unbook, "probe": probe},
        }[kind]
        self.program.step(name=f"{kind} {name}", **settings)(node)

    async def begin(self, **settings: Any) -> Any:
        """Run the pipeline."""
        return await self.outcome(run(self.program, value=5, run_id="r", **settings))


async def plain(make: type[Case], seed: int) -> tuple[Case, MemoryStore, Any]:
    """The undisturbed run without guesses."""
    case, store = make(seed), MemoryStore()
    return case, store, await case.begin(store=store, policy=Fixed(0))


def check(case: Case, store: Any, outcome: Any, expected: tuple[Case, MemoryStore, Any]) -> None:
    """Is everything as in the undisturbed run?"""
    plain_case, plain_store, plain_outcome = expected
    assert case.busy == 0
    assert outcome == plain_outcome
    assert history(store, "r") == history(plain_store, "r")
    assert values_of(store, "r") == values_of(plain_store, "r")
    assert store.get_run("r").status is plain_store.get_run("r").status
    assert store.get_run("r").owner is None
    counts = Counter((name, key) for name, key, _args in case.seen if name not in ("put", "unbook"))
    assert set(counts.values()) <= {1}
    # Idempotent effects of wrong guesses may be seen by whoever lists them; nothing else of a wrong guess is.
    assert {
        entry: n for entry, n in case.net().items() if entry in plain_case.net() or entry[0] != "put"
    } == plain_case.net()
    assert case.order({"tell"}) == plain_case.order({"tell"})
    open_rows = {
        row.step.split()[0] for row in store.effects("r") if row.status in (EffectStatus.SENT, EffectStatus.PREPARED)
    }
    assert open_rows <= {"put", "store"}


async def run_or_resume(case: Case, store: Any, policy: Any) -> Any:
    """Begin, or go on."""
    settings: dict[str, Any] = {"store": store, "policy": policy, "limits": {"bank": 1}}
    if store.list_runs():
        return await case.outcome(resume("r", program=case.program, **settings))
    return await case.begin(**settings)


def dying(generator: random.Random, inner: MemoryStore, commits: int) -> DyingStore:
    """A store that dies at a random commit, before or after it is written."""
    left = generator.randrange(commits)

    def dies(commit: Commit) -> bool:
        nonlocal left
        left -= 1
        return left == -1

    error = generator.choice([PowerCutError(), StoreUnavailableError("here", "the disk is full")])
    return DyingStore(dies, after=generator.random() < 0.5, error=error, inner=inner)


async def live_again_and_again(make: type[Case], seed: int) -> None:
    """Die at random commits, are cancelled at random ticks, up to four times; then end."""
    generator = random.Random(seed)
    expected = await plain(make, seed)
    commits = expected[1].get_run("r").head + 4
    case, store = make(seed), MemoryStore()
    for _ in range(generator.randrange(5)):
        policy = generator.choice(POLICIES)
        if generator.random() < 0.7:
            with contextlib.suppress(PowerCutError, StoreUnavailableError):
                await run_or_resume(case, dying(generator, store, commits), policy)
        else:
            async with anyio.create_task_group() as group:
                group.start_soon(run_or_resume, case, store, policy)
                for _ in range(generator.randrange(60)):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
        assert case.busy == 0
        if store.list_runs():
            kept = history(store, "r")
            assert kept == history(expected[1], "r")[: len(kept)]
            assert store.get_run("r").status is not RunStatus.BLOCKED
    check(case, store, await run_or_resume(case, store, generator.choice(POLICIES)), expected)


async def try_all(make: type[Case], seeds: Iterable[int]) -> None:
    """Try many seeds; a failure names its seed."""
    for seed in seeds:
        try:
            await live_again_and_again(make, seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("make", [Case, GraphCase])
@pytest.mark.parametrize("part", range(4))
async def test_random_programs_survive_random_deaths(part: int, make: type[Case]) -> None:
    """Whatever dies when: the history stays a prefix, and the end is that of the undisturbed run."""
    await try_all(make, range(40 * part, 40 * part + 40))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("make", [Case, GraphCase])
async def test_many_random_programs_survive_random_deaths(make: type[Case]) -> None:
    """The same for five thousand programs of each kind."""
    await try_all(make, range(10_000, 15_000))


@pytest.mark.parametrize("make", [Case, GraphCase])
async def test_a_fork_at_any_version_that_replays_ends_like_its_origin(make: type[Case]) -> None:
    """Going back anywhere, also between parallel branches, and using recorded results repeats history and no effect."""
    generator = random.Random(1)
    for seed in range(12):
        case, store = make(seed), MemoryStore()
        case.fails = False  # what a failed run has undone is not there to be used again
        outcome = await case.begin(store=store, policy=generator.choice(POLICIES[:3]))
        seen, origin = list(case.seen), history(store, "r")
        for version in range(len(origin) + 1):
            new = fork("r", version, store=store, effects="replay")
            assert history(store, new) == origin[:version]
            policy = generator.choice(POLICIES[:3])
            assert await case.outcome(resume(new, store=store, program=case.program, policy=policy)) == outcome
            assert history(store, new) == origin
            assert values_of(store, new) == values_of(store, "r")
            assert case.seen == seen


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_broken_stores_are_noticed(anyio_backend: str) -> None:
    """The same lives on a store that loses SENT rows, or writes of branches, or entries' order, do not pass."""

    class Losing(WrappedStore):
        """Loses something of what a run reads back."""

        what = ""

        def commit(self, lease: Lease, commit: Commit) -> int:
            """Commit."""
            head: int = self.inner.commit(lease, commit)
            return head

        def effects(self, run_id: str) -> Any:
            """The outbox."""
            rows = self.inner.effects(run_id)
            return [row for row in rows if row.status is not EffectStatus.SENT] if self.what == "sent" else rows

        def entries(self, *args: Any) -> Any:
            """The history."""
            found = list(self.inner.entries(*args))
            if self.what == "entry" and len(found) > 1:
                found.pop()
            return found

    for what in ("sent", "entry"):
        noticed = 0
        for seed in range(150):
            generator = random.Random(seed)
            expected = await plain(Case, seed)
            case, store = Case(seed), MemoryStore()
            losing = Losing(store)
            losing.what = what
            commits = expected[1].get_run("r").head + 4
            with contextlib.suppress(PowerCutError, StoreUnavailableError):
                await run_or_resume(case, dying(generator, store, commits), POLICIES[3])
            try:
                check(case, store, await run_or_resume(case, losing, POLICIES[0]), expected)
            except Exception:  # noqa: BLE001 -- whatever it is, it was noticed
                noticed += 1
                if noticed > 5:
                    break
        assert noticed > 5, what
