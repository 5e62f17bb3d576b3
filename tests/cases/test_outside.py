"""Symptoms that users of similar systems reported, each with what must hold here instead.

The reference names where the symptom was seen. Those of the wake are in ``tests/notify``, those of migrations
in ``tests/test_migrations.py``, and pooling in the matrix, which runs this suite behind PgBouncer.
"""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import create_engine, event, func, insert, literal, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from switchboard_stall import STALL_POLICY, Duty, Reaper, Todo, nudge_stalled_queues, set_todo_ready_hook
from switchboard_stall.duties import in_session, standard_duties
from switchboard_stall.statement import nudge_statement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine
    from support.builders import World

    from switchboard_stall import Nudge

SOON = 10.0


@pytest.fixture
def woken() -> Iterator[list[str]]:
    """The ids of the todos the ready hook was fired for."""
    ids: list[str] = []
    previous = set_todo_ready_hook(lambda todo, _: ids.append(todo.id))
    yield ids
    set_todo_ready_hook(previous)


def sweep(engine: Engine, now: datetime | None) -> list[Nudge]:
    with Session(engine) as session:
        nudges = nudge_stalled_queues(session, now=now)
        session.commit()
    return nudges


def test_pgboss_850_river_pr1361_a_wake_lost_without_an_error_is_found_without_notify(
    present: World, woken: list[str]
) -> None:
    """Detection never depends on NOTIFY, and a connection cut under the reaper costs no tick."""
    sessions = sessionmaker(present.engine)
    statements: list[str] = []
    event.listen(present.engine, "before_cursor_execute", lambda *call: statements.append(call[2].upper()))
    reaper = Reaper(standard_duties(sessions))
    reaper.tick()
    todo = present.queue().pending(age="6m")
    with create_engine(present.engine.url).connect() as killer:
        killer.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )
        killer.commit()
        killer.detach()
    reaper.tick()
    assert woken == [todo.id]
    assert not [text for text in statements if "NOTIFY " in text or "LISTEN " in text]


def test_celery_8030_a_consumer_connected_and_silent_is_not_alive(world: World) -> None:
    """Life is a claim, not a connection: heartbeats on an old claim change nothing."""
    inbox = world.queue()
    inbox.claimed(ago="6m", updated_at=world.now, lease_expires_at=world.after("5m"))
    inbox.pending(age="6m")
    assert len(sweep(world.engine, world.now)) == 1


def test_camunda_pr48998_one_job_wakes_one_consumer_and_not_everyone(world: World) -> None:
    endpoint = world.endpoint(scope=["a", "b", "c"])
    endpoint.hook()
    for _ in range(50):
        endpoint.queue("b").pending(age="1h")
    nudges = sweep(world.engine, world.now)
    assert [(nudge.endpoint_id, nudge.queue) for nudge in nudges] == [(endpoint.id, "b")]


def test_oban_1301_702_any_one_live_instance_is_enough(world: World) -> None:
    """No leader: an instance that died in the middle of a sweep leaves nothing that another must wait out."""
    inbox = world.queue()
    inbox.pending(age="1h")
    dying = create_engine(world.engine.url)
    connection = dying.connect()
    with Session(connection) as session:
        assert len(nudge_stalled_queues(session, now=world.now)) == 1
        pid = session.scalar(select(func.pg_backend_pid()))
        with world.engine.connect() as killer:
            killer.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})
        with pytest.raises(DBAPIError):
            session.commit()
    dying.dispose()
    (nudge,) = sweep(world.engine, world.now)
    assert (nudge.endpoint_id, nudge.queue, nudge.number) == (*inbox.pair, 1)


def test_procrastinate_1408_a_duty_that_hangs_or_fails_does_not_stop_the_sweep(
    present: World, woken: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    todo = present.queue().pending(age="6m")
    over = threading.Event()

    def fails() -> None:
        raise RuntimeError("no")

    sessions = sessionmaker(present.engine)
    hangs = Duty("hangs", lambda: over.wait(SOON))
    nudges = Duty("nudges", in_session(sessions, nudge_stalled_queues))
    reaper = Reaper([hangs, Duty("fails", fails), nudges], patience=timedelta(seconds=2))
    with caplog.at_level(logging.WARNING, logger="switchboard_stall.reaper"):
        reaper.tick()
    over.set()
    assert woken == [todo.id]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["hangs", "fails"]


def test_dbos_716_a_sweep_that_failed_charged_nothing_and_the_pair_is_due_on_the_next_tick(
    present: World, woken: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    inbox = present.queue()
    todo = inbox.pending(age="6m")
    failures = iter([True, False])

    def work(session: Session) -> list[Nudge]:
        nudges = nudge_stalled_queues(session)
        if next(failures):
            session.execute(text("SELECT 1 / 0"))
        return nudges

    reaper = Reaper([Duty("nudge stalled queues", in_session(sessionmaker(present.engine), work))])
    with caplog.at_level(logging.WARNING):
        reaper.tick()
    assert (inbox.stall, woken) == (None, [])
    assert [record.getMessage() for record in caplog.records] == ["nudge stalled queues: failed"]
    reaper.tick()
    assert woken == [todo.id]


def test_temporal_547_a_depth_that_reads_zero_is_not_progress_and_neither_is_one_that_shrinks(
    world: World,
) -> None:
    """Progress counts claims: the backlog may shrink by cancellation, and the stall goes on."""
    inbox = world.queue()
    inbox.pending(age="1d")
    inbox.nudged(2, ago="59m")
    inbox.pending(age="1d", state="canceled")
    assert sweep(world.engine, world.now) == []
    (nudge,) = sweep(world.engine, world.after("1m"))
    assert nudge.number == 3


def test_alertmanager_3551_the_charge_is_committed_before_anything_is_sent(world: World) -> None:
    inbox = world.queue()
    inbox.pending(age="1h")
    seen: list[int] = []

    def send(todo: Todo, _: object) -> None:
        stall = inbox.stall  # Read by a connection of its own.
        assert stall is not None
        seen.append(stall.nudges)
        assert sweep(world.engine, world.now) == []  # A peer that sweeps while the send is in flight.

    previous = set_todo_ready_hook(send)
    try:
        sweep(world.engine, world.now)
    finally:
        set_todo_ready_hook(previous)
    assert seen == [1]


def test_alertmanager_4008_drain_then_refill_inside_one_wait_brings_no_second_wake_early(
    world: World,
) -> None:
    inbox = world.queue()
    inbox.pending(age="1h")
    assert len(sweep(world.engine, world.now)) == 1
    with Session(world.engine) as session:
        session.execute(update(Todo).values(state="canceled"))
        session.commit()
    assert sweep(world.engine, world.after("1m")) == []
    refilled = world.after("2m")
    inbox.pending(age="0s", created_at=refilled, updated_at=refilled)
    quiet_until = refilled + STALL_POLICY.waits[0]
    assert sweep(world.engine, quiet_until - timedelta(milliseconds=1)) == []
    assert [nudge.number for nudge in sweep(world.engine, quiet_until)] == [1]


def test_solid_queue_140_a_queue_no_worker_serves_gets_five_nudges_one_warning_and_silence(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.queue("nobody-serves-this").pending(age="0s")
    now, numbers = world.now, []
    with caplog.at_level(logging.INFO, logger="switchboard_stall.sweep"):
        for _ in range(1000):  # Twenty hours of ticks.
            now += timedelta(seconds=72)
            numbers += [nudge.number for nudge in sweep(world.engine, now)]
    assert numbers == [1, 2, 3, 4, 5]
    assert [r.levelname for r in caplog.records].count("WARNING") == 1


def test_que_409_a_transaction_that_has_been_open_for_an_hour_still_sweeps_by_the_present() -> None:
    """``now()`` is the start of the transaction: the statement never asks for it."""
    sql = str(nudge_statement())
    assert "statement_timestamp()" in sql
    assert " now()" not in sql


def test_koderea_102_an_application_clock_an_hour_wrong_changes_nothing(
    present: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime(1999, 1, 1, tzinfo=UTC)

    for module in ("switchboard_stall.sweep", "switchboard_stall.clock"):
        monkeypatch.setattr(f"{module}.datetime", Wrong, raising=False)
    fresh, stalled = present.queue(), present.queue()
    fresh.pending(age="4m")
    stalled.pending(age="6m")
    nudges = sweep(present.engine, None)
    assert [(nudge.endpoint_id, nudge.queue) for nudge in nudges] == [stalled.pair]


def test_mission_control_160_pgboss_228_the_sweep_reads_a_few_pages_of_a_deep_backlog(
    world: World,
) -> None:
    inbox = world.queue()
    old = world.ago("1d")
    row = {
        "endpoint_id": inbox.endpoint.id,
        "queue": "inbox",
        "title": "t",
        "vouched": True,
        "created_at": old,
        "updated_at": old,
    }
    with Session(world.engine) as session:
        for state, claimed_at in (("pending", None), ("claimed", old), ("done", old)):
            number = func.generate_series(1, 20_000).column_valued("number")
            same = row | {"state": state, "claimed_at": claimed_at}
            values = [literal(value, getattr(Todo, name).type) for name, value in same.items()]
            many = select(func.concat("td_", state, number), *values)
            session.execute(insert(Todo).from_select(["id", *same], many))
        session.commit()
        session.execute(text("ANALYZE"))
        session.commit()
        sql = nudge_statement(now=world.now).compile(
            session.get_bind(), compile_kwargs={"literal_binds": True}
        )
        explain = text(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {str(sql).replace(':', chr(92) + ':')}")
        plan = session.scalar(explain)[0]["Plan"]
        session.rollback()
    assert plan["Actual Rows"] == 1
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 100


def test_openobserve_pr13480_the_tick_is_jittered_so_that_nodes_do_not_tick_together() -> None:
    waits: list[float] = []
    stopped = threading.Event()

    def pause(event: threading.Event, seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 50:
            stopped.set()
            event.wait(SOON)

    with Reaper([], pause=pause):
        assert stopped.wait(SOON)
    assert len(set(waits)) > 25
    assert all(27 <= wait <= 33 for wait in waits)
