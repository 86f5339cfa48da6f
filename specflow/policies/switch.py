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

    * A streak of executed drafts of which nothing is accepted first shortens the drafts, by half per acceptance owed,
      then switches off. The streak is measured in expected acceptances that did not come (``debt``), so a drafter that
      promises little is given more rounds: an honest one comes to owe :attr:`PATIENCE` with probability
      ``exp(-PATIENCE)`` at most.
    * A wait of ``wait`` rounds without an executed draft makes a probe due: one item is executed although it does not
      seem to pay, twice if the first is rejected. Every probe doubles the wait; an ordinary accepted draft resets it.
    * After a successful probe, and in a chain about which nothing is known, drafts start short.

    Args:
        max_draft: longest draft ever wanted.
        first_wait: rounds until the first probe.
        max_wait: longest wait between probes.
    """

    __slots__ = (
        "_first_wait", "_full", "_grace", "_max_draft", "_max_wait", "_on", "_tries",
        "debt", "idle", "length", "reason", "wait",
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
        self.debt = 0.0
        self._grace = 1.0
        self.length = self._full = self._max_draft
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
        # A proven drafter is allowed one missed acceptance before its drafts get shorter.
        self.length = max(1, self._full >> max(0, int(self.debt - self._grace)))
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

    def join(self) -> None:
        """Short drafts again, because another chain's probe was accepted."""
        if not self._on:
            self._on = True
            self.idle = 0
            self._tries = self.TRIES
            self._restart("another chain's probe was accepted: short drafts until the next success")

    def rested(self) -> None:
        """A round passed in which the chain had, or would have had, a draft but executed none of it."""
        self.idle += 1

    def _restart(self, reason: str) -> None:
        self.debt = 0.0
        self._grace = 0.0
        self.length = self._full = min(self.START_LENGTH, self._max_draft)
        self.reason = reason


class Experience:
    """What new chains inherit: whether the drafter works at all, and how long it has been since anyone tried.

    Without it every short-lived chain would pay for learning again that the drafter is of no use.

    Args:
        first_wait: rounds until the first probe.
    """

    __slots__ = ("_debt", "_first_wait", "_is_proven", "idle", "wait")

    def __init__(self, first_wait: int) -> None:
        self._first_wait = first_wait
        self._debt = 0.0
        self._is_proven = False
        self.wait = first_wait
        self.idle = 0

    def introduce(self, switch: Switch) -> None:
        """Set up the switch of a new chain."""
        if self._debt >= Switch.PATIENCE:
            switch.turn_off("drafts of earlier chains were not accepted", self.wait, self.idle)
        elif self._is_proven:
            switch.trust()

    def won(self) -> None:
        """Some chain's ordinary draft had an accepted item."""
        self._debt = 0.0
        self._is_proven = True
        self.wait = self._first_wait
        self.idle = 0

    def lost(self, charge: float) -> None:
        """Nothing of some chain's ordinary draft was accepted."""
        self._debt += charge
        self.idle = 0

    def probed(self, wait: int, *, accepted: bool) -> None:
        """Some chain was probed and now waits ``wait`` rounds for its next probe."""
        self.wait = wait
        self.idle = 0
        if accepted:
            self._debt = 0.0
            self._is_proven = False

    def rested(self) -> None:
        """A round passed in which no chain executed a draft."""
        self.idle += 1
