"""An order as a saga: effects that can be held back, undone, or neither, and a crash in the middle.

    python examples/order_saga.py

A shop takes an order in four steps. Each changes the outside world, here three files beside the run's store:

- ``reserve`` takes stock (COMPENSABLE: there is an undo),
- ``charge`` takes money (IRREVERSIBLE: never on a guess, recorded before it is started),
- ``confirm`` writes a letter (BUFFERED: sent after its place in the program is committed),
- ``ship`` hands the parcel over, or fails.

The script runs an order in a process that is killed right after the money was taken, resumes it in a new process, and
shows that nothing was sent twice. Then it runs an order that fails at the end, and shows that its stock came back.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import anyio

from specflow import Attempt, Context, Effect, NotSent, Sent, given, resume, run, step, workflow
from specflow.stores import SQLiteStore

WORLD = Path(os.environ.get("ORDER_SAGA_WORLD", "."))
"""The folder that stands for the outside world."""


@dataclass(frozen=True)
class Order:
    """What a customer wants."""

    number: int
    item: str
    price: int
    address: str


def send(service: str, line: str) -> None:
    """Something the outside world sees and remembers: one line in a service's ledger."""
    with (WORLD / f"{service}.txt").open("a", encoding="utf-8") as ledger:
        ledger.write(line + "\n")


def unreserve(_receipt: object, order: Order) -> None:
    """Undo of ``reserve``; safe to repeat."""
    send("warehouse", f"put {order.item} of order {order.number} back")


@step(effect=Effect.COMPENSABLE, undo=unreserve)
def reserve(order: Order) -> str:
    """Take the item from the shelf."""
    send("warehouse", f"take {order.item} for order {order.number}")
    return f"shelf receipt {order.number}"


def find_charge(key: str, order: Order) -> object:
    """After a crash: ask the bank whether it knows this key."""
    lines = (WORLD / "bank.txt").read_text(encoding="utf-8") if (WORLD / "bank.txt").exists() else ""
    return Sent(f"charged {order.price}") if key in lines else NotSent()


@step(effect=Effect.IRREVERSIBLE, probe=find_charge)
def charge(order: Order, attempt: Attempt = given) -> str:
    """Take the money. The bank gets the idempotency key, and can be asked for it."""
    send("bank", f"charge {order.price} for order {order.number}, key {attempt.idempotency_key}")
    if os.environ.get("ORDER_SAGA_CRASH") == "after charge":
        os.kill(os.getpid(), signal.SIGKILL)  # the answer never reaches the run
    return f"charged {order.price}"


@step(effect=Effect.BUFFERED)
def confirm(order: Order, text: str) -> None:
    """Write to the customer."""
    send("post", f"letter to {order.address}: {text}")


@step(effect=Effect.IRREVERSIBLE)
def ship(order: Order) -> str:
    """Hand the parcel over."""
    if order.address == "nowhere":
        raise ValueError("there is no such address")
    send("parcels", f"parcel {order.number} to {order.address}")
    return f"parcel {order.number}"


@workflow
async def take_order(ctx: Context, order: Order) -> str:
    """The whole saga, as ordinary code."""
    await ctx.call(reserve, order)
    paid = await ctx.call(charge, order)
    await ctx.call(confirm, order, f"thank you, we {paid}")
    return await ctx.call(ship, order)


def show(title: str) -> None:
    """Print what the outside world has seen."""
    print(title)
    for ledger in sorted(WORLD.glob("*.txt")):
        for line in ledger.read_text(encoding="utf-8").splitlines():
            print(f"  {ledger.stem:10} {line.partition(', key')[0]}")


async def first_part(store: SQLiteStore) -> None:
    """What the process does that is killed."""
    await run(take_order, Order(1, "a kettle", 30, "1 Main Street"), store=store, run_id="order-1")


async def main() -> None:
    """Crash, resume; then fail and compensate."""
    store = SQLiteStore(WORLD / "runs.db")
    environment = {**os.environ, "ORDER_SAGA_WORLD": str(WORLD), "ORDER_SAGA_CRASH": "after charge"}
    code = await anyio.to_thread.run_sync(
        lambda: subprocess.run([sys.executable, __file__, "--first"], env=environment, check=False).returncode  # noqa: S603
    )
    show(f"\nthe process was killed (exit code {code}) right after the money was taken:")

    result = await resume("order-1", store=store, program=take_order)
    show(f"\nresumed in another process: {result.value}")
    bank = (WORLD / "bank.txt").read_text(encoding="utf-8").splitlines()
    assert len(bank) == 1, "the money was taken once"

    try:
        await run(take_order, Order(2, "a lamp", 20, "nowhere"), store=store, run_id="order-2")
    except ValueError as error:
        show(f"\norder 2 failed ({error}), and what could be undone was:")
    assert "put a lamp of order 2 back" in (WORLD / "warehouse.txt").read_text(encoding="utf-8")
    print("\noutbox of order 2:")
    for row in store.effects("order-2"):
        print(f"  {row.step.partition(':')[2]:10} {row.status.value}")


if __name__ == "__main__":
    if "--first" in sys.argv:
        anyio.run(first_part, SQLiteStore(WORLD / "runs.db"))
    else:
        with tempfile.TemporaryDirectory() as folder:
            WORLD = Path(folder)
            anyio.run(main)
