"""One short transaction for one piece of work, and a second one when the connection turns out to be lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from sqlalchemy.exc import DBAPIError

from switchboard_stall.models import Todo

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.orm import Session

_T = TypeVar("_T")


def in_transaction(session_factory: Callable[[], Session], work: Callable[[Session], _T]) -> _T:
    """Do ``work`` in a session and a READ COMMITTED transaction of its own, and return what it returned.

    The transaction commits when ``work`` returns and rolls back when it raises. If the connection to the
    database turns out to be lost, ``work`` runs once more, at once, on a new one. It must therefore bear to
    run twice, also when only the answer to the commit was lost.

    :param session_factory: makes a session; a ``sessionmaker``.
    :param work: is given the session. What it returns must not need the session any more.
    :raises sqlalchemy.exc.DBAPIError: the database refused, or the connection was lost again.
    """

    def once() -> _T:
        with session_factory() as session:
            # Before anything else begins it: on the connection that keeps todos, where there are several.
            session.connection({"mapper": Todo}, execution_options={"isolation_level": "READ COMMITTED"})
            result = work(session)
            session.commit()
            return result

    try:
        return once()
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
    # The pool has thrown out every connection as old as the lost one, so this one is new.
    return once()
