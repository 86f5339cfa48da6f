"""Does the drafter remember the right things?

A guess may depend on the committed tokens of its own request and on nothing else, unless the drafter learns across
requests on purpose. Wrong memories never make the output wrong; they make guesses worse, and memory grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .harness import Desk, Setup, WatchedDrafter
from .report import Outcome

Finding = tuple[Outcome, str]

LIMIT = 6
"""Draft length asked for."""
REJECT_AT = (0, 2, 9, 1)
"""How many proposed tokens are accepted in successive rounds; 9 accepts all."""
GROWTH_ROWS = 24
"""Requests opened and released when looking for memory that stays."""

LEARNS = "declared to learn across requests, so its guesses are not a function of the request's tokens"
SILENT = "it never proposed anything on the texts of this check"


def check_repeatable(setup: Setup, desk: Desk) -> Finding:
    """Two new drafters that see the same requests propose the same."""
    spoke = False
    for text in desk.texts:
        first, second = setup.drafter(), setup.drafter()
        for length in range(max(1, len(text) - 4), len(text) + 1):
            ids = {0: text[:length]}
            ours, theirs = desk.ask(first, ids, {0: LIMIT})[0], desk.ask(second, ids, {0: LIMIT})[0]
            spoke = spoke or bool(ours)
            if ours != theirs:
                twice = f"{ours} and {theirs} for the same greedy request"
                return Outcome.SKIPPED, f"it draws from a generator of its own ({twice})"
    return (Outcome.OK, "the same requests give the same proposals") if spoke else (Outcome.SKIPPED, SILENT)


def check_rollback(setup: Setup, desk: Desk) -> Finding:
    """A proposal after rejections equals the proposal of a new drafter for the same tokens."""
    compared = 0
    for text in desk.texts:
        drafter, ids = setup.drafter(), list(text)
        for turn, accept in enumerate(REJECT_AT):
            proposed = desk.ask(drafter, {0: ids}, {0: LIMIT})[0]
            fresh = desk.ask(setup.drafter(), {0: ids}, {0: LIMIT})[0]
            compared += bool(proposed or fresh)
            if not _agree(proposed, fresh):
                return Outcome.FAILED, (
                    f"round {turn}, after {sum(REJECT_AT[:turn])} accepted tokens and a rejection each round: "
                    f"proposes {proposed}, from scratch {fresh}"
                )
            ids = _committed(ids, proposed, accept)
    if not compared:
        return Outcome.SKIPPED, SILENT
    return Outcome.OK, f"{compared} proposals after rejections equal those from scratch"


def check_rows_apart(setup: Setup, desk: Desk) -> Finding:
    """A request gets the same proposals in a changing batch and alone."""
    rows = dict(enumerate(desk.texts))
    limits = {0: LIMIT, 1: 3, 2: 5, 3: 4, 4: LIMIT}
    together = setup.drafter()
    alone = {row: setup.drafter() for row in rows}
    compared = 0
    for turn, accept in enumerate(REJECT_AT):
        if turn == 2:  # one request leaves and another joins
            together.release(desk.request(together, 1, rows.pop(1), 0).row)
            rows[4] = list(rows[0][:-1])
            alone[4] = setup.drafter()
        order = sorted(rows, key=lambda row: (row + turn) % len(rows))
        in_batch = desk.ask(together, {row: rows[row] for row in order}, limits)
        for row in order:
            solo = desk.ask(alone[row], {row: rows[row]}, limits)[row]
            compared += bool(solo or in_batch[row])
            if not _agree(in_batch[row], solo):
                return Outcome.FAILED, f"round {turn}, row {row}: proposes {in_batch[row]} in a batch, {solo} alone"
        rows = {row: _committed(ids, in_batch[row], (accept + row) % 4) for row, ids in rows.items()}
    if not compared:
        return Outcome.SKIPPED, SILENT
    return Outcome.OK, f"{compared} proposals are the same in a ragged batch and alone"


def check_release(setup: Setup, desk: Desk, *, repeatable: bool) -> Finding:
    """A released row is forgotten: its number can be used again, and its memory is free.

    Args:
        setup: what to run.
        desk: who asks.
        repeatable: a fresh drafter can be compared with.
    """
    drafter = setup.drafter()
    stranger = desk.request(drafter, 99, [1], 0).row
    drafter.release(stranger)  # never seen: must be ignored
    noise, motif, own, _ = desk.texts
    # One number for texts that are shorter, longer and of other tokens than the one before: a memory of that one shows.
    for text in (noise, motif[:9], own, noise[:7]):
        again = desk.ask(drafter, {7: text}, {7: LIMIT})[7]
        drafter.release(desk.request(drafter, 7, text, 0).row)
        fresh = desk.ask(setup.drafter(), {7: text}, {7: LIMIT})[7]
        if repeatable and not _agree(again, fresh):
            return Outcome.FAILED, f"after release, a request of the same number gets {again}, from scratch {fresh}"
    return _growth(setup, desk)


def _growth(setup: Setup, desk: Desk) -> Finding:
    """Whether memory grows with the number of finished requests, by the drafter's own account."""
    drafter = setup.drafter()
    text = [*desk.texts[1], *desk.texts[0]]
    _serve(drafter, desk, text, range(4))
    before = _total(drafter.state_bytes())
    live = range(100, 104)
    desk.ask(drafter, dict.fromkeys(live, text), dict.fromkeys(live, LIMIT))
    per_row = (_total(drafter.state_bytes()) - before) / len(live)
    for row in live:
        drafter.release(desk.request(drafter, row, text, 0).row)
    start = _total(drafter.state_bytes())
    _serve(drafter, desk, text, range(200, 200 + GROWTH_ROWS))
    growth = _total(drafter.state_bytes()) - start
    if not before and not per_row:
        return Outcome.OK, "reports no state, and reuses a row number without remembering it"
    # What is shared may grow a little (learned rates, spare capacity); what a row held must be gone.
    left = f"{GROWTH_ROWS} finished requests left {max(0, growth)} bytes"
    if per_row > 0 and growth > 0.5 * per_row * GROWTH_ROWS:
        return Outcome.FAILED, f"{left}, as if {growth / per_row:.0f} were still held"
    return Outcome.OK, f"{left}; a live one holds {max(0, round(per_row))}"


def _serve(drafter: WatchedDrafter, desk: Desk, text: Sequence[int], rows: range) -> None:
    """Open, ask and release one row after another."""
    for row in rows:
        desk.ask(drafter, {row: text}, {row: LIMIT})
        drafter.release(desk.request(drafter, row, text, 0).row)


def _total(state: Mapping[str, int]) -> int:
    return sum(state.values())


def _agree(left: Sequence[int], right: Sequence[int]) -> bool:
    """Equal as far as both go: how long a draft is may be learned, what it says may not."""
    shared = min(len(left), len(right))
    return list(left[:shared]) == list(right[:shared]) and (shared > 0 or len(left) == len(right))


def _committed(ids: Sequence[int], proposed: Sequence[int], accept: int) -> list[int]:
    """The request's tokens after a round that accepts some of a proposal and then emits something else."""
    kept = list(proposed[:accept])
    refused = proposed[len(kept)] if len(kept) < len(proposed) else None
    replacement = next((token for token in dict.fromkeys(reversed(ids)) if token != refused), 0)
    return [*ids, *kept, replacement]
