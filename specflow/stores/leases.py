"""Who may write to a run: names for processes, and whether the process behind a name is still there.

A lease normally ends by being released, or by expiring. Where the name says that its owner ran on this machine and the
operating system says that this process is gone, there is nothing to wait for; where it is there still, there is nobody
to take the run from, however late it is with renewing.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

from ..errors import InvalidSettingError

_PROC = Path("/proc")


def this_owner() -> str:
    """Name of this process: ``host:pid:start:suffix``.

    ``host`` is the host name with a digest of the boot and the process namespace where the system tells them, so that
    two containers of one name are not taken for one machine. ``start`` is the start of the process in clock ticks since
    boot, empty where it is not known: process ids are used again. The suffix is random. A forked process has a name of
    its own.
    """
    return _name(os.getpid())


@cache
def _name(pid: int) -> str:
    started = _look_up(pid)
    return ":".join((_host(), str(pid), "" if started is None else started[1], secrets.token_hex(4)))


def is_alive(owner: str) -> bool | None:
    """Does the process that :func:`this_owner` named still run?

    Returns:
        True or False where this can be known, which takes a process of this machine; None otherwise, also for names
        that were made in another way.
    """
    if owner == this_owner():
        return True
    parts = owner.rsplit(":", 3)
    if os.name != "posix" or len(parts) != 4 or parts[0] != this_owner().rsplit(":", 3)[0]:
        return None  # signal 0 is harmless under POSIX only
    pid, started = parts[1], parts[2]
    if re.fullmatch("[1-9][0-9]{0,8}", pid) is None:
        return None
    with suppress(PermissionError):  # it is there, and belongs to another user
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return False
    found = _look_up(int(pid))
    if found is None or not started:
        return None
    state, started_now = found
    return started_now == started and state not in {"Z", "X"}  # killed, and waiting for its parent to notice


def is_free(owner: str | None, expires_at: float, now: float) -> bool:
    """May a run be leased to somebody else without taking it away from its owner?

    Args:
        owner: who holds the lease; None for nobody.
        expires_at: when the lease expires, in seconds since the epoch.
        now: seconds since the epoch.
    """
    if owner is None:
        return True
    alive = is_alive(owner)
    return now >= expires_at if alive is None else not alive


def check_lease_seconds(lease_seconds: float) -> None:
    """Refuse a lease that would never hold.

    Raises:
        InvalidSettingError: it is not a positive number.
    """
    if not lease_seconds > 0.0:
        raise InvalidSettingError("lease_seconds", lease_seconds, "a number of seconds > 0")


def _host() -> str:
    marks: list[str] = []
    with suppress(OSError):  # not Linux, or no access: the host name has to do
        marks.append((_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii"))
        marks.append(str((_PROC / "self/ns/pid").readlink()))
    digest = blake2b("\n".join(marks).encode(), digest_size=4).hexdigest()
    return f"{socket.gethostname()}@{digest}"


def _look_up(pid: int) -> tuple[str, str] | None:
    """State letter and start time of a process, from fields 3 and 22 of its ``stat`` file (proc(5))."""
    try:
        if (_PROC / "self").readlink() != Path(str(os.getpid())):
            return None  # mounted from another process namespace: its numbers are not ours
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold blanks and parentheses
    return fields[0], fields[19]


__all__ = ["check_lease_seconds", "is_alive", "is_free", "this_owner"]
