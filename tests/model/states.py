"""Whole states as no history would make them, with a liking for exact boundaries and ties."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

from attrs import field, frozen
from hypothesis import strategies as st
from model.twin import Charge, Endpoint, Hook, Pair, Todo, Twin
from support.builders import NOW

from switchboard_stall.models import QUARANTINE, TODO_STATES
from switchboard_stall.schedule import STALL_POLICY, StallPolicy

if TYPE_CHECKING:
    from datetime import datetime

QUEUES = ("a", "b", "c", "", QUARANTINE)
MILLISECOND, MOMENT = timedelta(milliseconds=1), timedelta(microseconds=1)
EDGES = (timedelta(0), MILLISECOND, -MILLISECOND, MOMENT, -MOMENT)

MINUTE = timedelta(minutes=1)
POLICIES = (
    STALL_POLICY,
    StallPolicy(waits=(MINUTE, 3 * MINUTE, 3 * MINUTE), sweep_limit=2),
    StallPolicy(waits=(MILLISECOND,), sweep_limit=20),
    StallPolicy(waits=(MILLISECOND, MINUTE, 2 * MINUTE, timedelta(days=40)), sweep_limit=20),
    StallPolicy(waits=(7 * MINUTE,) * 7, sweep_limit=20),
)
"""Few, since each is a statement of its own to compile; the schedule has properties for all the others."""

mostly = st.sampled_from((True,) * 7 + (False,))
often = st.booleans()
seldom = st.sampled_from((False,) * 3 + (True,))
edges = st.sampled_from(EDGES)
few_names = st.lists(st.sampled_from(QUEUES), max_size=2)


@frozen
class State:
    """What is in the tables at ``NOW``, and the policy that the sweep is given."""

    policy: StallPolicy
    rows: Twin


@frozen
class Times:
    """Instants that matter under one policy, each with its edges."""

    policy: StallPolicy
    about: st.SearchStrategy[datetime] = field(init=False)
    long_ago: st.SearchStrategy[datetime] = field(init=False)

    @about.default
    def _no_one_or_two_waits_before_now_or_seldom_a_wait_after_it(self) -> st.SearchStrategy[datetime]:
        waits = dict.fromkeys((*self.policy.waits, timedelta(0)))
        spans = dict.fromkeys((*waits, *(one + other for one in waits for other in waits)))
        before = [NOW + edge - span for edge in EDGES for span in spans]
        return st.sampled_from(before + [NOW + wait for wait in waits])

    @long_ago.default
    def _longer_ago_than_all_waits(self) -> st.SearchStrategy[datetime]:
        return self.ago(sum(self.policy.waits, timedelta(1)))

    def ago(self, span: timedelta) -> st.SearchStrategy[datetime]:
        return st.sampled_from([NOW - span + edge for edge in EDGES])


@st.composite
def states(draw: st.DrawFn) -> State:
    """A policy, at most 4 endpoints with 2 hooks each, and any queues with rows of any age and state.

    Most conditions mostly hold, so that the one that is on its edge decides.
    """
    policy = draw(st.sampled_from(POLICIES))
    times = Times(policy)
    rows = Twin()
    for number in range(draw(st.sampled_from((1, 2, 3, 4)))):
        endpoint = Endpoint(
            id=uuid.UUID(int=number),
            scope=QUEUES if draw(mostly) else tuple(draw(few_names)),
            state="active" if draw(mostly) else "revoked",
            expires_at=NOW + draw(edges) if draw(seldom) else None,
        )
        rows.endpoints[endpoint.id] = endpoint
        for other in range(draw(st.sampled_from((1, 1, 2, 0)))):
            hook = Hook(
                id=uuid.UUID(int=number * 10 + other),
                endpoint=endpoint.id,
                enabled=draw(mostly),
                queues=() if draw(mostly) else tuple(draw(few_names)),
            )
            rows.hooks[hook.id] = hook
        for queue, there in zip(QUEUES, (mostly, mostly, mostly, often, seldom), strict=True):
            if draw(there):
                _queue(draw, times, rows, (endpoint.id, queue))
    return State(policy, rows)


def _queue(draw: st.DrawFn, times: Times, rows: Twin, pair: Pair) -> None:
    endpoint, queue = pair
    policy = times.policy
    first_wait_ago = times.ago(policy.waits[0])
    birth = first_wait_ago | times.about | st.just(NOW) if draw(seldom) else times.long_ago
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3, 0)))):
        created_at = draw(birth)
        requeued_at = draw(first_wait_ago | times.about) if draw(seldom) else None
        todo = Todo(
            # Not in the order of creation, so that a tie in time is broken by id and not by chance.
            id=f"td_{len(rows.todos) * 7 % 100}",
            endpoint=endpoint,
            queue=queue,
            created_at=created_at,
            updated_at=requeued_at or created_at,
            vouched=draw(mostly),
            state="pending" if draw(mostly) else draw(st.sampled_from(TODO_STATES)),
            claimed_at=draw(times.about) if draw(seldom) else None,
        )
        rows.todos[todo.id] = todo
    if draw(seldom):
        claimed_at = draw(times.about | times.long_ago)
        todo_id = f"td_{len(rows.todos) * 7 % 100}"
        rows.todos[todo_id] = Todo(
            todo_id, endpoint, queue, claimed_at, claimed_at, state="done", claimed_at=claimed_at
        )
    if draw(often):
        nudges = draw(st.sampled_from((*range(1, policy.cap), policy.cap, policy.cap - 1, 7, 0)))
        next_wait = policy.waits[min(nudges, policy.cap - 1)]
        claims = [todo.claimed_at for todo in rows.todos.values() if todo.pair == pair and todo.claimed_at]
        seen = max(claims, default=None) if draw(often) else draw(st.none() | times.about | times.long_ago)
        rows.ledger[pair] = Charge(nudges, draw(times.ago(next_wait) | times.about), seen)
