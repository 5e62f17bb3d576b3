"""Any state, one sweep: what PostgreSQL makes of it is what the rule makes of it."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from model import tables
from model.states import State, states
from sqlalchemy import literal, select, union_all
from sqlalchemy.orm import Session
from support.builders import NOW
from support.databases import database_copy

from switchboard_stall.statement import (
    charge_statement,
    charged,
    drain_statement,
    drained,
    due,
    due_statement,
    pairs,
    pending,
)
from switchboard_stall.sweep import nudge_stalled_queues

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection
    from support.databases import DatabaseServer


@pytest.fixture(scope="module")
def scratch(server: DatabaseServer, template: str) -> Iterator[Connection]:
    """A connection to tables that are empty between transactions."""
    with database_copy(server, template) as name:
        engine = server.engine(name).execution_options(isolation_level="READ COMMITTED")
        with engine.connect() as connection:
            yield connection
        engine.dispose()


# The sweep gets every example of the profile; how its stages fit together, a third.
some = settings(max_examples=max(settings().max_examples // 3, 1))


@contextlib.contextmanager
def holding(scratch: Connection, state: State) -> Iterator[None]:
    """The state is in the tables until the end of the block."""
    with scratch.begin() as transaction:
        tables.store(scratch, state.rows)
        yield
        transaction.rollback()


@given(states())
def test_every_state_is_swept_as_the_rule_says(scratch: Connection, state: State) -> None:
    expected = copy.deepcopy(state.rows)
    wakes = expected.sweep(state.policy, NOW)
    with holding(scratch, state), Session(scratch) as session:
        nudges = nudge_stalled_queues(session, policy=state.policy, now=NOW)
        swept = tables.ledger(scratch)

    assert [tables.wake(nudge) for nudge in nudges] == wakes
    assert swept == expected.ledger


@some
@given(states())
def test_the_dry_run_names_what_the_sweep_would_and_writes_nothing(scratch: Connection, state: State) -> None:
    wakes = copy.deepcopy(state.rows).sweep(state.policy, NOW)
    with holding(scratch, state):
        rows = scratch.execute(due_statement(state.policy, now=NOW)).all()
        left = tables.ledger(scratch)

    told = [((row.endpoint_id, row.queue), row.todo_id, row.spent + 1, row.stalled_since) for row in rows]
    assert told == [(wake.pair, wake.todo, wake.number, wake.stalled_since) for wake in wakes]
    assert left == state.rows.ledger


@some
@given(states())
def test_the_dry_run_its_charge_and_the_drain_are_the_same_sweep(scratch: Connection, state: State) -> None:
    expected = copy.deepcopy(state.rows)
    wakes = expected.sweep(state.policy, NOW)
    with holding(scratch, state):
        rows = scratch.execute(due_statement(state.policy, now=NOW)).all()
        won = scratch.execute(charge_statement(rows, state.policy, now=NOW)).all() if rows else []
        emptied = scratch.execute(drain_statement()).all()
        left = tables.ledger(scratch)

    assert {((row.endpoint_id, row.queue), row.nudges) for row in won} == {(w.pair, w.number) for w in wakes}
    assert {tuple(row) for row in emptied} == state.rows.ledger.keys() - expected.ledger.keys()
    assert left == expected.ledger


@some
@given(states())
def test_no_ledger_key_is_both_drained_and_charged(scratch: Connection, state: State) -> None:
    all_pairs = pairs(pending())
    taken = charged(due(all_pairs, state.policy, now=NOW), state.policy, now=NOW)
    reset = drained(all_pairs)
    keys = union_all(
        *(
            select(literal(what).label("what"), stage.c.endpoint_id, stage.c.queue)
            for what, stage in (("charged", taken), ("drained", reset))
        )
    )
    with holding(scratch, state):
        rows = scratch.execute(keys).all()

    found = {
        what: {(row.endpoint_id, row.queue) for row in rows if row.what == what}
        for what in ("charged", "drained")
    }
    assert not found["charged"] & found["drained"]
    waiting = {todo.pair for todo in state.rows.todos.values() if todo.state == "pending"}
    assert found["charged"] <= waiting
    assert found["drained"] == state.rows.ledger.keys() - waiting
