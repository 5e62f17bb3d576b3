"""The drain reset beside charges and other drains: it takes what nobody else has, and waits for nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.actors import PATIENCE
from support.acts import (
    Wake,
    claim,
    commit,
    delete,
    finish,
    hold_ledger_row,
    release,
    rollback,
    sweep,
)

from switchboard_stall import STALL_POLICY, StallPolicy

if TYPE_CHECKING:
    from support.actors import Stage
    from support.builders import World

ONE_PAIR = StallPolicy(waits=STALL_POLICY.waits, sweep_limit=1)


def test_a_drain_leaves_a_row_that_another_sweep_is_charging_and_does_not_wait_for_it(
    world: World, actor: Stage
) -> None:
    inbox = world.queue()
    inbox.pending(age="1h")
    inbox.nudged(1, ago="20m")
    charger, consumer, drainer = actor("charger"), actor("consumer"), actor("drainer")

    assert charger.does(sweep()) == [Wake(inbox.pair, 2)]
    consumer.does(finish(inbox))
    consumer.does(commit)
    assert drainer.does(sweep()) == []
    drainer.does(commit)
    charger.does(commit)

    assert inbox.stall is not None
    assert inbox.stall.nudges == 2


def test_a_row_that_a_drain_had_to_leave_goes_with_the_next_sweep(world: World, actor: Stage) -> None:
    inbox = world.queue()
    inbox.pending(age="1h")
    inbox.nudged(1, ago="20m")
    charger, consumer, drainer = actor("charger"), actor("consumer"), actor("drainer")
    charger.does(sweep())
    consumer.does(finish(inbox))
    consumer.does(commit)
    drainer.does(sweep())
    drainer.does(commit)
    charger.does(commit)

    drainer.does(sweep())
    drainer.does(commit)

    assert inbox.stall is None


def test_a_drain_leaves_a_row_that_was_charged_after_its_snapshot(world: World, actor: Stage) -> None:
    """The drainer sees the pair empty, and is held at another pair's row until a refill was charged."""
    gated, inbox = world.queue(), world.queue()
    gated.pending(age="2d")
    gated.nudged(4, ago="6h")
    inbox.nudged(3, ago="6h")
    gate, drainer, charger = actor("gate"), actor("drainer"), actor("charger")

    gate.does(hold_ledger_row(gated))
    draining = drainer.starts(sweep())
    drainer.waits_for(gate)
    inbox.pending(age="7m")
    assert charger.does(sweep(policy=ONE_PAIR)) == [Wake(inbox.pair, 4)]
    charger.does(commit)
    gate.does(rollback)

    assert draining.result(PATIENCE) == [Wake(gated.pair, 5)]
    drainer.does(commit)
    assert inbox.stall is not None
    assert inbox.stall.nudges == 4


def test_a_charge_waits_for_a_drain_of_its_row_and_then_opens_a_new_stall(world: World, actor: Stage) -> None:
    inbox = world.queue()
    inbox.nudged(3, ago="6h")
    drainer, charger = actor("drainer"), actor("charger")

    assert drainer.does(sweep()) == []
    inbox.pending(age="7m")
    waiting = charger.starts(sweep())
    charger.waits_for(drainer)
    drainer.does(commit)

    assert waiting.result(PATIENCE) == [Wake(inbox.pair, 1)]
    charger.does(commit)
    assert inbox.stall is not None
    assert inbox.stall.nudges == 1


def test_two_drains_of_the_same_rows_do_not_wait_for_each_other(world: World, actor: Stage) -> None:
    for _ in range(50):
        world.queue().nudged(1, ago="1h")
    first, second = actor("first"), actor("second")

    first.does(sweep())
    second.does(sweep())
    first.does(commit)
    second.does(commit)

    assert world.stalls() == {}


def test_a_drain_that_rolls_back_forgets_nothing(world: World, actor: Stage) -> None:
    inbox = world.queue()
    inbox.nudged(3, ago="6h")
    first, second = actor("first"), actor("second")

    first.does(sweep())
    second.does(sweep())
    second.does(commit)
    first.does(rollback)

    assert inbox.stall is not None


def test_a_pair_that_was_charged_drained_and_refilled_is_not_woken_within_the_first_wait(
    world: World, actor: Stage
) -> None:
    inbox = world.queue()
    inbox.pending(age="7m")
    sweeper, consumer = actor("sweeper"), actor("consumer")
    assert sweeper.does(sweep()) == [Wake(inbox.pair, 1)]
    sweeper.does(commit)

    consumer.does(claim(inbox, at="1s"))
    consumer.does(commit)
    assert sweeper.does(sweep(at="2s")) == []
    sweeper.does(commit)
    assert inbox.stall is None
    inbox.pending(age="-3s")

    assert sweeper.does(sweep(at="5m2.999s")) == []
    assert sweeper.does(sweep(at="5m3s")) == [Wake(inbox.pair, 1)]


def test_a_pair_whose_drained_todo_is_released_is_not_woken_within_the_first_wait_of_the_release(
    world: World, actor: Stage
) -> None:
    inbox = world.queue()
    todo = inbox.pending(age="7m")
    sweeper, consumer = actor("sweeper"), actor("consumer")
    sweeper.does(sweep())
    sweeper.does(commit)
    consumer.does(claim(inbox, at="1s"))
    consumer.does(commit)
    sweeper.does(sweep(at="2s"))
    sweeper.does(commit)
    assert inbox.stall is None

    assert consumer.does(release(todo, at="3s")) is not None
    consumer.does(commit)

    assert sweeper.does(sweep(at="5m2.999s")) == []
    assert sweeper.does(sweep(at="5m3s")) == [Wake(inbox.pair, 1)]


def test_a_deleted_endpoint_and_the_drain_of_its_pairs_do_not_deadlock(world: World, actor: Stage) -> None:
    inbox = world.queue()
    inbox.nudged(1, ago="1h")
    drainer, owner = actor("drainer"), actor("owner")

    drainer.does(sweep())
    deleting = owner.starts(delete(inbox.endpoint.row))
    owner.waits_for(drainer)
    drainer.does(commit)

    deleting.result(PATIENCE)
    owner.does(commit)
    assert world.stalls() == {}
