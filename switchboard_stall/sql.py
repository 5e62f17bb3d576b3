"""What a statement must write into its SQL rather than bind."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Text, literal_column


def inlined(value: str) -> ColumnElement[str]:
    """Return ``value`` as a text literal that stands in the SQL itself, quoted.

    A generic plan does not know the value of a bound parameter, so it cannot use a partial index whose
    predicate names that value. What an index predicate names is therefore written, never bound.

    :param value: a constant of the program, such as a state. Each distinct value is a distinct statement
        to every statement cache, so never a name that a sender chose.
    :raises ValueError: ``value`` holds a backslash or NUL, whose meaning hangs on a server setting.
    """
    if "\\" in value or "\0" in value:
        raise ValueError(f"cannot write {value!r} into SQL; bind it as a parameter")
    quoted = value.replace("'", "''")
    return literal_column(f"'{quoted}'", Text())
