"""Whom a todo is told to: each hook that may be told, the oldest first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy.orm import Session

from switchboard_stall.notify.eligible import receivers

if TYPE_CHECKING:
    from support.builders import World


def test_hooks_are_told_in_the_order_in_which_they_were_made(world: World) -> None:
    endpoint = world.endpoint(scope=["inbox"])
    ages = ("2d", "5d", "1d", "4d", "3d")
    made = {age: endpoint.hook(created_at=world.ago(age)).id for age in ages}
    todos = [endpoint.queue().pending(age="1h").id for _ in range(3)]
    with Session(world.engine) as session:
        found = receivers(session, todos)
    oldest_first = [made[age] for age in sorted(ages, reverse=True)]
    assert {todo: [hook for hook, *_ in hooks] for todo, hooks in found.items()} == dict.fromkeys(
        todos, oldest_first
    )
