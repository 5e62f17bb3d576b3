"""What the command prints to be read: the schedule, the SQL, durations and tables."""

from __future__ import annotations

import io
import json
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from sqlalchemy import text

from switchboard_stall.cli import main
from switchboard_stall.cli.layout import WIDTH, laid_out
from switchboard_stall.cli.output import duration, say
from switchboard_stall.cli.sql import STAGES, compiled

if TYPE_CHECKING:
    from sqlalchemy import Engine


def test_the_schedule_adds_up_to_silence() -> None:
    shown = CliRunner().invoke(main, ["schedule"]).stdout
    for after in ("5 min", "25 min", "1 h 25 min", "7 h 25 min", "13 h 25 min"):
        assert after in shown
    assert "then silence, until a claim or a drain" in shown
    answer = json.loads(CliRunner().invoke(main, ["schedule", "--json"]).stdout)
    assert answer["waits"] == [300, 1200, 3600, 21600, 21600]
    assert answer["nudges_at"][-1] == timedelta(hours=13, minutes=25).total_seconds()
    assert (answer["cap"], answer["sweep_limit"]) == (5, 4)


@pytest.mark.parametrize("stage", STAGES)
def test_the_sql_of_each_stage_is_as_shown(engine: Engine, stage: str) -> None:
    shown = CliRunner().invoke(main, ["sql", "--stage", stage]).stdout
    # Nothing but white space was touched.
    assert "".join(shown.split()) == "".join(f"{compiled(STAGES[stage]())};".split())
    assert max(map(len, shown.splitlines())) <= WIDTH
    with engine.connect() as connection:
        connection.execute(text("EXPLAIN " + shown.replace(":", r"\:")))


def test_laying_out_leaves_quoted_text_alone() -> None:
    assert laid_out("SELECT 'FROM  (x, y)' AS a FROM t WHERE b = 'it''s'") == (
        "SELECT 'FROM  (x, y)' AS a\nFROM t\nWHERE b = 'it''s'"
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (timedelta(0), "0 s"),
        (timedelta(seconds=59.9), "59 s"),
        (timedelta(minutes=5), "5 min"),
        (timedelta(hours=13, minutes=25), "13 h 25 min"),
        (timedelta(days=2, minutes=3, seconds=1), "2 d"),
        (timedelta(hours=-1, minutes=-1), "-1 h 1 min"),
    ],
)
def test_a_duration_is_said_in_its_two_largest_units(value: timedelta, words: str) -> None:
    assert duration(value) == words


def test_a_stream_without_the_signs_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    say("✓ held, ✗ not")
    sys.stdout.flush()
    assert raw.getvalue() == b"ok held, FAILED not\n"


def test_every_command_explains_itself() -> None:
    runner = CliRunner()
    commands = [
        [],
        ["db"],
        *([name] for name in main.commands),
        *(["db", name] for name in ("upgrade", "stamp")),
    ]
    for arguments in commands:
        result = runner.invoke(main, [*arguments, "--help"])
        assert (result.exit_code, "Usage:" in result.stdout) == (0, True)
