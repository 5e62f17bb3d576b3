"""``sweep``: one sweep, now, with the wakes it owes."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click
from sqlalchemy import select
from sqlalchemy.orm import Session

from switchboard_stall.cli.database import connected, database_option, now_option
from switchboard_stall.cli.output import duration, echo_json, quoted, say, table
from switchboard_stall.cli.wake import Allowed, allow_options, dispatcher, waking
from switchboard_stall.clock import instant
from switchboard_stall.models import Endpoint
from switchboard_stall.notify.secrets import SecretKeyError
from switchboard_stall.schedule import STALL_POLICY
from switchboard_stall.statement import due_statement
from switchboard_stall.sweep import Nudge, nudge_stalled_queues

SENDING: Final = timedelta(minutes=2)
"""The longest that a sweep waits for its wakes: all retries of a few hooks, and some slack."""

if TYPE_CHECKING:
    import uuid
    from collections.abc import Iterable

    from sqlalchemy import Engine


@click.command("sweep")
@click.option("--dry-run", is_flag=True, help="Only show what would be nudged: no charge, no wake, no write.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@allow_options
@now_option
@database_option
def sweep(
    dry_run: bool, as_json: bool, allow_cidr: tuple[str, ...], allow_http: bool, now: datetime | None
) -> None:
    """Run one sweep: charge the queues that are due a nudge, and send their wakes.

    It ends when each wake was delivered or given up. `run` does this on every tick.
    """
    sent: dict[str, int] | None = None
    with connected() as engine:
        if dry_run:
            found = _would_nudge(engine, now)
        else:
            found, sent = _nudge(engine, Allowed(allow_cidr, allow_http), now)
    if as_json:
        echo_json({"dry_run": dry_run, "nudges": found, "wakes": sent})
        return
    if not found:
        say("No queue is due a nudge.")
        return
    heading = ("endpoint", "queue", "nudge", "stalled for", "next wait", "todo")
    say(table([heading, *(_row(each) for each in found)]))
    say()
    if sent is None:
        say("Nothing was charged and nobody was woken: this was a dry run.")
    else:
        say("wakes: " + ", ".join(f"{count} {outcome}" for outcome, count in sent.items()))


def _nudge(
    engine: Engine, allowed: Allowed, now: datetime | None
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Sweep, send, and wait until each wake was delivered or given up."""
    with ExitStack() as stack:
        missing: SecretKeyError | None = None
        try:
            sender = stack.enter_context(waking(dispatcher(engine, allowed)))
        except SecretKeyError as error:
            missing = error
        with Session(engine) as session:
            nudges = nudge_stalled_queues(session, now=now)
            if nudges and missing is not None:
                # A charge without a wake would eat the budget of a queue that nobody was told about.
                session.rollback()
                raise click.ClickException(
                    f"{len(nudges)} of the queues are due a nudge, and no wake could be sent: {missing}. "
                    "Nothing was charged; --dry-run shows them"
                )
            present = session.scalar(select(instant(now)))
            assert present is not None
            slugs = _slugs(session, (nudge.endpoint_id for nudge in nudges))
            found = [_nudged(nudge, slugs, present) for nudge in nudges]
            session.commit()
        if missing is not None:
            return found, {"delivered": 0, "failed": 0, "dropped": 0, "skipped": 0}
        idle = sender.wait_idle(SENDING)
        stats = sender.stats
    sent = {
        "delivered": stats.delivered,
        "failed": sum(stats.failed.values()),
        "dropped": sum(stats.dropped.values()),
        "skipped": sum(stats.skipped.values()),
    }
    return found, sent if idle else {**sent, "unfinished": stats.ready + stats.deliveries + stats.running}


def _would_nudge(engine: Engine, now: datetime | None) -> list[dict[str, Any]]:
    with Session(engine) as session:
        rows = session.execute(due_statement(now=now)).all()
        present = session.scalar(select(instant(now)))
        assert present is not None
        slugs = _slugs(session, (row.endpoint_id for row in rows))
        return [
            {
                "endpoint": slugs.get(row.endpoint_id),
                "endpoint_id": row.endpoint_id,
                "queue": row.queue,
                "number": row.spent + 1,
                "cap": STALL_POLICY.cap,
                "stalled_since": row.stalled_since,
                "stalled_for": present - row.stalled_since,
                "next_wait": STALL_POLICY.next_wait(row.spent + 1),
                "todo_id": row.todo_id,
            }
            for row in rows
        ]


def _nudged(nudge: Nudge, slugs: dict[uuid.UUID, str], present: datetime) -> dict[str, Any]:
    return {
        "endpoint": slugs.get(nudge.endpoint_id),
        "endpoint_id": nudge.endpoint_id,
        "queue": nudge.queue,
        "number": nudge.number,
        "cap": STALL_POLICY.cap,
        "stalled_since": nudge.stalled_since,
        "stalled_for": present - nudge.stalled_since,
        "next_wait": nudge.next_wait,
        "todo_id": nudge.todo.id,
    }


def _slugs(session: Session, ids: Iterable[uuid.UUID]) -> dict[uuid.UUID, str]:
    rows = session.execute(select(Endpoint.id, Endpoint.slug).where(Endpoint.id.in_(list(ids))))
    return {row.id: row.slug for row in rows}


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    next_wait: timedelta | None = each["next_wait"]
    return (
        quoted(each["endpoint"] or str(each["endpoint_id"])),
        quoted(each["queue"]),
        f"{each['number']} of {each['cap']}",
        duration(each["stalled_for"]),
        "none: silence" if next_wait is None else duration(next_wait),
        each["todo_id"],
    )
