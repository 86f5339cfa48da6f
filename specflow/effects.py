"""What a step may do to the outside world, and what that allows the runtime to do with it."""

from __future__ import annotations

import hashlib
from enum import Enum

from .history import Position, format_position


class Effect(Enum):
    """The class of a step. Undeclared means :attr:`IRREVERSIBLE`: such a step never runs on a guess."""

    PURE = "pure"
    """Depends on its arguments only. May run ahead; the result of a squashed attempt may serve an equal call."""
    READONLY = "readonly"
    """Reads the outside world and changes nothing. May run ahead: what it saw a moment early counts as fresh enough."""
    IDEMPOTENT = "idempotent"
    """Doing it again with the same idempotency key changes nothing. Runs ahead only where the policy lists it; sent
    again after a crash."""
    BUFFERED = "buffered"
    """Held back: the call returns None at once, and the step runs after its place in the program was committed."""
    COMPENSABLE = "compensable"
    """Has an ``undo``. Runs ahead only where the policy lists it; undone when squashed or when the run fails."""
    IRREVERSIBLE = "irreversible"
    """Cannot be undone or repeated. Runs only when everything before it is committed."""

    @property
    def is_external(self) -> bool:
        """True when an attempt changes the outside world, so that it must be recorded before it is made."""
        return self not in (Effect.PURE, Effect.READONLY)


RUN_AHEAD = frozenset({Effect.PURE, Effect.READONLY, Effect.BUFFERED})
"""Effects that run ahead without being listed by the policy."""


def idempotency_key(run_id: str, position: Position, step: str, arguments: bytes, purpose: str = "do") -> str:
    """Key of an effect: the same for every attempt, retry and recovery of one call at one place of one run.

    Args:
        run_id: the run; a fork has its own, so its effects are its own.
        position: program position of the call.
        step: name of the step.
        arguments: encoded arguments. A deterministic program has one step and one set of arguments at a position; a
            wrong guess may have others, and must not take the real call's key.
        purpose: ``"do"``, or ``"undo"`` for its compensation.

    Returns:
        32 hexadecimal digits.
    """
    text = f"{run_id}\x00{format_position(position)}\x00{step}\x00{purpose}\x00"
    return hashlib.blake2b(text.encode() + arguments, digest_size=16).hexdigest()


__all__ = ["RUN_AHEAD", "Effect", "idempotency_key"]
