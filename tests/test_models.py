"""What the models declare: the columns, defaults and rules of the wake chain, and names for all of them."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import (
    CheckConstraint,
    Column,
    ForeignKeyConstraint,
    PrimaryKeyConstraint,
    Table,
    UniqueConstraint,
    inspect,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import IntegrityError
from sqlalchemy.schema import CreateIndex
from support.builders import NOW

from switchboard_stall.models import (
    MAX_QUEUE_BYTES,
    STALL_INDEXES,
    TODO_STATES,
    Base,
    Endpoint,
    NotifyHook,
    QueueStall,
    Todo,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.builders import World

DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]

COLUMNS = {
    "endpoints": """
        id UUID NOT NULL
        slug TEXT NOT NULL
        scope_queues TEXT[] NOT NULL
        state TEXT NOT NULL
        expires_at TIMESTAMP WITH TIME ZONE
        created_at TIMESTAMP WITH TIME ZONE NOT NULL
        revoked_at TIMESTAMP WITH TIME ZONE
        default_lease_ttl_seconds INTEGER
    """,
    "todos": """
        id TEXT NOT NULL
        endpoint_id UUID NOT NULL
        queue TEXT NOT NULL
        source TEXT
        kind TEXT
        title TEXT NOT NULL
        payload JSONB
        idempotency_key TEXT
        assignee TEXT
        state TEXT NOT NULL
        owner TEXT
        lease_expires_at TIMESTAMP WITH TIME ZONE
        attempt INTEGER NOT NULL
        max_attempts INTEGER NOT NULL
        result JSONB
        next_retry_at TIMESTAMP WITH TIME ZONE
        last_ringed_at TIMESTAMP WITH TIME ZONE
        ring_attempts INTEGER NOT NULL
        created_at TIMESTAMP WITH TIME ZONE NOT NULL
        updated_at TIMESTAMP WITH TIME ZONE NOT NULL
        claimed_at TIMESTAMP WITH TIME ZONE
        completed_at TIMESTAMP WITH TIME ZONE
        vouched BOOLEAN NOT NULL
    """,
    "notify_hooks": """
        id UUID NOT NULL
        endpoint_id UUID NOT NULL
        url TEXT NOT NULL
        secret TEXT NOT NULL
        prev_secret TEXT
        prev_secret_expires_at TIMESTAMP WITH TIME ZONE
        queues TEXT[] NOT NULL
        ignore_presence BOOLEAN NOT NULL
        enabled BOOLEAN NOT NULL
        disabled_reason TEXT
        disabled_at TIMESTAMP WITH TIME ZONE
        consecutive_failures INTEGER NOT NULL
        last_attempt_at TIMESTAMP WITH TIME ZONE
        last_status INTEGER
        last_error TEXT
        created_at TIMESTAMP WITH TIME ZONE NOT NULL
        rotated_at TIMESTAMP WITH TIME ZONE
    """,
    "queue_stalls": """
        endpoint_id UUID NOT NULL
        queue TEXT NOT NULL
        nudges INTEGER NOT NULL
        last_nudged_at TIMESTAMP WITH TIME ZONE NOT NULL
        last_claim_at TIMESTAMP WITH TIME ZONE
    """,
}

TABLES = sorted(Base.metadata.tables.values(), key=lambda table: table.name)


def told(column: Column[Any]) -> str:
    nullable = "" if column.nullable else " NOT NULL"
    return f"{column.name} {column.type.compile(DIALECT)}{nullable}"


def every_name() -> Iterator[str | None]:
    for table in TABLES:
        yield from (str(constraint.name) for constraint in table.constraints)
        yield from (index.name for index in table.indexes)


# The columns


@pytest.mark.parametrize("name", COLUMNS)
def test_a_table_has_the_columns_of_the_wake_chain(name: str) -> None:
    wanted = [line.strip() for line in COLUMNS[name].strip().splitlines()]
    assert [told(column) for column in Base.metadata.tables[name].columns] == wanted


def test_there_is_no_other_table() -> None:
    assert {table.name for table in TABLES} == set(COLUMNS)


def test_the_ledger_has_no_owner_but_its_key() -> None:
    table = Base.metadata.tables["queue_stalls"]
    assert [column.name for column in table.primary_key.columns] == ["endpoint_id", "queue"]
    (foreign_key,) = table.foreign_key_constraints
    assert foreign_key.ondelete == "CASCADE"
    assert foreign_key.referred_table.name == "endpoints"


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_everything_hangs_on_its_endpoint(table: Table) -> None:
    for foreign_key in table.foreign_key_constraints:
        assert (foreign_key.referred_table.name, foreign_key.ondelete) == ("endpoints", "CASCADE")


# Defaults


def test_an_endpoint_begins_active_with_an_empty_scope(world: World) -> None:
    row = world.insert(Endpoint(slug="fresh"))
    assert isinstance(row.id, uuid.UUID)
    assert (row.state, row.scope_queues, row.expires_at, row.revoked_at) == ("active", [], None, None)
    assert row.created_at.utcoffset() is not None


def test_a_todo_begins_pending_unclaimed_and_unvouched(world: World) -> None:
    row = world.insert(Todo(endpoint_id=world.endpoint().id, queue="inbox", title="work"))
    assert row.id.startswith("td_")
    assert uuid.UUID(row.id.removeprefix("td_")).version == 4
    assert (row.state, row.attempt, row.max_attempts, row.ring_attempts) == ("pending", 0, 5, 0)
    assert (row.vouched, row.claimed_at, row.created_at) == (False, None, row.updated_at)


def test_a_hook_begins_enabled_for_every_queue(world: World) -> None:
    row = world.insert(NotifyHook(endpoint_id=world.endpoint().id, url="https://a.example", secret="s"))
    assert (row.enabled, row.queues, row.ignore_presence, row.consecutive_failures) == (True, [], False, 0)


def test_no_json_is_null_and_not_the_json_null(world: World) -> None:
    row = world.insert(Todo(endpoint_id=world.endpoint().id, queue="inbox", title="work", payload=None))
    with world.engine.connect() as connection:
        payload = connection.exec_driver_sql("SELECT payload IS NULL FROM todos WHERE id = %s", (row.id,))
        assert payload.scalar() is True


# What a row may hold


@pytest.mark.parametrize("state", TODO_STATES)
def test_a_todo_may_be_in_every_state(world: World, state: str) -> None:
    assert world.endpoint().queue().pending(age="1h", state=state).state == state


@pytest.mark.parametrize(
    ("constraint", "make"),
    [
        ("ck_endpoints_state", lambda w: w.endpoint(state="paused")),
        ("ck_endpoints_default_lease_ttl_seconds", lambda w: w.endpoint(default_lease_ttl_seconds=59)),
        ("ck_endpoints_default_lease_ttl_seconds", lambda w: w.endpoint(default_lease_ttl_seconds=86401)),
        ("ck_todos_state", lambda w: w.queue().pending(age="1h", state="open")),
        ("ck_notify_hooks_url", lambda w: w.endpoint().hook(url="x" * 2049)),
        ("ck_notify_hooks_disabled_reason", lambda w: w.endpoint().hook(disabled_reason="bored")),
        ("ck_queue_stalls_nudges", lambda w: w.queue().nudged(-1, ago="1h")),
        ("uq_endpoints_slug", lambda w: [w.endpoint(slug="one"), w.endpoint(slug="one")]),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused_by_name(world: World, constraint: str, make: Any) -> None:
    with pytest.raises(IntegrityError, match=constraint):
        make(world)


@pytest.mark.parametrize("seconds", [None, 60, 86400])
def test_a_lease_may_last_a_minute_to_a_day(world: World, seconds: int | None) -> None:
    assert world.endpoint(default_lease_ttl_seconds=seconds).row.default_lease_ttl_seconds == seconds


def test_the_longest_queue_name_fits_every_index_and_the_ledger(world: World) -> None:
    # Random, so that nothing is saved by compressing it.
    name = "".join(chr(0x4E00 + (number * 7919) % 20000) for number in range(MAX_QUEUE_BYTES // 3))
    queue = world.endpoint(scope=[name]).queue(name)
    queue.requeued(ago="1h", vouched=True)
    queue.nudged(1, ago="1h")
    assert queue.stall is not None
    assert queue.stall.queue == name


# Names and indexes


def test_every_constraint_and_index_is_named_by_the_convention() -> None:
    prefixes = {
        PrimaryKeyConstraint: "pk_",
        ForeignKeyConstraint: "fk_",
        UniqueConstraint: "uq_",
        CheckConstraint: "ck_",
    }
    for table in TABLES:
        for constraint in table.constraints:
            named = str(constraint.name)
            assert named.startswith(f"{prefixes[type(constraint)]}{table.name}"), named
        for index in table.indexes:
            assert str(index.name).startswith((f"ix_{table.name}_", f"uq_{table.name}_")), index.name


def test_no_two_share_a_name_and_postgres_cuts_none_short() -> None:
    names = list(every_name())
    assert len(set(names)) == len(names)
    assert all(name is not None and len(name.encode()) <= 63 for name in names)


def test_the_indexes_of_the_wake_chain_are_there() -> None:
    # By what they hold: in an existing database they may have other names.
    added = {index.name for index in STALL_INDEXES}
    there = {
        str(CreateIndex(index).compile(dialect=DIALECT)).replace(f"INDEX {index.name} ON ", "INDEX ON ")
        for table in TABLES
        for index in table.indexes
        if index.name not in added
    }
    assert there == {
        "CREATE INDEX ON endpoints (expires_at) WHERE state = 'active' AND expires_at IS NOT NULL",
        "CREATE INDEX ON todos (endpoint_id, queue, created_at) WHERE state = 'pending'",
        "CREATE INDEX ON todos (endpoint_id, created_at DESC)",
        "CREATE INDEX ON todos (last_ringed_at ASC NULLS FIRST, created_at) WHERE state = 'pending'",
        "CREATE INDEX ON todos (next_retry_at) WHERE state = 'failed' AND next_retry_at IS NOT NULL",
        "CREATE UNIQUE INDEX ON todos (endpoint_id, idempotency_key) WHERE idempotency_key IS NOT NULL"
        " AND state != 'done' AND (state != 'failed' OR next_retry_at IS NOT NULL)",
        "CREATE INDEX ON notify_hooks (endpoint_id) WHERE enabled",
    }


def test_every_added_index_is_on_todos_and_keeps_to_the_rows_it_is_asked_for() -> None:
    # Done work is nearly all of the table: no index may hold it but for its claim.
    for index in STALL_INDEXES:
        assert index.table is Todo.__table__
        assert index.dialect_options["postgresql"]["where"] is not None, index.name


def test_an_instant_comes_back_as_it_went_in_with_its_zone(world: World) -> None:
    at = NOW + timedelta(microseconds=1)
    row = world.endpoint(expires_in=timedelta(microseconds=1)).row
    assert row.expires_at == at
    assert inspect(QueueStall).columns["last_nudged_at"].type.compile(DIALECT).endswith("WITH TIME ZONE")
