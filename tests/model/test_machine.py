"""Any history: senders, workers, owners and sweeps of several instances, and the rule told beside them.

Each step acts on the database and on the twin, and then the two must hold the same rows. What the sweeps
returned is also judged by itself, over the whole history, without the twin.
"""

from __future__ import annotations

import random
import uuid
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unittest import mock

from attrs import evolve, frozen
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import tables
from model.twin import Endpoint, Hook, Pair, Todo, Twin, Wake
from sqlalchemy import delete, update
from sqlalchemy.orm import Session
from support.builders import NOW
from support.databases import empty, leave_to_us, vacuum

from switchboard_stall import models, queue
from switchboard_stall.ready import Reason, set_todo_ready_hook
from switchboard_stall.schedule import STALL_POLICY, StallPolicy
from switchboard_stall.sweep import nudge_stalled_queues

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from sqlalchemy import Engine

POLICIES = (STALL_POLICY, StallPolicy(waits=STALL_POLICY.waits[:2], sweep_limit=1))
QUEUES = ("a", "b")
BELIEVED = (0, 1, 200)
"""Rows of todos that the statistics tell of: whatever they say, no plan may change what is done."""

MILLISECOND = timedelta(milliseconds=1)

queues = st.sampled_from(QUEUES)
some_queues = st.sampled_from([QUEUES, QUEUES, ("a",), ("b",), ()])
mostly = st.sampled_from([True, True, True, False])
edges = st.sampled_from([timedelta(0), -MILLISECOND, MILLISECOND])


def one_of(choose: Callable[[Machine], list[Any]]) -> st.SearchStrategy[Any]:
    """One of what the machine holds when the rule runs."""
    return st.runner().flatmap(lambda machine: st.sampled_from(choose(machine)))


@frozen
class Given:
    """A wake that a sweep committed."""

    wake: Wake
    at: datetime
    since_reset: int


class Machine(RuleBasedStateMachine):
    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.now = NOW
        self.policy = STALL_POLICY
        self.twin = Twin()
        self.numbers = iter(range(1, 1_000_000))
        self.history: dict[Pair, list[Given]] = {}
        self.unanswered: dict[Pair, int] = {}
        self.fired: list[tuple[str, Reason]] = []
        # Ids break ties, so they are the same when a history is told again.
        bits = random.Random(0)
        self.ids = mock.patch(
            "switchboard_stall.models.uuid.uuid4",
            side_effect=lambda: uuid.UUID(int=bits.getrandbits(128), version=4),
        )
        self.ids.start()
        self.hook_before = set_todo_ready_hook(lambda todo, reason: self.fired.append((todo.id, reason)))

    def teardown(self) -> None:
        set_todo_ready_hook(self.hook_before)
        self.ids.stop()
        empty(self.engine)

    # What the rules choose from

    def claimed(self) -> list[Todo]:
        return [todo for todo in self.twin.todos.values() if todo.state == "claimed"]

    def ended(self) -> list[Todo]:
        return [todo for todo in self.twin.todos.values() if todo.state in ("done", "failed")]

    def open_endpoints(self) -> list[uuid.UUID]:
        return [endpoint.id for endpoint in self.twin.endpoints.values() if endpoint.active(self.now)]

    def instants(self) -> list[datetime]:
        """When something will change by itself, soonest first."""
        rows = self.twin
        instants = {stall.due_at for stall in rows.stalls(self.policy)}
        instants |= {todo.lease_expires_at for todo in rows.todos.values()}
        instants |= {todo.next_retry_at for todo in rows.todos.values()}
        instants |= {endpoint.expires_at for endpoint in rows.endpoints.values()}
        return sorted(at for at in instants if at is not None and at >= self.now)

    def next_nudge(self) -> datetime | None:
        """When the next pair will be due for which somebody may be woken."""
        may = [stall for stall in self.twin.stalls(self.policy) if self.twin.may_be_woken(stall, self.now)]
        return min((stall.due_at for stall in may if stall.due_at is not None), default=None)

    # Owners

    @initialize(policy=st.sampled_from(POLICIES), believed=st.sampled_from(BELIEVED))
    def begins(self, policy: StallPolicy, believed: int) -> None:
        """One endpoint and one todo. Statistics tell of so many: nothing may hang on the plan."""
        self.policy = policy
        self.endpoint_is_made()
        (endpoint,) = self.twin.endpoints
        believe(self.engine, Todo("", endpoint, "a", NOW, NOW), believed)
        self.enqueue(endpoint, "a", vouched=True, times=1, max_attempts=5)

    @precondition(lambda self: len(self.open_endpoints()) < 2)
    @rule()
    def endpoint_is_made(self) -> None:
        endpoint = Endpoint(uuid.UUID(int=next(self.numbers)), QUEUES)
        hook = Hook(uuid.UUID(int=next(self.numbers)), endpoint.id)
        self.twin.endpoints[endpoint.id] = endpoint
        self.twin.hooks[hook.id] = hook
        with self.engine.begin() as connection:
            tables.store_endpoints(connection, [endpoint])
            tables.store_hooks(connection, [hook])

    @precondition(lambda self: self.open_endpoints())
    @rule(endpoint=one_of(open_endpoints), scope=some_queues, enabled=mostly, filtered=some_queues)
    def owner_changes(
        self, endpoint: uuid.UUID, scope: tuple[str, ...], enabled: bool, filtered: tuple[str, ...]
    ) -> None:
        (hook,) = (hook for hook in self.twin.hooks.values() if hook.endpoint == endpoint)
        self.twin.endpoints[endpoint] = evolve(self.twin.endpoints[endpoint], scope=scope)
        self.twin.hooks[hook.id] = evolve(hook, enabled=enabled, queues=filtered)
        self.change(models.Endpoint, endpoint, scope_queues=list(scope))
        self.change(models.NotifyHook, hook.id, enabled=enabled, queues=list(filtered))

    @precondition(lambda self: len(self.open_endpoints()) > 1)
    @rule(endpoint=one_of(open_endpoints), after=st.sampled_from([timedelta(minutes=5), timedelta(0)]))
    def endpoint_will_expire(self, endpoint: uuid.UUID, after: timedelta) -> None:
        expires_at = self.now + after
        self.twin.endpoints[endpoint] = evolve(self.twin.endpoints[endpoint], expires_at=expires_at)
        self.change(models.Endpoint, endpoint, expires_at=expires_at)

    @precondition(lambda self: len(self.open_endpoints()) > 1)
    @rule(endpoint=one_of(open_endpoints))
    def endpoint_is_revoked(self, endpoint: uuid.UUID) -> None:
        self.commits(lambda session: queue.revoke_endpoint(session, endpoint, now=self.now))
        self.twin.revoke(endpoint, self.now)

    @precondition(lambda self: self.ended())
    @rule(todo=one_of(ended))
    def retention_deletes(self, todo: Todo) -> None:
        self.commits(lambda session: session.execute(delete(models.Todo).where(models.Todo.id == todo.id)))
        del self.twin.todos[todo.id]

    # Senders

    @precondition(lambda self: self.open_endpoints())
    @rule(
        endpoint=one_of(open_endpoints),
        name=queues,
        vouched=mostly,
        times=st.integers(1, 3),
        max_attempts=st.sampled_from([5, 1]),
    )
    def enqueue(self, endpoint: uuid.UUID, name: str, vouched: bool, times: int, max_attempts: int) -> None:
        for _ in range(times):
            todo_id = self.commits(
                lambda session: (
                    queue.enqueue(
                        session,
                        endpoint,
                        name,
                        "a piece of work",
                        vouched=vouched,
                        max_attempts=max_attempts,
                        now=self.now,
                    ).todo.id
                )
            )
            self.twin.todos[todo_id] = Todo(
                todo_id, endpoint, name, self.now, self.now, vouched=vouched, max_attempts=max_attempts
            )

    # Workers

    @precondition(lambda self: self.twin.stalls(self.policy))
    @rule(
        endpoint=one_of(lambda self: sorted({stall.pair[0] for stall in self.twin.stalls(self.policy)})),
        names=st.sampled_from([QUEUES, ("a",), ("b",)]),
        limit=st.integers(1, 2),
    )
    def claim(self, endpoint: uuid.UUID, names: tuple[str, ...], limit: int) -> None:
        got = self.commits(
            lambda session: [
                todo.id
                for todo in queue.claim(session, endpoint, "worker", queues=names, limit=limit, now=self.now)
            ]
        )
        oldest_first = sorted(
            self.twin.claimable(endpoint, names, self.now), key=lambda todo: todo.created_at
        )[:limit]
        taken = [self.twin.todos[todo_id] for todo_id in got]
        # Which of two that were made at one instant is nobody's promise.
        assert [todo.created_at for todo in taken] == [todo.created_at for todo in oldest_first]
        for todo in taken:
            self.twin.claim(todo, "worker", self.now)
            self.unanswered[todo.pair] = 0

    @precondition(lambda self: self.claimed())
    @rule(todo=one_of(claimed), verb=st.sampled_from(["complete", "fail", "release", "heartbeat"]))
    def worker_does(self, verb: str, todo: Todo) -> None:
        self.commits(lambda session: getattr(queue, verb)(session, todo.id, "worker", now=self.now))
        getattr(self.twin, verb)(todo, self.now)

    # The tick

    @rule(duty=st.sampled_from(["reap", "retry", "expire"]))
    def duty_runs(self, duty: str) -> None:
        verbs = {
            "reap": queue.reap_lapsed_leases,
            "retry": queue.requeue_due_retries,
            "expire": queue.expire_endpoints,
        }
        self.commits(lambda session: verbs[duty](session, now=self.now))
        getattr(self.twin, duty)(self.now)

    @rule(instances=st.integers(1, 3), crashed=mostly.map(lambda yes: not yes))
    def sweep(self, instances: int, crashed: bool) -> None:
        """Several instances sweep, one after the other; before them one that crashes before its commit."""
        if crashed:
            with Session(self.engine) as session:
                nudge_stalled_queues(session, policy=self.policy, now=self.now)
        for _ in range(instances):
            self.one_sweeps()

    # Time

    @precondition(lambda self: self.instants())
    @rule(at=one_of(lambda self: self.instants()[:4]), edge=edges)
    def time_comes_to(self, at: datetime, edge: timedelta) -> None:
        self.now = max(self.now, at + edge)

    @precondition(lambda self: self.next_nudge() is not None)
    @rule(sweeps=st.lists(edges, min_size=1, max_size=6))
    def nobody_answers(self, sweeps: list[timedelta]) -> None:
        """Each sweep comes just before, just on, or just after the next nudge is due."""
        for edge in sweeps:
            at = self.next_nudge()
            if at is not None:
                self.now = max(self.now, at + edge)
                self.one_sweeps()

    # What must hold

    @invariant()
    def database_and_twin_hold_the_same(self) -> None:
        with self.engine.connect() as connection:
            assert tables.ledger(connection) == self.twin.ledger
            assert tables.todos(connection) == self.twin.todos

    @invariant()
    def two_nudges_of_a_pair_are_never_closer_than_the_first_wait(self) -> None:
        for given in self.history.values():
            for earlier, later in pairwise(given):
                assert later.at - earlier.at >= self.policy.waits[0]

    @invariant()
    def nobody_gets_more_nudges_than_the_cap_without_a_claim_or_a_drain_between(self) -> None:
        assert all(given.since_reset <= self.policy.cap for each in self.history.values() for given in each)

    # Acts

    def one_sweeps(self) -> None:
        with self.engine.connect() as connection:
            before = tables.ledger(connection)
            rows = tables.todos(connection)
        self.fired.clear()
        with Session(self.engine) as session:
            nudges = nudge_stalled_queues(session, policy=self.policy, now=self.now)
            assert self.fired == []
            session.commit()
        with self.engine.connect() as connection:
            after = tables.ledger(connection)
        wakes = [tables.wake(nudge) for nudge in nudges]

        waiting = {todo.pair for todo in rows.values() if todo.state == "pending"}
        assert after.keys() <= waiting, "a ledger row of a pair without pending work"
        charged = {pair for pair, charge in after.items() if charge != before.get(pair)}
        assert charged == {wake.pair for wake in wakes}, "a charge without a returned row"
        assert all(rows[wake.todo].vouched for wake in wakes), "an unvouched name"
        assert [todo_id for todo_id, _ in self.fired] == [wake.todo for wake in wakes]

        for pair in before.keys() - after.keys():
            self.unanswered[pair] = 0
        for wake in wakes:
            self.unanswered[wake.pair] = self.unanswered.get(wake.pair, 0) + 1
            told = Given(wake, self.now, self.unanswered[wake.pair])
            self.history.setdefault(wake.pair, []).append(told)
        assert wakes == self.twin.sweep(self.policy, self.now)

    def commits(self, act: Callable[[Session], Any]) -> Any:
        with Session(self.engine) as session:
            result = act(session)
            session.commit()
            return result

    def change(self, model: type[models.Base], key: uuid.UUID, **columns: Any) -> None:
        self.commits(
            lambda session: session.execute(
                update(model).where(model.__table__.c.id == key).values(**columns)
            )
        )


def believe(engine: Engine, bygone: Todo, rows: int) -> None:
    """Let statistics tell of so many todos; they are gone."""
    todos = {str(number): evolve(bygone, id=str(number)) for number in range(rows)}
    with engine.begin() as connection:
        tables.store(connection, Twin(todos=todos))
    vacuum(engine, "VACUUM ANALYZE", models.Todo)
    with engine.begin() as connection:
        connection.execute(delete(models.Todo))


def test_in_every_history_the_sweeps_do_what_the_rule_says(engine: Engine) -> None:
    with engine.begin() as connection:
        leave_to_us(connection)
    # A history is many sweeps: a third of the profile's examples.
    run_state_machine_as_test(
        lambda: Machine(engine),  # type: ignore[arg-type]  # (it is annotated for a class, and calls it)
        settings=settings(max_examples=max(settings().max_examples // 3, 1), stateful_step_count=40),
    )
