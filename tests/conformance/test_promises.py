"""The promises of the sweep, as a user can test them: on every PostgreSQL, through every kind of session."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import DateTime, func, select
from sqlalchemy.orm import Session
from support import acts
from support.actors import PATIENCE, stage
from support.builders import World

from switchboard_stall import STALL_POLICY, queue, set_todo_ready_hook

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conformance.conftest import Sweep
    from sqlalchemy import Engine
    from support.databases import DatabaseServer

    from switchboard_stall import Todo
    from switchboard_stall.ready import Reason

MOMENT = timedelta(milliseconds=1)


@pytest.fixture
def fired() -> Iterator[list[tuple[str, Reason]]]:
    """What the ready hook was fired for: the todo's id and the reason."""
    calls: list[tuple[str, Reason]] = []

    def hook(todo: Todo, reason: Reason) -> None:
        calls.append((todo.id, reason))

    previous = set_todo_ready_hook(hook)
    yield calls
    set_todo_ready_hook(previous)


def present(engine: Engine) -> datetime:
    """What the database's clock says."""
    with Session(engine) as session:
        return session.execute(select(func.clock_timestamp(type_=DateTime(timezone=True)))).scalar_one()


def test_a_stalled_queue_is_nudged_and_its_oldest_vouched_todo_named(world: World, sweep: Sweep) -> None:
    inbox = world.queue()
    inbox.pending(age="3h", vouched=False)
    oldest = inbox.pending(age="2h", title="the oldest that is vouched for")
    inbox.pending(age="1h")

    (nudge,) = sweep()

    assert (nudge.endpoint_id, nudge.queue) == inbox.pair
    assert nudge.todo.id == oldest.id
    assert nudge.todo.title == "the oldest that is vouched for"
    assert nudge.number == 1
    assert nudge.stalled_since == world.ago("3h")
    assert nudge.next_wait == timedelta(minutes=20)


def test_a_nudge_is_charged_with_the_claim_it_saw(world: World, sweep: Sweep) -> None:
    inbox = world.queue()
    inbox.pending(age="2h")
    inbox.done(ago="30m", claimed_ago="1h")

    (nudge,) = sweep()

    assert nudge.stalled_since == world.ago("1h")
    stall = inbox.stall
    assert stall is not None
    assert (stall.nudges, stall.last_nudged_at, stall.last_claim_at) == (1, world.now, world.ago("1h"))


def test_a_stall_is_nudged_on_schedule_to_the_millisecond_and_then_never_again(
    world: World, sweep: Sweep
) -> None:
    inbox = world.queue()
    inbox.pending(age="0s")

    now = world.now
    for number, wait in enumerate(STALL_POLICY.waits, start=1):
        assert sweep(now + wait - MOMENT) == []
        now += wait
        assert [nudge.number for nudge in sweep(now)] == [number]
    assert sweep(now + timedelta(days=365)) == []


def test_a_claim_opens_a_fresh_budget_one_first_wait_later(world: World, sweep: Sweep) -> None:
    inbox = world.queue()
    inbox.pending(age="1d")
    inbox.nudged(5, ago="10h")
    inbox.claimed(ago="0s")

    assert sweep(world.after("5m") - MOMENT) == []
    assert [nudge.number for nudge in sweep(world.after("5m"))] == [1]


def test_a_todo_put_back_keeps_the_queue_quiet_for_the_first_wait(world: World, sweep: Sweep) -> None:
    inbox = world.queue()
    inbox.pending(age="1d")
    inbox.requeued(ago="0s", claimed_ago="10h")

    assert sweep(world.after("5m") - MOMENT) == []
    assert len(sweep(world.after("5m"))) == 1


def test_a_drained_queue_is_forgotten(world: World, sweep: Sweep) -> None:
    inbox = world.queue()
    inbox.nudged(3, ago="1h")
    inbox.done(ago="1h")

    assert sweep() == []

    assert world.stalls() == {}


def test_unvouched_todos_alone_wake_nobody(world: World, sweep: Sweep) -> None:
    world.queue().pending(age="1h", vouched=False)

    assert sweep() == []
    assert world.stalls() == {}


def test_one_sweep_nudges_four_the_least_nudged_and_then_longest_waiting_first(
    world: World, sweep: Sweep
) -> None:
    nudged = world.queue()
    nudged.pending(age="9h")
    nudged.nudged(1, ago="8h")
    waiting = [world.queue() for _ in range(5)]
    for number, pair in enumerate(waiting):
        pair.pending(age=timedelta(hours=7 - number))

    first = [(nudge.endpoint_id, nudge.queue) for nudge in sweep()]
    second = [(nudge.endpoint_id, nudge.queue) for nudge in sweep()]

    assert first == [pair.pair for pair in waiting[:4]]
    assert second == [waiting[4].pair, nudged.pair]
    assert sweep() == []


@pytest.mark.parametrize(
    "name",
    ["", "a:b", "it's", 'a "quoted" name', "two\nlines", "ключ 🔑", "50%", "%(now)s", "x" * 512],
    ids=ascii,
)
def test_a_queue_name_is_any_text(
    world: World, sweep: Sweep, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = world.queue(name)
    inbox.pending(age="1h")

    with caplog.at_level(logging.INFO, logger="switchboard_stall.sweep"):
        (nudge,) = sweep()

    assert nudge.queue == name
    assert inbox.stall is not None
    (record,) = caplog.records
    assert "\n" not in record.getMessage()


def test_the_hook_fires_once_for_each_nudge_after_the_commit(
    world: World, sweep: Sweep, fired: list[tuple[str, Reason]]
) -> None:
    new = world.queue().pending(age="2h")
    put_back = world.queue().requeued(ago="1h")

    sweep()

    assert fired == [(new.id, "created"), (put_back.id, "requeued")]


def test_a_sweep_that_rolls_back_charged_nothing_and_fires_nothing(
    world: World, sweep: Sweep, fired: list[tuple[str, Reason]]
) -> None:
    inbox = world.queue()
    inbox.pending(age="1h")

    assert len(sweep(commit=False)) == 1

    assert inbox.stall is None
    assert fired == []


def test_a_nudge_can_be_read_after_its_session_is_gone(world: World, sweep: Sweep) -> None:
    world.queue().pending(age="1h", payload={"key": ["value"]}, kind="kind", source="source")

    (nudge,) = sweep()

    assert nudge.todo.payload == {"key": ["value"]}
    assert (nudge.todo.kind, nudge.todo.source, nudge.todo.state) == ("kind", "source", "pending")


def test_an_idle_sweep_returns_nothing_and_leaves_no_row(world: World, sweep: Sweep) -> None:
    world.queue().pending(age="4m")
    world.queue("quarantine").pending(age="1h")
    world.endpoint(scope=["inbox"]).queue("inbox").pending(age="1h")
    world.endpoint(scope=["inbox"], state="revoked").queue("inbox").pending(age="1h")

    assert sweep() == []
    assert world.stalls() == {}


def test_the_log_line_tells_how_long_the_queue_is_stalled(
    world: World, sweep: Sweep, caplog: pytest.LogCaptureFixture
) -> None:
    world.queue().pending(age="1h7m")

    with caplog.at_level(logging.INFO, logger="switchboard_stall.sweep"):
        sweep()

    (record,) = caplog.records
    assert "stalled for 1:07:00, next wait 0:20:00" in record.getMessage()


def test_the_database_clock_decides_what_is_due(engine: Engine, sweep: Sweep) -> None:
    world = World(engine, now=present(engine))
    due, fresh = world.queue(), world.queue()
    due.pending(age="5m")
    fresh.pending(age="4m")

    before = present(engine)
    nudges = sweep(None)

    assert [(nudge.endpoint_id, nudge.queue) for nudge in nudges] == [due.pair]
    assert due.stall is not None
    assert before <= due.stall.last_nudged_at <= present(engine)


def test_the_database_clock_stamps_the_life_of_a_todo(world: World, sweep: Sweep, engine: Engine) -> None:
    endpoint = world.queue().endpoint
    before = present(engine)
    with Session(engine) as session:
        todo = queue.enqueue(session, endpoint.id, "inbox", "work", vouched=True).todo
        session.commit()
        (claimed,) = queue.claim(session, endpoint.id, "worker")
        session.commit()
        assert claimed.id == todo.id
        assert claimed.claimed_at is not None
        assert claimed.lease_expires_at is not None
        assert before <= claimed.created_at <= claimed.claimed_at <= present(engine)
        assert claimed.lease_expires_at - claimed.claimed_at == queue.LEASE
        assert queue.reap_lapsed_leases(session) == []
        released = queue.release(session, todo.id, "worker")
        session.commit()
        assert released is not None
        assert released.claimed_at is not None
    assert sweep(None) == []


def test_the_clock_of_this_process_is_as_wrong_as_the_variant_says(
    server: DatabaseServer, engine: Engine
) -> None:
    """Else the tests of the clock would prove nothing."""
    ahead = present(engine) - datetime.now(UTC)

    assert abs(ahead - timedelta(hours=server.variant.server_is_ahead_hours)) < timedelta(minutes=5)


def test_of_two_sweeps_at_once_one_waits_and_returns_nothing(world: World, engine: Engine) -> None:
    inbox = world.queue()
    inbox.pending(age="7m")
    with stage(engine) as actor:
        first, second = actor("first"), actor("second")
        assert first.does(acts.sweep()) == [acts.Wake(inbox.pair, 1)]
        waiting = second.starts(acts.sweep())
        second.waits_for(first)
        first.does(acts.commit)
        assert waiting.result(PATIENCE) == []


def test_many_sessions_share_the_connections_and_none_fails(world: World, sweep: Sweep) -> None:
    """More sweeps than a driver takes to prepare a statement on the server."""
    pairs = [world.queue() for _ in range(8)]
    for pair in pairs:
        pair.pending(age="1h")

    swept = sweep.at_once(60)

    woken = [(nudge.endpoint_id, nudge.queue) for nudges in swept for nudge in nudges]
    assert sorted(woken) == sorted(pair.pair for pair in pairs)
