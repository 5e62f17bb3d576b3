"""One process of the contention part: ``python instance.py ROLE ORDERS``; prints what it did as JSON.

It connects, says ``ready``, and begins when a line comes in, so that all begin together.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

from benchmarks.verbs import Writer
from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import Session

from switchboard_stall import nudge_stalled_queues
from switchboard_stall.statement import pending

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine


def sweep(engine: Engine, orders: dict[str, Any]) -> Callable[[], int]:
    now = datetime.fromisoformat(orders["now"])

    def act() -> int:
        with Session(engine) as session:
            nudges = nudge_stalled_queues(session, now=now)
            session.commit()
        return len(nudges)

    return act


def walk(engine: Engine, _: dict[str, Any]) -> Callable[[], int]:
    """Spend as much of the machine as a sweep, and lock nothing."""
    statement = select(func.count()).select_from(pending())

    def act() -> int:
        with engine.connect() as connection:
            connection.execute(statement).all()
        return 0

    return act


def work(engine: Engine, orders: dict[str, Any]) -> Callable[[], int]:
    """Enqueue one todo and claim one, in a transaction each."""
    writer = Writer(engine)
    writer.dice.seed(orders["seed"])
    writer.sent = orders["seed"] * 10**8

    def act() -> int:
        writer.batch("enqueue", 1)
        writer.batch("claim", 1)
        return 2

    return act


ROLES = {"sweep": sweep, "walk": walk, "work": work}


def main(role: str, written: str) -> None:
    """Act until the seconds are over, or until so many acts in a row came to nothing."""
    orders = json.loads(written)
    engine = create_engine(orders["url"], pool_size=1, connect_args={"prepare_threshold": 0})
    act = ROLES[role](engine, orders)
    if role != "sweep":
        act()
    print("ready", flush=True)
    sys.stdin.readline()
    began = last = time.monotonic()
    acts = came = empty = 0
    times = []
    while time.monotonic() - began < orders["seconds"] and empty < orders.get("give_up_after", 10**9):
        before = time.perf_counter()
        made = act()
        times.append((time.perf_counter() - before) * 1000)
        acts += 1
        came += made
        empty = 0 if made else empty + 1
        if made:
            last = time.monotonic()
    took = time.monotonic() - began
    print(json.dumps({"acts": acts, "came": came, "times": times, "took": took, "last": last - began}))
    engine.dispose()


if __name__ == "__main__":
    main(*sys.argv[1:])
