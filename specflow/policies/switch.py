"""Whether a chain speculates at all: on, off, or off and probing."""

from __future__ import annotations

from enum import Enum


class SwitchState(Enum):
    """What a chain is allowed to do."""

    ON = "on"
    """Draft and execute what pays."""
    OFF = "off"
    """Run plainly until the wait is over."""
    PROBING = "probing"
    """Off, but the wait is over: execute one item to find out whether drafting works again."""


class Switch:
    """The on/off switch of one chain. It counts rounds and items only; it knows no clock and no cost.

    * A streak of executed drafts of which nothing is accepted first shortens the drafts, then switches off. The streak is
      measured in expected acceptances that did not come (``debt``), so a drafter that promises little is given more rounds:
      an honest one owes :attr:`PATIENCE` acceptances in a row with probability about ``exp(-PATIENCE)`` at most.
    * A wait of ``wait`` rounds without an executed draft makes a probe due: one item is executed although it does not seem
      to pay, twice if the first is rejected. Every probe doubles the wait; an ordinary accepted draft resets it.
    * After a successful probe, and in a chain about which nothing is known, drafts start short.

    Args:
        max_draft: longest draft ever wanted.
        first_wait: rounds until the first probe.
        max_wait: longest wait between probes.
    """

    __slots__ = (
        "_first_wait", "_max_draft", "_max_wait", "_misses", "_on", "_tries", "debt", "idle", "length", "reason", "wait",
    )  # fmt: skip

    PATIENCE = 5.0
    START_LENGTH = 2
    TRIES = 2

    def __init__(self, max_draft: int, first_wait: int, max_wait: int) -> None:
        self._max_draft = max_draft
        self._first_wait = first_wait
        self._max_wait = max_wait
        self._on = True
        self._tries = self.TRIES
        self.wait = first_wait
        self.idle = 0
        self._restart("nothing is known yet: short drafts until one is accepted")

    @property
    def state(self) -> SwitchState:
        """On, off or probing."""
        if self._on:
            return SwitchState.ON
        return SwitchState.PROBING if self.probe_due else SwitchState.OFF

    @property
    def probe_due(self) -> bool:
        """True when a single item should be executed even if it does not seem to pay."""
        return self.idle >= self.wait

    @property
    def is_on(self) -> bool:
        """True when drafts are executed wherever they pay."""
        return self._on

    @property
    def limit(self) -> int:
        """Longest draft allowed now."""
        if self._on:
            return self.length
        return 1 if self.idle >= self.wait else 0

    def trust(self) -> None:
        """Allow full drafts: the drafter is known to work."""
        self._misses = 0
        self.debt = 0.0
        self.length = self._max_draft
        self.reason = "drafts are accepted"

    def turn_off(self, reason: str, wait: int = 0, idle: int = 0) -> None:
        """Run plainly until a probe is due; ``wait`` and ``idle`` carry over what other chains have waited already."""
        self._on = False
        self.wait = max(self.wait, wait)
        self.idle = idle
        self.reason = reason

    def won(self) -> None:
        """An ordinary draft had an accepted item."""
        self.idle = 0
        self.wait = self._first_wait
        self.trust()

    def lost(self, charge: float) -> None:
        """Nothing of an ordinary draft was accepted, where ``charge`` acceptances were expected of its first item."""
        self.idle = 0
        self.debt += charge
        self._misses += 1
        if self._misses > 1:
            self.length = max(1, self.length // 2)
        if self.debt >= self.PATIENCE:
            self.turn_off("no draft has been accepted for too long")

    def probed(self, *, accepted: bool) -> None:
        """A probe's item was executed."""
        self._tries -= 1
        if not accepted and self._tries > 0:
            return
        self._tries = self.TRIES
        self.idle = 0
        self.wait = min(2 * self.wait, self._max_wait)
        if accepted and not self._on:
            self._on = True
            self._restart("a probe was accepted: short drafts until the next success")

    def rested(self) -> None:
        """A round passed in which the chain had, or would have had, a draft but executed none of it."""
        self.idle += 1

    def _restart(self, reason: str) -> None:
        self._misses = 1
        self.debt = 0.0
        self.length = min(self.START_LENGTH, self._max_draft)
        self.reason = reason
