"""Who may be woken now: read when a notification is queued, and again before each attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from attrs import field, frozen
from sqlalchemy import ColumnElement, Select, Text, and_, any_, bindparam, case, func, or_, select, true
from sqlalchemy.dialects.postgresql import ARRAY

from switchboard_stall.clock import instant
from switchboard_stall.models import Endpoint, NotifyHook, Todo
from switchboard_stall.plans import connection_of, forget_old_plans
from switchboard_stall.sql import beside_key

if TYPE_CHECKING:
    import uuid
    from collections.abc import Iterable

    from sqlalchemy.orm import InstrumentedAttribute, Session

SkipReason: TypeAlias = Literal[
    "hook gone", "hook disabled", "endpoint inactive", "out of scope", "not pending"
]
"""Why there is nothing to attempt any more. None of these is a failure of the receiver."""


@frozen
class Receiver:
    """A hook that may be called now, as it was read a moment ago. Neither URL nor secrets are shown.

    :param secrets: sealed, the one in force first; two during the day after a rotation.
    """

    url: str = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)


def receivers(session: Session, todo_ids: Iterable[str]) -> dict[str, list[tuple[uuid.UUID, str, str]]]:
    """Return the hooks to call for each of these todos: hook id, its URL, and the endpoint's slug."""
    forget_old_plans(connection_of(session))
    found: dict[str, list[tuple[uuid.UUID, str, str]]] = {}
    for todo_id, hook_id, url, slug in session.execute(_receivers_statement(list(set(todo_ids)))):
        found.setdefault(todo_id, []).append((hook_id, url, slug))
    return found


def receiver(session: Session, hook_id: uuid.UUID, todo_id: str, queue: str) -> Receiver | SkipReason:
    """Return the hook as it stands now, or why it is not to be called for this todo."""
    forget_old_plans(connection_of(session))
    row = session.execute(_receiver_statement(hook_id, todo_id, queue)).one_or_none()
    if row is None:
        return "hook gone"
    if not row.endpoint_active:
        return "endpoint inactive"
    if not row.in_scope:
        return "out of scope"
    if not (row.enabled and row.admits):
        return "hook disabled"
    if not row.pending:
        return "not pending"
    return Receiver(row.url, tuple(secret for secret in (row.secret, row.prev_secret) if secret is not None))


def _receivers_statement(todo_ids: list[str]) -> Select[str, uuid.UUID, str, str]:
    # The hooks of each todo in order beside it: the todos are found by their ids and nothing else, whatever
    # the statistics make a walk from the endpoints look like.
    ready = (
        select(Todo.id, Todo.endpoint_id, Todo.queue)
        # One array, so that batches of all sizes are one prepared statement.
        .where(
            Todo.id == any_(bindparam("todo_ids", todo_ids, ARRAY(Text()))),
            beside_key(Todo.state == "pending"),
        )
        .subquery("ready")
    )
    told = (
        select(NotifyHook.id, NotifyHook.url, Endpoint.slug)
        .join(Endpoint, Endpoint.id == NotifyHook.endpoint_id)
        .where(
            Endpoint.id == ready.c.endpoint_id,
            _endpoint_active(),
            any_(Endpoint.scope_queues) == ready.c.queue,
            NotifyHook.enabled,
            _admits(ready.c.queue),
        )
        .order_by(NotifyHook.created_at, NotifyHook.id)
        .lateral("told")
    )
    return select(ready.c.id, *told.c).select_from(ready.join(told, true()))


def _receiver_statement(
    hook_id: uuid.UUID, todo_id: str, queue: str
) -> Select[str, str, str | None, bool, bool, bool, bool, bool]:
    name = bindparam("queue", queue, Text())
    return (
        select(
            NotifyHook.url,
            NotifyHook.secret,
            case((NotifyHook.prev_secret_expires_at > instant(None), NotifyHook.prev_secret)).label(
                "prev_secret"
            ),
            NotifyHook.enabled,
            _admits(name).label("admits"),
            _endpoint_active().label("endpoint_active"),
            (any_(Endpoint.scope_queues) == name).label("in_scope"),
            func.coalesce(Todo.state == "pending", False).label("pending"),
        )
        .join(Endpoint, Endpoint.id == NotifyHook.endpoint_id)
        .outerjoin(Todo, and_(Todo.id == todo_id, Todo.endpoint_id == Endpoint.id))
        .where(NotifyHook.id == hook_id)
    )


def _endpoint_active() -> ColumnElement[bool]:
    return and_(
        Endpoint.state == "active",
        or_(Endpoint.expires_at.is_(None), Endpoint.expires_at > instant(None)),
    )


def _admits(queue: ColumnElement[str] | InstrumentedAttribute[str]) -> ColumnElement[bool]:
    return or_(func.cardinality(NotifyHook.queues) == 0, any_(NotifyHook.queues) == queue)
