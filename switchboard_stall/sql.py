"""How a statement is written where the planner must not be left to guess."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, overload

from sqlalchemy import ColumnElement, Integer, Interval, Text, case, false, literal_column, true


@overload
def inlined(value: str) -> ColumnElement[str]: ...
@overload
def inlined(value: int) -> ColumnElement[int]: ...
@overload
def inlined(value: timedelta) -> ColumnElement[timedelta]: ...


def inlined(value: str | int | timedelta) -> ColumnElement[Any]:
    """Return ``value`` as a literal that stands in the SQL itself, quoted where it is text.

    A generic plan does not know the value of a bound parameter: it cannot use a partial index whose
    predicate names that value, nor plan for a limit. What decides a plan is therefore written.

    :param value: a constant of the program, such as a state. Each distinct value is a distinct statement
        to every statement cache, so never a name that a sender chose.
    :raises ValueError: ``value`` holds a backslash or NUL, whose meaning hangs on a server setting.
    """
    if isinstance(value, int):
        return literal_column(str(int(value)), Integer())
    if isinstance(value, timedelta):
        sign = "-" if value < timedelta(0) else ""
        seconds, rest = divmod(abs(value), timedelta(seconds=1))
        fraction = f".{rest.microseconds:06}" if rest else ""
        return literal_column(f"interval '{sign}{seconds}{fraction} seconds'", Interval())
    if "\\" in value or "\0" in value:
        raise ValueError(f"cannot write {value!r} into SQL; bind it as a parameter")
    quoted = value.replace("'", "''")
    return literal_column(f"'{quoted}'", Text())


def beside_key(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return ``condition`` in a form for which no index is considered.

    For rows that the same statement finds by their keys. Left open, a condition on the state can win a
    partial index that the statistics call empty: it looks as cheap as the key, and after a burst every entry
    of it is read.
    """
    return case((condition, true()), else_=false())
