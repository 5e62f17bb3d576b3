"""A plan that the server keeps for a prepared statement must not outlive the tables it was made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import text
from sqlalchemy.orm import Session
from support.backlogs import PAIRS, STALLED, add_pairs, add_pending
from support.databases import leave_to_us, vacuum

from switchboard_stall import nudge_stalled_queues, plans

if TYPE_CHECKING:
    import pytest
    from sqlalchemy import Engine

EACH = 20


def test_a_burst_after_many_sweeps_of_an_empty_table_is_swept_with_a_new_plan(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then the driver has prepared the statement, and the server has settled on a plan for it."""
    clock = 0.0
    monkeypatch.setattr(plans, "monotonic", lambda: clock)
    with engine.begin() as connection:
        leave_to_us(connection)
    vacuum(engine, "ANALYZE todos, queue_stalls, endpoints, notify_hooks")

    with engine.connect() as connection, Session(connection) as session:
        for _ in range(15):
            assert nudge_stalled_queues(session, now=STALLED) == []
            session.commit()
        with engine.begin() as other:
            add_pairs(other, PAIRS)
            add_pending(other, EACH)
        clock += plans.PLAN_LIFETIME.total_seconds()

        assert len(nudge_stalled_queues(session, now=STALLED)) == 4
        scanned = session.scalar(
            text("SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'todos'")
        )

    assert scanned is not None
    assert scanned <= 4 * PAIRS
