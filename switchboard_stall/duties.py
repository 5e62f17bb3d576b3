"""The duties of the tick, each in a session of its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from switchboard_stall.queue import (
    expire_endpoints,
    reap_lapsed_leases,
    requeue_due_retries,
    rering_unclaimed,
)
from switchboard_stall.reaper import Duty
from switchboard_stall.schedule import STALL_POLICY, StallPolicy
from switchboard_stall.sweep import nudge_stalled_queues
from switchboard_stall.transaction import in_transaction

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.orm import Session

_T = TypeVar("_T")


def in_session(session_factory: Callable[[], Session], work: Callable[[Session], _T]) -> Callable[[], _T]:
    """Return ``work`` as a call without arguments: a duty's ``run``, in a transaction of its own.

    A connection that was cut between two ticks costs none: :func:`.transaction.in_transaction` says what
    ``work`` must bear for that, and what is raised.

    :param session_factory: makes a session; a ``sessionmaker``.
    :param work: is given the session. What it returns must not need the session any more.

    Source: design, "Where the sweep runs".
    """
    return partial(in_transaction, session_factory, work)


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
