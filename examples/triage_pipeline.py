"""A declared graph whose router is predicted by its history.

    python examples/triage_pipeline.py

Support tickets go through a small pipeline: read the language, route, look up what the route needs, draft a reply. The
classifiers are real (word counts over the ticket). Each step also waits as long as the remote service would that it
stands for; the waits are the only thing that is made up, and are printed.

The router is the slow step. Its answer for the next ticket is guessed from the answers so far, and everything behind it
starts on the guess. Removing the predictor changes nothing but the time.
"""

from __future__ import annotations

import time
from collections import Counter

import anyio

from specflow import Effect, Fixed, Pipeline, run
from specflow.predictors import Markov

WAITS = {"language": 0.02, "route": 0.12, "account": 0.06, "manual": 0.06, "reply": 0.05}
"""Seconds that each remote service takes."""

TICKETS = [
    "please refund the invoice, the card was charged twice",
    "the app crashes with an error when it starts",
    "refund my last payment, I was charged for a plan I left",
    "error 42 when I print, then it crashes",
] * 4

WORDS = {
    "billing": {"refund", "invoice", "charged", "card", "payment", "plan"},
    "technical": {"crashes", "error", "print", "app", "starts"},
}
ROUTER_HISTORY = Markov(order=2)


def build(*, predict: bool) -> Pipeline:
    """The pipeline, with or without a predictor on its router."""
    triage = Pipeline("triage")

    @triage.step(effect=Effect.PURE)
    async def language(ticket: str) -> str:
        await anyio.sleep(WAITS["language"])
        words = Counter(ticket.lower().split())
        return "en" if words["the"] + words["my"] + words["i"] else "unknown"

    @triage.step(effect=Effect.PURE, predict=ROUTER_HISTORY if predict else None)
    async def route(ticket: str) -> str:
        await anyio.sleep(WAITS["route"])
        found = Counter({name: len(words & set(ticket.replace(",", "").split())) for name, words in WORDS.items()})
        return found.most_common(1)[0][0]

    @triage.step(effect=Effect.READONLY, when={"route": "billing"})
    async def account(ticket: str) -> str:
        await anyio.sleep(WAITS["account"])
        return f"account of whoever wrote {len(ticket)} letters"

    @triage.step(effect=Effect.READONLY, when={"route": "technical"})
    async def manual(ticket: str) -> str:
        await anyio.sleep(WAITS["manual"])
        return f"manual page {sum(map(ord, ticket)) % 100}"

    @triage.step(effect=Effect.PURE)
    async def reply(language: str, route: str, account: str | None, manual: str | None) -> str:
        await anyio.sleep(WAITS["reply"])
        return f"[{language}] {route}: see {account or manual}"

    return triage


async def main() -> None:
    """Run all tickets with and without the predictor, and compare."""
    answers: dict[bool, list[str]] = {}
    seconds: dict[bool, float] = {}
    hits = misses = 0
    for predict in (False, True):
        triage = build(predict=predict)
        started = time.perf_counter()
        answers[predict] = []
        for ticket in TICKETS:
            result = await run(triage, ticket=ticket, policy=Fixed(1))
            answers[predict].append(result.value)
            hits += result.report.hits
            misses += result.report.misses
        seconds[predict] = time.perf_counter() - started
    assert answers[True] == answers[False], "predictors change time, never results"
    print(build(predict=True).draw())
    print(f"\nwaits: {WAITS}")
    print(f"{len(TICKETS)} tickets, router guessed right {hits} times and wrong {misses} times")
    gain = seconds[False] / seconds[True]
    print(f"without prediction {seconds[False]:.2f} s, with {seconds[True]:.2f} s: {gain:.2f}x")
    print(answers[True][0])


if __name__ == "__main__":
    anyio.run(main)
