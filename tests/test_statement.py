"""The statement: what it compiles to, what it never contains, and that its stages can be used apart.

The golden SQL under ``golden/`` is for reading in a review. After a change that is meant, write it anew with
``SWITCHBOARD_TEST_WRITE_GOLDEN=1 pytest tests/test_statement.py``.
"""

from __future__ import annotations

import os
import re
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, assert_type

import pytest
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session

from switchboard_stall import STALL_POLICY, StallPolicy, Todo, nudge_stalled_queues, nudge_statement
from switchboard_stall.cli.layout import laid_out
from switchboard_stall.cli.sql import STAGES, compiled
from switchboard_stall.statement import charge_statement, due_statement

if TYPE_CHECKING:
    from typing import Any

    from sqlalchemy import Engine, Executable
    from support.builders import World

GOLDEN = Path(__file__).parent / "golden"
DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]
NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)


def sql(statement: Executable) -> str:
    """The SQL in one line, as the driver gets it."""
    return " ".join(str(statement.compile(dialect=DIALECT)).split())  # type: ignore[attr-defined]


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_compiles_to_the_sql_that_was_reviewed(stage: str) -> None:
    path = GOLDEN / f"{stage}.sql"
    text = f"{laid_out(compiled(STAGES[stage]()))};\n"
    if os.environ.get("SWITCHBOARD_TEST_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_the_layout_changes_no_token() -> None:
    plain = compiled(nudge_statement())
    assert re.sub(r"\s+", "", laid_out(plain)) == re.sub(r"\s+", "", plain)


def test_a_row_is_the_todo_and_its_charge() -> None:
    assert [column["name"] for column in nudge_statement().column_descriptions] == [
        "Todo",
        "number",
        "nudged_at",
        "stalled_since",
    ]


def _rows_are_typed(session: Session) -> None:
    """Run by the type checker only."""
    for todo, number, nudged_at, stalled_since in session.execute(nudge_statement()):
        assert_type(todo, Todo)
        assert_type(number, int)
        assert_type(nudged_at, datetime)
        assert_type(stalled_since, datetime)


def test_another_instant_is_the_same_statement_with_another_parameter() -> None:
    first = nudge_statement(now=NOON)._generate_cache_key()
    second = nudge_statement(now=NOON + timedelta(hours=1))._generate_cache_key()
    assert first is not None
    assert second is not None
    assert first.key == second.key
    assert {bound.value for bound in first.bindparams} == {NOON}
    assert {bound.value for bound in second.bindparams} == {NOON + timedelta(hours=1)}


def test_a_second_sweep_compiles_nothing(world: World, engine: Engine) -> None:
    def sweep(now: datetime) -> dict[str, int]:
        seen: dict[str, int] = {}
        cached = engine._compiled_cache
        assert cached is not None
        before = set(cached)
        with Session(engine) as session:
            nudge_stalled_queues(session, now=now)
            session.commit()
        seen["compiled"] = len(set(cached) - before)
        return seen

    assert sweep(world.now)["compiled"] > 0
    assert sweep(world.after("1h"))["compiled"] == 0


@pytest.mark.parametrize("now", [None, NOON], ids=["the database's clock", "an injected instant"])
def test_nothing_is_bound_but_the_instant(now: datetime | None) -> None:
    # Whatever an index predicate names must stand in the SQL: a generic plan cannot look into a parameter.
    compiled_now = nudge_statement(now=now).compile(dialect=DIALECT)
    assert set(compiled_now.params) == (set() if now is None else {"now"})


def test_the_lock_time_test_names_only_the_locked_row_and_what_was_proposed() -> None:
    conflict = re.search(r"ON CONFLICT .* RETURNING", sql(nudge_statement()))
    assert conflict is not None
    clause = conflict.group()
    assert "SELECT" not in clause
    assert set(re.findall(r"(\w+)\.\w+", clause)) == {"queue_stalls", "excluded"}
    assert "timestamp()" not in clause


def test_every_case_is_searched() -> None:
    assert re.search(r"\bCASE (?!WHEN)", sql(nudge_statement())) is None


def test_no_instant_has_an_interval_taken_from_it() -> None:
    # timestamptz - interval is not immutable; a difference of two instants compared with an interval is.
    text = sql(nudge_statement())
    assert re.search(r"[-+] interval", text, re.IGNORECASE) is None
    lock_time_test = text.partition("ON CONFLICT")[2].partition("RETURNING")[0]
    assert re.findall(r"(\S+) - (\S+)", lock_time_test) == [
        ("excluded.last_nudged_at", "queue_stalls.last_nudged_at")
    ]


def test_the_charge_is_ordered_by_key() -> None:
    insert = re.search(r"INSERT INTO queue_stalls .* ON CONFLICT", sql(nudge_statement()))
    assert insert is not None
    assert insert.group().endswith("ORDER BY standing.endpoint_id, standing.queue ON CONFLICT")


def test_a_stage_that_feeds_two_others_is_materialized() -> None:
    text = sql(nudge_statement())
    assert "pairs AS MATERIALIZED" in text
    assert "due AS MATERIALIZED" in text


def test_every_table_follows_the_schema_it_is_translated_to() -> None:
    statement = nudge_statement().compile(
        dialect=DIALECT, schema_translate_map={None: "elsewhere"}, render_schema_translate=True
    )
    text = " ".join(str(statement).split())
    for table in ("todos", "queue_stalls", "endpoints", "notify_hooks"):
        sources = re.findall(rf"(?:FROM|JOIN|INTO|DELETE FROM) (\S*\b{table})\b", text)
        assert sources
        assert set(sources) == {f"elsewhere.{table}"}


def test_the_policy_is_written_into_the_statement() -> None:
    policy = StallPolicy(waits=(timedelta(seconds=7), timedelta(seconds=77)), sweep_limit=9)
    text = sql(nudge_statement(policy))
    assert "interval '7 seconds'" in text
    assert "interval '77 seconds'" in text
    assert "LIMIT 9" in text
    assert "interval '300 seconds'" not in text


@pytest.mark.parametrize("build", [nudge_statement, due_statement])
def test_a_naive_instant_is_refused(build: Any) -> None:
    with pytest.raises(ValueError, match=r"2026.*no time zone.*aware"):
        build(now=datetime(2026, 12, 1))


def test_a_charge_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no due row"):
        charge_statement([])


def test_the_dry_run_writes_nothing_and_says_what_the_sweep_would_do(world: World, engine: Engine) -> None:
    inbox = world.queue()
    oldest = inbox.pending(age="10m")
    inbox.pending(age="9m")

    with Session(engine) as session:
        (row,) = session.execute(due_statement(now=world.now)).all()
        session.commit()

    assert world.stalls() == {}
    assert (
        row.endpoint_id,
        row.queue,
        row.claimed_at,
        row.spent,
        row.since,
        row.stalled_since,
        row.todo_id,
    ) == (
        inbox.endpoint.id,
        "inbox",
        None,
        0,
        world.ago("10m"),
        world.ago("10m"),
        oldest.id,
    )


def test_a_charge_at_lock_time_takes_a_row_charged_a_moment_ago_for_not_due(
    world: World, engine: Engine
) -> None:
    inbox = world.queue()
    inbox.pending(age="1h")
    with Session(engine) as session:
        rows = session.execute(due_statement(now=world.now)).all()
        assert len(session.execute(charge_statement(rows, now=world.now)).all()) == 1
        assert session.execute(charge_statement(rows, now=world.now)).all() == []


def test_the_cap_of_a_shorter_policy_holds_for_a_longer_ledger(world: World, engine: Engine) -> None:
    inbox = world.queue()
    inbox.pending(age="1d")
    inbox.nudged(STALL_POLICY.cap, ago="20h")
    with Session(engine) as session:
        policy = StallPolicy(waits=STALL_POLICY.waits[:2])
        assert session.execute(due_statement(policy, now=world.now)).all() == []


def test_a_pair_is_an_endpoint_and_a_queue(world: World, engine: Engine) -> None:
    endpoint = world.endpoint(scope=["a", "b"])
    endpoint.hook()
    endpoint.queue("a").pending(age="1h")
    endpoint.queue("b").pending(age="1h")
    with Session(engine) as session:
        found = session.execute(due_statement(now=world.now)).all()
    assert [(row.endpoint_id, row.queue) for row in found] == [(endpoint.id, "a"), (endpoint.id, "b")]
    assert all(isinstance(row.endpoint_id, uuid.UUID) for row in found)
