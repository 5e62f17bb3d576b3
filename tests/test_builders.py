from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import func, select
from support.builders import NOW, World, duration
from support.databases import empty

from switchboard_stall.models import Todo

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.orm import Session


@pytest.mark.parametrize(
    ("told", "meant"),
    [
        ("7m", timedelta(minutes=7)),
        ("1h30m", timedelta(hours=1, minutes=30)),
        ("4m59.5s", timedelta(minutes=4, seconds=59.5)),
        ("250ms", timedelta(milliseconds=250)),
        ("-2d", timedelta(days=-2)),
        (timedelta(seconds=3), timedelta(seconds=3)),
    ],
)
def test_a_duration_is_told_in_words(told: str | timedelta, meant: timedelta) -> None:
    assert duration(told) == meant


@pytest.mark.parametrize("told", ["", "7", "m", "7 m", "7m!", "--7m"])
def test_what_is_no_duration_is_refused(told: str) -> None:
    with pytest.raises(ValueError, match="is no duration"):
        duration(told)


def test_a_scenario_is_committed_relative_to_now(world: World, session: Session) -> None:
    inbox = world.queue("inbox")
    waiting = inbox.pending(age="7m", vouched=False)
    again = inbox.requeued(ago="2m")
    running = inbox.claimed(ago="3m", age="9m")

    rows = {todo.id: todo for todo in session.scalars(select(Todo))}

    assert rows[waiting.id].created_at == rows[waiting.id].updated_at == NOW - timedelta(minutes=7)
    assert not rows[waiting.id].vouched
    assert rows[again.id].updated_at == NOW - timedelta(minutes=2)
    assert rows[again.id].claimed_at == NOW - timedelta(minutes=7)
    assert rows[running.id].lease_expires_at == NOW + timedelta(minutes=2)


def test_the_ledger_is_read_by_pair(world: World) -> None:
    inbox = world.queue("inbox")
    assert inbox.stall is None

    inbox.nudged(2, ago="20m", last_claim_ago="1h")

    assert world.stalls().keys() == {inbox.pair}
    assert inbox.stall is not None
    assert inbox.stall.nudges == 2
    assert inbox.stall.last_claim_at == NOW - timedelta(hours=1)


def test_empty_leaves_no_row(world: World, engine: Engine, session: Session) -> None:
    world.queue("inbox").pending(age="7m")

    empty(engine)

    assert session.scalar(select(func.count()).select_from(Todo)) == 0
