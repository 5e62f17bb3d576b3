"""When the ready hook fires, and when it does not."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import create_engine, event, inspect, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import DetachedInstanceError

from switchboard_stall.models import Todo
from switchboard_stall.ready import (
    Reason,
    after_commit,
    announce,
    detached,
    reason_for,
    set_todo_ready_hook,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine
    from support.builders import QueueBuilder, World

Log = list[str]


@pytest.fixture
def unbound() -> Iterator[Session]:
    """A session whose transactions are real to it, on a database that holds nothing."""
    engine = create_engine("sqlite://")
    with Session(engine) as session:
        yield session
    engine.dispose()


@pytest.fixture
def log() -> Log:
    return []


@pytest.fixture
def fired() -> Iterator[list[tuple[Todo, Reason]]]:
    seen: list[tuple[Todo, Reason]] = []
    previous = set_todo_ready_hook(lambda todo, reason: seen.append((todo, reason)))
    yield seen
    set_todo_ready_hook(previous)


@pytest.fixture
def inbox(world: World) -> QueueBuilder:
    return world.queue("inbox")


def note(log: Log, word: str) -> Callable[[], None]:
    return lambda: log.append(word)


# After commit


def test_actions_run_once_after_the_commit_in_their_order(unbound: Session, log: Log) -> None:
    after_commit(unbound, note(log, "one"))
    after_commit(unbound, note(log, "two"))
    assert log == []
    unbound.commit()
    assert log == ["one", "two"]
    unbound.commit()
    assert log == ["one", "two"]


@pytest.mark.parametrize("end", ["rollback", "close", "invalidate", "reset"])
def test_an_action_is_dropped_with_its_transaction(unbound: Session, log: Log, end: str) -> None:
    after_commit(unbound, note(log, "never"))
    getattr(unbound, end)()
    unbound.execute(text("SELECT 1"))
    unbound.commit()
    assert log == []


def test_an_action_is_dropped_with_its_savepoint(unbound: Session, log: Log) -> None:
    after_commit(unbound, note(log, "before"))
    savepoint = unbound.begin_nested()
    after_commit(unbound, note(log, "within"))
    savepoint.rollback()
    after_commit(unbound, note(log, "after"))
    unbound.commit()
    assert log == ["before", "after"]


def test_a_released_savepoint_hands_its_actions_up(unbound: Session, log: Log) -> None:
    with unbound.begin_nested():
        after_commit(unbound, note(log, "outer"))
        with unbound.begin_nested():
            after_commit(unbound, note(log, "inner"))
    assert log == []
    unbound.commit()
    assert log == ["outer", "inner"]


def test_a_savepoint_released_into_one_that_rolls_back_takes_its_actions_along(
    unbound: Session, log: Log
) -> None:
    outer = unbound.begin_nested()
    with unbound.begin_nested():
        after_commit(unbound, note(log, "never"))
    outer.rollback()
    unbound.commit()
    assert log == []


def test_a_savepoint_still_open_is_committed_with_the_transaction(unbound: Session, log: Log) -> None:
    unbound.begin_nested()
    after_commit(unbound, note(log, "within"))
    unbound.commit()
    assert log == ["within"]


def test_a_flush_ends_nothing(session: Session, world: World, log: Log) -> None:
    after_commit(session, note(log, "before"))

    def within(flushed: Session, _: object) -> None:
        after_commit(flushed, note(log, "within"))
        with flushed.begin_nested():
            after_commit(flushed, note(log, "nested"))

    event.listen(session, "after_flush", within)
    session.add(Todo(endpoint_id=world.endpoint().id, queue="inbox", title="t"))
    session.flush()
    assert log == []
    session.commit()
    assert log == ["before", "within", "nested"]


def test_an_action_that_raises_is_logged_and_the_others_still_run(
    unbound: Session, log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    def bad() -> None:
        raise ValueError("broken hook")

    after_commit(unbound, bad)
    after_commit(unbound, note(log, "good"))
    unbound.commit()
    assert log == ["good"]
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)


def test_an_action_may_use_the_session_that_committed(unbound: Session, log: Log) -> None:
    def again() -> None:
        assert unbound.scalar(text("SELECT 1")) == 1
        after_commit(unbound, note(log, "second"))

    after_commit(unbound, again)
    unbound.commit()
    assert log == []
    unbound.commit()
    assert log == ["second"]


def test_it_begins_the_transaction_of_an_idle_session(unbound: Session, log: Log) -> None:
    after_commit(unbound, note(log, "one"))
    assert unbound.in_transaction()


def test_sessions_do_not_hear_of_each_other(unbound: Session, log: Log) -> None:
    after_commit(unbound, note(log, "never"))
    with Session(unbound.get_bind()) as other:
        other.execute(text("SELECT 1"))
        other.commit()
    assert log == []


def test_a_session_left_without_a_commit_leaks_nothing() -> None:
    class Held:
        def __call__(self) -> None: ...

    session, action = Session(), Held()
    after_commit(session, action)
    gone = weakref.ref(action)
    del session, action
    gc.collect()
    assert gone() is None


# The hook


def test_setting_a_hook_returns_the_one_before() -> None:
    def one(todo: Todo, reason: Reason) -> None: ...

    first = set_todo_ready_hook(one)
    assert set_todo_ready_hook(None) is one
    assert set_todo_ready_hook(first) is None


@pytest.mark.parametrize(("attempt", "reason"), [(0, "created"), (1, "requeued"), (5, "requeued")])
def test_the_reason_on_the_wire(attempt: int, reason: str) -> None:
    assert reason_for(attempt) == reason


def test_the_hook_that_fires_is_the_one_set_at_the_commit(session: Session, inbox: QueueBuilder) -> None:
    seen: Log = []
    announce(session, inbox.pending(age="1m"), "created")
    previous = set_todo_ready_hook(lambda todo, reason: seen.append(reason))
    try:
        session.commit()
    finally:
        set_todo_ready_hook(previous)
    assert seen == ["created"]


def test_without_a_hook_a_commit_is_only_a_commit(session: Session, inbox: QueueBuilder) -> None:
    previous = set_todo_ready_hook(None)
    try:
        announce(session, inbox.pending(age="1m"), "created")
        session.commit()
    finally:
        set_todo_ready_hook(previous)


def test_the_hook_gets_a_todo_that_needs_no_session(
    engine: Engine, inbox: QueueBuilder, fired: list[tuple[Todo, Reason]]
) -> None:
    todo_id = inbox.pending(age="1m", payload={"a": 1}).id
    with Session(engine) as session:
        todo = session.get_one(Todo, todo_id)
        announce(session, todo, "requeued")
        todo.title = "changed after it was announced"
        session.commit()
    [(given, reason)] = fired
    assert reason == "requeued"
    assert given is not todo
    columns = {name: getattr(given, name) for name in Todo.__mapper__.column_attrs.keys()}  # noqa: SIM118
    assert (columns["id"], columns["title"]) == (todo_id, "a piece of work")
    assert columns["payload"] == {"a": 1}
    assert columns["max_attempts"] == 5


def test_a_new_todo_is_announced_with_what_the_database_gave_it(
    session: Session, inbox: QueueBuilder, fired: list[tuple[Todo, Reason]]
) -> None:
    todo = Todo(endpoint_id=inbox.endpoint.id, queue="inbox", title="t")
    session.add(todo)
    announce(session, todo, "created")
    session.commit()
    [(given, _)] = fired
    assert given.id.startswith("td_")
    assert (given.state, given.attempt) == ("pending", 0)
    assert given.created_at is not None


def test_a_copy_loads_what_its_todo_had_not_loaded(session: Session, inbox: QueueBuilder) -> None:
    todo = session.get_one(Todo, inbox.pending(age="1m").id)
    session.expire(todo)
    copy = detached(todo)
    assert copy.title == "a piece of work"
    assert inspect(copy).detached
    session.expire(todo)
    session.expunge(todo)
    with pytest.raises(DetachedInstanceError):
        detached(todo)


def test_a_commit_that_fails_fires_nothing(
    session: Session, inbox: QueueBuilder, fired: list[tuple[Todo, Reason]]
) -> None:
    todo = inbox.pending(age="1m")
    announce(session, todo, "created")
    session.add(Todo(id=todo.id, endpoint_id=inbox.endpoint.id, queue="inbox", title="the same id"))
    with pytest.raises(IntegrityError):
        session.commit()
    session.rollback()
    session.commit()
    assert fired == []


def test_ten_thousand_todos_in_one_transaction(
    session: Session, inbox: QueueBuilder, fired: list[tuple[Todo, Reason]]
) -> None:
    todo = inbox.pending(age="1m")
    for _ in range(10_000):
        announce(session, todo, "created")
    session.commit()
    assert len(fired) == 10_000


def test_the_hook_fires_under_an_async_session_too(
    engine: Engine, inbox: QueueBuilder, fired: list[tuple[Todo, Reason]]
) -> None:
    todo_id = inbox.pending(age="1m").id

    def ready(session: Session) -> None:
        for todo in session.scalars(select(Todo)):
            announce(session, todo, "requeued")

    async def scenario() -> None:
        async_engine = create_async_engine(engine.url)
        async with AsyncSession(async_engine) as session:
            await session.run_sync(ready)
            await session.rollback()
            assert fired == []
            await session.run_sync(ready)
            assert fired == []
            await session.commit()
        await async_engine.dispose()

    asyncio.run(scenario())
    assert [(todo.id, reason) for todo, reason in fired] == [(todo_id, "requeued")]
