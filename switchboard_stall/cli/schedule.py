"""``schedule``: the waits of one stall, added up to silence."""

from __future__ import annotations

from datetime import timedelta
from itertools import accumulate

import click

from switchboard_stall.cli.output import duration, echo_json, say, table
from switchboard_stall.schedule import STALL_POLICY, StallPolicy


@click.command("schedule")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def schedule(as_json: bool) -> None:
    """Show when a stalled queue is nudged, from its last sign of life to silence."""
    if as_json:
        echo_json(
            {
                "waits": list(STALL_POLICY.waits),
                "nudges_at": list(accumulate(STALL_POLICY.waits)),
                "cap": STALL_POLICY.cap,
                "sweep_limit": STALL_POLICY.sweep_limit,
            }
        )
    else:
        say(timeline(STALL_POLICY))


def timeline(policy: StallPolicy) -> str:
    """Return the schedule as a table with a bar for each wait."""
    total = sum(policy.waits, timedelta())
    rows = [("nudge", "waits", "since", "after", "")]
    for number, (wait, after) in enumerate(zip(policy.waits, accumulate(policy.waits), strict=True), 1):
        since = "the last sign of life" if number == 1 else f"nudge {number - 1}"
        bar = "." * round(40 * ((after - wait) / total)) + "#" * max(1, round(40 * (wait / total)))
        rows.append((str(number), duration(wait), since, duration(after), bar))
    rows.append(("-", "", "", "", "then silence, until a claim or a drain"))
    pairs = "1 queue" if policy.sweep_limit == 1 else f"{policy.sweep_limit} queues"
    life = "A sign of life is a new oldest todo, a claim, or a requeue."
    return f"{table(rows)}\n\n{life} At most {pairs} a sweep."
