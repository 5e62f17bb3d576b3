"""Which database a command works on, and how it fails where it cannot."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from sqlalchemy import make_url

from switchboard_stall.cli import main
from switchboard_stall.cli.database import LINK, make_engine, place, redacted
from switchboard_stall.migrations import downgrade, head

if TYPE_CHECKING:
    from pathlib import Path

    from cli.conftest import Command
    from sqlalchemy import Engine

READERS = (["status"], ["why", "nobody", "inbox"], ["sweep", "--dry-run"], ["db", "current"])


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_takes_each_spelling_of_the_url(command: Command, url: str, scheme: str) -> None:
    named = url.replace("postgresql+psycopg", scheme, 1)
    assert command("status", "--database-url", named, DATABASE_URL=None).exit_code == 0
    assert command("--database-url", named, "status", DATABASE_URL=None).exit_code == 0
    assert command("status", DATABASE_URL=named).exit_code == 0


def test_the_option_goes_before_the_environment(command: Command, url: str) -> None:
    assert (
        command("status", "--database-url", url, DATABASE_URL="postgresql://nobody@127.0.0.1:1/x").exit_code
        == 0
    )


@pytest.mark.parametrize("arguments", READERS, ids=lambda arguments: arguments[0])
def test_a_database_that_is_down_is_one_line(arguments: list[str], nowhere: dict[str, str | None]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        environment = nowhere | {"DATABASE_URL": f"postgresql://u:hunter2@127.0.0.1:{port}/stall"}
        result = CliRunner().invoke(main, arguments, env=environment)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"Error: cannot work with the database 'stall' at 127.0.0.1:{port}:" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "hunter2" not in result.stderr


def test_a_wrong_password_is_one_line_without_it(command: Command, url: str) -> None:
    wrong = make_url(url).set(password="hunter2")
    result = command("status", DATABASE_URL=wrong.render_as_string(hide_password=False))
    assert result.exit_code == 1
    assert "password authentication failed" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "hunter2" not in result.stderr


@pytest.mark.parametrize("arguments", READERS[:3], ids=lambda arguments: arguments[0])
def test_missing_tables_are_named_with_the_remedy(
    engine: Engine, command: Command, arguments: list[str]
) -> None:
    with engine.connect() as connection:
        downgrade(connection, "base")
    result = command(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the database is not migrated" in result.stderr
    assert "switchboard-stall db upgrade" in result.stderr


@pytest.mark.parametrize("named", ["mysql://u:hunter2@h/d", "postgresql://u:hunter2@h:port/d", "hunter2"])
def test_a_url_that_is_none_is_refused_without_repeating_it(
    named: str, nowhere: dict[str, str | None]
) -> None:
    result = CliRunner().invoke(main, ["status"], env=nowhere | {"DATABASE_URL": named})
    assert result.exit_code == 1
    assert "database URL" in result.stderr
    assert "hunter2" not in result.stderr


def test_the_tables_can_be_made_and_looked_at(engine: Engine, command: Command) -> None:
    with engine.connect() as connection:
        downgrade(connection, "base")
    assert command.json("db", "current") == {"revision": None, "head": head(), "is_current": False}
    assert command("db", "upgrade").stdout == f"at revision {head()}\n"
    assert command("db", "upgrade").exit_code == 0
    assert command.json("db", "current") == {"revision": head(), "head": head(), "is_current": True}


def test_an_unknown_revision_is_a_failure_that_names_the_newest(command: Command) -> None:
    result = command("db", "upgrade", "9999")
    assert result.exit_code == 1
    assert head() in result.stderr


def test_existing_tables_are_adopted_by_a_stamp(engine: Engine, command: Command) -> None:
    assert command("db", "stamp", "base").exit_code == 0
    refused = command("db", "upgrade")
    assert refused.exit_code == 1
    assert "switchboard-stall db stamp" in refused.stderr
    assert command("db", "stamp", head()).stdout == f"at revision {head()}\n"
    assert command("db", "upgrade").exit_code == 0


def test_without_a_database_only_the_upgrade_makes_one(nowhere: dict[str, str | None]) -> None:
    runner = CliRunner()
    refused = runner.invoke(main, ["status"], env=nowhere)
    assert refused.exit_code == 1
    assert "no database is named" in refused.stderr
    assert "switchboard-stall db upgrade" in refused.stderr

    assert runner.invoke(main, ["db", "upgrade"], env=nowhere).exit_code == 0
    kept = runner.invoke(main, ["status", "--json"], env=nowhere)
    assert (kept.exit_code, json.loads(kept.stdout)["total"]) == (0, 0)
    assert "using the embedded PostgreSQL in" in kept.stderr


def test_a_half_open_connection_is_given_up_within_a_tick() -> None:
    found = LINK["keepalives_idle"] + LINK["keepalives_interval"] * LINK["keepalives_count"]
    assert found < 30
    assert LINK["tcp_user_timeout"] < 30_000
    assert LINK["connect_timeout"] < 30


def test_the_link_can_be_set_in_the_url(url: str) -> None:
    named = make_url(url).update_query_dict({"keepalives_idle": "77"})
    engine = make_engine(named)
    try:
        with engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            parameters = driver.info.get_parameters()
            assert parameters["keepalives_idle"] == "77"
            assert parameters["tcp_user_timeout"] == str(LINK["tcp_user_timeout"])
            assert driver.prepare_threshold is None
    finally:
        engine.dispose()


def test_no_spelling_of_the_password_is_shown() -> None:
    url = make_url("postgresql://u:a%2Fb%20c@h/d?sslpassword=deep")
    assert redacted("a/b c, a%2Fb%20c, a/b%20c, a%2Fb+c, deep", url) == "***, ***, ***, ***, ***"
    assert place(url) == "'d' at h"


def test_wrong_use_exits_with_2(tmp_path: Path) -> None:
    runner = CliRunner()
    for arguments in (["nonsense"], ["why", "one"], ["status", "--limit", "-1"], ["sql", "--stage", "x"]):
        assert runner.invoke(main, arguments).exit_code == 2
