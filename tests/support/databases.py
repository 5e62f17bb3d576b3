"""Databases for tests, each of its own: on an embedded PostgreSQL, or on the server the environment names."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, frozen
from sqlalchemy import URL, Engine, NullPool, create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from support.variants import Variant, variant_of_this_run

from switchboard_stall import models
from switchboard_stall.embedded import EmbeddedPostgres
from switchboard_stall.migrations import database_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection

    from switchboard_stall.models import Base

TEST_DATABASE_URL = "SWITCHBOARD_TEST_DATABASE_URL"
TEST_BIN_DIR = "SWITCHBOARD_TEST_BIN_DIR"


@frozen
class DatabaseServer:
    """A server that tests may create databases on.

    ``pooler``: address of a transaction pooler before the server. Tests go through it, so nothing is
    prepared on a session; what makes and drops their databases does not.
    """

    url: URL
    pooler: URL | None = None
    variant: Variant = field(factory=variant_of_this_run)
    _maintenance: Engine = field(init=False, repr=False)

    @_maintenance.default
    def _each_statement_on_its_own(self) -> Engine:
        return create_engine(self.url, isolation_level="AUTOCOMMIT", pool_size=1)

    def engine(self, database: str) -> Engine:
        """The engine a test works with."""
        return create_engine(self._url(database), **self.variant.engine)

    def async_engine(self, database: str) -> AsyncEngine:
        """The same for asyncio. It keeps no connection, so that it belongs to no event loop."""
        return create_async_engine(self._url(database), poolclass=NullPool, **self.variant.engine)

    def _url(self, database: str) -> URL:
        return (self.pooler or self.url).set(database=database)

    def create(self, name: str, *, template: str = "template1") -> None:
        self._run(f"CREATE DATABASE {_quoted(name)} TEMPLATE {_quoted(template)}")

    def drop(self, name: str) -> None:
        """Drop the database, whoever is connected to it.

        :raises AssertionError: somebody was: a test leaks sessions.
        """
        drop = f"DROP DATABASE IF EXISTS {_quoted(name)}"
        if self.pooler is not None:
            # A pooler keeps sessions open by itself.
            self._run(f"{drop} WITH (FORCE)")
            return
        try:
            # The server waits some seconds for sessions that are about to end.
            self._run(drop)
        except OperationalError as error:
            self._run(f"{drop} WITH (FORCE)")
            raise AssertionError(f"sessions were left open on the test's database: {error.orig}") from None

    def disconnect(self) -> None:
        """End the session that makes and drops databases."""
        self._maintenance.dispose()

    def close(self, name: str) -> None:
        """Let nobody connect to the database, so that it can serve as a template at any time."""
        self._run(f"ALTER DATABASE {_quoted(name)} ALLOW_CONNECTIONS false")
        self._run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name", name=name)

    def _run(self, statement: str, **parameters: str) -> None:
        with self._maintenance.connect() as connection:
            connection.execute(text(statement), parameters)


@contextlib.contextmanager
def database_server() -> Iterator[DatabaseServer]:
    """The server of this test run: the one the environment names, else an embedded one of its own."""
    variant = variant_of_this_run()
    with contextlib.ExitStack() as stack:
        named = os.environ.get(TEST_DATABASE_URL)
        if named:
            url = database_url(named)
        else:
            bin_dir = os.environ.get(TEST_BIN_DIR) or None
            embedded = EmbeddedPostgres(bin_dir=Path(bin_dir) if bin_dir else None, durable=False)
            with variant.while_starting():
                url = stack.enter_context(embedded).url
        server = DatabaseServer(url, stack.enter_context(variant.pooler(url)), variant)
        stack.callback(server.disconnect)
        yield server


@contextlib.contextmanager
def migrated_template(server: DatabaseServer) -> Iterator[str]:
    """A database that the migrations built, to be copied; other runs on the same server have others."""
    name = f"stall_template_{secrets.token_hex(6)}"
    server.create(name, template="template0")
    try:
        with create_engine(server.url.set(database=name), poolclass=NullPool).connect() as connection:
            server.variant.build(connection)
        server.close(name)
        yield name
    finally:
        server.drop(name)


@contextlib.contextmanager
def database_copy(server: DatabaseServer, template: str) -> Iterator[str]:
    """A copy of the template, dropped at the end: exact to the last statistic, in some 60 ms."""
    name = f"stall_test_{secrets.token_hex(6)}"
    server.create(name, template=template)
    try:
        yield name
    finally:
        server.drop(name)


def empty(engine: Engine) -> None:
    """Remove every row, between the examples of one property: everything hangs on an endpoint."""
    with engine.begin() as connection:
        connection.execute(models.Endpoint.__table__.delete())  # type: ignore[attr-defined]


def leave_to_us(connection: Connection) -> None:
    """Let no autovacuum interfere with what a test says of statistics."""
    tables = connection.scalars(
        text(
            "SELECT oid::regclass::text FROM pg_class"
            " WHERE relkind = 'r' AND relnamespace NOT IN"
            " ('pg_catalog'::regnamespace, 'information_schema'::regnamespace)"
        )
    ).all()
    for table in tables:
        connection.execute(text(f"ALTER TABLE {table} SET (autovacuum_enabled = false)"))


def vacuum(engine: Engine, how: str = "VACUUM (ANALYZE)", *of: type[Base]) -> None:
    """Vacuum the models' tables, wherever the variant keeps them; the whole database if none is given."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        tables = connection.scalars(
            text(
                "SELECT oid::regclass::text FROM pg_class"
                " WHERE relname = ANY (:names) AND relkind IN ('r', 'p')"
            ),
            {"names": [model.__tablename__ for model in of]},
        )
        connection.execute(text(f"{how} {', '.join(tables)}"))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
