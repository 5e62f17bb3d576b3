"""The lifecycle of a todo, row by row of the table, and the four sweeps."""

from __future__ import annotations

import threading
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import (
    delete,
    func,
    select,
    text,
)
from sqlalchemy.orm import Session, sessionmaker
from support.backlogs import fill
from support.builders import NOW, EndpointBuilder, QueueBuilder, World, duration
from support.databases import database_copy, vacuum

from switchboard_stall.models import MAX_QUEUE_BYTES, TODO_STATES, Endpoint, Todo
from switchboard_stall.queue import (
    MAX_KEY_BYTES,
    EndpointInactive,
    InvalidArgument,
    UnknownEndpoint,
    claim,
    complete,
    enqueue,
    expire_endpoints,
    fail,
    heartbeat,
    reap_lapsed_leases,
    release,
    requeue_due_retries,
    rering_unclaimed,
    revoke_endpoint,
)
from switchboard_stall.ready import Reason, set_todo_ready_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine
    from support.databases import DatabaseServer

MOMENT = timedelta(microseconds=1)

Fired = list[tuple[str, Reason]]


@pytest.fixture
def fired() -> Iterator[Fired]:
    """Each (todo id, reason) that the ready hook was given."""
    seen: Fired = []
    previous = set_todo_ready_hook(lambda todo, reason: seen.append((todo.id, reason)))
    yield seen
    set_todo_ready_hook(previous)


@pytest.fixture
def inbox(world: World) -> QueueBuilder:
    return world.queue("inbox")


def changed(before: Todo, after: Todo) -> dict[str, Any]:
    """The columns in which two versions of one todo differ, as they are after."""
    names = Todo.__mapper__.column_attrs.keys()
    return {name: getattr(after, name) for name in names if getattr(before, name) != getattr(after, name)}


def stored(engine: Engine, todo: Todo | str) -> Todo:
    """What other sessions see."""
    with Session(engine, expire_on_commit=False) as session:
        return session.get_one(Todo, todo if isinstance(todo, str) else todo.id)


def wait_until_blocked(engine: Engine) -> None:
    """Wait until another session of this database waits for a lock that somebody holds."""
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with engine.connect() as connection:
            if connection.scalar(waiting):
                return
    pytest.fail("nobody waits for a lock")


# Enqueue


def test_a_new_todo_is_pending_unclaimed_and_never_requeued(
    session: Session, engine: Engine, inbox: QueueBuilder
) -> None:
    enqueued = enqueue(session, inbox.endpoint.id, "inbox", "Greetings", now=NOW)
    session.commit()
    todo = stored(engine, enqueued.todo)
    assert enqueued.is_new
    assert (todo.state, todo.attempt, todo.max_attempts, todo.vouched) == ("pending", 0, 5, False)
    assert todo.created_at == todo.updated_at == NOW
    assert todo.id == f"td_{uuid.UUID(todo.id.removeprefix('td_'))}"


def test_without_an_instant_a_todo_is_created_by_the_statement_clock(
    session: Session, inbox: QueueBuilder
) -> None:
    began = session.scalar(select(func.now()))
    todo = enqueue(session, inbox.endpoint.id, "inbox", "Greetings").todo
    assert began is not None
    assert todo.created_at > began
    assert todo.updated_at == todo.created_at


def test_a_new_vouched_todo_fires_created_after_commit(
    session: Session, inbox: QueueBuilder, fired: Fired
) -> None:
    todo_id = enqueue(session, inbox.endpoint.id, "inbox", "Greetings", vouched=True).todo.id
    assert fired == []
    session.commit()
    assert fired == [(todo_id, "created")]


@pytest.mark.parametrize(
    ("queue", "vouched"), [("inbox", False), ("quarantine", True)], ids=["unvouched", "quarantine"]
)
def test_a_todo_that_may_ring_nobody_fires_nothing(
    session: Session, inbox: QueueBuilder, fired: Fired, queue: str, vouched: bool
) -> None:
    enqueue(session, inbox.endpoint.id, queue, "Greetings", vouched=vouched)
    session.commit()
    assert fired == []


def test_a_duplicate_delivery_is_the_live_todo_and_fires_nothing(
    session: Session, inbox: QueueBuilder, fired: Fired
) -> None:
    first = enqueue(session, inbox.endpoint.id, "inbox", "one", idempotency_key="k", vouched=True)
    session.commit()
    second = enqueue(session, inbox.endpoint.id, "other", "two", idempotency_key="k", vouched=True)
    session.commit()
    assert (second.todo.id, second.is_new) == (first.todo.id, False)
    assert second.todo.title == "one"
    assert len(fired) == 1


@pytest.mark.parametrize("state", TODO_STATES)
@pytest.mark.parametrize("retry", [None, "1m"])
def test_a_key_is_taken_exactly_while_its_todo_is_live(
    session: Session, inbox: QueueBuilder, state: str, retry: str | None
) -> None:
    live = state != "done" and (state != "failed" or retry is not None)
    next_retry_at = None if retry is None else inbox.endpoint.world.after(retry)
    inbox.pending(age="1m", state=state, next_retry_at=next_retry_at, idempotency_key="k")
    again = enqueue(session, inbox.endpoint.id, "inbox", "again", idempotency_key="k")
    assert again.is_new is not live


def test_two_senders_of_one_delivery_make_one_todo(
    engine: Engine, session_factory: sessionmaker[Session], inbox: QueueBuilder
) -> None:
    results: list[tuple[str, bool]] = []

    def second_sender() -> None:
        with session_factory.begin() as session:
            enqueued = enqueue(session, inbox.endpoint.id, "inbox", "two", idempotency_key="k")
            results.append((enqueued.todo.id, enqueued.is_new))

    with session_factory() as first:
        todo_id = enqueue(first, inbox.endpoint.id, "inbox", "one", idempotency_key="k").todo.id
        thread = threading.Thread(target=second_sender)
        thread.start()
        wait_until_blocked(engine)
        first.commit()
    thread.join(10)
    assert results == [(todo_id, False)]


def test_keys_of_two_endpoints_do_not_meet(session: Session, world: World) -> None:
    one, other = world.endpoint(), world.endpoint()
    assert enqueue(session, one.id, "inbox", "t", idempotency_key="k").is_new
    assert enqueue(session, other.id, "inbox", "t", idempotency_key="k").is_new


def test_todos_without_a_key_are_never_duplicates(session: Session, inbox: QueueBuilder) -> None:
    assert enqueue(session, inbox.endpoint.id, "inbox", "t").is_new
    assert enqueue(session, inbox.endpoint.id, "inbox", "t").is_new


def test_enqueue_names_an_unknown_endpoint(session: Session, world: World) -> None:
    stranger = uuid.uuid4()
    with pytest.raises(UnknownEndpoint, match=str(stranger)):
        enqueue(session, stranger, "inbox", "t")


@pytest.mark.parametrize("endpoint", [{"state": "revoked"}, {"expires_in": "0s"}], ids=["revoked", "expired"])
def test_enqueue_refuses_an_endpoint_that_nobody_reads(
    session: Session, world: World, endpoint: dict[str, Any]
) -> None:
    built = world.endpoint(**endpoint)
    with pytest.raises(EndpointInactive, match=str(built.id)):
        enqueue(session, built.id, "inbox", "t", now=NOW)
    assert session.scalar(select(func.count()).select_from(Todo)) == 0


def test_a_revocation_takes_the_todo_that_was_being_enqueued_with_it(
    engine: Engine, session_factory: sessionmaker[Session], inbox: QueueBuilder
) -> None:
    failed: list[int] = []

    def revoke() -> None:
        with session_factory.begin() as session:
            failed.append(revoke_endpoint(session, inbox.endpoint.id))

    with session_factory() as sender:
        enqueue(sender, inbox.endpoint.id, "inbox", "t")
        thread = threading.Thread(target=revoke)
        thread.start()
        wait_until_blocked(engine)
        sender.commit()
    thread.join(10)
    assert failed == [1]


NAMES = [
    "",
    " ",
    "a:b",
    "it's",
    '"quoted"',
    "two\nlines",
    "back\\slash",
    "%s %(x)s",
    "{curly}",
    ":bound",
    "очередь",
    "队列",
    "🛎️",
    "e\u0301",
    "\u202eright to left",
    "\x01\x7f",
    "q" * MAX_QUEUE_BYTES,
    "é" * (MAX_QUEUE_BYTES // 2),
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_queue_name_is_any_text(session: Session, world: World, fired: Fired, name: str) -> None:
    endpoint = world.endpoint(scope=[name, "decoy"])
    todo_id = enqueue(session, endpoint.id, name, "t", vouched=True).todo.id
    session.commit()
    assert fired == [(todo_id, "created")]
    assert [todo.queue for todo in claim(session, endpoint.id, "worker")] == [name]
    assert release(session, todo_id, "worker")
    assert [todo.id for todo in claim(session, endpoint.id, "worker", queues=[name])] == [todo_id]


BAD: list[tuple[str, Any, str]] = [
    ("queue", "q" * 513, "513 bytes"),
    ("queue", "é" * 257, "514 bytes"),
    ("queue", "a\0b", "NUL"),
    ("queue", "\ud800", "surrogate"),
    ("queue", None, "NoneType"),
    ("queue", b"q", "bytes"),
    ("title", "a\0b", "NUL"),
    ("title", None, "NoneType"),
    ("source", "\udfff", "surrogate"),
    ("source", 1, "int"),
    ("kind", "\0", "NUL"),
    ("assignee", "\0", "NUL"),
    ("idempotency_key", "\0", "NUL"),
    ("idempotency_key", "k" * (MAX_KEY_BYTES + 1), "2049 bytes"),
    ("payload", {"deep": ["a\0b"]}, "NUL"),
    ("payload", {"k\0": 1}, "NUL"),
    ("payload", ["\ud800"], "surrogate"),
    ("payload", float("nan"), "JSON"),
    ("payload", {1, 2}, "JSON"),
    ("payload", {"when": NOW}, "JSON"),
    ("max_attempts", 0, "range"),
    ("max_attempts", -1, "range"),
    ("max_attempts", 2**31, "range"),
    ("max_attempts", True, "bool"),
    ("max_attempts", 1.0, "float"),
    ("vouched", 1, "int"),
    ("vouched", None, "NoneType"),
    ("endpoint_id", "no-uuid", "str"),
]


@pytest.mark.parametrize(("name", "value", "told"), BAD, ids=lambda part: ascii(part)[:24])
def test_a_value_that_cannot_be_stored_is_refused_before_anything_is_sent(
    name: str, value: Any, told: str
) -> None:
    arguments: dict[str, Any] = {"endpoint_id": uuid.uuid4(), "queue": "inbox", "title": "t"}
    unbound = Session()
    with pytest.raises(InvalidArgument, match=rf"^{name}=.*{told}") as refused:
        enqueue(unbound, **arguments | {name: value})
    assert len(str(refused.value)) < 250
    assert str(refused.value).isprintable()
    assert unbound.get_transaction() is None


def test_the_longest_key_fits_its_index_however_random_it_is(session: Session, inbox: QueueBuilder) -> None:
    key = "".join(uuid.uuid4().hex for _ in range(MAX_KEY_BYTES // 32))
    assert enqueue(session, inbox.endpoint.id, "q" * MAX_QUEUE_BYTES, "t", idempotency_key=key).is_new
    assert not enqueue(session, inbox.endpoint.id, "inbox", "t", idempotency_key=key).is_new


@pytest.fixture(scope="module")
def shared_endpoint(server: DatabaseServer, template: str) -> Iterator[EndpointBuilder]:
    """One database for all examples of a property that leaves nothing behind."""
    with database_copy(server, template) as name:
        engine = server.engine(name)
        yield World(engine).endpoint()
        engine.dispose()


storable = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | storable,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(storable, inner, max_size=3),
    max_leaves=8,
)


@given(
    queue=storable.filter(lambda name: len(name.encode()) <= MAX_QUEUE_BYTES),
    title=storable,
    source=st.none() | storable,
    kind=st.none() | storable,
    key=st.none() | storable,
    payload=json_values,
)
def test_every_text_without_nul_and_surrogates_comes_back_as_it_went_in(
    shared_endpoint: EndpointBuilder,
    queue: str,
    title: str,
    source: str | None,
    kind: str | None,
    key: str | None,
    payload: Any,
) -> None:
    with Session(shared_endpoint.world.engine) as session:
        todo = enqueue(
            session,
            shared_endpoint.id,
            queue,
            title,
            source=source,
            kind=kind,
            idempotency_key=key,
            payload=payload,
        ).todo
        session.expire(todo)
        back = (todo.queue, todo.title, todo.source, todo.kind, todo.idempotency_key, todo.payload)
        assert back == (queue, title, source, kind, key, payload)


# Claim


def test_claim_writes_owner_lease_attempt_and_times(
    session: Session, engine: Engine, inbox: QueueBuilder
) -> None:
    before = inbox.pending(age="7m")
    [claimed] = claim(session, inbox.endpoint.id, "worker", now=NOW)
    session.commit()
    assert claimed.id == before.id
    assert changed(before, stored(engine, before)) == {
        "state": "claimed",
        "owner": "worker",
        "lease_expires_at": NOW + timedelta(seconds=300),
        "attempt": 1,
        "claimed_at": NOW,
        "updated_at": NOW,
    }


def test_a_lease_lasts_as_long_as_the_endpoint_says(session: Session, world: World) -> None:
    endpoint = world.endpoint(default_lease_ttl_seconds=86400)
    endpoint.queue().pending(age="7m")
    [claimed] = claim(session, endpoint.id, "worker", now=NOW)
    assert claimed.lease_expires_at == NOW + timedelta(days=1)


def lapsed(queue: QueueBuilder, **columns: Any) -> Todo:
    return queue.claimed(ago="5m", owner="dead", **columns)


def retry_due(queue: QueueBuilder, **columns: Any) -> Todo:
    return queue.failed(ago="30s", retry_in="0s", **columns)


def test_claim_takes_a_todo_whose_lease_lapsed(session: Session, inbox: QueueBuilder) -> None:
    before = lapsed(inbox)
    [claimed] = claim(session, inbox.endpoint.id, "worker", now=NOW)
    assert (claimed.id, claimed.owner, claimed.attempt) == (before.id, "worker", 2)


def test_claim_takes_a_failed_todo_whose_retry_is_due(session: Session, inbox: QueueBuilder) -> None:
    before = retry_due(inbox)
    [claimed] = claim(session, inbox.endpoint.id, "worker", now=NOW)
    assert (claimed.id, claimed.state, claimed.next_retry_at) == (before.id, "claimed", None)


UNCLAIMABLE: dict[str, Callable[[QueueBuilder], Todo]] = {
    "lease not lapsed": lambda queue: queue.claimed(ago="4m59.999999s"),
    "lapsed, attempts used up": lambda queue: lapsed(queue, attempt=5),
    "retry not due": lambda queue: queue.failed(ago="1m", retry_in="1us"),
    "due, attempts used up": lambda queue: retry_due(queue, attempt=5),
    "failed for good": lambda queue: queue.failed(ago="1m"),
    "done": lambda queue: queue.done(ago="1m"),
    "assigned to another": lambda queue: queue.pending(age="1m", assignee="somebody"),
    "lapsed, assigned to another": lambda queue: lapsed(queue, assignee="somebody"),
    "due, assigned to another": lambda queue: retry_due(queue, assignee="somebody"),
    "another queue": lambda queue: queue.endpoint.queue("elsewhere").pending(age="1m"),
    "another queue, lapsed": lambda queue: lapsed(queue.endpoint.queue("elsewhere")),
    "another endpoint": lambda queue: queue.endpoint.world.endpoint().queue("inbox").pending(age="1m"),
    "canceled": lambda queue: queue.pending(age="1m", state="canceled"),
    "input-required": lambda queue: queue.pending(age="1m", state="input-required"),
}


@pytest.mark.parametrize("why", UNCLAIMABLE)
def test_claim_leaves_what_is_not_claimable(session: Session, inbox: QueueBuilder, why: str) -> None:
    UNCLAIMABLE[why](inbox)
    assert claim(session, inbox.endpoint.id, "worker", now=NOW) == []


@pytest.mark.parametrize("assignee", [None, "", "worker"])
def test_claim_takes_what_is_assigned_to_nobody_or_its_owner(
    session: Session, inbox: QueueBuilder, assignee: str | None
) -> None:
    inbox.pending(age="1m", assignee=assignee)
    assert len(claim(session, inbox.endpoint.id, "worker", now=NOW)) == 1


def test_claim_goes_by_age_across_queues_and_states(session: Session, world: World) -> None:
    endpoint = world.endpoint(scope=["a", "b"])
    a, b = endpoint.queue("a"), endpoint.queue("b")
    expected = [
        a.pending(age="9m"),
        lapsed(b, age="8m"),
        b.pending(age="7m"),
        retry_due(a, age="6m"),
        a.pending(age="5m"),
    ]
    taken = claim(session, endpoint.id, "worker", limit=4, now=NOW)
    taken += claim(session, endpoint.id, "worker", limit=4, now=NOW)
    assert [todo.id for todo in taken] == [todo.id for todo in expected]


def test_claim_serves_the_named_queues_within_the_scope(session: Session, world: World) -> None:
    endpoint = world.endpoint(scope=["a", "b"])
    for name in ("a", "b", "outside"):
        endpoint.queue(name).pending(age="1m")
        lapsed(endpoint.queue(name))
    taken = claim(session, endpoint.id, "worker", queues=["b", "outside"], limit=9, now=NOW)
    assert [todo.queue for todo in taken] == ["b", "b"]
    assert claim(session, endpoint.id, "worker", queues=[], now=NOW) == []


@pytest.mark.parametrize("endpoint", [{"state": "revoked"}, {"expires_in": "0s"}], ids=["revoked", "expired"])
def test_claim_finds_nothing_at_an_inactive_endpoint(
    session: Session, world: World, endpoint: dict[str, Any]
) -> None:
    built = world.endpoint(**endpoint)
    built.queue().pending(age="1m")
    assert claim(session, built.id, "worker", now=NOW) == []
    assert claim(session, uuid.uuid4(), "worker", now=NOW) == []


@pytest.mark.parametrize(
    "arguments",
    [{"limit": 0}, {"owner": "a\0"}, {"queues": "inbox"}, {"queues": ["\ud800"]}, {"endpoint_id": "x"}],
    ids=str,
)
def test_claim_refuses_what_it_cannot_ask(arguments: dict[str, Any]) -> None:
    given_: dict[str, Any] = {"endpoint_id": uuid.uuid4(), "owner": "worker"}
    with pytest.raises(InvalidArgument):
        claim(Session(), **given_ | arguments)


def test_concurrent_claimers_get_disjoint_todos_and_leave_none(
    session_factory: sessionmaker[Session], inbox: QueueBuilder
) -> None:
    # More claims held open at once than one look sees: each later claimer must look past all of them.
    todos = [inbox.pending(age=timedelta(seconds=60 - number)) for number in range(40)]
    sessions = [session_factory() for _ in range(4)]
    taken = [todo.id for s in sessions for todo in claim(s, inbox.endpoint.id, "w", limit=10, now=NOW)]
    with session_factory() as late:
        assert claim(late, inbox.endpoint.id, "late", now=NOW) == []
    for s in sessions:
        s.close()
    assert taken == [todo.id for todo in todos]


def test_a_claimer_looks_past_every_todo_that_others_hold(
    session_factory: sessionmaker[Session], inbox: QueueBuilder
) -> None:
    todos = [inbox.pending(age=timedelta(seconds=90 - number)) for number in range(80)]
    with session_factory() as one, session_factory() as other:
        claim(one, inbox.endpoint.id, "one", limit=79, now=NOW)
        assert [todo.id for todo in claim(other, inbox.endpoint.id, "other", now=NOW)] == [todos[-1].id]


# Heartbeat, complete, fail, release


def test_heartbeat_moves_the_lease_and_updated_at_only(
    session: Session, engine: Engine, inbox: QueueBuilder
) -> None:
    before = inbox.claimed(ago="4m")
    assert heartbeat(session, before.id, "worker", now=NOW)
    session.commit()
    assert changed(before, stored(engine, before)) == {
        "lease_expires_at": NOW + timedelta(seconds=300),
        "updated_at": NOW,
    }


def test_complete_writes_result_and_time(session: Session, engine: Engine, inbox: QueueBuilder) -> None:
    before = inbox.claimed(ago="4m")
    assert complete(session, before.id, "worker", {"sent": 1}, now=NOW)
    session.commit()
    assert changed(before, stored(engine, before)) == {
        "state": "done",
        "result": {"sent": 1},
        "completed_at": NOW,
        "updated_at": NOW,
    }


def test_fail_gives_the_lease_back_and_sets_the_retry(
    session: Session, engine: Engine, inbox: QueueBuilder
) -> None:
    before = inbox.claimed(ago="4m")
    assert fail(session, before.id, "worker", "it broke", now=NOW)
    session.commit()
    assert changed(before, stored(engine, before)) == {
        "state": "failed",
        "lease_expires_at": None,
        "result": "it broke",
        "next_retry_at": NOW + timedelta(seconds=30),
        "updated_at": NOW,
    }


def test_fail_at_the_last_attempt_is_for_good(session: Session, inbox: QueueBuilder) -> None:
    before = inbox.claimed(ago="4m", attempt=5)
    failed = fail(session, before.id, "worker", now=NOW)
    assert failed is not None
    assert (failed.state, failed.next_retry_at) == ("failed", None)


@given(attempt=st.integers(1, 12) | st.integers(1, 2**31 - 2))
def test_a_retry_waits_30_s_doubled_for_each_attempt_at_most_15_min(
    shared_endpoint: EndpointBuilder, attempt: int
) -> None:
    wait = timedelta(seconds=min(30 * 2 ** min(attempt - 1, 99), 900))
    with Session(shared_endpoint.world.engine) as session:
        todo = Todo(
            endpoint_id=shared_endpoint.id,
            queue="inbox",
            title="t",
            state="claimed",
            owner="worker",
            attempt=attempt,
            max_attempts=2**31 - 1,
        )
        session.add(todo)
        session.flush()
        failed = fail(session, todo.id, "worker", now=NOW)
        assert failed is not None
        assert failed.next_retry_at == NOW + wait


def test_release_puts_the_todo_back_with_its_attempt_used_and_fires_nothing(
    session: Session, engine: Engine, inbox: QueueBuilder, fired: Fired
) -> None:
    before = inbox.claimed(ago="4m")
    assert release(session, before.id, "worker", now=NOW)
    session.commit()
    assert changed(before, stored(engine, before)) == {
        "state": "pending",
        "owner": None,
        "lease_expires_at": None,
        "updated_at": NOW,
    }
    assert fired == []


VERBS = [heartbeat, complete, fail, release]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("state", [*TODO_STATES, "another's", "absent"])
def test_a_verb_on_a_todo_one_does_not_hold_is_none_and_writes_nothing(
    session: Session, engine: Engine, inbox: QueueBuilder, verb: Callable[..., Todo | None], state: str
) -> None:
    owner = "somebody" if state == "another's" else "worker"
    stands = state if state in TODO_STATES else "claimed"
    before = inbox.pending(age="1m", state=stands, owner=owner, attempt=1)
    asked = "td_absent" if state == "absent" else before.id
    acted = verb(session, asked, "worker", now=NOW)
    session.commit()
    assert (acted is not None) is (state == "claimed")
    assert bool(changed(before, stored(engine, before))) is (state == "claimed")


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_refuses_a_name_that_cannot_be_stored(verb: Callable[..., Todo | None]) -> None:
    with pytest.raises(InvalidArgument, match="owner"):
        verb(Session(), "td_1", "\0")


# The sweeps


def test_reap_puts_a_todo_with_a_lapsed_lease_back(
    session: Session, engine: Engine, inbox: QueueBuilder, fired: Fired
) -> None:
    before = lapsed(inbox)
    reap_lapsed_leases(session, now=NOW)
    session.commit()
    assert changed(before, stored(engine, before)) == {
        "state": "pending",
        "owner": None,
        "lease_expires_at": None,
        "updated_at": NOW,
    }
    assert fired == [(before.id, "requeued")]


def test_reap_fails_a_todo_without_attempts_left_and_fires_nothing(
    session: Session, engine: Engine, inbox: QueueBuilder, fired: Fired
) -> None:
    before = lapsed(inbox, attempt=5)
    reap_lapsed_leases(session, now=NOW)
    session.commit()
    assert changed(before, stored(engine, before)) == {
        "state": "failed",
        "owner": None,
        "lease_expires_at": None,
        "updated_at": NOW,
    }
    assert fired == []


def test_reap_leaves_a_lease_that_has_not_lapsed(session: Session, inbox: QueueBuilder) -> None:
    inbox.claimed(ago=timedelta(seconds=300) - MOMENT)
    inbox.pending(age="1h")
    assert reap_lapsed_leases(session, now=NOW) == []


def test_due_retry_puts_a_failed_todo_back(
    session: Session, engine: Engine, inbox: QueueBuilder, fired: Fired
) -> None:
    before = retry_due(inbox)
    requeue_due_retries(session, now=NOW)
    session.commit()
    assert changed(before, stored(engine, before)) == {
        "state": "pending",
        "owner": None,
        "next_retry_at": None,
        "updated_at": NOW,
    }
    assert fired == [(before.id, "requeued")]


def test_due_retry_leaves_what_is_not_due_or_failed_for_good(session: Session, inbox: QueueBuilder) -> None:
    inbox.failed(ago="1m", retry_in=MOMENT)
    inbox.failed(ago="1m")
    assert requeue_due_retries(session, now=NOW) == []


@pytest.mark.parametrize("made", [lapsed, retry_due])
@pytest.mark.parametrize(("queue", "vouched"), [("inbox", False), ("quarantine", True)])
def test_what_goes_back_to_pending_fires_nothing_unvouched_or_in_quarantine(
    session: Session,
    world: World,
    fired: Fired,
    made: Callable[..., Todo],
    queue: str,
    vouched: bool,
) -> None:
    made(world.queue(queue), vouched=vouched)
    moved = reap_lapsed_leases(session, now=NOW) + requeue_due_retries(session, now=NOW)
    session.commit()
    assert len(moved) == 1
    assert fired == []


def test_a_sweep_that_rolls_back_fires_nothing(session: Session, inbox: QueueBuilder, fired: Fired) -> None:
    lapsed(inbox)
    assert len(reap_lapsed_leases(session, now=NOW)) == 1
    session.rollback()
    session.commit()
    assert fired == []


SWEEPS: dict[str, tuple[Callable[..., list[Any]], Callable[[QueueBuilder], Todo]]] = {
    "reap": (reap_lapsed_leases, lapsed),
    "due retry": (requeue_due_retries, retry_due),
    "re-ring": (rering_unclaimed, lambda queue: queue.pending(age="5m")),
}


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_second_instance_leaves_what_the_first_holds(
    session_factory: sessionmaker[Session], inbox: QueueBuilder, sweep: str
) -> None:
    run, made = SWEEPS[sweep]
    for _ in range(3):
        made(inbox)
    with session_factory() as one, session_factory() as other:
        assert len(run(one, now=NOW)) == 3
        assert run(other, now=NOW) == []
        one.commit()
        assert run(other, now=NOW) == []


def test_an_endpoint_that_expires_takes_its_open_todos_with_it(
    session: Session, engine: Engine, world: World, fired: Fired
) -> None:
    endpoint = world.endpoint(expires_in="0s")
    inbox = endpoint.queue()
    open_todos = [inbox.pending(age="1m"), inbox.claimed(ago="1m")]
    others = [
        inbox.done(ago="1m"),
        inbox.failed(ago="1m"),
        inbox.pending(age="1m", state="input-required"),
        world.endpoint(expires_in=MOMENT).queue().pending(age="1m"),
        world.endpoint().queue().pending(age="1m"),
    ]
    assert expire_endpoints(session, now=NOW) == [endpoint.id]
    session.commit()
    for before in open_todos:
        after = changed(before, stored(engine, before))
        assert after.pop("lease_expires_at", None) is None
        assert after == {
            "state": "failed",
            "result": {"error": "endpoint_revoked"},
            "completed_at": NOW,
            "updated_at": NOW,
        }
    for before in others:
        assert changed(before, stored(engine, before)) == {}
    revoked = session.get_one(Endpoint, endpoint.id)
    assert (revoked.state, revoked.revoked_at) == ("revoked", NOW)
    assert expire_endpoints(session, now=NOW) == []
    assert fired == []


def test_revoke_counts_the_todos_that_failed_and_again_changes_nothing(
    session: Session, inbox: QueueBuilder
) -> None:
    todo_id = inbox.pending(age="1m").id
    seen = session.get_one(Todo, todo_id)
    assert revoke_endpoint(session, inbox.endpoint.id, now=NOW) == 1
    assert seen.state == "failed"
    assert revoke_endpoint(session, inbox.endpoint.id, now=NOW + MOMENT) == 0
    assert session.get_one(Endpoint, inbox.endpoint.id).revoked_at == NOW


def test_revoke_names_an_unknown_endpoint(session: Session) -> None:
    stranger = uuid.uuid4()
    with pytest.raises(UnknownEndpoint, match=str(stranger)):
        revoke_endpoint(session, stranger)


RING_WAITS = ["5m", "20m", "1h", "6h", "6h"]


@pytest.mark.parametrize("rings", range(5))
@pytest.mark.parametrize("due", [True, False], ids=["due", "1 us early"])
def test_each_re_ring_waits_its_turn(session: Session, inbox: QueueBuilder, rings: int, due: bool) -> None:
    wait = duration(RING_WAITS[rings]) - (timedelta(0) if due else MOMENT)
    if rings:
        inbox.pending(age="2d", ring_attempts=rings, last_ringed_at=NOW - wait)
    else:
        inbox.pending(age=wait)
    assert len(rering_unclaimed(session, now=NOW)) == due


def test_a_re_ring_moves_its_own_two_columns_and_fires_no_hook(
    session: Session, engine: Engine, inbox: QueueBuilder, fired: Fired
) -> None:
    before = inbox.pending(age="5m")
    [rung] = rering_unclaimed(session, now=NOW)
    session.commit()
    assert rung.id == before.id
    assert changed(before, stored(engine, before)) == {"last_ringed_at": NOW, "ring_attempts": 1}
    assert fired == []


def test_a_todo_is_re_rung_five_times_and_no_more(session: Session, inbox: QueueBuilder) -> None:
    inbox.pending(age="9d", ring_attempts=5, last_ringed_at=inbox.endpoint.world.ago("8d"))
    assert rering_unclaimed(session, now=NOW) == []


NEVER_RUNG: dict[str, Callable[[World], Todo]] = {
    "unvouched": lambda world: world.queue().pending(age="1h", vouched=False),
    "quarantine": lambda world: world.queue("quarantine").pending(age="1h"),
    "claimed": lambda world: world.queue().claimed(ago="1h"),
    "revoked endpoint": lambda world: world.endpoint(state="revoked").queue().pending(age="1h"),
    "expired endpoint": lambda world: world.endpoint(expires_in="0s").queue().pending(age="1h"),
}


@pytest.mark.parametrize("why", NEVER_RUNG)
def test_no_re_ring_for(session: Session, world: World, why: str) -> None:
    NEVER_RUNG[why](world)
    assert rering_unclaimed(session, now=NOW) == []


def test_three_re_rings_a_sweep_go_round_the_endpoints(session: Session, world: World) -> None:
    busy, calm = world.queue(), world.queue()
    first, second, third = (busy.pending(age=age) for age in ("5h", "4h", "3h"))
    lone = calm.pending(age="10m")
    assert {todo.id for todo in rering_unclaimed(session, now=NOW)} == {first.id, lone.id, second.id}
    assert {todo.id for todo in rering_unclaimed(session, now=NOW)} == {third.id}


# Whatever the planner believes


@pytest.mark.parametrize("believed", [0, 1, 200])
def test_a_claim_keeps_its_limit_whatever_the_statistics_say(
    engine: Engine, world: World, believed: int
) -> None:
    # A locking subquery beside the update may be run once for each row, and takes its limit each time.
    endpoint = world.endpoint(scope=["inbox"])
    fill(engine, endpoint.id, believed)
    vacuum(engine, "VACUUM ANALYZE", Todo)
    with engine.begin() as connection:
        connection.execute(delete(Todo))
    fill(engine, endpoint.id, 12)
    with Session(engine) as session:
        for already in range(0, 12, 3):
            assert len(claim(session, endpoint.id, "worker", limit=3, now=NOW)) == 3
            claimed = select(func.count()).where(Todo.state == "claimed")
            assert session.scalar(claimed) == already + 3
