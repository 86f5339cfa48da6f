"""Owners have names that tell whether their process is still there, or that this cannot be known."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specflow.stores import this_owner
from specflow.stores.leases import is_alive, is_free

ROOT = Path(__file__).resolve().parents[3]
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the process table of Linux")


def name_of(pid: int) -> str:
    """What :func:`this_owner` would say in another process of this machine."""
    host, _, _, suffix = this_owner().rsplit(":", 3)
    start = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return f"{host}:{pid}:{start}:{suffix}"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits until it is killed."""
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_has_one_name() -> None:
    """The name is the same whenever it is asked for, holds the process id, and is known to be alive."""
    assert this_owner() == this_owner()
    assert this_owner().rsplit(":", 3)[1] == str(os.getpid())
    assert is_alive(this_owner()) is True


FORK = """
import os, sys
from specflow.stores import this_owner
from specflow.stores.leases import is_alive
mine = this_owner()
read, write = os.pipe()
child = os.fork()
if child == 0:
    os.write(write, this_owner().encode())
    os._exit(0)
os.waitpid(child, 0)
os.close(write)
theirs = os.fdopen(read).read()
sys.stdout.write(f"{child} {is_alive(theirs)}\\n{mine}\\n{theirs}")
"""


def test_a_forked_process_has_another_name() -> None:
    """A child that was forked after its parent was named does not go by the parent's name."""
    done = subprocess.run([sys.executable, "-c", FORK], cwd=ROOT, capture_output=True, text=True, check=True)
    (child, alive), mine, theirs = done.stdout.splitlines()[0].split(), *done.stdout.splitlines()[1:]
    assert theirs.rsplit(":", 3)[1] == child
    assert theirs.rsplit(":", 1)[1] != mine.rsplit(":", 1)[1]
    assert alive == "False"


@LINUX
def test_a_living_process_is_alive(sleeper: subprocess.Popen[bytes]) -> None:
    """A process of this machine that runs is alive, one that was killed is not, noticed by its parent or not."""
    name = name_of(sleeper.pid)
    assert is_alive(name) is True
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(name) is False
    sleeper.wait()
    assert is_alive(name) is False


@LINUX
def test_a_process_id_that_is_used_again_is_another_process(sleeper: subprocess.Popen[bytes]) -> None:
    """A process that began at another time than the owner did is not the owner."""
    host, pid, start, suffix = name_of(sleeper.pid).rsplit(":", 3)
    assert is_alive(f"{host}:{pid}:{int(start) - 1}:{suffix}") is False


@LINUX
def test_a_process_of_another_user_is_seen() -> None:
    """The first process, which an ordinary user may not signal, is alive."""
    assert is_alive(name_of(1)) is True


@pytest.mark.parametrize(
    "change",
    [
        lambda host, pid, start, suffix: f"another-{host}:{pid}:{start}:{suffix}",
        lambda host, pid, start, suffix: f"{host.rpartition('@')[0]}@00000000:{pid}:{start}:{suffix}",
        lambda host, pid, start, suffix: f"{host}:{pid}::other",
        lambda host, pid, start, suffix: f"{host}:0:{start}:{suffix}",
        lambda host, pid, start, suffix: f"{host}:-1:{start}:{suffix}",
        lambda host, pid, start, suffix: f"{host}:{'9' * 5000}:{start}:{suffix}",
        lambda host, pid, start, suffix: f"{host}:²:{start}:{suffix}",
        lambda host, pid, start, suffix: "a person",
        lambda host, pid, start, suffix: "",
        lambda host, pid, start, suffix: ":::",
    ],
    ids=["host", "boot", "no start", "group", "all", "huge", "superscript", "person", "empty", "colons"],
)
def test_what_cannot_be_known_is_none(change: object) -> None:
    """Names of other machines, of an unknown start, or made in another way say nothing about a process."""
    assert is_alive(change(*this_owner().rsplit(":", 3))) is None  # type: ignore[operator]


def test_a_lease_is_free_when_nobody_can_have_it() -> None:
    """Nobody's and a dead owner's leases are free, a living owner's is not; of an unknown owner the time decides."""
    host, _, start, suffix = this_owner().rsplit(":", 3)
    dead = f"{host}:{2**29}:{start}:{suffix}"  # beyond what a system gives to processes
    for expires_at in (9.0, 10.0, 11.0):
        assert is_free(None, expires_at, 10.0)
        assert not is_free(this_owner(), expires_at, 10.0)
        assert is_free(dead, expires_at, 10.0)
        assert is_free("somebody", expires_at, 10.0) == (expires_at <= 10.0)
