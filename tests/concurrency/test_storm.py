"""Everything at once: sweeps flat out in many processes, workers, SIGKILL, and a crash of the server."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from datetime import datetime, timedelta
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import define, field
from sqlalchemy import create_engine, func, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from support import storm
from support.builders import NOW, World
from support.databases import TEST_BIN_DIR
from support.storm import Clock, Orders, Wake, connection_was_lost, sweep_once

from switchboard_stall import STALL_POLICY, QueueStall, Todo
from switchboard_stall.embedded import EmbeddedPostgres
from switchboard_stall.migrations import upgrade

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

SECONDS = 12.0
SWEEPS_A_KILL = 50
SWEEPERS = 8
WORKERS = 2
ENDPOINTS = 20
QUEUES = tuple(f"queue {number}" for number in range(10))
SERVED = QUEUES[:3]
# After a leap every silent pair is due at one moment: the most that sweeps can quarrel over.
LEAPS = {"3": 1.0, "5": 6.0, "7": 6.0, "8.5": 6.0, "10": 6.0}


@define
class Storm:
    """The processes of one storm, and what they left behind."""

    folder: Path
    orders: Orders
    dice: random.Random = field(factory=lambda: random.Random(20261201))
    killed: int = 0
    errors: list[str] = field(factory=list)
    _running: list[tuple[str, Orders, subprocess.Popen[bytes]]] = field(factory=list)
    _started: int = 0

    def start(self, role: str, orders: Orders) -> None:
        self._started += 1
        name = self.folder / f"{self._started:03}-{role}"
        with open(f"{name}.out", "wb") as out, open(f"{name}.err", "wb") as err:
            process = subprocess.Popen(
                [sys.executable, storm.__file__, role, orders.written()],
                stdout=out,
                stderr=err,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._running.append((role, orders, process))

    def kill_one_and_start_another(self) -> None:
        role, orders, process = self._running.pop(self.dice.randrange(len(self._running)))
        process.kill()
        process.wait()
        self.killed += 1
        self.start(role, orders)

    def end(self) -> None:
        """Wait until every process has ended by itself, and keep what went wrong in those not killed."""
        for role, _, process in self._running:
            if process.wait(timeout=60) != 0:
                self.errors.append(f"{role} {process.args!r}")
        self.errors += [text for path in self.folder.glob("*.err") if (text := path.read_text())]

    def wakes(self) -> list[Wake]:
        """Every wake that some process committed and lived to tell; a line may be cut by SIGKILL."""
        lines = [
            line
            for path in self.folder.glob("*.out")
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        return [Wake(*json.loads(line)) for line in lines]


@contextlib.contextmanager
def raging(storm: Storm, served: list[list[tuple[str, str]]]) -> Iterator[None]:
    try:
        # The workers first: once sweepers run flat out, a process takes long to start.
        for pairs in served:
            storm.start("worker", storm.orders.serving(pairs))
        for _ in range(SWEEPERS):
            storm.start("sweeper", storm.orders)
        yield
    finally:
        storm.end()


def settle(engine: Engine, now: datetime) -> list[Wake]:
    """Sweep until nothing is due."""
    wakes: list[Wake] = []
    while won := sweep_once(engine, now):
        wakes += won
    return wakes


def record_charges(engine: Engine) -> None:
    """Let the server itself write down every charge that commits."""
    with engine.begin() as connection:
        for statement in (
            "CREATE TABLE charges (id bigserial, endpoint_id uuid, queue text, number int, at timestamptz)",
            "CREATE FUNCTION record_charge() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " INSERT INTO charges (endpoint_id, queue, number, at)"
            " VALUES (NEW.endpoint_id, NEW.queue, NEW.nudges, NEW.last_nudged_at); RETURN NULL; END $$",
            "CREATE TRIGGER record_charge AFTER INSERT OR UPDATE ON queue_stalls"
            " FOR EACH ROW EXECUTE FUNCTION record_charge()",
        ):
            connection.execute(text(statement))


def charges(engine: Engine) -> list[Wake]:
    """Every charge that committed, by pair and then in time."""
    with engine.connect() as connection:
        rows = connection.execute(
            text("SELECT endpoint_id, queue, number, at FROM charges ORDER BY 1, 2, at")
        )
        return [Wake(str(row.endpoint_id), row.queue, row.number, row.at.isoformat()) for row in rows]


def forgotten(engine: Engine, now: datetime) -> list[tuple[str, str]]:
    """The pairs that are due by the rule, told once more in Python. Every pair here has a receiver."""
    life = (
        select(
            Todo.endpoint_id,
            Todo.queue,
            func.min(Todo.created_at).filter(Todo.state == "pending").label("oldest"),
            func.max(Todo.claimed_at).label("claimed"),
            func.max(Todo.updated_at)
            .filter(Todo.state == "pending", Todo.updated_at > Todo.created_at)
            .label("requeued"),
        )
        .group_by(Todo.endpoint_id, Todo.queue)
        .subquery()
    )
    with engine.connect() as connection:
        rows = connection.execute(
            select(life, QueueStall.nudges, QueueStall.last_nudged_at, QueueStall.last_claim_at)
            .outerjoin(
                QueueStall,
                (QueueStall.endpoint_id == life.c.endpoint_id) & (QueueStall.queue == life.c.queue),
            )
            .where(life.c.oldest.is_not(None))
        ).all()
    first = STALL_POLICY.waits[0]
    due = []
    for row in rows:
        seen = row.last_claim_at
        progress = row.claimed is not None and (seen is None or row.claimed > seen)
        spent = 0 if row.nudges is None or progress else row.nudges
        signs = (row.oldest, row.claimed, row.requeued, row.last_nudged_at)
        since = row.last_nudged_at if spent else max(sign for sign in signs if sign is not None)
        fresh = now - row.oldest < first or (row.requeued is not None and now - row.requeued < first)
        if spent < STALL_POLICY.cap and now - since >= STALL_POLICY.waits[spent] and not fresh:
            due.append((str(row.endpoint_id), row.queue))
    return due


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    bin_dir = os.environ.get(TEST_BIN_DIR)
    with EmbeddedPostgres(
        tmp_path / "server", bin_dir=Path(bin_dir) if bin_dir else None, durable=False
    ) as server:
        yield server


@pytest.fixture
def engine(server: EmbeddedPostgres) -> Iterator[Engine]:
    """On a server of its own, which the test may crash."""
    engine = create_engine(server.url)
    with engine.connect() as connection:
        upgrade(connection)
    yield engine
    engine.dispose()


def test_a_storm_of_sweeps_kills_and_a_crash_wakes_nobody_twice_in_a_cooldown_and_forgets_nobody(
    server: EmbeddedPostgres, engine: Engine, tmp_path: Path
) -> None:
    record_charges(engine)
    world = World(engine)
    endpoints = [world.endpoint(scope=QUEUES) for _ in range(ENDPOINTS)]
    with Session(engine) as session:
        for endpoint in endpoints:
            endpoint.hook()
            session.add_all(
                Todo(
                    endpoint_id=endpoint.id,
                    queue=name,
                    title="a piece of work",
                    vouched=True,
                    created_at=NOW,
                    updated_at=NOW,
                )
                for name in QUEUES
                for _ in range(5)
            )
        session.commit()
    served = [(str(endpoint.id), name) for endpoint in endpoints for name in SERVED]

    began = time.monotonic()
    clock = Clock(NOW, began, LEAPS)
    url = server.url.render_as_string(hide_password=False)
    storm = Storm(tmp_path, Orders(url, clock, began + SECONDS, seed=1, served=[]))
    told: list[Wake] = []
    sweeps = restarts = 0
    with raging(storm, [served[number::WORKERS] for number in range(WORKERS)]):
        while (present := time.monotonic()) < began + SECONDS:
            try:
                told += sweep_once(engine, clock.now())
            except DBAPIError as error:
                if not connection_was_lost(error):
                    raise
            sweeps += 1
            if sweeps % SWEEPS_A_KILL == 0:
                storm.kill_one_and_start_another()
            if restarts == 0 and present > began + SECONDS / 2:
                server.restart("immediate")
                restarts += 1
    end = clock.now()
    told += settle(engine, end)

    assert storm.errors == []
    assert "deadlock detected" not in (tmp_path / "server" / "server.log").read_text()
    assert forgotten(engine, end) == []
    far = end + timedelta(hours=6)
    told += settle(engine, far)
    assert forgotten(engine, far) == []

    committed = charges(engine)
    for _, history in groupby(committed, key=lambda wake: (wake.endpoint_id, wake.queue)):
        for earlier, later in pairwise(history):
            gap = datetime.fromisoformat(later.at) - datetime.fromisoformat(earlier.at)
            assert later.number in (1, earlier.number + 1), (earlier, later)
            assert gap >= STALL_POLICY.wait(later.number), (earlier, later)
    told += storm.wakes()
    assert max(collections.Counter(told).values()) == 1, "two sweeps returned one charge"
    assert set(told) <= set(committed)
    untold = set(committed) - set(told)
    assert len(untold) <= STALL_POLICY.sweep_limit * (storm.killed + SWEEPERS + 1)

    assert restarts == 1
    assert storm.killed > 0
    # How far a process gets in its seconds is the machine's to say; that it got anywhere is not.
    assert {wake.number for wake in committed} >= {1, 2}
