"""What an actor does, as functions of a session: ``actor.does(sweep(at="5m"))`` reads like the scenario."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import frozen
from sqlalchemy import func, inspect, select, text, update
from sqlalchemy.orm import Session
from support.builders import NOW, duration

from switchboard_stall import STALL_POLICY, Endpoint, QueueStall, Todo, nudge_stalled_queues, queue

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable
    from datetime import timedelta

    from support.builders import QueueBuilder

    from switchboard_stall import Base, StallPolicy

PAUSE: Final = 20261201
"""The advisory lock behind ``hold_sweeps``."""

commit = Session.commit
rollback = Session.rollback


@frozen
class Wake:
    """A nudge, as far as two sweeps may quarrel over it."""

    pair: tuple[uuid.UUID, str]
    number: int


def sweep(
    *, at: str | timedelta = "0s", policy: StallPolicy = STALL_POLICY
) -> Callable[[Session], list[Wake]]:
    """Sweep ``at`` so long after ``NOW``; nothing is committed."""

    def act(session: Session) -> list[Wake]:
        nudges = nudge_stalled_queues(session, policy=policy, now=NOW + duration(at))
        return [Wake((nudge.endpoint_id, nudge.queue), nudge.number) for nudge in nudges]

    return act


def claim(pair: QueueBuilder, *, at: str | timedelta = "0s", limit: int = 1) -> Callable[[Session], int]:
    """Claim from the pair, and say how many; nothing is committed."""

    def act(session: Session) -> int:
        now = NOW + duration(at)
        return len(queue.claim(session, pair.endpoint.id, "worker", queues=[pair.name], limit=limit, now=now))

    return act


def release(todo: Todo, *, at: str | timedelta = "0s") -> Callable[[Session], Todo | None]:
    """Put a claimed todo back; nothing is committed."""
    return lambda session: queue.release(session, todo.id, "worker", now=NOW + duration(at))


def finish(pair: QueueBuilder) -> Callable[[Session], object]:
    """Complete whatever the pair still holds; nothing is committed."""
    endpoint_id, name = pair.pair
    return lambda session: session.execute(
        update(Todo).where(Todo.endpoint_id == endpoint_id, Todo.queue == name).values(state="done")
    )


def delete(row: Base) -> Callable[[Session], object]:
    """Delete one row, and what hangs on it; nothing is committed.

    At READ COMMITTED, whatever the engine says: under a stricter level it is the owner who fails.
    """

    def act(session: Session) -> None:
        session.execute(text("SET TRANSACTION ISOLATION LEVEL READ COMMITTED"))
        session.delete(session.get_one(type(row), inspect(row).identity))
        session.flush()

    return act


def hold_sweeps(session: Session) -> None:
    """Let whoever sweeps where ``sweeps_pause`` is wait between its snapshot and its charge."""
    session.execute(select(func.pg_advisory_xact_lock(PAUSE)))


def rescope(row: Endpoint) -> Callable[[Session], object]:
    """Let an endpoint serve one queue more; nothing is committed."""
    return lambda session: session.execute(
        update(Endpoint)
        .where(Endpoint.id == row.id)
        .values(scope_queues=func.array_append(Endpoint.scope_queues, "one more"))
    )


def hold_new_ledger_row(pair: QueueBuilder) -> Callable[[Session], object]:
    """Insert the pair's ledger row, so that whoever charges the pair waits; nothing is committed."""

    def act(session: Session) -> None:
        endpoint_id, name = pair.pair
        session.add(QueueStall(endpoint_id=endpoint_id, queue=name, nudges=1, last_nudged_at=NOW))
        session.flush()

    return act


def hold_ledger_row(pair: QueueBuilder) -> Callable[[Session], object]:
    """Lock the pair's ledger row, so that whoever charges the pair waits."""
    return lambda session: session.get_one(QueueStall, pair.pair, with_for_update=True)
