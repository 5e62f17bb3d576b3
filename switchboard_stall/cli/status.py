"""``status``: every pair in the ledger, and where on the schedule it is."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import click
from attrs import frozen
from sqlalchemy import select

from switchboard_stall.cli.database import connected, database_option, now_option
from switchboard_stall.cli.output import duration, echo_json, quoted, say, table
from switchboard_stall.cli.why import Facts, Judgement, facts_statement, judge
from switchboard_stall.models import QueueStall
from switchboard_stall.schedule import STALL_POLICY

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection

STATES: Final = {
    "due": "due now",
    "waiting": "waiting for the next nudge",
    "silent": "silent: all nudges spent",
    "blocked": "nobody may be woken",
    "moving": "claimed since the last nudge",
    "drained": "no pending work any more",
}
"""What a pair in the ledger can be, the one that wants a person first."""


@frozen
class Standing:
    """One pair of the ledger, with its facts and what the rule makes of them."""

    facts: Facts
    judgement: Judgement

    @property
    def state(self) -> str:
        """A key of :data:`STATES`."""
        facts, judged = self.facts, self.judgement
        if facts.oldest is None:
            return "drained"
        if judged.spent >= STALL_POLICY.cap:
            return "silent"
        if not judged.eligible:
            return "blocked"
        if judged.due:
            return "due"
        return "waiting" if judged.spent else "moving"


def standings(connection: Connection, *, now: datetime | None = None) -> list[Standing]:
    """Return every pair of the ledger, by state and then by when it is due. A few probes a pair.

    :param now: an aware datetime; ``None`` for the database's clock.
    """
    ledger = select(QueueStall.endpoint_id, QueueStall.queue).subquery("ledger")
    facts = [Facts(**row._mapping) for row in connection.execute(facts_statement(ledger, now))]
    found = [Standing(each, judge(each)) for each in facts]
    order = list(STATES)
    return sorted(
        found,
        key=lambda each: (
            order.index(each.state),
            each.judgement.next_due or each.facts.last_nudged_at or each.facts.now,
            each.facts.slug,
            each.facts.queue,
        ),
    )


@click.command("status")
@click.option(
    "--limit", type=click.IntRange(min=0), default=50, show_default=True, help="Queues to list; 0 for all."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@now_option
@database_option
def status(limit: int, as_json: bool, now: datetime | None) -> None:
    """Show the stalled queues: how often each was nudged, and what comes next.

    A queue is here from its first nudge until it has no pending work. `why` explains one of them.
    """
    with connected() as engine, engine.connect() as connection:
        found = standings(connection, now=now)
    shown = found[:limit] if limit else found
    totals = Counter(each.state for each in found)
    if as_json:
        echo_json(
            {
                "total": len(found),
                "totals": {state: totals[state] for state in STATES},
                "queues": [_listed(each) for each in shown],
            }
        )
        return
    if not found:
        say("No queue is stalled: the ledger is empty.")
        return
    heading = ("endpoint", "queue", "nudges", "last nudge", "next nudge", "state")
    say(table([heading, *(_row(each) for each in shown)]))
    if len(shown) < len(found):
        say(f"... and {len(found) - len(shown)} more: --limit 0 lists all")
    say()
    say(f"{len(found)} in the ledger: " + ", ".join(f"{totals[state]} {state}" for state in STATES))


def _row(each: Standing) -> tuple[str, ...]:
    facts, judged = each.facts, each.judgement
    assert facts.last_nudged_at is not None
    if judged.next_due is None:
        upcoming = "-"
    elif judged.due:
        upcoming = "now" if judged.eligible else "-"
    else:
        upcoming = f"in {duration(judged.next_due - facts.now)}"
    return (
        quoted(facts.slug),
        quoted(facts.queue),
        f"{judged.spent} of {STALL_POLICY.cap}",
        f"{duration(facts.now - facts.last_nudged_at)} ago",
        upcoming,
        STATES[each.state],
    )


def _listed(each: Standing) -> dict[str, object]:
    facts, judged = each.facts, each.judgement
    return {
        "endpoint": facts.slug,
        "endpoint_id": facts.endpoint_id,
        "queue": facts.queue,
        "state": each.state,
        "nudges": facts.nudges,
        "spent": judged.spent,
        "cap": STALL_POLICY.cap,
        "last_nudged_at": facts.last_nudged_at,
        "next_due": judged.next_due,
        "reasons": [reason.code for reason in judged.reasons],
    }
