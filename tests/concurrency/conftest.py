"""The stage: each test gets actors, sessions that act at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import NullPool, create_engine, text
from support.actors import stage
from support.acts import PAUSE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine
    from support.actors import Stage
    from support.databases import DatabaseServer


@pytest.fixture
def sweeps_pause(server: DatabaseServer, engine: Engine) -> None:
    """Let a sweep's question for a hook go through an advisory lock: by then it has its snapshot, and has
    charged nothing. A function of the server's is shadowed for it, which needs sessions that are new."""
    direct = create_engine(server.url.set(database=engine.url.database), poolclass=NullPool)
    with direct.begin() as connection:
        connection.execute(text("CREATE SCHEMA pauses"))
        connection.execute(
            text(
                "CREATE FUNCTION pauses.cardinality(text[]) RETURNS integer LANGUAGE plpgsql AS 'BEGIN"
                f" PERFORM pg_advisory_xact_lock_shared({PAUSE}); RETURN pg_catalog.cardinality($1); END'"
            )
        )
        connection.execute(
            text(f"ALTER DATABASE {engine.url.database} SET search_path = pauses, public, pg_catalog")
        )


@pytest.fixture
def actor(engine: Engine) -> Iterator[Stage]:
    with stage(engine) as make:
        yield make
