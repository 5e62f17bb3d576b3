"""The one clock: the database's, at the start of the statement, unless the caller injects an instant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import ColumnElement, DateTime, bindparam, func

if TYPE_CHECKING:
    from datetime import datetime


def check_instant(now: datetime | None) -> datetime | None:
    """Return ``now`` unchanged if it can be compared with the database's clock.

    :param now: an aware datetime, or ``None`` for the database's clock.
    :raises ValueError: ``now`` is naive.
    """
    if now is not None and now.utcoffset() is None:
        raise ValueError(f"now={now!r} has no time zone; pass an aware datetime, for example in UTC")
    return now


def instant(now: datetime | None) -> ColumnElement[datetime]:
    """Return the present as a column: ``statement_timestamp()``, or ``now`` as a bound parameter.

    Never the application's clock, and never SQL's ``now()``, which is the start of the transaction.

    :param now: an aware datetime, or ``None`` for the database's clock.
    :raises ValueError: ``now`` is naive.
    """
    if check_instant(now) is None:
        return func.statement_timestamp(type_=DateTime(timezone=True))
    return bindparam("now", now, DateTime(timezone=True))
