"""Databases for tests, each of its own: on an embedded PostgreSQL, or on the server the environment names."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen
from sqlalchemy import URL, Engine, NullPool, create_engine, make_url, text
from sqlalchemy.exc import OperationalError

from switchboard_stall import models
from switchboard_stall.embedded import EmbeddedPostgres

if TYPE_CHECKING:
    from collections.abc import Iterator

TEST_DATABASE_URL = "SWITCHBOARD_TEST_DATABASE_URL"
TEST_BIN_DIR = "SWITCHBOARD_TEST_BIN_DIR"
TEST_POOLER = "SWITCHBOARD_TEST_POOLER"

REPOSITORY = Path(__file__).parents[2]


@frozen
class DatabaseServer:
    """A server that tests may create databases on.

    ``pooler``: a transaction pooler stands before it, so nothing is prepared on a session, and a session
    that stays open is not a test's fault.
    """

    url: URL
    pooler: bool = False

    def engine(self, database: str | None = None) -> Engine:
        """An engine on the database; ``None``: on the maintenance database, each statement on its own."""
        connect_args = {"prepare_threshold": None} if self.pooler else {}
        if database is None:
            return create_engine(
                self.url, connect_args=connect_args, poolclass=NullPool, isolation_level="AUTOCOMMIT"
            )
        return create_engine(self.url.set(database=database), connect_args=connect_args)

    def create(self, name: str, *, template: str = "template1") -> None:
        self._run(f"CREATE DATABASE {_quoted(name)} TEMPLATE {_quoted(template)}")

    def drop(self, name: str) -> None:
        """Drop the database, whoever is connected to it.

        :raises AssertionError: somebody was: a test leaks sessions.
        """
        try:
            # The server waits some seconds for sessions that are about to end.
            self._run(f"DROP DATABASE IF EXISTS {_quoted(name)}")
        except OperationalError as error:
            self._run(f"DROP DATABASE IF EXISTS {_quoted(name)} WITH (FORCE)")
            if not self.pooler:
                raise AssertionError(
                    f"sessions were left open on the test's database: {error.orig}"
                ) from None

    def close(self, name: str) -> None:
        """Let nobody connect to the database, so that it can serve as a template at any time."""
        self._run(f"ALTER DATABASE {_quoted(name)} ALLOW_CONNECTIONS false")
        self._run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name", name=name)

    def _run(self, statement: str, **parameters: str) -> None:
        with self.engine().connect() as connection:
            connection.execute(text(statement), parameters)


@contextlib.contextmanager
def database_server() -> Iterator[DatabaseServer]:
    """The server of this test run: the one the environment names, else an embedded one of its own."""
    named = os.environ.get(TEST_DATABASE_URL)
    if named:
        url = make_url(named)
        if url.drivername in {"postgresql", "postgres"}:
            url = url.set(drivername="postgresql+psycopg")
        yield DatabaseServer(url, pooler=bool(os.environ.get(TEST_POOLER)))
        return
    bin_dir = os.environ.get(TEST_BIN_DIR)
    with EmbeddedPostgres(bin_dir=Path(bin_dir) if bin_dir else None, durable=False) as embedded:
        yield DatabaseServer(embedded.url)


@contextlib.contextmanager
def migrated_template(server: DatabaseServer) -> Iterator[str]:
    """A database that the migrations built, to be copied; other runs on the same server have others."""
    name = f"stall_template_{secrets.token_hex(6)}"
    server.create(name, template="template0")
    try:
        engine = server.engine(name)
        try:
            build_schema(engine)
        finally:
            engine.dispose()
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


def build_schema(engine: Engine) -> None:
    models.Base.metadata.create_all(engine)


def empty(engine: Engine) -> None:
    """Remove every row, between the examples of one property: everything hangs on an endpoint."""
    with engine.begin() as connection:
        connection.execute(models.Endpoint.__table__.delete())  # type: ignore[attr-defined]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
