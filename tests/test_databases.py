from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from support.databases import TEST_DATABASE_URL, DatabaseServer, database_copy

if TYPE_CHECKING:
    from sqlalchemy import Engine

REPOSITORY = Path(__file__).parents[1]


def test_a_session_left_open_is_told(server: DatabaseServer, template: str) -> None:
    if server.pooler is not None:
        pytest.skip("a pooler keeps sessions open by itself")
    copy = database_copy(server, template)
    engine = server.engine(copy.__enter__())
    engine.connect().close()

    with pytest.raises(AssertionError, match="sessions were left open"):
        copy.__exit__(None, None, None)

    engine.dispose()


def test_the_template_is_closed(server: DatabaseServer, template: str) -> None:
    engine = server.engine(template)
    with pytest.raises(OperationalError), engine.connect():
        pass


@pytest.mark.parametrize("_turn", range(2))
def test_what_a_test_does_to_the_schema_stays_with_it(engine: Engine, _turn: int) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE scratch ()"))


def test_a_named_server_that_is_not_there_fails_the_tests() -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "tests/test_builders.py",
            "-k",
            "empty",
            "-p",
            "no:cacheprovider",
        ],
        cwd=REPOSITORY,
        env=os.environ | {TEST_DATABASE_URL: "postgresql://nobody@127.0.0.1:1/postgres"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 1
    assert "1 error" in run.stdout
