"""The ledger of stalled queues, and the indexes that the sweep and the reaper ride.

Revision: 0002, after 0001.
"""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import sqlalchemy as sa
from alembic import op

from switchboard_stall import migrations

if TYPE_CHECKING:
    from collections.abc import Iterator

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


class ConcurrentIndex(NamedTuple):
    """An index built while the table is written to."""

    name: str
    table: str
    columns: str
    where: str


CONCURRENT_INDEXES = (
    ConcurrentIndex(
        "ix_todos_stall_vouched",
        "todos",
        "endpoint_id, queue, created_at, id",
        "state = 'pending' AND vouched",
    ),
    ConcurrentIndex(
        "ix_todos_stall_claimed",
        "todos",
        "endpoint_id, queue, claimed_at",
        "claimed_at IS NOT NULL",
    ),
    ConcurrentIndex(
        "ix_todos_stall_requeued",
        "todos",
        "endpoint_id, queue, updated_at",
        "state = 'pending' AND updated_at > created_at",
    ),
    ConcurrentIndex("ix_todos_lease", "todos", "lease_expires_at", "state = 'claimed'"),
)

metadata = sa.MetaData()
"""The tables this revision makes, frozen: it must not follow the models."""

sa.Table("endpoints", metadata, sa.Column("id", sa.Uuid(), primary_key=True), info={"reference": True})

queue_stalls = sa.Table(
    "queue_stalls",
    metadata,
    sa.Column("endpoint_id", sa.Uuid(), nullable=False),
    sa.Column("queue", sa.Text(), nullable=False),
    sa.Column("nudges", sa.Integer(), nullable=False),
    sa.Column("last_nudged_at", sa.DateTime(timezone=True), nullable=False),
    sa.Column("last_claim_at", sa.DateTime(timezone=True)),
    sa.PrimaryKeyConstraint("endpoint_id", "queue", name="pk_queue_stalls"),
    sa.ForeignKeyConstraint(
        ["endpoint_id"], ["endpoints.id"], name="fk_queue_stalls_endpoint_id_endpoints", ondelete="CASCADE"
    ),
    sa.CheckConstraint("nudges >= 0", name="ck_queue_stalls_nudges"),
)


def upgrade() -> None:
    context = op.get_context()
    if not context.as_sql:
        migrations.refuse_unversioned(op.get_bind(), context.opts["stall_schema"], metadata, revision)
    # The indexes come first: the table then commits together with the version row, and a run that was
    # interrupted anywhere is simply run again.
    with _outside_transaction():
        for index in CONCURRENT_INDEXES:
            if context.as_sql:
                _write_build(index)
            else:
                _build(index, index.table, index.name)
    queue_stalls.create(op.get_bind(), checkfirst=False)


def downgrade() -> None:
    with _outside_transaction():
        for index in CONCURRENT_INDEXES:
            if _is_partitioned(index.table):
                _execute(f"DROP INDEX IF EXISTS {index.name}")
            else:
                _concurrently(f"DROP INDEX CONCURRENTLY IF EXISTS {index.name}")
    queue_stalls.drop(op.get_bind(), checkfirst=False)


@contextmanager
def _outside_transaction() -> Iterator[None]:
    """Run where CONCURRENTLY may, for as long as a build takes."""
    context = op.get_context()
    with context.autocommit_block():
        _set_timeout("statement", timedelta())
        yield
        _set_timeout("statement", context.opts["stall_timeouts"].statement)


def _concurrently(sql: str) -> None:
    """Execute what no reader or writer queues behind: it may wait long for older transactions."""
    timeouts: migrations.Timeouts = op.get_context().opts["stall_timeouts"]
    _set_timeout("lock", timeouts.build_lock)
    _execute(sql)
    _set_timeout("lock", timeouts.lock)


def _set_timeout(kind: str, value: timedelta) -> None:
    op.execute(f"SET {kind}_timeout = {int(value.total_seconds() * 1000)}")


def _build(index: ConcurrentIndex, relation: str, name: str) -> str:
    """Build the index on the relation and below it, keeping what an earlier run finished; return its name."""
    schema = _scalar(
        "SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = CAST(:relation AS regclass)",
        relation=relation,
    )
    quoted = op.get_bind().dialect.identifier_preparer.quote(name)
    qualified = f"{schema}.{quoted}"
    valid = _scalar("SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:index)", index=qualified)
    if _is_partitioned(relation):
        # CONCURRENTLY is refused here. ONLY takes no time, and is invalid until every partition is attached;
        # but writers queue behind its lock, so it must not wait long for it.
        if valid is None:
            _execute(f"CREATE INDEX {quoted} ON ONLY {relation} ({index.columns}) WHERE {index.where}")
        for partition in _partitions_without(relation, qualified):
            child = _build(index, partition, _partition_index_name(index, partition))
            _execute(f"ALTER INDEX {qualified} ATTACH PARTITION {child}")
        return qualified
    if valid is False:
        _concurrently(f"DROP INDEX CONCURRENTLY {qualified}")
    if not valid:
        _concurrently(
            f"CREATE INDEX CONCURRENTLY {quoted} ON {relation} ({index.columns}) WHERE {index.where}"
        )
    return qualified


def _write_build(index: ConcurrentIndex) -> None:
    """Write the build into a script. It cannot look first, so it stops where an index is invalid."""
    _concurrently(
        f"CREATE INDEX CONCURRENTLY IF NOT EXISTS {index.name} ON {index.table} ({index.columns}) "
        f"WHERE {index.where}"
    )
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM pg_index WHERE indexrelid = "
        f"to_regclass('{index.name}') AND NOT indisvalid) THEN "
        f"RAISE 'index {index.name} is invalid: DROP INDEX CONCURRENTLY {index.name}, then run this again'; "
        "END IF; END $$"
    )


def _is_partitioned(relation: str) -> bool:
    if op.get_context().as_sql:
        return False
    kind = _scalar(
        "SELECT relkind::text FROM pg_class WHERE oid = CAST(:relation AS regclass)", relation=relation
    )
    return kind == "p"


def _partitions_without(relation: str, index: str) -> list[str]:
    """Return the partitions whose own index is not yet part of this one."""
    found = op.get_bind().scalars(
        sa.text(
            "SELECT p.inhrelid::regclass::text FROM pg_inherits AS p "
            "WHERE p.inhparent = CAST(:relation AS regclass) AND NOT EXISTS ("
            "SELECT FROM pg_inherits AS a JOIN pg_index AS i ON i.indexrelid = a.inhrelid "
            "WHERE a.inhparent = CAST(:index AS regclass) AND i.indrelid = p.inhrelid) ORDER BY 1"
        ),
        {"relation": relation, "index": index},
    )
    return list(found)


def _partition_index_name(index: ConcurrentIndex, partition: str) -> str:
    # PostgreSQL cuts names at 63 bytes, where two partitions may still agree.
    return f"{index.name}_{sha256(partition.encode()).hexdigest()[:8]}"


def _scalar(sql: str, **parameters: str) -> object:
    return op.get_bind().scalar(sa.text(sql), parameters)


def _execute(sql: str) -> None:
    # A name may hold a colon, which text() would take for a parameter.
    op.execute(sa.text(sql.replace(":", r"\:")))
