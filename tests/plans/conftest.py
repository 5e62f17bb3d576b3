"""Backlogs that are made once for each run, and copied for each test."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from support.backlogs import BACKLOGS
from support.databases import DatabaseServer, database_copy, leave_to_us, vacuum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection, Engine


@pytest.fixture(scope="session")
def backlog(server: DatabaseServer, template: str) -> Iterator[Callable[[str], str]]:
    """Give the name of a database that holds the backlog of that name."""
    made: dict[str, str] = {}
    with contextlib.ExitStack() as databases:

        def make(title: str) -> str:
            if title not in made:
                told = BACKLOGS[title]
                name = databases.enter_context(database_copy(server, template))
                engine = server.engine(name)
                with engine.begin() as connection:
                    leave_to_us(connection)
                    told.before(connection)
                if told.then:
                    vacuum(engine, told.then)
                with engine.begin() as connection:
                    told.after(connection)
                engine.dispose()
                made[title] = name
            return made[title]

        yield make


@pytest.fixture
def on(server: DatabaseServer, backlog: Callable[[str], str]) -> Iterator[Callable[[str], Connection]]:
    """Connect to a backlog; whatever is written there is rolled back."""
    with contextlib.ExitStack() as exits:

        def connect(title: str) -> Connection:
            engine: Engine = server.engine(backlog(title))
            exits.callback(engine.dispose)
            return exits.enter_context(engine.connect())

        yield connect
