"""Plans that the server keeps for prepared statements, and when they are too old."""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Final

from switchboard_stall.models import Todo

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

PLAN_LIFETIME: Final = timedelta(seconds=20)
"""How long a server-side plan may serve: less than a tick."""

_PLANNED_AT: Final = f"{__name__}.planned_at"


def connection_of(session: Session) -> Connection:
    """Return the connection on which the session keeps todos, where it has several; begin if need be."""
    return session.connection({"mapper": Todo})


def forget_old_plans(connection: Connection) -> None:
    """Let no plan outlive the tables it was made for.

    The driver keeps a statement prepared, and the server then keeps its plan until the next ANALYZE. A plan
    made while ``todos`` was empty reads the whole table, and a burst comes sooner than autovacuum. Statements
    a tick apart are planned anew; those that come flat out share a plan.
    """
    planned_at: float | None = connection.info.get(_PLANNED_AT)
    present = monotonic()
    if planned_at is None or present - planned_at >= PLAN_LIFETIME.total_seconds():
        if planned_at is not None:
            connection.exec_driver_sql("DISCARD PLANS")
        connection.info[_PLANNED_AT] = present
