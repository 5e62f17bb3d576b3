"""A sweep with nothing to do costs nothing: no WAL record, no log line, no wake."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session
from support.builders import NOW, World
from support.databases import vacuum
from support.plans import explain

from switchboard_stall import (
    Endpoint,
    NotifyHook,
    QueueStall,
    Todo,
    nudge_stalled_queues,
    nudge_statement,
    set_todo_ready_hook,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection, Engine

    from switchboard_stall.ready import Reason

ATTEMPTS: Final = 50
"""Sweeps among which one must coincide with no write of the server's own."""


def nothing_pending(world: World) -> None:
    inbox = world.queue()
    inbox.done(ago="1h")
    inbox.claimed(ago="1h")
    inbox.failed(ago="1h", retry_in="1h")


def all_fresh(world: World) -> None:
    inbox = world.queue()
    inbox.done(ago="1h")
    inbox.pending(age="4m59.999s")


def all_claimed_lately(world: World) -> None:
    inbox = world.queue()
    inbox.pending(age="1d")
    inbox.done(ago="1m", claimed_ago="4m59.999s")


def all_requeued_lately(world: World) -> None:
    inbox = world.queue()
    inbox.pending(age="1d")
    inbox.requeued(ago="4m59.999s", claimed_ago="10h")


def all_paced(world: World) -> None:
    for nudges, waited in enumerate(("19m59.999s", "59m59.999s", "5h59m59.999s", "5h59m59.999s"), start=1):
        inbox = world.queue()
        inbox.pending(age="2d")
        inbox.nudged(nudges, ago=waited)


def all_capped(world: World) -> None:
    inbox = world.queue()
    inbox.pending(age="30d")
    inbox.nudged(5, ago="20d")


def claimed_since_a_nudge_just_now(world: World) -> None:
    inbox = world.queue()
    inbox.pending(age="1h")
    inbox.nudged(3, ago="4m59.999s")
    inbox.claimed(ago="4m58s")


def no_hook(world: World) -> None:
    world.endpoint(scope=["inbox"]).queue("inbox").pending(age="1h")


def hook_disabled(world: World) -> None:
    endpoint = world.endpoint(scope=["inbox"])
    endpoint.hook(enabled=False)
    endpoint.queue("inbox").pending(age="1h")


def hook_for_another_queue(world: World) -> None:
    endpoint = world.endpoint(scope=["inbox", "outbox"])
    endpoint.hook(queues=["outbox"])
    endpoint.queue("inbox").pending(age="1h")


def queue_out_of_scope(world: World) -> None:
    endpoint = world.endpoint(scope=["outbox"])
    endpoint.hook()
    endpoint.queue("inbox").pending(age="1h")


def endpoint_revoked(world: World) -> None:
    endpoint = world.endpoint(scope=["inbox"], state="revoked")
    endpoint.hook()
    endpoint.queue("inbox").pending(age="1h")


def endpoint_expired(world: World) -> None:
    endpoint = world.endpoint(scope=["inbox"], expires_in="0s")
    endpoint.hook()
    endpoint.queue("inbox").pending(age="1h")


def all_unvouched(world: World) -> None:
    inbox = world.queue()
    inbox.pending(age="1h", vouched=False)


def in_quarantine(world: World) -> None:
    world.queue("quarantine").pending(age="1h")


def nothing_at_all(_: World) -> None:
    pass


IDLE: Final[tuple[Callable[[World], None], ...]] = (
    nothing_at_all,
    nothing_pending,
    all_fresh,
    all_claimed_lately,
    all_requeued_lately,
    all_paced,
    all_capped,
    claimed_since_a_nudge_just_now,
    no_hook,
    hook_disabled,
    hook_for_another_queue,
    queue_out_of_scope,
    endpoint_revoked,
    endpoint_expired,
    all_unvouched,
    in_quarantine,
)


@pytest.fixture(params=IDLE, ids=lambda told: told.__name__.replace("_", " "))
def idle(request: pytest.FixtureRequest, world: World) -> Engine:
    """A database in which nobody is to be woken, settled: what readers tidy up is tidied up."""
    request.param(world)
    vacuum(world.engine, "VACUUM (ANALYZE)", Endpoint, NotifyHook, Todo, QueueStall)
    return world.engine


@pytest.fixture
def fired() -> Iterator[list[Todo]]:
    """The todos that the ready hook was fired for."""
    todos: list[Todo] = []

    def hook(todo: Todo, _: Reason) -> None:
        todos.append(todo)

    previous = set_todo_ready_hook(hook)
    yield todos
    set_todo_ready_hook(previous)


def written_so_far(connection: Connection) -> str:
    """The end of the server's write-ahead log."""
    return str(connection.scalar(select(func.pg_current_wal_insert_lsn())))


def sweep(engine: Engine) -> int:
    with Session(engine) as session:
        nudges = nudge_stalled_queues(session, now=NOW)
        session.commit()
    return len(nudges)


def test_an_idle_sweep_writes_no_wal_record(idle: Engine) -> None:
    with idle.connect() as connection:
        assert explain(connection, nudge_statement(now=NOW)).wal_records == 0


def test_an_idle_sweep_and_its_commit_move_the_log_by_nothing(idle: Engine) -> None:
    """The server also writes on its own account; a sweep that writes would do so every time."""
    with idle.connect() as observer:
        for _ in range(ATTEMPTS):
            before = written_so_far(observer)
            sweep(idle)
            if written_so_far(observer) == before:
                return
    pytest.fail(f"each of {ATTEMPTS} idle sweeps wrote to the log")


def test_an_idle_sweep_logs_no_line_and_fires_nothing(
    idle: Engine, fired: list[Todo], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="switchboard_stall"):
        assert sweep(idle) == 0

    assert [record for record in caplog.records if record.name.startswith("switchboard_stall")] == []
    assert fired == []


def test_a_sweep_that_nudges_does_move_the_log_so_the_measure_can_tell(world: World) -> None:
    for _ in range(5):
        world.queue().pending(age="1h")

    with world.engine.connect() as observer:
        before = written_so_far(observer)
        assert sweep(world.engine) == 4
        assert written_so_far(observer) != before
        observer.rollback()
        assert explain(observer, nudge_statement(now=NOW)).wal_records > 0
