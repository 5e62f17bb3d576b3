"""The command, run in this process on the test's database."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from switchboard_stall.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy import Engine


class Command:
    """Runs ``switchboard-stall`` with the test's database in the environment."""

    def __init__(self, environment: dict[str, str | None]) -> None:
        self.environment = environment
        self.runner = CliRunner()

    def __call__(self, *arguments: str, **environment: str | None) -> Result:
        return self.runner.invoke(main, list(arguments), env=self.environment | environment)

    def json(self, *arguments: str) -> Any:
        """What a command prints under ``--json``, once it has exited with 0."""
        result = self(*arguments, "--json")
        assert (result.exit_code, result.stderr) == (0, "")
        return json.loads(result.stdout)


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, str | None]:
    """An environment that names no database, and has none of its own."""
    return {
        "DATABASE_URL": None,
        "XDG_DATA_HOME": str(tmp_path / "data of a user"),
        "SWITCHBOARD_SECRET_ENCRYPTION_KEY": None,
    }


@pytest.fixture
def url(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


@pytest.fixture
def command(url: str, nowhere: dict[str, str | None]) -> Iterator[Command]:
    # A command that configures logging must not leave that to the next test.
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield Command(nowhere | {"DATABASE_URL": url})
    root.handlers[:] = handlers
    root.setLevel(level)
