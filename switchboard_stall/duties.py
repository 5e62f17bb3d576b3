"""The duties of the tick, each in a session of its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy.exc import DBAPIError

from switchboard_stall.queue import (
    expire_endpoints,
    reap_lapsed_leases,
    requeue_due_retries,
    rering_unclaimed,
)
from switchboard_stall.reaper import Duty
from switchboard_stall.schedule import STALL_POLICY, StallPolicy
from switchboard_stall.sweep import nudge_stalled_queues

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.orm import Session

_T = TypeVar("_T")


def in_session(session_factory: Callable[[], Session], work: Callable[[Session], _T]) -> Callable[[], _T]:
    """Return ``work`` as a call without arguments, in a session and a READ COMMITTED transaction of its own.

    The transaction commits when ``work`` returns and rolls back when it raises. If the connection to the
    database turns out to be lost, ``work`` runs once more, at once, on a new one: a connection that was cut
    between two ticks costs none. It must therefore bear to run twice, also when only the answer to the
    commit was lost.

    :param session_factory: makes a session; a ``sessionmaker``.
    :param work: is given the session. What it returns must not need the session any more.

    Source: design, "Where the sweep runs".
    """

    def once() -> _T:
        with session_factory() as session:
            session.connection(execution_options={"isolation_level": "READ COMMITTED"})
            result = work(session)
            session.commit()
            return result

    def run() -> _T:
        try:
            return once()
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
        # The pool has thrown out every connection as old as the lost one, so this one is new.
        return once()

    return run


def standard_duties(
    session_factory: Callable[[], Session], *, policy: StallPolicy = STALL_POLICY
) -> tuple[Duty, ...]:
    """Return the duties of one tick, in order: the four sweeps of the wake chain, then the stall sweep.

    :param session_factory: makes the session of each run; a ``sessionmaker``.
    :param policy: when a stalled queue is nudged, and how many a tick.

    Source: design, "Where the sweep runs"; wake chain, "The reaper tick today".
    """
    work: dict[str, Callable[[Session], object]] = {
        "reap lapsed leases": reap_lapsed_leases,
        "requeue due retries": requeue_due_retries,
        "re-ring unclaimed todos": rering_unclaimed,
        "expire endpoints": expire_endpoints,
        "nudge stalled queues": partial(nudge_stalled_queues, policy=policy),
    }
    return tuple(Duty(name, in_session(session_factory, sweep)) for name, sweep in work.items())
