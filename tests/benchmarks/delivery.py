"""Part 5: from the commit of a sweep to the receiver's first byte, and deliveries a second, over HTTPS."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import statistics
import threading
import time
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Final

from attrs import define, field, frozen
from benchmarks.bench import Bench, Result, circumstances, execute, process, quantile, vacuum
from benchmarks.data import add_pairs, add_pending, clear_charges
from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session, sessionmaker
from support.builders import NOW
from support.receiver import LOOPBACK

from switchboard_stall import Endpoint, Todo, nudge_stalled_queues, set_todo_ready_hook
from switchboard_stall.notify import Dispatcher, TargetPolicy, create_hook

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

    from switchboard_stall.ready import Reason

KEY: Final = base64.b64encode(bytes(range(32))).decode()
OPENED: Final = "127.0.0.0/8"
SHARES: Final = (0.0, 0.1, 0.5)
"""The shares of receivers that take a connection and never answer."""

EACH: Final = 5
"""Notifications for each receiver in the flood."""


@define
class Receivers:
    """The receivers' process, and when each todo's request came in."""

    certificate: str
    fast_port: int
    hole_port: int
    came: dict[str, list[float]] = field(factory=dict)
    count: int = 0
    changed: threading.Condition = field(factory=threading.Condition)

    def read(self, lines: IO[str]) -> None:
        for line in lines:
            at, todo_id = json.loads(line)
            with self.changed:
                self.came.setdefault(todo_id, []).append(at)
                self.count += 1
                self.changed.notify_all()

    def wait_for(self, count: int, timeout: float = 60.0) -> None:
        with self.changed:
            arrived = self.changed.wait_for(lambda: self.count >= count, timeout)
        assert arrived, f"{self.count} of {count} requests arrived in {timeout} s"

    def forget(self) -> None:
        with self.changed:
            self.came.clear()
            self.count = 0


@contextlib.contextmanager
def receivers() -> Iterator[Receivers]:
    """Start them; they end with the block."""
    started = process("fast_receiver.py")
    assert started.stdout is not None
    told = Receivers(*json.loads(started.stdout.readline()))
    reader = threading.Thread(target=told.read, args=(started.stdout,), daemon=True)
    reader.start()
    try:
        yield told
    finally:
        assert started.stdin is not None
        started.stdin.close()
        started.wait(30)
        reader.join(30)
        started.stdout.close()


@frozen
class Stage:
    """A database in which each receiver has one queue with work."""

    engine: Engine
    receivers: Receivers
    todos: list[Todo]
    holes: set[str]


def run(bench: Bench) -> Result:
    """Wakes one sweep after another; then as many as the dispatcher holds, at once."""
    result = Result(circumstances(bench))
    latency = result.table(
        "latency",
        "From the sweep's commit to the first byte, ms",
        "black holes, %",
        "wakes",
        "p50",
        "p99",
        "sweep and commit p50",
    )
    rate = result.table(
        "rate",
        f"{EACH} notifications to each of {bench.scale.receivers} receivers at once, 8 workers",
        "black holes, %",
        "delivered to the others",
        "deliveries/s",
    )
    for share in SHARES:
        for measure, table in ((_latency, latency), (_flood, rate)):
            with _stage(bench, share) as stage:
                row = measure(bench, stage)
                bench.say(f"delivery: {share:.0%} black holes: {row}")
                table.add(round(share * 100), *row)
    return result


@contextlib.contextmanager
def _stage(bench: Bench, share: float) -> Iterator[Stage]:
    count = bench.scale.receivers
    with bench.database() as made, receivers() as told:
        engine = create_engine(made.url, pool_size=12)
        add_pairs(made, count * 4)
        execute(made, "DELETE FROM notify_hooks")
        # Pair 4 n is the first queue of endpoint n: one queue with work for each endpoint.
        add_pending(made, count * 4, count * 4)
        execute(made, "DELETE FROM todos WHERE queue <> 'queue-0'")
        with Session(engine, expire_on_commit=False) as session:
            todos = list(session.scalars(select(Todo).order_by(Todo.created_at)))
            policy = TargetPolicy(allow_cidrs=[OPENED])
            for number, endpoint in enumerate(session.scalars(select(Endpoint).order_by(Endpoint.id)).all()):
                dead = int((number + 1) * share) > int(number * share)
                port = told.hole_port if dead else told.fast_port
                url = f"https://{LOOPBACK}:{port}/hook"
                create_hook(session, endpoint.id, url, key=KEY, policy=policy)
                if dead:
                    endpoint.slug = f"hole {endpoint.slug}"
            session.commit()
            dead_ids = set(session.scalars(select(Endpoint.id).where(Endpoint.slug.startswith("hole"))))
            session.expunge_all()
        vacuum(made)
        try:
            yield Stage(engine, told, todos, {todo.id for todo in todos if todo.endpoint_id in dead_ids})
        finally:
            engine.dispose()


@contextlib.contextmanager
def _dispatcher(stage: Stage) -> Iterator[Dispatcher]:
    trust = ssl.create_default_context(cadata=stage.receivers.certificate)
    with Dispatcher(sessionmaker(stage.engine), key=KEY, allow_cidrs=[OPENED], tls=trust) as dispatcher:
        yield dispatcher


def _latency(bench: Bench, stage: Stage) -> tuple[int, float, float, float]:
    """Sweep after sweep, four wakes each; a sweep begins when its wakes to live receivers have arrived."""
    fired: list[tuple[float, str]] = []
    delays: list[float] = []
    sweeps: list[float] = []
    now = NOW
    with _dispatcher(stage) as dispatcher:

        def hook(todo: Todo, reason: Reason) -> None:
            fired.append((time.monotonic(), todo.id))
            dispatcher.enqueue(todo, reason)

        previous = set_todo_ready_hook(hook)
        try:
            while len(delays) < bench.scale.wakes:
                fired.clear()
                stage.receivers.forget()
                with Session(stage.engine) as session:
                    began = time.monotonic()
                    nudges = nudge_stalled_queues(session, now=now)
                    session.commit()
                sweeps.append((time.monotonic() - began) * 1000)
                if not nudges:
                    clear_charges(stage.engine)
                    now += timedelta(seconds=1)
                    continue
                alive = [(at, todo_id) for at, todo_id in fired if todo_id not in stage.holes]
                stage.receivers.wait_for(len(alive))
                delays += [(stage.receivers.came[todo_id][0] - at) * 1000 for at, todo_id in alive]
        finally:
            set_todo_ready_hook(previous)
    return (
        len(delays),
        round(statistics.median(delays), 1),
        round(quantile(delays, 0.99), 1),
        round(statistics.median(sweeps), 1),
    )


def _flood(bench: Bench, stage: Stage) -> tuple[int, int]:
    """As many notifications as the dispatcher holds; the rate is that of receivers that answer."""
    alive = [todo for todo in stage.todos if todo.id not in stage.holes]
    wanted = len(alive) * EACH
    with _dispatcher(stage) as dispatcher:
        began = time.monotonic()
        for _ in range(EACH):
            for todo in stage.todos:
                dispatcher.enqueue(todo, "created")
        stage.receivers.wait_for(wanted, timeout=300)
        last = max(at for times in stage.receivers.came.values() for at in times)
    return wanted, round(wanted / (last - began))
