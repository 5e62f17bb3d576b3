"""The rule of the sweep and the lifecycle of a todo told again in plain Python, without SQL.

Written from the design's words and not from the statements: where the two differ, one of them is wrong.
O, C, R, n, L, K and N are the letters of that page.
"""

# ruff: noqa: E741

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import define, evolve, field, frozen

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from switchboard_stall.schedule import StallPolicy

Pair: TypeAlias = tuple[uuid.UUID, str]

LEASE = timedelta(seconds=300)


@frozen
class Endpoint:
    id: uuid.UUID
    scope: tuple[str, ...]
    state: str = "active"
    expires_at: datetime | None = None

    def active(self, now: datetime) -> bool:
        return self.state == "active" and (self.expires_at is None or self.expires_at > now)


@frozen
class Hook:
    id: uuid.UUID
    endpoint: uuid.UUID
    enabled: bool = True
    queues: tuple[str, ...] = ()

    def admits(self, pair: Pair) -> bool:
        endpoint, queue = pair
        return self.endpoint == endpoint and self.enabled and (not self.queues or queue in self.queues)


@frozen
class Todo:
    id: str
    endpoint: uuid.UUID
    queue: str
    created_at: datetime
    updated_at: datetime
    vouched: bool = True
    state: str = "pending"
    claimed_at: datetime | None = None
    owner: str | None = None
    lease_expires_at: datetime | None = None
    next_retry_at: datetime | None = None
    attempt: int = 0
    max_attempts: int = 5

    @property
    def pair(self) -> Pair:
        return (self.endpoint, self.queue)


@frozen
class Charge:
    """One row of the ledger: n, L and K."""

    nudges: int
    last_nudged_at: datetime
    last_claim_at: datetime | None


@frozen
class Wake:
    """What the sweep returns for one pair."""

    pair: Pair
    todo: str
    number: int
    stalled_since: datetime
    next_wait: timedelta | None


@frozen
class Stall:
    """How one pair with pending work stands; ``due_at`` is None when its budget is spent."""

    pair: Pair
    spent: int
    since: datetime
    due_at: datetime | None
    stalled_since: datetime
    latest_claim: datetime | None
    named: str | None


@define
class Twin:
    """Everything in one database."""

    endpoints: dict[uuid.UUID, Endpoint] = field(factory=dict)
    hooks: dict[uuid.UUID, Hook] = field(factory=dict)
    todos: dict[str, Todo] = field(factory=dict)
    ledger: dict[Pair, Charge] = field(factory=dict)

    # The sweep

    def sweep(self, policy: StallPolicy, now: datetime) -> list[Wake]:
        """Do what one statement does, and return the wakes in the order of the cut."""
        pending = {todo.pair for todo in self.todos.values() if todo.state == "pending"}
        self.ledger = {pair: charge for pair, charge in self.ledger.items() if pair in pending}
        due = [
            stall
            for stall in self.stalls(policy)
            if stall.due_at is not None and stall.due_at <= now and self.may_be_woken(stall, now)
        ]
        due.sort(key=lambda stall: (stall.spent, stall.since, stall.pair))
        wakes = []
        for stall in due[: policy.sweep_limit]:
            number = stall.spent + 1
            self.ledger[stall.pair] = Charge(number, now, stall.latest_claim)
            next_wait = policy.waits[number] if number < len(policy.waits) else None
            assert stall.named is not None
            wakes.append(Wake(stall.pair, stall.named, number, stall.stalled_since, next_wait))
        return wakes

    def stalls(self, policy: StallPolicy) -> list[Stall]:
        """Every pair with pending work, due or not, whoever may be woken for it."""
        pairs = {todo.pair: None for todo in self.todos.values() if todo.state == "pending"}
        return [self._stall(pair, policy) for pair in pairs]

    def _stall(self, pair: Pair, policy: StallPolicy) -> Stall:
        rows = [todo for todo in self.todos.values() if todo.pair == pair]
        waiting = [todo for todo in rows if todo.state == "pending"]
        O = min(todo.created_at for todo in waiting)
        C = max((todo.claimed_at for todo in rows if todo.claimed_at), default=None)
        R = max((todo.updated_at for todo in waiting if todo.updated_at > todo.created_at), default=None)
        life = max(at for at in (O, C, R) if at is not None)

        charge = self.ledger.get(pair)
        if charge is None:
            spent, since = 0, life
        else:
            n, L, K = charge.nudges, charge.last_nudged_at, charge.last_claim_at
            progress = C is not None and (K is None or C > K)
            spent = 0 if progress else n
            since = L if spent > 0 else max(life, L)

        # Due when N has come to the last of these.
        due_at = None
        if spent < len(policy.waits):
            due_at = max(since + policy.waits[spent], O + policy.waits[0])
            if R is not None:
                due_at = max(due_at, R + policy.waits[0])
        vouched = [(todo.created_at, todo.id) for todo in waiting if todo.vouched]
        return Stall(pair, spent, since, due_at, life, C, min(vouched)[1] if vouched else None)

    def may_be_woken(self, stall: Stall, now: datetime) -> bool:
        """Whether the pair is eligible, due or not."""
        endpoint_id, queue = stall.pair
        endpoint = self.endpoints[endpoint_id]
        return (
            stall.named is not None
            and endpoint.active(now)
            and queue in endpoint.scope
            and queue != "quarantine"
            and any(hook.admits(stall.pair) for hook in self.hooks.values())
        )

    # The lifecycle of a todo

    def claimable(self, endpoint: uuid.UUID, queues: Collection[str], now: datetime) -> Iterator[Todo]:
        """What a worker may claim now, in no order."""
        told = self.endpoints[endpoint]
        for todo in self.todos.values():
            if not (told.active(now) and todo.endpoint == endpoint and todo.queue in queues):
                continue
            if todo.queue in told.scope and (
                todo.state == "pending"
                or (todo.attempt < todo.max_attempts and (_lapsed(todo, now) or _retry_due(todo, now)))
            ):
                yield todo

    def claim(self, todo: Todo, owner: str, now: datetime) -> None:
        self._move(
            todo,
            now,
            state="claimed",
            owner=owner,
            lease_expires_at=now + LEASE,
            attempt=todo.attempt + 1,
            claimed_at=now,
            next_retry_at=None,
        )

    def heartbeat(self, todo: Todo, now: datetime) -> None:
        self._move(todo, now, lease_expires_at=now + LEASE)

    def complete(self, todo: Todo, now: datetime) -> None:
        self._move(todo, now, state="done")

    def fail(self, todo: Todo, now: datetime) -> None:
        wait = min(timedelta(seconds=30) * 2 ** (todo.attempt - 1), timedelta(minutes=15))
        retry = None if todo.attempt >= todo.max_attempts else now + wait
        self._move(todo, now, state="failed", lease_expires_at=None, next_retry_at=retry)

    def release(self, todo: Todo, now: datetime) -> None:
        self._move(todo, now, state="pending", owner=None, lease_expires_at=None)

    def reap(self, now: datetime) -> None:
        for todo in [todo for todo in self.todos.values() if _lapsed(todo, now)]:
            state = "failed" if todo.attempt >= todo.max_attempts else "pending"
            self._move(todo, now, state=state, owner=None, lease_expires_at=None, next_retry_at=None)

    def retry(self, now: datetime) -> None:
        for todo in [todo for todo in self.todos.values() if _retry_due(todo, now)]:
            self._move(todo, now, state="pending", owner=None, lease_expires_at=None, next_retry_at=None)

    def revoke(self, endpoint: uuid.UUID, now: datetime) -> None:
        if self.endpoints[endpoint].state == "revoked":
            return
        self.endpoints[endpoint] = evolve(self.endpoints[endpoint], state="revoked")
        for todo in list(self.todos.values()):
            if todo.endpoint == endpoint and todo.state in ("pending", "claimed"):
                self._move(todo, now, state="failed", lease_expires_at=None, next_retry_at=None)

    def expire(self, now: datetime) -> None:
        for endpoint in list(self.endpoints.values()):
            if endpoint.expires_at is not None and endpoint.expires_at <= now:
                self.revoke(endpoint.id, now)

    def _move(self, todo: Todo, now: datetime, **changes: Any) -> None:
        self.todos[todo.id] = evolve(todo, updated_at=now, **changes)


def _lapsed(todo: Todo, now: datetime) -> bool:
    return todo.state == "claimed" and todo.lease_expires_at is not None and todo.lease_expires_at <= now


def _retry_due(todo: Todo, now: datetime) -> bool:
    return todo.state == "failed" and todo.next_retry_at is not None and todo.next_retry_at <= now
