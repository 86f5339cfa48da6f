"""How busy the machine is with other work while something is timed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

BUSY_CORES = 0.2
"""Cores that other processes may use on average before a timing counts as disturbed."""
BUSY_LOAD = 0.5
"""Load average at the start above which the machine counts as busy: this process has not worked yet then."""

_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Processor seconds at one moment."""

    wall: float
    own: float
    everyone: float | None
    """Busy (stolen included) seconds of all cores since boot; None where the system does not tell."""


def cpu_use() -> CpuUse:
    """Processor seconds used so far, by this process and by everyone."""
    return CpuUse(time.perf_counter(), time.process_time(), _everyone())


def _everyone(stat: Path = _STAT) -> float | None:
    try:
        fields = stat.read_text(encoding="ascii").partition("\n")[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields)
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def others_cores(before: CpuUse, after: CpuUse) -> float | None:
    """Cores that other processes used on average between two moments; None where the system does not tell."""
    elapsed = after.wall - before.wall
    if before.everyone is None or after.everyone is None or elapsed <= 0:
        return None
    return max(0.0, (after.everyone - before.everyone - (after.own - before.own)) / elapsed)


def load_average() -> float | None:
    """The one-minute load average, where the system has one."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None
