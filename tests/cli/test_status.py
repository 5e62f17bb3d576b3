"""``status``: each pair of the ledger with its place on the schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.builders import NOW

if TYPE_CHECKING:
    from cli.conftest import Command
    from support.builders import World

AT = ("--now", NOW.isoformat())


def test_tells_where_each_queue_stands(world: World, command: Command) -> None:
    waiting = world.queue("waiting")
    waiting.pending(age="1h")
    waiting.nudged(1, ago="19m")
    due = world.queue("due")
    due.pending(age="1h")
    due.nudged(1, ago="20m")
    silent = world.queue("silent")
    silent.pending(age="3d")
    silent.nudged(5, ago="2d")
    moving = world.queue("moving")
    moving.pending(age="1h")
    moving.claimed(ago="1m")
    moving.nudged(2, ago="10m")
    drained = world.queue("drained")
    drained.nudged(1, ago="10m")
    blocked = world.endpoint(scope=["blocked"]).queue("blocked")
    blocked.pending(age="1h")
    blocked.nudged(1, ago="20m")

    answer = command.json("status", *AT)
    assert {each["queue"]: each["state"] for each in answer["queues"]} == {
        name: name for name in ("due", "waiting", "silent", "blocked", "moving", "drained")
    }
    assert answer["total"] == 6
    assert set(answer["totals"].values()) == {1}
    (first,) = (each for each in answer["queues"] if each["queue"] == "waiting")
    assert (first["spent"], first["cap"], first["next_due"]) == (1, 5, "2026-12-01T12:01:00Z")

    shown = command("status", *AT).stdout
    assert "in 1 min" in shown
    assert "silent: all nudges spent" in shown


def test_lists_no_more_than_asked_and_counts_all(world: World, command: Command) -> None:
    endpoint = world.endpoint(scope=["0", "1", "2"])
    for name in "012":
        endpoint.queue(name).pending(age="1h")
        endpoint.queue(name).nudged(1, ago="1m")
    assert len(command.json("status", "--limit", "2", *AT)["queues"]) == 2
    result = command("status", "--limit", "2", *AT)
    assert "... and 1 more" in result.stdout
    assert "3 in the ledger" in result.stdout


def test_an_empty_ledger_is_no_news(command: Command) -> None:
    result = command("status")
    assert (result.exit_code, result.stdout) == (0, "No queue is stalled: the ledger is empty.\n")


def test_a_hostile_queue_name_stays_on_its_line(world: World, command: Command) -> None:
    queue = world.queue('in\nbox "ü"')
    queue.pending(age="1h")
    queue.nudged(1, ago="1m")
    lines = command("status", *AT).stdout.splitlines()
    assert '"in\\nbox \\"\\u00fc\\""' in lines[1]
