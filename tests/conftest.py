"""Fixtures every test may use: a database of its own, and a world to tell scenarios in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from sqlalchemy import func, select
from sqlalchemy.orm import Session, sessionmaker
from support.builders import World
from support.databases import DatabaseServer, database_copy, database_server, migrated_template

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

for _profile, _examples in {"quick": 20, "ci": 300, "nightly": 5000}.items():
    settings.register_profile(
        _profile,
        max_examples=_examples,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def server() -> Iterator[DatabaseServer]:
    """The PostgreSQL of this run: each worker of pytest-xdist starts its own, unless one is named."""
    with database_server() as running:
        yield running


@pytest.fixture(scope="session")
def template(server: DatabaseServer) -> Iterator[str]:
    """Name of the database that the migrations built; nobody can connect to it."""
    with migrated_template(server) as name:
        yield name


@pytest.fixture
def engine(server: DatabaseServer, template: str) -> Iterator[Engine]:
    """An engine on a fresh, migrated database. A session left open on it fails the test."""
    with database_copy(server, template) as name:
        engine = server.engine(name)
        try:
            yield engine
        finally:
            engine.dispose()


@pytest.fixture
def session_factory(engine: Engine) -> sessionmaker[Session]:
    return sessionmaker(engine)


@pytest.fixture
def session(session_factory: sessionmaker[Session]) -> Iterator[Session]:
    with session_factory() as session:
        yield session


@pytest.fixture
def world(engine: Engine) -> World:
    """Nothing yet: the database of ``engine``, told from ``NOW``."""
    return World(engine)


@pytest.fixture
def present(engine: Engine) -> World:
    """Nothing yet, told from the database's present: for what takes no injected instant."""
    with engine.connect() as connection:
        now = connection.scalar(select(func.statement_timestamp()))
    assert now is not None
    return World(engine, now)
