"""The sweep: run the statement in a READ COMMITTED transaction, hand over what was nudged, and say so."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

from attrs import frozen

from switchboard_stall.clock import check_instant
from switchboard_stall.models import Todo
from switchboard_stall.plans import connection_of, forget_old_plans
from switchboard_stall.ready import after_commit, announce, detached_of, reason_for
from switchboard_stall.schedule import STALL_POLICY, StallPolicy
from switchboard_stall.statement import nudge_statement

if TYPE_CHECKING:
    import uuid

    from sqlalchemy import Connection, Select
    from sqlalchemy.orm import Session

_log = logging.getLogger(__name__)
_ANY_INSTANT: Final = datetime(2000, 1, 1, tzinfo=UTC)


class IsolationError(RuntimeError):
    """The sweep was asked to run in a transaction whose isolation it can neither use nor change."""


@frozen
class Nudge:
    """One wake that a sweep has charged to the ledger.

    :param todo: the pair's representative: its oldest pending todo that the sender gate vouches for.
        Detached: it can be read after the session has committed or closed.
    :param endpoint_id: the endpoint to wake.
    :param queue: the queue that stalled.
    :param number: which nudge of this stall it is, 1 for the first.
    :param stalled_since: when the pair last showed life: its oldest pending todo's creation, its latest
        claim, or its latest requeue, whichever came last.
    :param next_wait: how long the next nudge of this stall waits, or ``None`` after the last.
    """

    todo: Todo
    endpoint_id: uuid.UUID
    queue: str
    number: int
    stalled_since: datetime
    next_wait: timedelta | None


def nudge_stalled_queues(
    session: Session, *, policy: StallPolicy = STALL_POLICY, now: datetime | None = None
) -> list[Nudge]:
    """Charge every queue that is due a wake, at most ``policy.sweep_limit`` of them, and return the nudges.

    The caller commits. After the commit, once per nudge, a line is logged and the ready hook fires; if the
    transaction rolls back, nothing was charged, nothing is logged and nothing fires. Any number of
    instances may run this at the same time: each pair is returned to one of them.

    Also works within ``AsyncSession.run_sync``.

    :param session: in no transaction, or in one that runs under READ COMMITTED. A fresh transaction is
        pinned to READ COMMITTED, whatever the engine's default.
    :param policy: the waits and the limit.
    :param now: an aware datetime, for tests and simulations; ``None`` means the database's
        ``statement_timestamp()``, which is the present even in a transaction that began long ago.
    :returns: the nudges, least-nudged pair first; empty when nothing is due.
    :raises IsolationError: the caller's transaction has begun under another isolation level, or commits
        each statement by itself. Nothing was written.
    :raises ValueError: ``now`` is naive. Nothing was written.

    Source: design, "One statement decides, charges and names" and "Where the sweep runs".
    """
    check_instant(now)
    connection = connection_of(session)
    _pin_read_committed(connection)
    forget_old_plans(connection)
    if session.autoflush:
        session.flush()
    # By the connection: most sweeps return no row, and the set-up of an entity that never comes is dear.
    rows = connection.execute(
        _statement(policy, now is not None), {} if now is None else {"now": now}
    ).mappings()
    nudges = []
    for row in rows:
        todo = detached_of({column.key: row[column] for column in Todo.__table__.columns})
        nudge = Nudge(
            todo=todo,
            endpoint_id=todo.endpoint_id,
            queue=todo.queue,
            number=row["number"],
            stalled_since=row["stalled_since"],
            next_wait=policy.next_wait(row["number"]),
        )
        nudges.append(nudge)
        after_commit(session, partial(_report, nudge, policy, row["nudged_at"]))
        announce(session, todo, reason_for(todo.attempt))
    return nudges


@lru_cache(maxsize=32)
def _statement(policy: StallPolicy, injected: bool) -> Select[Todo, int, datetime, datetime]:
    """Build the statement once for each policy; an injected instant is a parameter of it."""
    return nudge_statement(policy, now=_ANY_INSTANT if injected else None)


def _pin_read_committed(connection: Connection) -> None:
    """Make the session's transaction READ COMMITTED while that is still possible.

    Under a snapshot that spans the transaction, waiting for another sweep's charge ends in a
    serialization failure (40001) where READ COMMITTED simply sees the charge.
    """
    driver = connection.connection.driver_connection
    if driver is None or driver.autocommit:
        raise IsolationError(
            "this session's connection is in AUTOCOMMIT: a charge would stand although the transaction "
            "rolls back; give the sweep a session whose engine does not commit each statement"
        )
    # Transaction control has no construct, and SQLAlchemy's option is refused once a session has begun.
    if driver.info.transaction_status == driver.info.transaction_status.IDLE:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
    elif (level := connection.get_isolation_level()) != "READ COMMITTED":
        raise IsolationError(
            f"the sweep needs READ COMMITTED, and this session's transaction has already begun under "
            f"{level}; call it in a transaction of its own, before any other statement"
        )


def _report(nudge: Nudge, policy: StallPolicy, nudged_at: datetime) -> None:
    last = nudge.next_wait is None
    _log.log(
        logging.WARNING if last else logging.INFO,
        "queue stalled: endpoint %s queue %s: nudge %d of %d, stalled for %s, next wait %s, todo %s",
        nudge.endpoint_id,
        json.dumps(nudge.queue),
        nudge.number,
        policy.cap,
        nudged_at - nudge.stalled_since,
        "none: silent until a claim or a drain" if last else nudge.next_wait,
        nudge.todo.id,
    )
