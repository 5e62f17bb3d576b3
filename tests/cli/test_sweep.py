"""``sweep``: charges what it can send, shows what it would."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from support.builders import NOW

if TYPE_CHECKING:
    from cli.conftest import Command
    from support.builders import World

KEY = base64.b64encode(bytes(range(32))).decode()
AT = ("--now", NOW.isoformat())


def test_a_dry_run_shows_what_is_due_and_writes_nothing(world: World, command: Command) -> None:
    inbox = world.queue()
    todo = inbox.pending(age="7m")
    answer = command.json("sweep", "--dry-run", *AT)
    (nudge,) = answer["nudges"]
    assert answer["dry_run"] is True
    assert (nudge["endpoint"], nudge["queue"], nudge["todo_id"]) == (
        inbox.endpoint.row.slug,
        "inbox",
        todo.id,
    )
    assert (nudge["number"], nudge["cap"], nudge["stalled_for"], nudge["next_wait"]) == (1, 5, 420.0, 1200.0)
    assert world.stalls() == {}


def test_charges_the_ledger_and_tells_what_became_of_the_wakes(world: World, command: Command) -> None:
    endpoint = world.endpoint()
    endpoint.hook(url="https://127.0.0.1/hook")
    inbox = endpoint.queue()
    inbox.pending(age="7m")
    command.environment["SWITCHBOARD_SECRET_ENCRYPTION_KEY"] = KEY
    # The hook's stored secret was sealed under another key, so its wake cannot be signed.
    answer = command.json("sweep", *AT)
    assert [nudge["number"] for nudge in answer["nudges"]] == [1]
    assert answer["wakes"] == {"delivered": 0, "failed": 0, "dropped": 1, "skipped": 0}
    assert inbox.stall is not None
    assert command.json("sweep", *AT)["nudges"] == []


def test_without_a_key_it_charges_nothing(world: World, command: Command) -> None:
    inbox = world.queue()
    inbox.pending(age="7m")
    result = command("sweep", *AT)
    assert (result.exit_code, inbox.stall) == (1, None)
    assert "SWITCHBOARD_SECRET_ENCRYPTION_KEY is not set" in result.stderr
    assert "Nothing was charged" in result.stderr


def test_a_sweep_with_nothing_due_needs_no_key(world: World, command: Command) -> None:
    drained = world.queue()
    drained.nudged(3, ago="1h")
    result = command("sweep", *AT)
    assert (result.exit_code, result.stdout) == (0, "No queue is due a nudge.\n")
    assert drained.stall is None


def test_a_time_without_a_zone_is_wrong_use(command: Command) -> None:
    assert command("sweep", "--now", "2026-12-01T12:00").exit_code == 2
