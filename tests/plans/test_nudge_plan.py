"""The plan of the sweep: one probe a pair, whatever the backlog, the statistics and the plan mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.backlogs import BACKLOGS, BEING_CLAIMED, FRESH, PAIRS, STALLED, add_charges, requeue_one
from support.plans import explain

from switchboard_stall import STALL_POLICY, nudge_statement

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from sqlalchemy import Connection
    from support.plans import Plan, PlanMode

    On = Callable[[str], Connection]

every_mode = pytest.mark.parametrize("mode", ["auto", "force_generic_plan"])
every_backlog = pytest.mark.parametrize("title", BACKLOGS)

EVENLY = "50,000 rows evenly"
A_TENTH = "a tenth of them"


def plan(connection: Connection, mode: PlanMode = "auto", *, now: datetime = STALLED, runs: int = 1) -> Plan:
    return explain(connection, nudge_statement(now=now), mode=mode, runs=runs)


@every_mode
@every_backlog
def test_no_plan_scans_the_todos(on: On, title: str, mode: PlanMode) -> None:
    assert plan(on(title), mode).sequential_scans("todos") == []


@every_mode
@every_backlog
def test_the_rows_looked_at_are_a_few_for_each_pair(on: On, title: str, mode: PlanMode) -> None:
    """The walk, the claim and the requeue: one entry each; a representative only for the pairs in line."""
    assert plan(on(title), mode).rows("todos") <= 3 * PAIRS + 4 * STALL_POLICY.sweep_limit


@every_mode
@every_backlog
def test_each_probe_asks_an_index_for_one_pair_and_stops_at_its_first_row(
    on: On, title: str, mode: PlanMode
) -> None:
    told = plan(on(title), mode)

    for index in ("ix_todos_stall_claimed", "ix_todos_stall_vouched"):
        (probe,) = [node for node in told.probes("endpoint_id", "queue") if node.index == index]
        assert probe.parent is not None
        assert probe.parent.kind == "Limit"
        assert probe.rows <= probe.loops


@every_mode
def test_once_any_todo_was_requeued_the_requeue_is_one_probe_a_pair(on: On, mode: PlanMode) -> None:
    connection = on(EVENLY)
    requeue_one(connection)

    told = plan(connection, mode)

    (probe,) = [node for node in told.probes("endpoint_id", "queue") if "requeued" in node.index]
    assert probe.loops == PAIRS
    assert probe.rows <= 1
    assert told.sequential_scans("todos") == []


def test_a_plan_that_the_server_chose_to_keep_is_as_good(on: On) -> None:
    """From the sixth execution on ``auto`` may reuse one plan for all parameters."""
    told = plan(on(EVENLY), runs=7)

    assert told.sequential_scans("todos") == []
    assert told.buffers <= 8 * PAIRS


@every_mode
@pytest.mark.parametrize("now", [STALLED, BEING_CLAIMED], ids=["stalled", "being claimed"])
def test_a_pair_with_old_work_costs_at_most_8_buffers(on: On, now: datetime, mode: PlanMode) -> None:
    assert plan(on(EVENLY), mode, now=now).buffers <= 8 * PAIRS


@every_mode
def test_a_paced_pair_costs_at_most_8_buffers(on: On, mode: PlanMode) -> None:
    connection = on(EVENLY)
    add_charges(connection)

    told = plan(connection, mode)

    assert told.buffers <= 8 * PAIRS
    assert told.wal_records == 0


@every_mode
def test_a_pair_whose_work_is_fresh_costs_at_most_6_buffers(on: On, mode: PlanMode) -> None:
    assert plan(on(EVENLY), mode, now=FRESH).buffers <= 6 * PAIRS


def test_a_flood_of_unvouched_rows_in_one_pair_changes_nothing(on: On) -> None:
    flooded, even = on("one pair with nearly all rows, unvouched"), on(EVENLY)

    assert plan(flooded).buffers <= plan(even).buffers


def test_a_pair_whose_rows_are_all_unvouched_costs_at_most_8_buffers(on: On) -> None:
    assert plan(on("all rows unvouched")).buffers <= 8 * PAIRS


@pytest.mark.parametrize("now", [STALLED, BEING_CLAIMED, FRESH], ids=["stalled", "being claimed", "fresh"])
def test_ten_times_the_backlog_costs_at_most_one_level_of_a_tree_more(on: On, now: datetime) -> None:
    """The walk and the claim's probe are two descents a pair."""
    small, large = plan(on(A_TENTH), now=now).buffers, plan(on(EVENLY), now=now).buffers

    assert large <= small + 2 * PAIRS


def test_a_burst_that_no_vacuum_has_seen_costs_a_few_buffers_a_pair(on: On) -> None:
    """Entries that no vacuum has seen are looked up in the table as well."""
    assert plan(on("a burst after an analysis of nothing")).buffers <= 16 * PAIRS
