"""A processor's speculation, on the same loop that decodes tokens.

Four small programs run as hardware threads of a toy machine. Each round a branch predictor guesses the next branches
of every thread, the machine runs ahead along the guessed path with an undo log, and what turns out wrong is squashed:

    predict   fetch: walk the code along predicted branches
    execute   run the instructions on that path, really, and resolve each branch
    verify    compare predicted and real directions
    commit    retire the right prefix, undo the rest, train the predictor

The branches retired this way must be those of a run without prediction; the program checks that.

    python examples/branch_prediction.py
    python examples/branch_prediction.py --policy threshold --depth 16
    python examples/branch_prediction.py --record branches.txt       # write the retired branches
    python examples/branch_prediction.py --trace branches.txt        # speculate over a recorded trace
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from specflow import (
    AcceptPrefix,
    Adaptive,
    Admission,
    ChainBackend,
    ChainId,
    ChainLoop,
    ChainView,
    Draft,
    Fixed,
    Policy,
    RoundReport,
    Threshold,
    run_sync,
)
from specflow.predictors import BranchPrediction, BranchPredictor, GShare, TwoBit
from specflow.testing import ManualClock, SequenceBackend, Timing

# ------------------------------------------------------------------------------------------------------------ programs

PROGRAMS = {
    "nested loops": """
        li r1 0
    outer:
        li r2 0
    inner:
        add r3 r3 r2
        addi r2 r2 1
        blt r2 r5 inner
        addi r1 r1 1
        blt r1 r6 outer
        halt
    """,
    "insertion sort": """
        li r1 1
    next:
        bge r1 r6 done
        load r3 r1
        addi r2 r1 -1
    shift:
        blt r2 r0 place
        load r4 r2
        bge r3 r4 place
        store r4 r2 1
        addi r2 r2 -1
        jmp shift
    place:
        store r3 r2 1
        addi r1 r1 1
        jmp next
    done:
        halt
    """,
    "word counter": """
        li r7 32
    scan:
        bge r1 r6 done
        load r2 r1
        addi r1 r1 1
        beq r2 r7 space
        bne r3 r0 scan
        li r3 1
        addi r4 r4 1
        jmp scan
    space:
        li r3 0
        jmp scan
    done:
        halt
    """,
    "collatz": """
        li r1 1
        li r7 1
    start:
        add r2 r1 r0
    step:
        beq r2 r7 done
        andi r3 r2 1
        beq r3 r0 even
        add r4 r2 r2
        add r2 r4 r2
        addi r2 r2 1
        jmp step
    even:
        half r2 r2
        jmp step
    done:
        addi r1 r1 1
        blt r1 r6 start
        halt
    """,
}
"""Assembly by name. Registers are r0 to r7, and r0 stays 0; r5 is 12 and r6 the size of the data at the start.
``load rd ra`` reads memory[ra], ``store rs ra n`` writes memory[ra + n]."""

BRANCHES: dict[str, Callable[[int, int], bool]] = {
    "beq": lambda left, right: left == right,
    "bne": lambda left, right: left != right,
    "blt": lambda left, right: left < right,
    "bge": lambda left, right: left >= right,
}


class Branch(NamedTuple):
    """One executed conditional branch: the item that chains are made of here."""

    address: int
    taken: bool


class Instruction(NamedTuple):
    """A decoded instruction; registers and labels are numbers."""

    name: str
    arguments: tuple[int, ...]


def assemble(source: str) -> list[Instruction]:
    """Turn assembly into instructions, labels into addresses."""
    lines = [line.split() for line in source.splitlines() if line.strip()]
    labels: dict[str, int] = {}
    words: list[list[str]] = []
    for line in lines:
        if line[0].endswith(":"):
            labels[line[0][:-1]] = len(words)
        else:
            words.append(line)

    def number(word: str) -> int:
        return labels[word] if word in labels else int(word.removeprefix("r"))

    return [Instruction(name, tuple(number(word) for word in rest)) for name, *rest in words]


# ------------------------------------------------------------------------------------------------------------- machine


class MachineFault(Exception):  # noqa: N818 -- what processors call it
    """A step that cannot be executed. On a wrongly predicted path it is squashed with the path and nobody sees it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A point to roll back to."""

    log_length: int
    pc: int


class Machine:
    """Registers, memory and an undo log; stops at every conditional branch."""

    MAX_STEPS = 10_000

    def __init__(self, code: Sequence[Instruction], memory: Sequence[int], size: int) -> None:
        self.code = code
        self.pc = 0
        self.memory = list(memory)
        self.registers = [0] * 8
        self.registers[5], self.registers[6] = 12, size
        self._log: list[tuple[list[int], int, int]] = []

    def resolve(self) -> Branch | None:
        """Run to the next conditional branch and return it with its real direction; None where the program ends.

        Raises:
            MachineFault: an address is out of range, or the path never reaches a branch.
        """
        for _ in range(self.MAX_STEPS):
            name, arguments = self.code[self.pc]
            if name in BRANCHES:
                return Branch(self.pc, BRANCHES[name](self.registers[arguments[0]], self.registers[arguments[1]]))
            if name == "halt":
                return None
            self._step(name, arguments)
        raise MachineFault("no branch in sight")

    def follow(self, taken: bool) -> None:  # noqa: FBT001 -- the one thing a branch has
        """Leave the branch at the program counter in a direction, right or not."""
        self.pc = successor(self.code, Branch(self.pc, taken))

    def mark(self) -> Mark:
        """The present point."""
        return Mark(len(self._log), self.pc)

    def roll_back(self, mark: Mark) -> None:
        """Undo every write since a mark."""
        while len(self._log) > mark.log_length:
            target, index, old = self._log.pop()
            target[index] = old
        self.pc = mark.pc

    def retire(self) -> None:
        """Make every write permanent."""
        self._log.clear()

    def _step(self, name: str, arguments: tuple[int, ...]) -> None:
        registers = self.registers
        match name, arguments:
            case "jmp", (target,):
                self.pc = target
                return
            case "li", (rd, value):
                self._write(registers, rd, value)
            case "add", (rd, ra, rb):
                self._write(registers, rd, registers[ra] + registers[rb])
            case "addi", (rd, ra, value):
                self._write(registers, rd, registers[ra] + value)
            case "andi", (rd, ra, value):
                self._write(registers, rd, registers[ra] & value)
            case "half", (rd, ra):
                self._write(registers, rd, registers[ra] >> 1)
            case "load", (rd, ra):
                self._write(registers, rd, self.memory[self._checked(registers[ra])])
            case "store", (rs, ra, offset):
                self._write(self.memory, self._checked(registers[ra] + offset), registers[rs])
        self.pc += 1

    def _checked(self, address: int) -> int:
        if not 0 <= address < len(self.memory):
            raise MachineFault(f"address {address}")
        return address

    def _write(self, target: list[int], index: int, value: int) -> None:
        self._log.append((target, index, target[index]))
        target[index] = value


def successor(code: Sequence[Instruction], branch: Branch) -> int:
    """Where execution goes on after a branch."""
    return code[branch.address].arguments[2] if branch.taken else branch.address + 1


def next_branch(code: Sequence[Instruction], pc: int) -> int | None:
    """Address of the first conditional branch on the way from ``pc``, found without executing, if there is one."""
    for _ in range(len(code)):
        name, arguments = code[pc]
        if name in BRANCHES:
            return pc
        if name == "halt":
            return None
        pc = arguments[0] if name == "jmp" else pc + 1
    return None


# ------------------------------------------------------------------------------------------------------------- backend


@dataclass(slots=True)
class Thread:
    """One hardware thread."""

    chain_id: ChainId
    machine: Machine
    history: int = 0
    """Outcomes of retired branches, newest in the lowest bit."""
    retired: int = 0


@dataclass(frozen=True, slots=True)
class RealPath:
    """What execution found out about one thread: the real branches on the guessed path, and where they were."""

    branches: Sequence[Branch | None]
    marks: Sequence[Mark]


@dataclass(frozen=True, slots=True)
class Lookup:
    """A predictor as one thread sees it. Threads share its tables, but not the same entries for the same address."""

    SPREAD: ClassVar[int] = 0x9E3

    predictor: BranchPredictor
    thread: int
    history: int

    def predict(self, address: int, history: int) -> BranchPrediction:
        """Guess a branch."""
        return self.predictor.predict(address + self.SPREAD * self.thread, history)

    def observe(self, branch: Branch) -> None:
        """Learn a retired branch."""
        self.predictor.observe(branch.address + self.SPREAD * self.thread, self.history, taken=branch.taken)


def fetch(lookup: Lookup, start: int | None, follow: Callable[[Branch], int | None], limit: int) -> Draft[Branch]:
    """Predict branch after branch from ``start``, with the probability that all of them are right."""
    address, history, certainty = start, lookup.history, 1.0
    values: list[Branch] = []
    survival: list[float] = []
    while address is not None and len(values) < limit:
        guess = lookup.predict(address, history)
        certainty *= guess.confidence
        values.append(Branch(address, guess.taken))
        survival.append(certainty)
        history = history << 1 | guess.taken
        address = follow(values[-1])
    return Draft(values, survival)


class Processor:
    """The five phases for hardware threads that share a branch predictor."""

    WINDOW = 64

    def __init__(self, machines: Sequence[Machine], predictor: BranchPredictor, clock: ManualClock) -> None:
        self._threads = [Thread(ChainId(number), machine) for number, machine in enumerate(machines)]
        self._predictor = predictor
        self._clock = clock
        self._paths: list[RealPath] = []
        self._starts = [thread.machine.mark() for thread in self._threads]

    def chains(self) -> Sequence[ChainView]:
        """Threads that have not halted."""
        return [ChainView(thread.chain_id, thread.retired, self.WINDOW) for thread in self._threads]

    async def predict(self, limits: Sequence[int]) -> Sequence[Draft[Branch]]:
        """Fetch: walk the code along predicted directions."""
        return [self._fetch(thread, limit) for thread, limit in zip(self._threads, limits, strict=True)]

    async def execute(self, drafts: Sequence[Draft[Branch]], admission: Admission) -> Sequence[RealPath]:
        """Run every thread along its guessed path and one branch further."""
        self._clock.advance(cycles(len(drafts) + admission.total))
        self._paths = [
            self._run_ahead(thread.machine, draft.values[:length])
            for thread, draft, length in zip(self._threads, drafts, admission.lengths, strict=True)
        ]
        return self._paths

    async def verify(
        self, drafts: Sequence[Draft[Branch]], admission: Admission, outcome: object
    ) -> Sequence[AcceptPrefix[Branch]]:
        """Count the branches that went as predicted; the one after them is known too."""
        del outcome
        verdicts: list[AcceptPrefix[Branch]] = []
        for draft, length, path in zip(drafts, admission.lengths, self._paths, strict=True):
            right = 0
            while right < length and draft.values[right] == path.branches[right]:
                right += 1
            verdicts.append(AcceptPrefix(right, path.branches[right]))
        return verdicts

    async def commit(self, verdicts: Sequence[AcceptPrefix[Branch]]) -> Sequence[Sequence[Branch]]:
        """Retire the right branches, squash the others, train the predictor."""
        items: list[Sequence[Branch]] = []
        for thread, verdict, path in zip(self._threads, verdicts, self._paths, strict=True):
            thread.machine.roll_back(path.marks[verdict.num_accepted])
            retired = [branch for branch in path.branches[: verdict.num_accepted + 1] if branch is not None]
            for branch in retired:
                Lookup(self._predictor, thread.chain_id, thread.history).observe(branch)
                thread.history = thread.history << 1 | branch.taken
            if verdict.replacement is not None:
                thread.machine.follow(verdict.replacement.taken)
            thread.machine.retire()
            thread.retired += len(retired)
            items.append(retired)
        self._threads = [
            thread for thread, verdict in zip(self._threads, verdicts, strict=True) if verdict.replacement is not None
        ]
        self._starts = [thread.machine.mark() for thread in self._threads]
        return items

    def discard(self) -> None:
        """Undo the round."""
        for thread, start in zip(self._threads, self._starts, strict=True):
            thread.machine.roll_back(start)

    def _fetch(self, thread: Thread, limit: int) -> Draft[Branch]:
        code = thread.machine.code
        lookup = Lookup(self._predictor, thread.chain_id, thread.history)
        return fetch(
            lookup,
            next_branch(code, thread.machine.pc),
            lambda branch: next_branch(code, successor(code, branch)),
            limit,
        )

    @staticmethod
    def _run_ahead(machine: Machine, guesses: Sequence[Branch]) -> RealPath:
        branches: list[Branch | None] = []
        marks: list[Mark] = []
        for guess in [*guesses, None]:
            try:
                branches.append(machine.resolve())
            except MachineFault:
                if all(real == wanted for real, wanted in zip(branches, guesses, strict=False)):
                    raise  # this path is the real one
                break
            marks.append(machine.mark())
            if branches[-1] is None or guess is None:
                break
            machine.follow(guess.taken)
        return RealPath(branches, marks)


def cycles(width: int) -> float:
    """What a round costs: filling the pipeline, and a little for each branch in flight."""
    return 12.0 + width


# -------------------------------------------------------------------------------------------------------------- traces


class TraceProcessor(SequenceBackend[Branch]):
    """Speculates over recorded branches. There is no code to walk: where a branch leads is learned from the trace."""

    def __init__(self, traces: Sequence[Sequence[Branch]], predictor: BranchPredictor, clock: ManualClock) -> None:
        super().__init__(traces, self._fetch, Timing(clock, cycles))
        self._traces = traces
        self._predictor = predictor
        self._histories = [0] * len(traces)
        self._learned = [0] * len(traces)
        self._targets: list[dict[Branch, int]] = [{} for _ in traces]

    async def commit(self, verdicts: Sequence[AcceptPrefix[Branch]]) -> Sequence[Sequence[Branch]]:
        """Retire, and train predictor and branch targets."""
        items = await super().commit(verdicts)
        for thread, trace in enumerate(self._traces):
            retired = self.history(thread)
            for number in range(self._learned[thread], len(retired)):
                branch = trace[number]
                Lookup(self._predictor, thread, self._histories[thread]).observe(branch)
                self._histories[thread] = self._histories[thread] << 1 | branch.taken
                if number:
                    self._targets[thread][trace[number - 1]] = branch.address
            self._learned[thread] = len(retired)
        return items

    def _fetch(self, thread: int, position: int, future: Sequence[Branch]) -> Draft[Branch]:
        targets = self._targets[thread]
        start = targets.get(self._traces[thread][position - 1]) if position else None
        return fetch(Lookup(self._predictor, thread, self._histories[thread]), start, targets.get, len(future))


def write_traces(path: Path, traces: dict[str, Sequence[Branch]]) -> None:
    """One ``address T|N`` line per branch, a ``# name`` line before each thread."""
    lines: list[str] = []
    for name, branches in traces.items():
        lines.append(f"# {name}")
        lines += [f"{branch.address} {'T' if branch.taken else 'N'}" for branch in branches]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_traces(path: Path) -> dict[str, Sequence[Branch]]:
    """Read what :func:`write_traces` wrote; addresses may also be hexadecimal (0x...)."""
    traces: dict[str, list[Branch]] = {}
    name = "trace"
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            name = line[1:].strip()
        elif line.strip():
            address, direction = line.split()
            traces.setdefault(name, []).append(Branch(int(address, 0), direction.upper() in {"T", "1"}))
    return dict(traces)


# ---------------------------------------------------------------------------------------------------------------- runs


@dataclass(slots=True)
class Tally:
    """What one thread did."""

    rounds: int = 0
    retired: int = 0
    right: int = 0
    mispredicted: int = 0
    squashed: int = 0


class TallyObserver:
    """Counts per thread."""

    def __init__(self) -> None:
        self.tallies: dict[int, Tally] = {}

    def on_round(self, report: RoundReport) -> None:
        """Add a round."""
        for index, thread in enumerate(report.chain_ids):
            tally = self.tallies.setdefault(thread, Tally())
            admitted, accepted = report.admitted[index], report.accepted[index]
            tally.rounds += 1
            tally.retired += report.emitted[index]
            tally.right += accepted
            tally.mispredicted += accepted < admitted
            tally.squashed += admitted - accepted


Histories = dict[int, list[Branch]]


def retire_all(
    backend: ChainBackend[Branch], policy: Policy, clock: ManualClock
) -> tuple[Histories, dict[int, Tally], float]:
    """Run every thread to its end; returns retired branches and tallies by thread, and the cycles it took."""
    observer = TallyObserver()
    loop = ChainLoop(backend, policy, [observer], clock)
    histories: Histories = {}
    while (finished := run_sync(loop.round())) is not None:
        for thread, items in zip(finished.report.chain_ids, finished.items, strict=True):
            histories.setdefault(thread, []).extend(items)
    return histories, observer.tallies, clock()


def machines(size: int) -> list[Machine]:
    """The four programs with their data."""
    noise = list(pseudo_random(size))
    text = [32 if value % 6 == 0 else 97 for value in noise]
    data = {"insertion sort": noise[: max(2, size // 8)], "word counter": text}
    return [
        Machine(assemble(source), data.get(name, []), len(data.get(name, [])) or size // 8)
        for name, source in PROGRAMS.items()
    ]


def pseudo_random(count: int) -> Iterator[int]:
    """The same numbers every time (a linear congruential generator, Knuth's MMIX constants)."""
    state = 7
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 48


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, compare with the serial run, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=8, help="most branches predicted ahead per thread")
    parser.add_argument("--policy", choices=["fixed", "threshold", "adaptive"], default="fixed")
    parser.add_argument("--size", type=int, default=1200, help="size of the programs' data")
    parser.add_argument("--trace", type=Path, help="speculate over recorded branches instead of running programs")
    parser.add_argument("--record", type=Path, help="write the retired branches to a file")
    options = parser.parse_args(arguments)
    policies: dict[str, Callable[[], Policy]] = {
        "fixed": lambda: Fixed(options.depth),
        "threshold": lambda: Threshold(options.depth, 0.5),
        "adaptive": lambda: Adaptive(options.depth),
    }
    traces = read_traces(options.trace) if options.trace else {}
    names = list(traces or PROGRAMS)

    def backend(predictor: BranchPredictor, clock: ManualClock) -> ChainBackend[Branch]:
        if traces:
            return TraceProcessor(list(traces.values()), predictor, clock)
        return Processor(machines(options.size), predictor, clock)

    clock = ManualClock()
    serial, plain, plain_cycles = retire_all(backend(TwoBit(), clock), Fixed(0), clock)
    if options.record:
        write_traces(options.record, {name: serial[thread] for thread, name in enumerate(names)})
    print(
        f"{'predictor':<10}{'thread':<16}{'branches':>9}{'accuracy':>10}{'run':>7}{'rounds':>8}{'plain':>8}{'squashed':>10}"
    )
    for label, predictor in (("two-bit", TwoBit()), ("gshare", GShare())):
        clock = ManualClock()
        histories, tallies, used = retire_all(backend(predictor, clock), policies[options.policy](), clock)
        if histories != serial:
            raise SystemExit(f"{label}: the retired branches differ from the serial run")
        for thread, name in enumerate(names):
            tally = tallies[thread]
            accuracy = tally.right / max(1, tally.right + tally.mispredicted)
            print(
                f"{label:<10}{name:<16}{tally.retired:>9}{accuracy:>10.1%}{tally.retired / tally.rounds:>7.2f}"
                f"{tally.rounds:>8}{plain[thread].rounds:>8}{tally.squashed:>10}"
            )
        print(f"{label:<10}all threads at once: {used:.0f} cycles, {plain_cycles / used:.2f} times as fast as plain")
    print("retired branches equal the serial run")


if __name__ == "__main__":
    main()
