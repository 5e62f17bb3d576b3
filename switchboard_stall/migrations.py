"""The schema's revisions from Python: upgrade, downgrade, stamp, current, and a filter for a host's alembic.

The scripts are alembic's, in a folder of their own with a version table of their own, so a host that runs
alembic for its other tables keeps its history untouched. In a checkout the folder is ``alembic/``; in a
wheel it is ``switchboard_stall/alembic/``.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.script.revision import ResolutionError
from alembic.util import CommandError
from sqlalchemy.exc import ArgumentError

from switchboard_stall.models import Base

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from alembic.runtime.environment import NameFilterType
    from sqlalchemy.engine.interfaces import ReflectedColumn

VERSION_TABLE: Final = "switchboard_stall_version"
"""The table that holds this package's revision. Never ``alembic_version``, which is the host's."""

BASE_REVISION: Final = "0001"
"""The wake chain's base tables, with ``todos.vouched``: the revision an existing database adopts."""

DATABASE_URL: Final = "DATABASE_URL"
"""The environment variable that names the database when nothing else does."""

_DRIVER: Final = "postgresql+psycopg"

# alembic keeps what it works on in its module ``context``, one for the whole process.
_ONE_AT_A_TIME: Final = threading.Lock()


class MigrationError(CommandError):
    """What every error of this module is. The ``alembic`` command prints its message and no traceback."""


class DatabaseUrlMissing(MigrationError):
    """No database was named."""


class DatabaseUrlInvalid(MigrationError):
    """The database URL cannot be read, or is not one of PostgreSQL's. The message never holds the URL."""


class SchemaMissing(MigrationError):
    """The PostgreSQL schema to migrate does not exist."""


class ConnectionBusy(MigrationError):
    """The connection given is inside a transaction, so no migration can commit on it."""


class NotAdopted(MigrationError):
    """The tables are there, and whole, but no row of the version table says which revision made them."""


class SchemaIncomplete(MigrationError):
    """The tables do not hold what the revision promises.

    :ivar missing: one sentence for each difference, with the SQL that mends it where one statement does.
    """

    def __init__(self, message: str, missing: tuple[str, ...]) -> None:
        """Keep the differences beside the message."""
        super().__init__(message)
        self.missing = missing


class NotOurs(MigrationError):
    """A downgrade would drop tables that this package did not make."""


class UnknownRevision(MigrationError):
    """The database, or the caller, names a revision that this release does not have."""


class UpgradeInProgress(MigrationError):
    """Another process is migrating this database and did not finish in time."""


class LockTimeout(MigrationError):
    """A lock was not granted in time. Nothing is half done that running again would not finish."""


class Offline(MigrationError):
    """The operation must read the database, so it cannot be written out as SQL."""


@attrs.frozen(kw_only=True)
class Timeouts:
    """How long a migration may wait and work. All are durations; parts of a millisecond are dropped.

    :ivar turn: to wait for another process that is migrating the same database.
    :ivar lock: to wait for any lock in a transactional step. Writers queue behind such a wait: keep it short.
    :ivar statement: to run one statement in a transactional step.
    :ivar build_lock: to wait, while an index is built or dropped CONCURRENTLY, for the transactions that were
        open before it. No reader or writer queues behind this wait. The build itself has no limit.
    """

    turn: timedelta = timedelta(minutes=10)
    lock: timedelta = timedelta(seconds=4)
    statement: timedelta = timedelta(seconds=60)
    build_lock: timedelta = timedelta(minutes=5)


TIMEOUTS: Final = Timeouts()
"""The timeouts when the caller names none."""

Target = str | sa.URL | sa.Engine | sa.Connection
"""What can be migrated: a URL in any form :func:`database_url` takes, an engine, or an idle connection."""


def database_url(value: str | sa.URL | None = None) -> sa.URL:
    """Return the database's URL with the psycopg driver.

    :param value: ``postgres://``, ``postgresql://`` or ``postgresql+psycopg://``. ``None`` or the empty
        string means the environment variable ``DATABASE_URL``.
    :raises DatabaseUrlMissing: neither names a database.
    :raises DatabaseUrlInvalid: it is no URL, or of another database or driver.
    """
    value = value or os.environ.get(DATABASE_URL)
    if not value:
        raise DatabaseUrlMissing(
            f"No database is named: set {DATABASE_URL}, for example "
            f"{DATABASE_URL}=postgresql://user@localhost:5432/switchboard"
        )
    try:
        url = sa.make_url(value)
    except (ArgumentError, ValueError):
        # The cause repeats the URL, and with it the password.
        raise DatabaseUrlInvalid(
            f"The database URL cannot be read: write it as postgresql://user:password@host:5432/name, "
            f"with special characters in the password percent-encoded ({DATABASE_URL} when none was passed)"
        ) from None
    if url.drivername not in ("postgres", "postgresql", _DRIVER):
        raise DatabaseUrlInvalid(
            f"The database URL begins with {url.drivername!r}: "
            f"it must begin with postgres, postgresql or {_DRIVER}"
        )
    return url.set(drivername=_DRIVER)


def upgrade(
    target: Target, revision: str = "head", *, schema: str | None = None, timeouts: Timeouts = TIMEOUTS
) -> None:
    """Bring the schema to a revision. A second call is a no-op; two processes at once take turns.

    :param target: the database, reached directly and not through a transaction pooler. An engine gives one
        connection, closed for good after use. A connection given must be idle; it keeps its settings.
    :param revision: where to go, ``head`` for the newest.
    :param schema: the PostgreSQL schema that holds the tables and the version table. ``None`` means the first
        schema of the connection's search path.
    :param timeouts: how long to wait and work.
    :raises NotAdopted: the tables are there without a version row; see :func:`stamp`.
    :raises SchemaIncomplete: some of the tables are there, or they lack columns.
    :raises UpgradeInProgress: another process did not finish within ``timeouts.turn``.
    :raises LockTimeout: a lock was not granted; run it again.
    :raises UnknownRevision: this release does not know the revision, or the one the database is at.
    """
    _run(command.upgrade, target, revision, schema, timeouts)


def downgrade(
    target: Target, revision: str, *, schema: str | None = None, timeouts: Timeouts = TIMEOUTS
) -> None:
    """Take the schema back to an older revision, with the data that only newer ones hold.

    :param target: see :func:`upgrade`.
    :param revision: ``0001`` drops the ledger and the stall indexes; ``base`` drops every table with its
        rows.
    :param schema: see :func:`upgrade`.
    :param timeouts: see :func:`upgrade`.
    :raises NotOurs: ``base`` would drop tables that this package did not make.
    :raises LockTimeout: a lock was not granted; run it again.
    :raises UnknownRevision: this release does not know the revision, or the one the database is at.
    """
    _run(command.downgrade, target, revision, schema, timeouts)


def stamp(
    target: Target, revision: str = BASE_REVISION, *, schema: str | None = None, timeouts: Timeouts = TIMEOUTS
) -> None:
    """Adopt tables that are there already: check them, then write the version row and nothing else.

    :param target: see :func:`upgrade`.
    :param revision: the revision whose promise the tables keep. The default is what the wake chain makes
        plus ``todos.vouched``; :func:`upgrade` goes on from there. ``base`` forgets the tables and leaves
        them alone.
    :param schema: see :func:`upgrade`.
    :param timeouts: see :func:`upgrade`.
    :raises SchemaIncomplete: a table, column, key or index of the revision is missing or differs. Nothing is
        written. What the host has beyond that is no obstacle.
    :raises UnknownRevision: this release does not know the revision.
    """
    _run(command.stamp, target, revision, schema, timeouts)


def current(target: Target, *, schema: str | None = None) -> str | None:
    """Return the revision the version table names, ``None`` when it names none. Waits for nobody; only reads.

    :param target: see :func:`upgrade`. A connection may be inside a transaction, and through a pooler.
    :param schema: see :func:`upgrade`.
    """
    if isinstance(target, sa.Connection):
        return _current(target, schema)
    engine = target if isinstance(target, sa.Engine) else make_engine(target)
    with engine.connect() as connection:
        return _current(connection, schema)


def head() -> str:
    """Return the newest revision this release has."""
    revision = ScriptDirectory(str(script_location())).get_current_head()
    assert revision is not None
    return revision


def include_object(
    item: sa.schema.SchemaItem,
    name: str | None,
    type_: NameFilterType,
    reflected: bool,
    compare_to: sa.schema.SchemaItem | None,
) -> bool:
    """Keep a host's autogenerate away from this package's tables: ``context.configure(include_object=...)``.

    The host neither drops nor makes what is ours, in whatever schema, also when its metadata includes
    ``Base.metadata``. A table of ours that the host declares itself stays the host's to compare, but for the
    columns and indexes that only we declare. The parameters are alembic's.
    """
    if not reflected:
        return _table(item).metadata is not Base.metadata
    if compare_to is not None:
        return _table(compare_to).metadata is not Base.metadata
    table = _table(item).name
    if table == VERSION_TABLE:
        return False
    ours = Base.metadata.tables.get(table)
    if ours is None:
        return True
    if type_ == "table":
        return False
    named = {thing.name for thing in (*ours.columns, *ours.indexes, *ours.constraints)}
    return name not in named


def make_engine(url: str | sa.URL | None = None) -> sa.Engine:
    """Return an engine that keeps no connection.

    :param url: see :func:`database_url`.
    """
    return sa.create_engine(database_url(url), poolclass=sa.pool.NullPool)


def script_location() -> Path:
    """Return the folder of the revisions: the checkout's if this is one, else the one in the wheel."""
    package = Path(__file__).resolve().parent
    shipped = package / "alembic"
    return shipped if shipped.is_dir() else package.parent / "alembic"


def differences(connection: sa.Connection, schema: str, revision: str) -> tuple[str, ...]:
    """Return what the tables in ``schema`` lack of what ``revision`` and those below it promise.

    :param connection: any connection to the database; only reads.
    :param schema: the PostgreSQL schema to look in.
    :param revision: a revision of this release.
    :return: a sentence for each difference, in the order of the revisions; empty when there is none.
    """
    found: list[str] = []
    scripts = ScriptDirectory(str(script_location()))
    for script in reversed(list(scripts.walk_revisions("base", revision))):
        found += _table_differences(connection, schema, script.module.metadata)
        for index in getattr(script.module, "CONCURRENT_INDEXES", ()):
            valid = _index_is_valid(connection, schema, index.name)
            if not valid:
                state = "missing" if valid is None else "invalid"
                drop = "" if valid is None else f"DROP INDEX CONCURRENTLY {index.name}; "
                found.append(
                    f"index {index.name} on {index.table} is {state}: {drop}CREATE INDEX CONCURRENTLY "
                    f"{index.name} ON {index.table} ({index.columns}) WHERE {index.where};"
                )
    return tuple(found)


def refuse_unversioned(connection: sa.Connection, schema: str, metadata: sa.MetaData, revision: str) -> None:
    """Refuse to make tables where some are there already, made by something that wrote no version row.

    :param metadata: the tables the revision is about to make.
    :param revision: its identifier, for the message.
    :raises NotAdopted: all are there and whole.
    :raises SchemaIncomplete: some are there, or lack something.
    """
    inspector = sa.inspect(connection)
    there = [table.name for table in _own_tables(metadata) if inspector.has_table(table.name, schema=schema)]
    if not there:
        return
    missing = tuple(_table_differences(connection, schema, metadata))
    found = (
        f"Schema {schema!r} already holds {', '.join(there)}, "
        f"but {VERSION_TABLE} says that revision {revision} did not make it"
    )
    if missing:
        raise SchemaIncomplete(
            f"{found}, and it is not what that makes. Nothing was changed. Mend this, then stamp {revision}, "
            "then upgrade; or name another schema:" + _listed(missing),
            missing,
        )
    raise NotAdopted(
        f"{found}. Nothing was changed. If they are the wake chain's, adopt them, then upgrade: "
        f"switchboard-stall db stamp {revision} (or: alembic stamp {revision})"
    )


def refuse_foreign(connection: sa.Connection, schema: str, metadata: sa.MetaData) -> None:
    """Refuse to drop tables that hold columns no revision made, or are partitioned: someone else owns them.

    :param metadata: the tables about to be dropped.
    :raises NotOurs: naming each such table and column.
    """
    signs: list[str] = []
    inspector = sa.inspect(connection)
    for table in _own_tables(metadata):
        if inspector.has_table(table.name, schema=schema):
            extra = {column["name"] for column in inspector.get_columns(table.name, schema=schema)}
            signs += (f"{table.name}.{name}" for name in sorted(extra - set(table.columns.keys())))
            if _is_partitioned(connection, schema, table.name):
                signs.append(f"the partitions of {table.name}")
    if signs:
        raise NotOurs(
            f"Schema {schema!r} holds what this package never made: {', '.join(signs)}. Its tables were "
            "adopted, so they are not dropped. To leave them and forget the revision: "
            "switchboard-stall db stamp base"
        )


def verify_stamp(connection: sa.Connection, schema: str, revision: str) -> None:
    """Refuse a version row that the tables do not bear out.

    :raises SchemaIncomplete: with every difference.
    """
    missing = differences(connection, schema, revision)
    if missing:
        raise SchemaIncomplete(
            f"Schema {schema!r} is not at revision {revision}, so it was not stamped and nothing was written:"
            + _listed(missing),
            missing,
        )


def _run(
    operation: Callable[[Config, str], None],
    target: Target,
    revision: str,
    schema: str | None,
    timeouts: Timeouts,
) -> None:
    config = Config(attributes={"schema": schema, "timeouts": timeouts})
    # ConfigParser interpolates: a percent sign in a folder's name is not one of its variables.
    config.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    if isinstance(target, sa.Connection):
        config.attributes["connection"] = target
    elif isinstance(target, sa.Engine):
        config.attributes["engine"] = target
    else:
        config.attributes["engine"] = make_engine(target)
    try:
        with _ONE_AT_A_TIME:
            operation(config, revision)
    except CommandError as error:
        if isinstance(error.__cause__, ResolutionError):
            raise UnknownRevision(
                f"{error}. This release has revisions up to {head()}: ask for one of those, or install the "
                "release that made the database's"
            ) from error
        raise


def _current(connection: sa.Connection, schema: str | None) -> str | None:
    context = MigrationContext.configure(
        connection, opts={"version_table": VERSION_TABLE, "version_table_schema": schema}
    )
    return context.get_current_revision()


def _table(item: sa.schema.SchemaItem) -> sa.Table:
    table = item if isinstance(item, sa.Table) else getattr(item, "table", None)
    assert isinstance(table, sa.Table)
    return table


def _own_tables(metadata: sa.MetaData) -> list[sa.Table]:
    """Return the tables the revision makes, without those it only refers to."""
    return [table for table in metadata.sorted_tables if not table.info.get("reference")]


def _listed(missing: tuple[str, ...]) -> str:
    return "".join(f"\n  - {sentence}" for sentence in missing)


def _table_differences(connection: sa.Connection, schema: str, metadata: sa.MetaData) -> list[str]:
    inspector = sa.inspect(connection)
    found: list[str] = []
    for table in _own_tables(metadata):
        if not inspector.has_table(table.name, schema=schema):
            found.append(f"table {table.name} is missing")
            continue
        there = {column["name"]: column for column in inspector.get_columns(table.name, schema=schema)}
        for column in table.columns:
            found += _column_differences(column, there.get(column.name), connection.dialect)
        # A partitioned table's keys must hold the partition key as well.
        if not _is_partitioned(connection, schema, table.name):
            key = inspector.get_pk_constraint(table.name, schema=schema)["constrained_columns"]
            if key != table.primary_key.columns.keys():
                wanted = ", ".join(table.primary_key.columns.keys())
                found.append(f"table {table.name} has the primary key ({', '.join(key)}), must be ({wanted})")
        unique = {
            tuple(index["column_names"])
            for index in inspector.get_indexes(table.name, schema=schema)
            if index["unique"]
        }
        for promised, ddl in _unique(table):
            if promised not in unique:
                label = f"{table.name} ({', '.join(promised)})"
                found.append(f"nothing keeps {label} unique: {ddl.compile(dialect=connection.dialect)};")
        keys = {
            (tuple(key["constrained_columns"]), key["referred_table"], key["options"].get("ondelete"))
            for key in inspector.get_foreign_keys(table.name, schema=schema)
        }
        for foreign in table.foreign_key_constraints:
            promise = (tuple(foreign.column_keys), foreign.referred_table.name, foreign.ondelete)
            if promise not in keys:
                ddl = sa.schema.AddConstraint(foreign, isolate_from_table=False)
                found.append(
                    f"no foreign key leads from {table.name} ({', '.join(foreign.column_keys)}) to "
                    f"{promise[1]}: {ddl.compile(dialect=connection.dialect)};"
                )
    return found


def _column_differences(
    column: sa.Column[object], there: ReflectedColumn | None, dialect: sa.Dialect
) -> Iterable[str]:
    label = f"{column.table.name}.{column.name}"
    alter = f"ALTER TABLE {column.table.name}"
    ddl = sa.schema.CreateColumn(column).compile(dialect=dialect)
    if there is None:
        then = column.info.get("then", ())
        yield " ".join((f"column {label} is missing: {alter} ADD COLUMN {ddl};", *then))
        return
    promised, actual = column.type.compile(dialect), there["type"].compile(dialect)
    if promised != actual:
        yield f"column {label} is {actual}, must be {promised}"
    if column.nullable != there["nullable"]:
        says, verb = ("refuses", "DROP") if column.nullable else ("admits", "SET")
        yield f"column {label} {says} null: {alter} ALTER COLUMN {column.name} {verb} NOT NULL;"
    if column.server_default is not None and there["default"] is None:
        yield f"column {label} has no default, must be {ddl}"


def _unique(table: sa.Table) -> Iterable[tuple[tuple[str, ...], sa.schema.ExecutableDDLElement]]:
    """Return what the table promises to keep unique, as columns, and the statement that makes it so."""
    for constraint in table.constraints:
        if isinstance(constraint, sa.UniqueConstraint):
            add = sa.schema.AddConstraint(constraint, isolate_from_table=False)
            yield tuple(constraint.columns.keys()), add
    for index in table.indexes:
        if index.unique:
            yield tuple(index.columns.keys()), sa.schema.CreateIndex(index)


def _is_partitioned(connection: sa.Connection, schema: str, table: str) -> bool:
    kind: str | None = connection.scalar(
        sa.text(
            "SELECT c.relkind::text FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n "
            "ON n.oid = c.relnamespace WHERE n.nspname = :schema AND c.relname = :table"
        ),
        {"schema": schema, "table": table},
    )
    return kind == "p"


def _index_is_valid(connection: sa.Connection, schema: str, name: str) -> bool | None:
    """Return ``None`` when there is no such index."""
    valid: bool | None = connection.scalar(
        sa.text(
            "SELECT i.indisvalid FROM pg_catalog.pg_index AS i "
            "JOIN pg_catalog.pg_class AS c ON c.oid = i.indexrelid "
            "JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace "
            "WHERE n.nspname = :schema AND c.relname = :name"
        ),
        {"schema": schema, "name": name},
    )
    return valid
