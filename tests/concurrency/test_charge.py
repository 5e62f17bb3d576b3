"""Two sweeps of one pair: one wake, whoever commits first, late, or never."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.actors import PATIENCE
from support.acts import (
    Wake,
    claim,
    commit,
    delete,
    hold_ledger_row,
    hold_new_ledger_row,
    hold_sweeps,
    rescope,
    rollback,
    sweep,
)

from switchboard_stall import STALL_POLICY, StallPolicy

if TYPE_CHECKING:
    from support.actors import Stage
    from support.builders import QueueBuilder, World

ONE_PAIR = StallPolicy(waits=STALL_POLICY.waits, sweep_limit=1)


def in_key_order(*pairs: QueueBuilder) -> list[QueueBuilder]:
    """The pairs as the ledger's primary key orders them."""
    return sorted(pairs, key=lambda queue: queue.pair)


@pytest.mark.parametrize(
    ("charged", "ago", "second_sweeps_at"),
    [
        pytest.param(0, None, "0s", id="its first"),
        pytest.param(1, "20m", "0s", id="its second"),
        pytest.param(4, "6h", "1d", id="its last, and the other sweep comes a day later"),
    ],
)
def test_of_two_sweeps_that_see_a_nudge_due_one_charges_it_and_the_other_waits_and_returns_nothing(
    world: World, actor: Stage, charged: int, ago: str | None, second_sweeps_at: str
) -> None:
    inbox = world.queue()
    inbox.pending(age="2d" if charged else "7m")
    if ago is not None:
        inbox.nudged(charged, ago=ago)
    first, second = actor("first"), actor("second")

    assert first.does(sweep()) == [Wake(inbox.pair, charged + 1)]
    waiting = second.starts(sweep(at=second_sweeps_at))
    second.waits_for(first)
    first.does(commit)

    assert waiting.result(PATIENCE) == []
    second.does(commit)
    assert inbox.stall is not None
    assert inbox.stall.nudges == charged + 1


def test_when_the_first_charger_rolls_back_the_second_wins(world: World, actor: Stage) -> None:
    inbox = world.queue()
    inbox.pending(age="7m")
    first, second = actor("first"), actor("second")

    first.does(sweep())
    waiting = second.starts(sweep())
    second.waits_for(first)
    first.does(rollback)

    assert waiting.result(PATIENCE) == [Wake(inbox.pair, 1)]
    second.does(commit)
    assert inbox.stall is not None


def test_a_charge_that_commits_long_after_its_statement_still_paces_from_its_statement(
    world: World, actor: Stage
) -> None:
    inbox = world.queue()
    inbox.pending(age="7m")
    slow, early, due = actor("slow"), actor("early"), actor("due")

    slow.does(sweep())
    within = early.starts(sweep(at="19m59.999s"))
    early.waits_for(slow)
    slow.does(commit)

    assert within.result(PATIENCE) == []
    early.does(commit)
    assert due.does(sweep(at="20m")) == [Wake(inbox.pair, 2)]


def test_a_sweep_that_waited_past_the_next_wait_for_a_slow_commit_gives_the_next_nudge(
    world: World, actor: Stage
) -> None:
    inbox = world.queue()
    inbox.pending(age="7m")
    slow, later = actor("slow"), actor("later")

    slow.does(sweep())
    waiting = later.starts(sweep(at="20m"))
    later.waits_for(slow)
    slow.does(commit)

    assert waiting.result(PATIENCE) == [Wake(inbox.pair, 2)]


def test_a_sweep_with_an_older_clock_than_the_charge_it_waited_for_returns_nothing(
    world: World, actor: Stage
) -> None:
    inbox = world.queue()
    inbox.pending(age="7m")
    ahead, behind = actor("ahead"), actor("behind")

    ahead.does(sweep(at="1m"))
    waiting = behind.starts(sweep())
    behind.waits_for(ahead)
    ahead.does(commit)

    assert waiting.result(PATIENCE) == []
    behind.does(commit)
    assert inbox.stall is not None
    assert inbox.stall.last_nudged_at == world.after("1m")


def test_a_claim_that_began_before_the_sweep_and_committed_after_it_is_progress(
    world: World, actor: Stage
) -> None:
    inbox = world.queue()
    inbox.pending(age="8m")
    inbox.pending(age="7m")
    worker, sweeper = actor("worker"), actor("sweeper")

    assert worker.does(claim(inbox, at="-1s")) == 1
    assert sweeper.does(sweep()) == [Wake(inbox.pair, 1)]
    sweeper.does(commit)
    worker.does(commit)

    assert sweeper.does(sweep(at="4m59.999s")) == []
    assert sweeper.does(sweep(at="5m")) == [Wake(inbox.pair, 1)]


def test_a_claim_that_the_charge_saw_is_no_progress(world: World, actor: Stage) -> None:
    inbox = world.queue()
    inbox.pending(age="8m")
    inbox.pending(age="7m")
    worker, sweeper = actor("worker"), actor("sweeper")

    worker.does(claim(inbox, at="-6m"))
    worker.does(commit)
    assert sweeper.does(sweep()) == [Wake(inbox.pair, 1)]
    sweeper.does(commit)

    assert sweeper.does(sweep(at="19m59.999s")) == []
    assert sweeper.does(sweep(at="20m")) == [Wake(inbox.pair, 2)]


def test_a_claim_after_the_charge_that_a_sweep_waits_for_opens_a_fresh_budget(
    world: World, actor: Stage
) -> None:
    inbox = world.queue()
    inbox.pending(age="8m")
    inbox.pending(age="7m")
    slow, worker, later = actor("slow"), actor("worker"), actor("later")

    slow.does(sweep())
    worker.does(claim(inbox, at="1s"))
    worker.does(commit)
    waiting = later.starts(sweep(at="5m1s"))
    later.waits_for(slow)
    slow.does(commit)

    assert waiting.result(PATIENCE) == [Wake(inbox.pair, 1)]


def test_a_sweep_that_missed_the_claim_that_a_later_charge_saw_opens_no_fresh_budget(
    world: World, actor: Stage
) -> None:
    gated, inbox = in_key_order(world.queue(), world.queue())
    gated.pending(age="2h")
    gated.nudged(1, ago="1h")
    for _ in range(3):
        inbox.pending(age="2h")
    inbox.nudged(1, ago="1h")
    gate, worker, missed, saw = actor("gate"), actor("worker"), actor("missed"), actor("saw")
    worker.does(claim(inbox, at="-50m"))
    worker.does(commit)

    gate.does(hold_ledger_row(gated))
    waiting = missed.starts(sweep(at="6m"))
    missed.waits_for(gate)
    worker.does(claim(inbox, at="-10m"))
    worker.does(commit)
    assert saw.does(sweep(policy=ONE_PAIR)) == [Wake(inbox.pair, 1)]
    saw.does(commit)
    gate.does(rollback)

    assert waiting.result(PATIENCE) == [Wake(gated.pair, 2)]


def test_a_sweep_waits_for_nobody_who_claims_and_nobody_who_claims_waits_for_a_sweep(
    world: World, actor: Stage
) -> None:
    inbox = world.queue()
    inbox.pending(age="8m")
    inbox.pending(age="7m")
    early, sweeper, late = actor("early"), actor("sweeper"), actor("late")

    assert early.does(claim(inbox)) == 1
    assert sweeper.does(sweep()) == [Wake(inbox.pair, 1)]
    assert late.does(claim(inbox)) == 1


def test_two_sweeps_that_see_many_pairs_in_opposite_orders_do_not_deadlock(
    world: World, actor: Stage
) -> None:
    """Between the snapshots the first and the last in line change places; the one between is held."""
    low, middle, high = in_key_order(*(world.queue() for _ in range(3)))
    oldest = low.pending(age="2h")
    low.pending(age="10m")
    middle.pending(age="1h")
    high.pending(age="20m")
    gate, first, second, sender = actor("gate"), actor("first"), actor("second"), actor("sender")

    gate.does(hold_new_ledger_row(middle))
    charging = first.starts(sweep())
    first.waits_for(gate)
    sender.does(delete(oldest))
    sender.does(commit)
    high.pending(age="3h")
    waiting = second.starts(sweep())
    second.waits_for(first)
    gate.does(rollback)

    assert charging.result(PATIENCE) == [Wake(pair.pair, 1) for pair in (low, middle, high)]
    first.does(commit)
    assert waiting.result(PATIENCE) == []


@pytest.mark.parametrize("earlier", [0, 1])
def test_an_endpoint_deleted_between_snapshot_and_charge_is_left_out_and_the_others_are_charged(
    world: World, actor: Stage, sweeps_pause: None, earlier: int
) -> None:
    kept, doomed = world.queue(), world.queue()
    for pair in (kept, doomed):
        pair.pending(age="1h")
        if earlier:
            pair.nudged(earlier, ago="20m")
    gate, sweeper, owner = actor("gate"), actor("sweeper"), actor("owner")

    gate.does(hold_sweeps)
    charging = sweeper.starts(sweep())
    sweeper.waits_for(gate)
    owner.does(delete(doomed.endpoint.row))
    owner.does(commit)
    gate.does(rollback)

    assert charging.result(PATIENCE) == [Wake(kept.pair, earlier + 1)]
    sweeper.does(commit)
    assert {pair: row.nudges for pair, row in world.stalls().items()} == {kept.pair: earlier + 1}


def test_an_endpoint_changed_between_snapshot_and_charge_is_charged_all_the_same(
    world: World, actor: Stage, sweeps_pause: None
) -> None:
    inbox = world.queue()
    inbox.pending(age="1h")
    gate, sweeper, owner = actor("gate"), actor("sweeper"), actor("owner")

    gate.does(hold_sweeps)
    charging = sweeper.starts(sweep())
    sweeper.waits_for(gate)
    owner.does(rescope(inbox.endpoint.row))
    owner.does(commit)
    gate.does(rollback)

    assert charging.result(PATIENCE) == [Wake(inbox.pair, 1)]


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_sweep_waits_for_nobody_who_changes_an_endpoint(world: World, actor: Stage, earlier: int) -> None:
    inbox = world.queue()
    inbox.pending(age="1h")
    if earlier:
        inbox.nudged(earlier, ago="20m")
    sweeper, owner = actor("sweeper"), actor("owner")

    owner.does(rescope(inbox.endpoint.row))
    assert sweeper.does(sweep()) == [Wake(inbox.pair, earlier + 1)]
    owner.does(commit)
    sweeper.does(commit)
    assert {pair: row.nudges for pair, row in world.stalls().items()} == {inbox.pair: earlier + 1}


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_sweep_waits_for_nobody_who_deletes_endpoints_so_neither_can_deadlock(
    world: World, actor: Stage, earlier: int
) -> None:
    first, second = in_key_order(world.queue(), world.queue())
    for pair, age in ((first, "1h"), (second, "2h")):
        pair.pending(age=age)
        if earlier:
            pair.nudged(earlier, ago="20m")
    sweeper, owner = actor("sweeper"), actor("owner")

    owner.does(delete(first.endpoint.row))
    assert sweeper.does(sweep()) == [Wake(second.pair, earlier + 1)]
    deleting = owner.starts(delete(second.endpoint.row))
    owner.waits_for(sweeper)
    sweeper.does(commit)
    deleting.result(PATIENCE)

    owner.does(rollback)
    assert sweeper.does(sweep()) == [Wake(first.pair, earlier + 1)]


def test_an_endpoint_that_a_charge_holds_is_deleted_after_it_without_deadlock(
    world: World, actor: Stage
) -> None:
    inbox = world.queue()
    inbox.pending(age="7m")
    sweeper, owner = actor("sweeper"), actor("owner")

    sweeper.does(sweep())
    deleting = owner.starts(delete(inbox.endpoint.row))
    owner.waits_for(sweeper)
    sweeper.does(commit)

    deleting.result(PATIENCE)
    owner.does(commit)
    assert world.stalls() == {}
