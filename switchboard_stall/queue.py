"""The lifecycle of a todo: the verbs of senders and workers, and the four sweeps of the reaper's tick.

Every function takes a session first and works in its transaction; the caller commits. Every function takes
``now``, an aware datetime for tests and simulations; without it the database's statement clock counts.
Written for READ COMMITTED. Ready hooks fire after the caller's commit.
"""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from attrs import frozen
from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Float,
    Text,
    and_,
    any_,
    case,
    func,
    literal,
    null,
    or_,
    select,
    true,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import insert

from switchboard_stall.clock import instant
from switchboard_stall.models import MAX_QUEUE_BYTES, QUARANTINE, Endpoint, Todo
from switchboard_stall.plans import connection_of, forget_old_plans
from switchboard_stall.ready import announce
from switchboard_stall.schedule import STALL_POLICY
from switchboard_stall.sql import beside_key, inlined

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import CursorResult, Select
    from sqlalchemy.orm import Session
    from sqlalchemy.sql.dml import ReturningUpdate

LEASE: Final = timedelta(seconds=300)
"""How long a claim lasts where the endpoint does not say."""

RETRY_FIRST: Final = timedelta(seconds=30)
"""The wait before the first retry; each later one is twice the one before it."""

RETRY_CAP: Final = timedelta(minutes=15)
"""The longest wait before a retry."""

RING_WAITS: Final = STALL_POLICY.waits
"""The wait before each re-ring of one todo, the first since its creation: the same schedule as the nudges."""

RING_SWEEP_LIMIT: Final = 3
"""The most todos one sweep re-rings."""

MAX_KEY_BYTES: Final = 2048
"""The longest idempotency key, in UTF-8 bytes: its index entry still fits its page."""

_ACTIVE: Final = inlined("active")
_PENDING: Final = inlined("pending")
_CLAIMED: Final = inlined("claimed")
_DONE: Final = inlined("done")
_FAILED: Final = inlined("failed")

_MAX_INTEGER: Final = 2**31 - 1
_ENDPOINT_REVOKED: Final = {"error": "endpoint_revoked"}

# How many more candidates than wanted a claim looks at, for those that other claimers hold locked.
_LOOKAHEAD: Final = 4

_T = TypeVar("_T")


class InvalidArgument(ValueError):
    """A value that the database could not hold, or that has the wrong type. Nothing was written."""


class UnknownEndpoint(LookupError):
    """There is no endpoint with this id."""


class EndpointInactive(RuntimeError):
    """The endpoint is revoked or past its ``expires_at``: nobody could ever claim the todo."""


@frozen
class Enqueued:
    """What :func:`enqueue` did.

    :param todo: the new todo, or the live one that already carries the idempotency key.
    :param is_new: whether this call made it.
    """

    todo: Todo
    is_new: bool


def enqueue(
    session: Session,
    endpoint_id: uuid.UUID,
    queue: str,
    title: str,
    *,
    source: str | None = None,
    kind: str | None = None,
    payload: Any | None = None,
    idempotency_key: str | None = None,
    assignee: str | None = None,
    max_attempts: int = 5,
    vouched: bool = False,
    now: datetime | None = None,
) -> Enqueued:
    """Put a todo into a queue of an endpoint, unless a live one carries the same idempotency key.

    A todo is live until it is done, or failed with no retry to come. After commit the ready hook fires
    with ``created`` if the todo is new and vouched and its queue is not ``quarantine``.

    :param session: the caller commits. It keeps the endpoint from being revoked until then.
    :param endpoint_id: whose queue. The queue need not be in its scope yet.
    :param queue: any text of at most 512 UTF-8 bytes, the empty string too.
    :param title: what the wake will say.
    :param source: where the delivery came from.
    :param kind: what sort of delivery it was.
    :param payload: anything JSON can say; ``None`` for none.
    :param idempotency_key: names the delivery within the endpoint, at most 2048 UTF-8 bytes.
    :param assignee: the only owner that may claim it; ``None`` or empty for any.
    :param max_attempts: how many claims it gets, 1 to 2147483647.
    :param vouched: whether the sender gate vouches for the delivery behind it.
    :param now: its creation; ``None`` for the database's clock.
    :raises InvalidArgument: a value is too long, has the wrong type, or holds what PostgreSQL cannot store.
    :raises UnknownEndpoint: there is no such endpoint.
    :raises EndpointInactive: the endpoint is revoked or expired. It never becomes active again, so the todo
        could only ever be a queue that stalls.

    Source: wake chain, "Lifecycle of a todo" and the index on ``idempotency_key``.
    """
    values: dict[str, Any] = {
        "endpoint_id": _typed("endpoint_id", endpoint_id, uuid.UUID),
        "queue": _text("queue", queue, most=MAX_QUEUE_BYTES),
        "title": _text("title", title),
        "source": _optional_text("source", source),
        "kind": _optional_text("kind", kind),
        "payload": _json("payload", payload),
        "idempotency_key": _optional_text("idempotency_key", idempotency_key, most=MAX_KEY_BYTES),
        "assignee": _optional_text("assignee", assignee),
        "max_attempts": _count("max_attempts", max_attempts),
        "vouched": _typed("vouched", vouched, bool),
    }
    present = instant(now)
    _require_active(session, endpoint_id, present)
    statement = (
        insert(Todo)
        .values(**values, created_at=present, updated_at=present)
        .on_conflict_do_nothing(
            index_elements=[Todo.endpoint_id, Todo.idempotency_key],
            index_where=and_(Todo.idempotency_key.is_not(None), _live()),
        )
        .returning(Todo)
    )
    while True:
        todo = session.scalars(statement).one_or_none()
        if todo is not None:
            if vouched and queue != QUARANTINE:
                announce(session, todo, "created")
            return Enqueued(todo, is_new=True)
        forget_old_plans(connection_of(session))
        todo = session.scalars(
            select(Todo)
            .where(Todo.endpoint_id == endpoint_id, Todo.idempotency_key == idempotency_key, _live())
            .execution_options(populate_existing=True)
        ).one_or_none()
        # None: the live one ended between the two statements, so the key is free again.
        if todo is not None:
            return Enqueued(todo, is_new=False)


def claim(
    session: Session,
    endpoint_id: uuid.UUID,
    owner: str,
    *,
    queues: Sequence[str] | None = None,
    limit: int = 1,
    now: datetime | None = None,
) -> list[Todo]:
    """Claim the oldest claimable todos of an endpoint, oldest first; those that others hold are skipped.

    Claimable are pending todos, claimed ones whose lease lapsed, and failed ones whose retry is due, the
    last two while they have attempts left; each only if its assignee is empty or ``owner``. The cost is a
    probe for each queue plus the lapsed and due todos that no sweep has put back yet, whatever the backlog.

    :param endpoint_id: whose todos. An endpoint that is unknown, revoked or expired has none.
    :param owner: who claims, as the other verbs will name it.
    :param queues: which queues of the endpoint's scope; ``None`` for all of it.
    :param limit: the most todos to claim, at least 1.
    :param now: the time of the claim; ``None`` for the database's clock.
    :returns: the claimed todos, each with a lease of 300 s unless the endpoint says otherwise.
    :raises InvalidArgument: a value is out of range, or holds what PostgreSQL cannot store.

    Source: wake chain, "Lifecycle of a todo": claim.
    """
    _typed("endpoint_id", endpoint_id, uuid.UUID)
    _text("owner", owner)
    _count("limit", limit)
    if queues is not None:
        if isinstance(queues, str):
            raise InvalidArgument(f"queues={_shown(queues)} is one text; pass a list of queue names")
        queues = [_text("queues", queue) for queue in queues]
    present = instant(now)
    forget_old_plans(connection_of(session))
    claimed: list[Todo] = []
    look = limit + _LOOKAHEAD
    while True:
        candidates = session.scalars(_claim_candidates(endpoint_id, owner, queues, look, present)).all()
        if candidates:
            rank = {todo_id: place for place, todo_id in enumerate(candidates)}
            taken = _write(session, _claim_of(candidates, owner, limit - len(claimed), present))
            claimed += sorted(taken, key=lambda todo: rank[todo.id])
        if len(claimed) == limit or len(candidates) < look:
            return claimed
        look *= 4


def heartbeat(session: Session, todo_id: str, owner: str, *, now: datetime | None = None) -> Todo | None:
    """Extend the lease of a claimed todo to a full one from now.

    :param todo_id: the todo.
    :param owner: who claimed it. A lapsed lease can still be extended until the todo is reaped or reclaimed.
    :param now: the time of the heartbeat; ``None`` for the database's clock.
    :returns: the todo, or ``None`` if ``owner`` does not hold it: stop working on it.
    :raises InvalidArgument: a text holds what PostgreSQL cannot store.

    Source: wake chain, "Lifecycle of a todo": heartbeat.
    """
    present = instant(now)
    return _move(
        session,
        todo_id,
        owner,
        {"lease_expires_at": present + _lease_of_endpoint(), "updated_at": present},
    )


def complete(
    session: Session, todo_id: str, owner: str, result: Any | None = None, *, now: datetime | None = None
) -> Todo | None:
    """Finish a claimed todo: it is done.

    :param todo_id: the todo.
    :param owner: who claimed it.
    :param result: anything JSON can say; ``None`` for none.
    :param now: the time of completion; ``None`` for the database's clock.
    :returns: the todo, or ``None`` if ``owner`` does not hold it: nothing was written.
    :raises InvalidArgument: a value holds what PostgreSQL cannot store.

    Source: wake chain, "Lifecycle of a todo": complete.
    """
    present = instant(now)
    return _move(
        session,
        todo_id,
        owner,
        {
            "state": _DONE,
            "result": _json("result", result),
            "completed_at": present,
            "updated_at": present,
        },
    )


def fail(
    session: Session, todo_id: str, owner: str, result: Any | None = None, *, now: datetime | None = None
) -> Todo | None:
    """Give a claimed todo back as failed: to be retried, or for good when its attempts are used up.

    The retry is due after 30 s, doubled for each attempt after the first, at most 15 min.

    :param todo_id: the todo.
    :param owner: who claimed it.
    :param result: what went wrong, anything JSON can say; ``None`` for none.
    :param now: the time of the failure; ``None`` for the database's clock.
    :returns: the todo, or ``None`` if ``owner`` does not hold it: nothing was written.
    :raises InvalidArgument: a value holds what PostgreSQL cannot store.

    Source: wake chain, "Lifecycle of a todo": fail.
    """
    present = instant(now)
    # The exponent stops where the cap is reached: an interval overflows long before an attempt count does.
    doublings = func.least(Todo.attempt - 1, (RETRY_CAP // RETRY_FIRST).bit_length())
    delay = func.least(func.power(2, doublings, type_=Float()) * literal(RETRY_FIRST), literal(RETRY_CAP))
    return _move(
        session,
        todo_id,
        owner,
        {
            "state": _FAILED,
            "lease_expires_at": null(),
            "result": _json("result", result),
            "next_retry_at": case((Todo.attempt >= Todo.max_attempts, null()), else_=present + delay),
            "updated_at": present,
        },
    )


def release(session: Session, todo_id: str, owner: str, *, now: datetime | None = None) -> Todo | None:
    """Put a claimed todo back to pending, with its attempt used. No hook fires.

    :param todo_id: the todo.
    :param owner: who claimed it.
    :param now: the time of the release; ``None`` for the database's clock.
    :returns: the todo, or ``None`` if ``owner`` does not hold it: nothing was written.
    :raises InvalidArgument: a text holds what PostgreSQL cannot store.

    Source: wake chain, "Lifecycle of a todo": release.
    """
    return _move(
        session,
        todo_id,
        owner,
        {"state": _PENDING, "owner": null(), "lease_expires_at": null(), "updated_at": instant(now)},
    )


def reap_lapsed_leases(session: Session, *, now: datetime | None = None) -> list[Todo]:
    """Take claimed todos whose lease lapsed from their owners: pending again, or failed at the last attempt.

    Todos that another transaction holds are left to the next sweep. After commit the ready hook fires with
    ``requeued`` for each vouched one that is pending again, outside ``quarantine``.

    :param now: the time of the sweep; ``None`` for the database's clock.
    :returns: the todos, in their new state.

    Source: wake chain, "Lifecycle of a todo": reap.
    """
    present = instant(now)
    reaped = _sweep(
        session,
        _lapsed(present),
        {
            "state": case((Todo.attempt >= Todo.max_attempts, _FAILED), else_=_PENDING),
            "owner": null(),
            "lease_expires_at": null(),
            "next_retry_at": null(),
            "updated_at": present,
        },
    )
    _announce_requeued(session, reaped)
    return reaped


def requeue_due_retries(session: Session, *, now: datetime | None = None) -> list[Todo]:
    """Put every failed todo whose retry is due back to pending.

    Todos that another transaction holds are left to the next sweep. After commit the ready hook fires with
    ``requeued`` for each vouched one, outside ``quarantine``.

    :param now: the time of the sweep; ``None`` for the database's clock.
    :returns: the todos, pending again.

    Source: wake chain, "Lifecycle of a todo": due retry.
    """
    present = instant(now)
    requeued = _sweep(
        session,
        _retry_due(present),
        {
            "state": _PENDING,
            "owner": null(),
            "lease_expires_at": null(),
            "next_retry_at": null(),
            "updated_at": present,
        },
    )
    _announce_requeued(session, requeued)
    return requeued


def rering_unclaimed(session: Session, *, now: datetime | None = None) -> list[Todo]:
    """Charge a re-ring to at most 3 vouched todos that wait unclaimed, round robin over their endpoints.

    A todo is rung at most 5 times: 5 min after its creation, then 20 min, 1 h, 6 h and 6 h after the ring
    before. Two instances never ring the same one for the same wait. The ready hook does not fire: a re-ring
    is the business of the host's doorbell channel, which gets the todos from here.

    :param now: the time of the sweep; ``None`` for the database's clock.
    :returns: the todos to ring, with the ring charged; their ``updated_at`` has not moved.

    Source: wake chain, "The reaper tick today".
    """
    present = instant(now)
    due = and_(
        Todo.state == _PENDING,
        Todo.vouched,
        Todo.queue != QUARANTINE,
        or_(
            and_(Todo.last_ringed_at.is_(None), Todo.created_at <= present - RING_WAITS[0]),
            *(
                and_(Todo.ring_attempts == rings, Todo.last_ringed_at <= present - wait)
                for rings, wait in enumerate(RING_WAITS)
                if rings > 0
            ),
        ),
    )
    longest_unrung = (Todo.last_ringed_at.asc().nulls_first(), Todo.created_at)
    ranked = (
        select(
            Todo.id,
            Todo.last_ringed_at,
            Todo.created_at,
            func.row_number().over(partition_by=Todo.endpoint_id, order_by=longest_unrung).label("turn"),
        )
        .join(Endpoint, Endpoint.id == Todo.endpoint_id)
        .where(due, _may_be_woken(present))
        .subquery("ranked")
    )
    chosen = (
        select(ranked.c.id)
        .order_by(ranked.c.turn, ranked.c.last_ringed_at.asc().nulls_first(), ranked.c.created_at)
        .limit(RING_SWEEP_LIMIT)
        .cte("chosen")
        .prefix_with("MATERIALIZED")
    )
    return _sweep(
        session,
        # The test stands again beside the lock: it is judged on the row as the other instance left it.
        and_(beside_key(due), Todo.id.in_(select(chosen.c.id))),
        {"last_ringed_at": present, "ring_attempts": Todo.ring_attempts + 1},
    )


def expire_endpoints(session: Session, *, now: datetime | None = None) -> list[uuid.UUID]:
    """Revoke every active endpoint that is past its ``expires_at``, and fail its pending and claimed todos.

    Endpoints that another transaction holds are left to the next sweep.

    :param now: the time of the sweep; ``None`` for the database's clock.
    :returns: the ids of the endpoints revoked by this call.

    Source: wake chain, "Lifecycle of a todo": revoke, expire.
    """
    present = instant(now)
    expired = session.scalars(
        select(Endpoint.id)
        .where(Endpoint.state == _ACTIVE, Endpoint.expires_at <= present)
        .order_by(Endpoint.id)
        .with_for_update(key_share=True, skip_locked=True)
    ).all()
    for endpoint_id in expired:
        _revoke(session, endpoint_id, present)
    return list(expired)


def revoke_endpoint(session: Session, endpoint_id: uuid.UUID, *, now: datetime | None = None) -> int:
    """Revoke an endpoint, and fail its pending and claimed todos for good, in this transaction.

    Revoking it again changes nothing.

    :param endpoint_id: which endpoint.
    :param now: the time of the revocation; ``None`` for the database's clock.
    :returns: how many todos failed with it.
    :raises UnknownEndpoint: there is no such endpoint.

    Source: wake chain, "Lifecycle of a todo": revoke, expire.
    """
    state = session.scalar(
        select(Endpoint.state)
        .where(Endpoint.id == _typed("endpoint_id", endpoint_id, uuid.UUID))
        .with_for_update(key_share=True)
    )
    if state is None:
        raise UnknownEndpoint(f"there is no endpoint {endpoint_id}; it was deleted or never made")
    return 0 if state == "revoked" else _revoke(session, endpoint_id, instant(now))


# Conditions, each one line of the lifecycle.


def _live() -> ColumnElement[bool]:
    return and_(Todo.state != _DONE, or_(Todo.state != _FAILED, Todo.next_retry_at.is_not(None)))


def _lapsed(present: ColumnElement[datetime]) -> ColumnElement[bool]:
    return and_(Todo.state == _CLAIMED, Todo.lease_expires_at <= present)


def _retry_due(present: ColumnElement[datetime]) -> ColumnElement[bool]:
    return and_(Todo.state == _FAILED, Todo.next_retry_at <= present)


def _attempts_left() -> ColumnElement[bool]:
    return Todo.attempt < Todo.max_attempts


def _open_to(owner: str) -> ColumnElement[bool]:
    return or_(Todo.assignee.is_(None), Todo.assignee.in_(("", owner)))


def _may_be_woken(present: ColumnElement[datetime]) -> ColumnElement[bool]:
    return and_(Endpoint.state == _ACTIVE, or_(Endpoint.expires_at.is_(None), Endpoint.expires_at > present))


def _lease_of_endpoint() -> ColumnElement[timedelta]:
    said = Endpoint.default_lease_ttl_seconds * literal(timedelta(seconds=1))
    return (
        select(func.coalesce(said, literal(LEASE))).where(Endpoint.id == Todo.endpoint_id).scalar_subquery()
    )


# Statements.


def _claim_candidates(
    endpoint_id: uuid.UUID,
    owner: str,
    queues: Sequence[str] | None,
    look: int,
    present: ColumnElement[datetime],
) -> Select[str]:
    """The ids of the ``look`` oldest claimable todos, unlocked, oldest first."""
    served = (
        select(func.unnest(Endpoint.scope_queues).label("queue"))
        .where(Endpoint.id == endpoint_id, _may_be_woken(present))
        .distinct()
        .cte("served")
    )
    wanted = true() if queues is None else served.c.queue == any_(literal(queues, ARRAY(Text())))
    mine = and_(Todo.endpoint_id == endpoint_id, _open_to(owner))
    # One probe for each queue: asked for all queues at once, the planner sorts the whole backlog by age.
    oldest = (
        select(Todo.id, Todo.created_at)
        .where(mine, Todo.queue == served.c.queue, Todo.state == _PENDING)
        .order_by(Todo.created_at)
        .limit(look)
        .lateral("oldest")
    )
    arms = [select(oldest.c.id, oldest.c.created_at).select_from(served).join(oldest, true()).where(wanted)]
    for name, condition in (("lapsed", _lapsed(present)), ("retry_due", _retry_due(present))):
        # Materialized, so that the order by age is not pushed into it: the planner would then walk every
        # todo the endpoint ever had, oldest first, in the hope of an early match.
        ended = (
            select(Todo.id, Todo.created_at, Todo.queue)
            # By the condition alone: for an endpoint that the statistics do not know yet, its whole
            # backlog looks like a row or two.
            .where(beside_key(mine), condition, _attempts_left())
            .cte(name)
            .prefix_with("MATERIALIZED")
        )
        arms.append(
            select(ended.c.id, ended.c.created_at).join(served, served.c.queue == ended.c.queue).where(wanted)
        )
    candidates = union_all(*arms).subquery("candidates")
    return select(candidates.c.id).order_by(candidates.c.created_at).limit(look)


def _claim_of(
    candidates: Sequence[str], owner: str, limit: int, present: ColumnElement[datetime]
) -> ReturningUpdate[Todo]:
    claimable = or_(
        Todo.state == _PENDING,
        and_(or_(_lapsed(present), _retry_due(present)), _attempts_left()),
    )
    return _update_locked(
        select(Todo.id)
        .where(Todo.id == any_(literal(candidates, ARRAY(Text()))), beside_key(claimable), _open_to(owner))
        .order_by(Todo.created_at)
        .limit(limit),
        {
            "state": _CLAIMED,
            "owner": owner,
            "lease_expires_at": present + _lease_of_endpoint(),
            "attempt": Todo.attempt + 1,
            "claimed_at": present,
            "next_retry_at": null(),
            "updated_at": present,
        },
    )


def _update_locked(chosen: Select[str], values: dict[str, Any]) -> ReturningUpdate[Todo]:
    """Update the chosen todos that no other transaction holds.

    They are chosen once: a subquery may be run again for each row it is joined with, and would then lock
    its limit anew each time.
    """
    locked = chosen.with_for_update(skip_locked=True).cte("locked").prefix_with("MATERIALIZED")
    return update(Todo).where(Todo.id == locked.c.id).values(values).returning(Todo)


def _write(session: Session, statement: ReturningUpdate[Todo]) -> Sequence[Todo]:
    forget_old_plans(connection_of(session))
    options = {"synchronize_session": False, "populate_existing": True}
    return session.scalars(statement, execution_options=options).all()


def _move(session: Session, todo_id: str, owner: str, values: dict[str, Any]) -> Todo | None:
    """Update a todo that ``owner`` has claimed."""
    held = and_(
        Todo.id == _text("todo_id", todo_id),
        beside_key(and_(Todo.state == _CLAIMED, Todo.owner == _text("owner", owner))),
    )
    moved = _write(session, update(Todo).where(held).values(values).returning(Todo))
    return moved[0] if moved else None


def _sweep(session: Session, condition: ColumnElement[bool], values: dict[str, Any]) -> list[Todo]:
    # One order for every instance, and no waiting: two sweeps cannot deadlock.
    chosen = select(Todo.id).where(condition).order_by(Todo.id)
    return list(_write(session, _update_locked(chosen, values)))


def _announce_requeued(session: Session, todos: Sequence[Todo]) -> None:
    for todo in todos:
        if todo.state == "pending" and todo.vouched and todo.queue != QUARANTINE:
            announce(session, todo, "requeued")


def _require_active(session: Session, endpoint_id: uuid.UUID, present: ColumnElement[datetime]) -> None:
    # FOR SHARE: a revocation waits for this transaction, and so fails the todo it is about to add.
    active = session.scalar(
        select(_may_be_woken(present)).where(Endpoint.id == endpoint_id).with_for_update(read=True)
    )
    if active is None:
        raise UnknownEndpoint(f"there is no endpoint {endpoint_id}; it was deleted or never made")
    if not active:
        raise EndpointInactive(f"endpoint {endpoint_id} is revoked or expired; enqueue to another endpoint")


def _revoke(session: Session, endpoint_id: uuid.UUID, present: ColumnElement[datetime]) -> int:
    """Revoke an endpoint whose row is locked; return how many todos failed with it."""
    forget_old_plans(connection_of(session))
    session.execute(
        update(Endpoint).where(Endpoint.id == endpoint_id).values(state="revoked", revoked_at=present),
        execution_options={"synchronize_session": "fetch"},
    )
    waiting = (
        select(Todo.id)
        .where(Todo.endpoint_id == endpoint_id, or_(Todo.state == _PENDING, Todo.state == _CLAIMED))
        .order_by(Todo.id)
        .with_for_update()
        .subquery("waiting")
    )
    failed = session.execute(
        update(Todo)
        .where(Todo.id == waiting.c.id)
        .values(
            state=_FAILED,
            lease_expires_at=null(),
            next_retry_at=null(),
            result=_ENDPOINT_REVOKED,
            completed_at=present,
            updated_at=present,
        ),
        execution_options={"synchronize_session": "fetch"},
    )
    return cast("CursorResult[Any]", failed).rowcount


# Values, checked before anything is written.


def _typed(name: str, value: _T, wanted: type[_T]) -> _T:
    if not isinstance(value, wanted):
        raise InvalidArgument(f"{name}={_shown(value)} is a {type(value).__name__}; pass a {wanted.__name__}")
    return value


def _count(name: str, value: int) -> int:
    if isinstance(value, bool):
        raise InvalidArgument(f"{name}={value} is a bool; pass a whole number")
    if not 1 <= _typed(name, value, int) <= _MAX_INTEGER:
        raise InvalidArgument(f"{name}={_shown(value)} is out of range; pass 1 to {_MAX_INTEGER}")
    return value


def _text(name: str, value: str, *, most: int | None = None) -> str:
    if "\0" in _typed(name, value, str):
        raise InvalidArgument(
            f"{name}={_shown(value)} holds a NUL character; strip it, PostgreSQL cannot store it"
        )
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"{name}={_shown(value)} holds a lone surrogate, which is no character; decode its bytes anew"
        ) from None
    if most is not None and size > most:
        raise InvalidArgument(
            f"{name}={_shown(value)} is {size} bytes of UTF-8, the most is {most}; shorten it or use its hash"
        )
    return value


def _optional_text(name: str, value: str | None, *, most: int | None = None) -> str | None:
    return None if value is None else _text(name, value, most=most)


def _json(name: str, value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"{name}={_shown(value)} is not JSON ({error}); pass what JSON can say"
        ) from error
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            _text(name, part)
        elif isinstance(part, dict):
            parts += part.keys()
            parts += part.values()
        elif isinstance(part, (list, tuple)):
            parts += part
    return value


def _shown(value: object) -> str:
    # By repr, so that it is one line and can be printed; by its start, so that it is a short one.
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"{value[:40]!r}..."
    try:
        shown = repr(value)
    except (RecursionError, ValueError):
        return f"<{type(value).__name__}>"
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
