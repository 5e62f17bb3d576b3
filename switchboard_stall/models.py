"""The tables: endpoints, their todos, their notify hooks, and the ledger of stalled queues.

Columns carry the names, types and defaults of the existing wake chain, so these models read a database
that chain made. Only ``todos.vouched`` and the table ``queue_stalls`` are new. No logic lives here.
"""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any, Final, cast

from sqlalchemy import (
    CheckConstraint,
    ColumnElement,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    and_,
    func,
    or_,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

TODO_STATES: Final = (
    "pending",
    "claimed",
    "done",
    "failed",
    "canceled",
    "rejected",
    "input-required",
    "auth-required",
)
"""Every state a todo can be in. ``pending`` is claimable now."""

QUARANTINE: Final = "quarantine"
"""The queue that no edge ever rings."""

MAX_QUEUE_BYTES: Final = 512
"""The longest queue name, in UTF-8 bytes: an entry of every index that holds it still fits its page."""


class Base(DeclarativeBase):
    """The declarative base. Its metadata is what the migrations make, to the last constraint name."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 (declared by DeclarativeBase)
        datetime: DateTime(timezone=True),
        str: Text(),
        list[str]: ARRAY(Text()),
    }


class Endpoint(Base):
    """A receiver of todos: which queues it serves, and whether it still may be woken."""

    __tablename__ = "endpoints"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=func.gen_random_uuid())
    slug: Mapped[str] = mapped_column(unique=True)
    scope_queues: Mapped[list[str]] = mapped_column(server_default=text("'{}'"))
    state: Mapped[str] = mapped_column(server_default="active")
    expires_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    revoked_at: Mapped[datetime | None]
    default_lease_ttl_seconds: Mapped[int | None]


class Todo(Base):
    """One piece of work. A queue is the set of todos of one endpoint that carry the same ``queue``."""

    __tablename__ = "todos"

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: f"td_{uuid.uuid4()}")
    endpoint_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("endpoints.id", ondelete="CASCADE"))
    queue: Mapped[str]
    source: Mapped[str | None]
    kind: Mapped[str | None]
    title: Mapped[str]
    payload: Mapped[Any | None] = mapped_column(JSONB(none_as_null=True))
    idempotency_key: Mapped[str | None]
    assignee: Mapped[str | None]
    state: Mapped[str] = mapped_column(server_default="pending")
    owner: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    attempt: Mapped[int] = mapped_column(Integer, server_default="0")
    max_attempts: Mapped[int] = mapped_column(Integer, server_default="5")
    result: Mapped[Any | None] = mapped_column(JSONB(none_as_null=True))
    next_retry_at: Mapped[datetime | None]
    last_ringed_at: Mapped[datetime | None]
    ring_attempts: Mapped[int] = mapped_column(Integer, server_default="0")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())
    claimed_at: Mapped[datetime | None]
    completed_at: Mapped[datetime | None]
    vouched: Mapped[bool] = mapped_column(server_default=text("false"))


class NotifyHook(Base):
    """Where an endpoint wants to be woken, for which queues, and how healthy that address is."""

    __tablename__ = "notify_hooks"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=func.gen_random_uuid())
    endpoint_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("endpoints.id", ondelete="CASCADE"))
    url: Mapped[str]
    secret: Mapped[str]
    prev_secret: Mapped[str | None]
    prev_secret_expires_at: Mapped[datetime | None]
    queues: Mapped[list[str]] = mapped_column(server_default=text("'{}'"))
    ignore_presence: Mapped[bool] = mapped_column(server_default=text("false"))
    enabled: Mapped[bool] = mapped_column(server_default=text("true"))
    disabled_reason: Mapped[str | None]
    disabled_at: Mapped[datetime | None]
    consecutive_failures: Mapped[int] = mapped_column(Integer, server_default="0")
    last_attempt_at: Mapped[datetime | None]
    last_status: Mapped[int | None]
    last_error: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    rotated_at: Mapped[datetime | None]


class QueueStall(Base):
    """The ledger: one row for each pair that was nudged and still holds pending work.

    It has no owner columns: the primary key and the cascade from ``endpoints`` are its ownership
    (design: "A table for a queue that is not a table").
    """

    __tablename__ = "queue_stalls"

    endpoint_id: Mapped[uuid.UUID] = mapped_column(
        ForeignKey("endpoints.id", ondelete="CASCADE"), primary_key=True
    )
    queue: Mapped[str] = mapped_column(primary_key=True)
    nudges: Mapped[int] = mapped_column(Integer)
    last_nudged_at: Mapped[datetime]
    last_claim_at: Mapped[datetime | None]


_CHECKS: dict[type[Base], dict[str, ColumnElement[bool]]] = {
    Endpoint: {
        "state": Endpoint.state.in_(("active", "revoked")),
        "default_lease_ttl_seconds": or_(
            Endpoint.default_lease_ttl_seconds.is_(None),
            Endpoint.default_lease_ttl_seconds.between(60, 86400),
        ),
    },
    Todo: {"state": Todo.state.in_(TODO_STATES)},
    NotifyHook: {
        "url": func.length(NotifyHook.url) <= 2048,
        "disabled_reason": or_(
            NotifyHook.disabled_reason.is_(None),
            NotifyHook.disabled_reason.in_(("consecutive_failures", "operator")),
        ),
    },
    QueueStall: {"nudges": QueueStall.nudges >= 0},
}
for _model, _conditions in _CHECKS.items():
    for _name, _condition in _conditions.items():
        cast("Table", _model.__table__).append_constraint(CheckConstraint(_condition, name=_name))

_PENDING = Todo.state == "pending"

# What the wake chain already had.
Index(
    "ix_endpoints_expires_at",
    Endpoint.expires_at,
    postgresql_where=and_(Endpoint.state == "active", Endpoint.expires_at.is_not(None)),
)
Index("ix_todos_pending", Todo.endpoint_id, Todo.queue, Todo.created_at, postgresql_where=_PENDING)
Index("ix_todos_endpoint_id_created_at", Todo.endpoint_id, Todo.created_at.desc())
Index("ix_todos_ring", Todo.last_ringed_at.asc().nulls_first(), Todo.created_at, postgresql_where=_PENDING)
Index(
    "ix_todos_retry",
    Todo.next_retry_at,
    postgresql_where=and_(Todo.state == "failed", Todo.next_retry_at.is_not(None)),
)
Index(
    "uq_todos_idempotency_key",
    Todo.endpoint_id,
    Todo.idempotency_key,
    unique=True,
    postgresql_where=and_(
        Todo.idempotency_key.is_not(None),
        Todo.state != "done",
        or_(Todo.state != "failed", Todo.next_retry_at.is_not(None)),
    ),
)
Index("ix_notify_hooks_endpoint_id", NotifyHook.endpoint_id, postgresql_where=NotifyHook.enabled)

# What this package adds. The sweep asks the first three one question about one pair in one descent each;
# the fourth lets the reaper and a claim find lapsed leases without reading every todo that was ever done.
STALL_INDEXES: Final = (
    Index(
        "ix_todos_stall_vouched",
        Todo.endpoint_id,
        Todo.queue,
        Todo.created_at,
        Todo.id,
        postgresql_where=and_(_PENDING, Todo.vouched),
    ),
    Index(
        "ix_todos_stall_claimed",
        Todo.endpoint_id,
        Todo.queue,
        Todo.claimed_at,
        postgresql_where=Todo.claimed_at.is_not(None),
    ),
    Index(
        "ix_todos_stall_requeued",
        Todo.endpoint_id,
        Todo.queue,
        Todo.updated_at,
        postgresql_where=and_(_PENDING, Todo.updated_at > Todo.created_at),
    ),
    Index("ix_todos_lease", Todo.lease_expires_at, postgresql_where=Todo.state == "claimed"),
)
"""The indexes this package adds to ``todos``: representative, latest claim, latest requeue, lapsed leases."""
