"""The sweep: the transaction it runs in, who may be nudged, what counts as life, and what it says."""

from __future__ import annotations

import contextlib
import logging
import secrets
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

import pytest
from sqlalchemy import create_engine, func, select, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session, sessionmaker

from switchboard_stall import (
    STALL_POLICY,
    IsolationError,
    Nudge,
    StallPolicy,
    Todo,
    nudge_stalled_queues,
    set_todo_ready_hook,
)
from switchboard_stall.schedule import MAX_SWEEP_LIMIT, MAX_WAIT
from switchboard_stall.transaction import in_transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine
    from support.builders import EndpointBuilder, QueueBuilder, World

MOMENT = timedelta(milliseconds=1)


def sweep(engine: Engine, now: datetime | None, **options: StallPolicy) -> list[Nudge]:
    with Session(engine) as session:
        nudges = nudge_stalled_queues(session, now=now, **options)
        session.commit()
    return nudges


def woken(world: World, after: str | timedelta = "0s") -> list[tuple[object, str]]:
    return [(nudge.endpoint_id, nudge.queue) for nudge in sweep(world.engine, world.after(after))]


# The transaction.


@pytest.mark.parametrize("default", ["SERIALIZABLE", "REPEATABLE READ"])
@pytest.mark.parametrize("begun", [False, True], ids=["in no transaction", "just begun"])
def test_a_fresh_transaction_is_read_committed_whatever_the_engine_says(
    world: World, default: str, begun: bool
) -> None:
    inbox = world.queue()
    inbox.pending(age="1h")
    strict = create_engine(world.engine.url, isolation_level=default)
    with Session(strict) as session:
        if begun:
            session.begin()
        (nudge,) = nudge_stalled_queues(session, now=world.now)
        assert session.scalar(select(func.current_setting("transaction_isolation"))) == "read committed"
        session.commit()
        assert session.scalar(select(func.current_setting("transaction_isolation"))) == default.lower()
    strict.dispose()
    assert (nudge.endpoint_id, nudge.queue) == inbox.pair


def test_a_transaction_that_has_begun_under_another_level_is_refused_before_anything_is_written(
    world: World,
) -> None:
    inbox = world.queue()
    inbox.pending(age="1h")
    with Session(world.engine.execution_options(isolation_level="SERIALIZABLE")) as session:
        session.execute(select(1))
        with pytest.raises(IsolationError, match=r"SERIALIZABLE.*transaction of its own"):
            nudge_stalled_queues(session, now=world.now)
        assert session.scalar(select(1)) == 1  # The caller's transaction is as it was.
        session.commit()
    assert inbox.stall is None


def test_a_connection_that_commits_by_itself_is_refused(world: World) -> None:
    inbox = world.queue()
    inbox.pending(age="1h")
    with (
        Session(world.engine.execution_options(isolation_level="AUTOCOMMIT")) as session,
        pytest.raises(IsolationError, match="AUTOCOMMIT"),
    ):
        nudge_stalled_queues(session, now=world.now)
    assert inbox.stall is None


def test_it_joins_the_callers_transaction_under_read_committed(world: World) -> None:
    inbox = world.queue()
    todo = inbox.pending(age="1h")
    with Session(world.engine) as session:
        session.execute(text("UPDATE todos SET title = 'told anew'"))
        (nudge,) = nudge_stalled_queues(session, now=world.now)
        session.rollback()
    assert (nudge.todo.id, nudge.todo.title) == (todo.id, "told anew")
    assert inbox.stall is None


def test_a_todo_that_the_session_has_read_before_is_handed_over_as_it_is_now(world: World) -> None:
    todo = world.queue().pending(age="1h")
    with Session(world.engine) as session:
        stale = session.get_one(Todo, todo.id)
        with world.engine.begin() as other:
            other.execute(text("UPDATE todos SET title = 'told anew'"))
        (nudge,) = nudge_stalled_queues(session, now=world.now)
        assert (stale.id, nudge.todo.title) == (todo.id, "told anew")


def test_it_runs_where_the_session_keeps_its_todos(world: World) -> None:
    todo = world.queue().pending(age="1h")
    elsewhere = sessionmaker(binds={Todo: world.engine})
    with elsewhere() as session:
        (nudge,) = nudge_stalled_queues(session, now=world.now)
    assert nudge.todo.id == todo.id
    (nudge,) = in_transaction(elsewhere, lambda session: nudge_stalled_queues(session, now=world.now))
    assert nudge.todo.id == todo.id


@pytest.mark.parametrize("autoflush", [True, False])
def test_what_the_session_has_not_written_yet_counts_if_it_flushes_by_itself(
    world: World, autoflush: bool
) -> None:
    todo = world.queue().pending(age="1h")
    with Session(world.engine, autoflush=autoflush) as session:
        session.get_one(Todo, todo.id).vouched = False
        nudges = nudge_stalled_queues(session, now=world.now)
    assert len(nudges) == (0 if autoflush else 1)


GRANTS: Final = (
    "SELECT ON endpoints",
    "SELECT ON notify_hooks",
    "SELECT ON todos",
    "UPDATE (state) ON endpoints",
    "SELECT ON queue_stalls",
    "INSERT ON queue_stalls",
    "UPDATE ON queue_stalls",
    "DELETE ON queue_stalls",
)


@pytest.fixture
def role(engine: Engine) -> Iterator[str]:
    """A role that owns nothing and may nothing."""
    name = f"sweeper_{secrets.token_hex(6)}"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {name}"))
    yield name
    with engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {name}"))
        connection.execute(text(f"DROP ROLE {name}"))


@pytest.mark.parametrize("without", [None, *GRANTS])
def test_its_user_needs_these_privileges_and_each_of_them(
    world: World, role: str, without: str | None
) -> None:
    stalled = world.queue().pending(age="1h")
    with Session(world.engine) as session:
        for grant in GRANTS:
            if grant != without:
                session.execute(text(f"GRANT {grant} TO {role}"))
        session.commit()
        session.execute(text(f"SET LOCAL ROLE {role}"))
        with contextlib.nullcontext() if without is None else pytest.raises(ProgrammingError, match="denied"):
            assert [nudge.todo.id for nudge in nudge_stalled_queues(session, now=world.now)] == [stalled.id]


def test_the_statement_is_paced_by_its_own_clock_and_not_by_the_start_of_the_transaction(
    world: World,
) -> None:
    with Session(world.engine) as session:
        began = session.scalar(select(func.now()))
        assert began is not None
        inbox = world.queue()
        inbox.pending(age=world.now - began + STALL_POLICY.waits[0])
        # Five minutes before the transaction began: due by either clock, so the charge tells which it was.
        nudge_stalled_queues(session)
        session.commit()
    assert inbox.stall is not None
    assert inbox.stall.last_nudged_at > began


def test_a_savepoint_that_rolls_back_takes_its_nudges_along(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = world.queue()
    inbox.pending(age="1h")
    fired: list[str] = []
    previous = set_todo_ready_hook(lambda todo, _: fired.append(todo.id))
    try:
        with Session(world.engine) as session, caplog.at_level(logging.INFO):
            savepoint = session.begin_nested()
            assert len(nudge_stalled_queues(session, now=world.now)) == 1
            savepoint.rollback()
            session.commit()
    finally:
        set_todo_ready_hook(previous)
    assert (fired, inbox.stall, caplog.records) == ([], None, [])


def test_a_naive_instant_is_refused_before_the_database_is_asked() -> None:
    with Session() as unbound, pytest.raises(ValueError, match="no time zone"):
        nudge_stalled_queues(unbound, now=datetime(2026, 12, 1))


# Who may be nudged.


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda w: w.endpoint(scope=["other"]), id="the queue is not in scope"),
        pytest.param(lambda w: w.endpoint(scope=[]), id="the scope is empty"),
        pytest.param(lambda w: w.endpoint(state="revoked"), id="the endpoint is revoked"),
        pytest.param(lambda w: w.endpoint(expires_in="-1s"), id="the endpoint has expired"),
        pytest.param(lambda w: w.endpoint(expires_in="0s"), id="the endpoint expires now"),
    ],
)
def test_an_endpoint_that_takes_no_wakes_takes_no_place_and_no_charge(
    world: World, make: Callable[[World], EndpointBuilder]
) -> None:
    refused: list[QueueBuilder] = []
    for _ in range(STALL_POLICY.sweep_limit):
        endpoint = make(world)
        endpoint.hook()
        refused.append(endpoint.queue("inbox"))
        refused[-1].pending(age="2d")
    last_in_line = world.queue()
    last_in_line.pending(age="1h")

    assert woken(world) == [last_in_line.pair]
    assert all(pair.stall is None for pair in refused)


def test_an_endpoint_about_to_expire_is_still_woken(world: World) -> None:
    endpoint = world.endpoint(expires_in=MOMENT)
    endpoint.hook()
    endpoint.queue().pending(age="1h")
    assert woken(world) == [endpoint.queue().pair]


def test_a_hook_must_be_enabled_and_admit_the_queue(world: World) -> None:
    nobody, disabled, other, admitting, second = (world.endpoint() for _ in range(5))
    disabled.hook(enabled=False)
    other.hook(queues=["other"])
    admitting.hook(queues=["other", "inbox"])
    second.hook(queues=["other"])
    second.hook(enabled=False)
    second.hook(queues=["inbox"])
    for endpoint in (nobody, disabled, other, admitting, second):
        endpoint.queue().pending(age="1h")
    assert sorted(woken(world)) == sorted([admitting.queue().pair, second.queue().pair])


def test_the_hook_of_another_endpoint_admits_nothing(world: World) -> None:
    world.endpoint().hook()
    world.endpoint().queue().pending(age="1h")
    assert woken(world) == []


def test_one_wake_for_a_queue_with_several_hooks(world: World) -> None:
    inbox = world.queue()
    inbox.endpoint.hook(queues=["inbox"])
    inbox.pending(age="1h")
    assert woken(world) == [inbox.pair]


def test_todos_created_at_one_instant_are_named_in_the_order_of_their_ids(world: World) -> None:
    inbox = world.queue()
    for todo_id in ("td_c", "td_a", "td_b"):
        inbox.pending(age="1h", id=todo_id)
    (nudge,) = sweep(world.engine, world.now)
    assert nudge.todo.id == "td_a"


# What counts as life.


def test_rings_with_no_new_webhook(world: World) -> None:
    inbox = world.queue()
    inbox.claimed(ago="0s", age="1s")
    inbox.pending(age="1s")
    assert woken(world, STALL_POLICY.waits[0] - MOMENT) == []
    assert woken(world, STALL_POLICY.waits[0]) == [inbox.pair]


def test_a_queue_that_is_being_claimed_is_never_nudged_however_deep_its_backlog(world: World) -> None:
    inbox = world.queue()
    for _ in range(20):
        inbox.pending(age="30d")
    inbox.claimed(ago="4m")
    assert woken(world) == []


@pytest.mark.parametrize("state", ["claimed", "done", "failed"])
def test_a_claim_counts_in_whatever_state_its_todo_is(world: World, state: str) -> None:
    inbox = world.queue()
    inbox.pending(age="1d")
    inbox.pending(age="1d", state=state, claimed_at=world.ago("4m59s"))
    assert woken(world) == []
    assert woken(world, "1s") == [inbox.pair]


def test_a_claim_the_charge_had_not_seen_is_progress_although_it_began_before(world: World) -> None:
    inbox = world.queue()
    inbox.pending(age="1d")
    inbox.nudged(5, ago="6m")
    inbox.claimed(ago="7m")
    (nudge,) = sweep(world.engine, world.now)
    assert nudge.number == 1


def test_a_claim_the_charge_had_seen_is_no_progress_although_it_is_later(world: World) -> None:
    inbox = world.queue()
    inbox.pending(age="1d")
    inbox.nudged(5, ago="10h", last_claim_ago="6m")
    inbox.claimed(ago="6m")
    assert woken(world) == []


def test_retention_that_deletes_old_claims_is_no_progress(world: World) -> None:
    inbox = world.queue()
    inbox.pending(age="1d")
    inbox.nudged(2, ago="59m", last_claim_ago="2h")
    inbox.done(ago="3h")
    assert woken(world) == []
    (nudge,) = sweep(world.engine, world.after("1m"))
    assert nudge.number == 3
    assert inbox.stall is not None
    assert inbox.stall.last_claim_at == world.ago("3h")


def test_a_fresh_budget_still_keeps_the_first_wait_from_the_last_nudge(world: World) -> None:
    inbox = world.queue()
    inbox.pending(age="1d")
    inbox.nudged(1, ago="4m", last_claim_ago="9h")
    inbox.done(ago="8h")
    assert woken(world, timedelta(minutes=1) - MOMENT) == []
    assert woken(world, "1m") == [inbox.pair]


def test_a_requeue_quiets_the_later_nudges_too(world: World) -> None:
    inbox = world.queue()
    inbox.pending(age="1d")
    inbox.nudged(1, ago="1h", last_claim_ago="2h")
    inbox.requeued(ago="4m", claimed_ago="2h")
    assert woken(world, timedelta(minutes=1) - MOMENT) == []
    (nudge,) = sweep(world.engine, world.after("1m"))
    assert (nudge.number, nudge.stalled_since) == (2, world.ago("4m"))


def test_a_requeue_counts_although_nobody_vouches_for_it(world: World) -> None:
    inbox = world.queue()
    inbox.pending(age="1d")
    inbox.requeued(ago="4m", claimed_ago="2h", vouched=False)
    assert woken(world) == []


def test_drain_then_refill_brings_no_wake_before_the_first_wait(world: World) -> None:
    inbox = world.queue()
    inbox.nudged(5, ago="1m")
    assert woken(world) == []
    inbox.pending(age="0s")
    assert woken(world, STALL_POLICY.waits[0] - MOMENT) == []
    (nudge,) = sweep(world.engine, world.after("5m"))
    assert nudge.number == 1


def test_the_policy_in_force_is_the_one_given(world: World) -> None:
    inbox = world.queue()
    inbox.pending(age="2s")
    policy = StallPolicy(waits=(timedelta(seconds=1), timedelta(seconds=3)), sweep_limit=1)
    (first,) = sweep(world.engine, world.now, policy=policy)
    (second,) = sweep(world.engine, world.after("3s"), policy=policy)
    assert (first.next_wait, second.next_wait) == (timedelta(seconds=3), None)
    assert sweep(world.engine, world.after("9h"), policy=policy) == []


@pytest.mark.parametrize(
    "policy",
    [
        StallPolicy(waits=(MAX_WAIT,), sweep_limit=MAX_SWEEP_LIMIT),
        StallPolicy(waits=[timedelta(microseconds=1), MAX_WAIT], sweep_limit=1),
    ],
    ids=["the largest", "from the shortest to the longest wait"],
)
def test_every_policy_that_exists_can_be_swept_with(world: World, policy: StallPolicy) -> None:
    inbox = world.queue()
    inbox.pending(age="1d")
    first = sweep(world.engine, world.now, policy=policy)
    assert len(first) == (0 if policy.wait(1) == MAX_WAIT else 1)
    assert sweep(world.engine, world.after("900d"), policy=policy) == []


# What it says.


def test_each_nudge_is_one_info_line_and_the_last_one_a_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = world.queue("in\nbox")
    todo = inbox.pending(age="0s")
    now = world.now
    with caplog.at_level(logging.INFO, logger="switchboard_stall.sweep"):
        for wait in STALL_POLICY.waits:
            now += wait
            sweep(world.engine, now)
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO"] * (STALL_POLICY.cap - 1) + ["WARNING"]
    for number, record in enumerate(caplog.records, start=1):
        message = record.getMessage()
        assert "\n" not in message
        for part in (str(inbox.endpoint.id), '"in\\nbox"', f"nudge {number} of 5", todo.id):
            assert part in message
    assert "none" in caplog.records[-1].getMessage()


def test_a_line_says_who_where_on_the_schedule_since_when_and_what_comes_next(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = world.queue()
    inbox.pending(age="1d")
    todo = inbox.pending(age="2d")
    inbox.requeued(ago="8h", claimed_ago="9h")
    inbox.nudged(3, ago="6h", last_claim_ago="9h")
    with caplog.at_level(logging.INFO, logger="switchboard_stall.sweep"):
        sweep(world.engine, world.now)
        sweep(world.engine, world.after("6h"))
    begins = f'queue stalled: endpoint {inbox.endpoint.id} queue "inbox": '
    assert [record.getMessage() for record in caplog.records] == [
        f"{begins}nudge 4 of 5, stalled for 8:00:00, next wait 6:00:00, todo {todo.id}",
        f"{begins}nudge 5 of 5, stalled for 14:00:00, next wait none: silent until a claim or a drain,"
        f" todo {todo.id}",
    ]


def test_nothing_is_said_before_the_commit(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.queue().pending(age="1h")
    with caplog.at_level(logging.INFO), Session(world.engine) as session:
        nudge_stalled_queues(session, now=world.now)
        assert caplog.records == []
        session.commit()
        assert len(caplog.records) == 1


def test_the_hook_may_use_the_session_factory_although_it_fires_within_the_commit(world: World) -> None:
    world.queue().pending(age="1h")
    seen: list[int] = []

    def hook(todo: Todo, _: object) -> None:
        with Session(world.engine) as session:
            seen.append(session.scalar(text("SELECT nudges FROM queue_stalls")) or 0)

    previous = set_todo_ready_hook(hook)
    try:
        sweep(world.engine, world.now)
    finally:
        set_todo_ready_hook(previous)
    assert seen == [1]
