"""One process of the storm: ``python storm.py ROLE ORDERS`` sweeps, or works, flat out until the storm ends.

What it saw goes to standard output, one JSON object a line. Exit 0: nothing went wrong but lost connections.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import time
import uuid
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from switchboard_stall import nudge_stalled_queues, queue

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine


@frozen
class Clock:
    """The storm's time: 200 times as fast as real time, and it leaps, the same in every process."""

    began: datetime
    began_monotonic: float
    leaps: dict[str, float]

    def now(self) -> datetime:
        real = time.monotonic() - self.began_monotonic
        leapt = sum(hours for second, hours in self.leaps.items() if real >= float(second))
        return self.began + timedelta(seconds=real * 200, hours=leapt)


@frozen
class Orders:
    """What a process of the storm is told.

    ``served``: the pairs that this process alone serves, as ``(endpoint_id, queue)``.
    """

    url: str
    clock: Clock
    ends_monotonic: float
    seed: int
    served: list[tuple[str, str]]

    def written(self) -> str:
        return json.dumps(attrs.asdict(self), default=datetime.isoformat)

    def serving(self, pairs: list[tuple[str, str]]) -> Orders:
        return attrs.evolve(self, served=pairs)

    @classmethod
    def read(cls, written: str) -> Orders:
        told: dict[str, Any] = json.loads(written)
        clock = told.pop("clock")
        began = datetime.fromisoformat(clock.pop("began"))
        return cls(clock=Clock(began=began, **clock), **told)


@frozen
class Wake:
    """A wake that a process committed, and so would have delivered."""

    endpoint_id: str
    queue: str
    number: int
    at: str


def connection_was_lost(error: DBAPIError) -> bool:
    """Whether the server went away or was not there: by its code, or no answer at all."""
    state: str | None = getattr(error.orig, "sqlstate", None)
    return state is None or state.startswith(("57P", "08"))


def sweep_once(engine: Engine, now: datetime, *, give_up: bool = False) -> list[Wake]:
    """Sweep, and return the wakes once they are committed; ``give_up`` rolls back instead."""
    with Session(engine) as session:
        nudges = nudge_stalled_queues(session, now=now)
        if give_up:
            return []
        session.commit()
    return [Wake(str(nudge.endpoint_id), nudge.queue, nudge.number, now.isoformat()) for nudge in nudges]


def sweep_flat_out(engine: Engine, orders: Orders, dice: random.Random) -> list[Wake]:
    return sweep_once(engine, orders.clock.now(), give_up=dice.random() < 0.1)


def serve_a_queue(engine: Engine, orders: Orders, dice: random.Random) -> list[Wake]:
    """Claim some of a queue, end or release it, and sometimes send more. Nobody else serves this queue."""
    endpoint, name = dice.choice(orders.served)
    endpoint_id = uuid.UUID(endpoint)
    with Session(engine) as session:
        now = orders.clock.now()
        todos = queue.claim(session, endpoint_id, "worker", queues=[name], limit=dice.randint(1, 5), now=now)
        session.commit()
        for todo in todos:
            end = dice.choice((queue.complete, queue.complete, queue.release))
            end(session, todo.id, "worker", now=orders.clock.now())
        session.commit()
        if dice.random() < 0.5:
            queue.enqueue(session, endpoint_id, name, "more work", vouched=True, now=orders.clock.now())
            session.commit()
    return []


ROLES: dict[str, Callable[[Engine, Orders, random.Random], list[Wake]]] = {
    "sweeper": sweep_flat_out,
    "worker": serve_a_queue,
}


def main(role: str, written: str) -> None:
    orders = Orders.read(written)
    engine = create_engine(orders.url, pool_size=1)
    dice = random.Random(orders.seed)
    while time.monotonic() < orders.ends_monotonic:
        try:
            wakes = ROLES[role](engine, orders, dice)
        except DBAPIError as error:
            if not connection_was_lost(error):
                raise
            continue
        for wake in wakes:
            print(json.dumps(attrs.astuple(wake)), flush=True)


if __name__ == "__main__":
    # The last nudge of a stall warns, which is no error: what a process writes to stderr is what went wrong.
    logging.basicConfig(level=logging.ERROR)
    main(*sys.argv[1:])
