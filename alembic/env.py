"""Runs the revisions: one transaction each, one migrating process at a time, never long in a writer's way."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from alembic import context
from sqlalchemy.exc import DBAPIError, PendingRollbackError

# `alembic upgrade head` in a checkout is promised without installing it.
_root = Path(__file__).resolve().parent.parent
if (_root / "switchboard_stall").is_dir() and str(_root) not in sys.path:
    sys.path.insert(0, str(_root))

from switchboard_stall import migrations  # noqa: E402
from switchboard_stall.models import Base  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from alembic.runtime.environment import NameFilterType
    from alembic.runtime.migration import MigrationContext, MigrationInfo

LOCK_KEY = 0x7377_6264_7374_616C
"""The advisory lock of a migrating process: "swbdstal" as eight bytes."""

POLL_SECONDS = 0.2
LOCK_NOT_AVAILABLE = "55P03"

options = context.config.attributes
timeouts: migrations.Timeouts = options.get("timeouts") or migrations.TIMEOUTS
asked_schema: str | None = options.get("schema") or context.get_x_argument(as_dictionary=True).get("schema")


def run() -> None:
    if context.is_offline_mode():
        run_offline()
    else:
        with session() as (connection, schema):
            configure(schema, connection=connection)
            with context.begin_transaction():
                context.run_migrations()


def run_offline() -> None:
    configure(
        asked_schema, dialect_name="postgresql", literal_binds=True, dialect_opts={"paramstyle": "named"}
    )
    context.execute(f"SET lock_timeout = {milliseconds(timeouts.lock)}")
    context.execute(f"SET statement_timeout = {milliseconds(timeouts.statement)}")
    if asked_schema is not None:
        quoted = context.get_context().dialect.identifier_preparer.quote(asked_schema)
        context.execute(f"SET search_path = {quoted}")
    context.execute(
        f"DO $$ BEGIN IF NOT pg_try_advisory_lock({LOCK_KEY}) THEN "
        "RAISE 'another process is migrating this database'; END IF; END $$"
    )
    with context.begin_transaction():
        context.run_migrations()


def configure(schema: str | None, **kw: Any) -> None:
    context.configure(
        target_metadata=Base.metadata,
        version_table=migrations.VERSION_TABLE,
        include_object=include_object,
        compare_server_default=True,
        transaction_per_migration=True,
        on_version_apply=verify_stamp,
        stall_schema=schema,
        stall_timeouts=timeouts,
        **kw,
    )


def include_object(
    item: sa.schema.SchemaItem,
    name: str | None,
    type_: NameFilterType,
    reflected: bool,
    compare_to: sa.schema.SchemaItem | None,
) -> bool:
    """Leave the host's tables alone."""
    return not (type_ == "table" and reflected and name not in Base.metadata.tables)


def verify_stamp(ctx: MigrationContext, step: MigrationInfo, *_: Any, **__: Any) -> None:
    """Check the tables in the transaction that writes the version row: a refusal takes the row with it."""
    if not step.is_stamp:
        return
    if ctx.as_sql:
        raise migrations.Offline(
            "A stamp checks the tables before it writes, so it needs the database: run it without --sql"
        )
    assert ctx.connection is not None
    for revision in step.destination_revision_ids:
        migrations.verify_stamp(ctx.connection, ctx.opts["stall_schema"], revision)


@contextmanager
def session() -> Iterator[tuple[sa.Connection, str]]:
    """Give a connection that holds the migration lock, with its schema and timeouts set."""
    given: sa.Connection | None = options.get("connection")
    if given is None:
        engine: sa.Engine = options.get("engine") or migrations.make_engine()
        with engine.connect() as connection:
            try:
                with prepared(connection) as schema:
                    yield connection, schema
            finally:
                # The lock and the settings end with the session, so a pool must not get it back.
                connection.invalidate()
    else:
        if given.in_transaction():
            raise migrations.ConnectionBusy(
                "The connection is inside a transaction: commit or roll back first, or pass the engine"
            )
        with given_back(given), prepared(given) as schema:
            yield given, schema


@contextmanager
def given_back(connection: sa.Connection) -> Iterator[None]:
    """Restore what the caller had set on the connection."""
    names = ("lock_timeout", "statement_timeout", "search_path")
    before = {name: connection.scalar(sa.func.current_setting(name)) for name in names}
    level = connection.get_isolation_level()
    dbapi_connection = connection.connection.dbapi_connection
    assert dbapi_connection is not None
    if connection.dialect.detect_autocommit_setting(dbapi_connection):
        level = "AUTOCOMMIT"
    connection.rollback()
    try:
        yield
    finally:
        connection.rollback()
        if not connection.invalidated:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            for name, value in before.items():
                connection.execute(sa.select(sa.func.set_config(name, value, False)))
            connection.execute(sa.select(sa.func.pg_advisory_unlock(LOCK_KEY)))
            connection.commit()
            connection.execution_options(isolation_level=level)


@contextmanager
def prepared(connection: sa.Connection) -> Iterator[str]:
    # Between the polls there must be no transaction: CREATE INDEX CONCURRENTLY in the process that
    # holds the lock waits for every older snapshot, and would wait for ours.
    connection.execution_options(isolation_level="AUTOCOMMIT")
    wait_turn(connection)
    schema = asked_schema or connection.scalar(sa.func.current_schema())
    known = connection.scalar(
        sa.text("SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = :schema)"),
        {"schema": schema},
    )
    if schema is None or not known:
        raise migrations.SchemaMissing(
            f"Schema {schema!r} does not exist: create it, or name another"
            if schema
            else "The search path names no schema that exists: create one, or name one"
        )
    quoted = connection.dialect.identifier_preparer.quote(schema)
    for name, value in (
        ("search_path", quoted),
        ("lock_timeout", milliseconds(timeouts.lock)),
        ("statement_timeout", milliseconds(timeouts.statement)),
    ):
        connection.execute(sa.select(sa.func.set_config(name, str(value), False)))
    connection.commit()
    connection.execution_options(isolation_level="READ COMMITTED")
    try:
        yield schema
    except PendingRollbackError as error:
        # A lost connection cannot leave an autocommit block: what is raised there hides why it was lost.
        raise error.__context__ or error from None
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) == LOCK_NOT_AVAILABLE:
            raise migrations.LockTimeout(
                f"A lock was not granted in time ({error.orig}): another transaction is open on the table. "
                "Run it again when that has ended; what was finished is kept"
            ) from error
        raise


def wait_turn(connection: sa.Connection) -> None:
    deadline = time.monotonic() + timeouts.turn.total_seconds()
    while not connection.scalar(sa.select(sa.func.pg_try_advisory_lock(LOCK_KEY))):
        if time.monotonic() >= deadline:
            raise migrations.UpgradeInProgress(
                f"Another process has been migrating this database for {timeouts.turn}: wait for it, or look "
                "for its advisory lock in pg_locks"
            )
        time.sleep(POLL_SECONDS)
    connection.commit()


def milliseconds(duration: timedelta) -> int:
    return int(duration.total_seconds() * 1000)


run()
