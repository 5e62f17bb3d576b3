"""Whole states as no history would make them, with a liking for exact boundaries and ties."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

from attrs import frozen
from hypothesis import strategies as st
from model.twin import Charge, Endpoint, Hook, Todo, Twin
from support.builders import NOW

from switchboard_stall.models import QUARANTINE, TODO_STATES
from switchboard_stall.schedule import STALL_POLICY, StallPolicy

if TYPE_CHECKING:
    from datetime import datetime

QUEUES = ("a", "b", "", QUARANTINE)
MILLISECOND, MOMENT = timedelta(milliseconds=1), timedelta(microseconds=1)
EDGES = (timedelta(0), -MILLISECOND, MILLISECOND, -MOMENT, MOMENT)

MINUTE = timedelta(minutes=1)
POLICIES = (
    STALL_POLICY,
    StallPolicy(waits=(MINUTE, 3 * MINUTE, 3 * MINUTE), sweep_limit=2),
    StallPolicy(waits=(MILLISECOND,), sweep_limit=1),
    StallPolicy(waits=(MILLISECOND, MINUTE, 2 * MINUTE, timedelta(days=40)), sweep_limit=3),
    StallPolicy(waits=(7 * MINUTE,) * 7, sweep_limit=20),
)
"""Few, since each is a statement of its own to compile; the schedule has properties for all the others."""

mostly = st.sampled_from((True,) * 7 + (False,))
seldom = st.sampled_from((False,) * 3 + (True,))
names = st.sampled_from(QUEUES[:2]) | st.sampled_from(QUEUES)
edges = st.sampled_from((*EDGES, timedelta(hours=1), timedelta(hours=-1)))
few_names = st.lists(names, max_size=2)


@frozen
class State:
    """What is in the tables at ``NOW``, and the policy that the sweep is given."""

    policy: StallPolicy
    rows: Twin


def instants(policy: StallPolicy) -> st.SearchStrategy[datetime]:
    """Half of them long ago, so that one condition is on its edge while the others hold.

    The rest no, one or two waits before ``NOW`` or, seldom, after it: on the edge or beside it.
    """
    waits = dict.fromkeys((*policy.waits, timedelta(0)))
    spans = dict.fromkeys((*waits, *(one + other for one in waits for other in waits)))
    before = [NOW + edge - span for edge in EDGES for span in spans]
    long_ago = [NOW - sum(policy.waits, timedelta(1)) + edge for edge in EDGES]
    return st.sampled_from(long_ago) | st.sampled_from(before + [NOW + wait for wait in waits])


@st.composite
def states(draw: st.DrawFn) -> State:
    """A policy, at most 3 endpoints with 2 hooks each, 10 todos, and a ledger row of any pair."""
    policy = draw(st.sampled_from(POLICIES))
    times = instants(policy)
    on_the_first_wait = edges.map(lambda edge: NOW - policy.waits[0] + edge)
    rows = Twin()
    for number in range(draw(st.integers(1, 3))):
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
    pairs = st.tuples(st.sampled_from(list(rows.endpoints)), names)
    for number in range(draw(st.integers(0, 10))):
        endpoint_id, queue = draw(pairs)
        created_at = draw(times)
        todo = Todo(
            # Not in the order of creation, so that a tie in time is broken by id and not by chance.
            id=f"td_{number * 7 % 10}",
            endpoint=endpoint_id,
            queue=queue,
            created_at=created_at,
            updated_at=draw(on_the_first_wait | times) if draw(seldom) else created_at,
            vouched=draw(mostly),
            state="pending" if draw(mostly) else draw(st.sampled_from(TODO_STATES)),
            claimed_at=draw(times) if draw(seldom) else None,
        )
        rows.todos[todo.id] = todo
    of_todos = [todo.pair for todo in rows.todos.values()]
    for pair in draw(st.lists(st.sampled_from(of_todos) if of_todos and draw(mostly) else pairs, max_size=5)):
        claims = [todo.claimed_at for todo in rows.todos.values() if todo.pair == pair and todo.claimed_at]
        rows.ledger[pair] = Charge(
            nudges=draw(st.integers(1, policy.cap) | st.integers(0, 7)),
            last_nudged_at=draw(times),
            last_claim_at=draw(st.none() | times) if draw(seldom) else max(claims, default=None),
        )
    return State(policy, rows)
