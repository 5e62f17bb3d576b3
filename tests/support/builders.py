"""Builders that read like a scenario: what is in the tables, told relative to one ``NOW``.

    world = World(engine)
    endpoint = world.endpoint(scope=["inbox"])
    endpoint.hook()
    inbox = endpoint.queue("inbox")
    inbox.pending(age="7m", vouched=True)
    inbox.claimed(ago="2m")
    assert world.stalls() == {}

Each call commits one row, so that other sessions see it, and returns the row detached.
"""

from __future__ import annotations

import itertools
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import field, frozen
from sqlalchemy import select
from sqlalchemy.orm import Session

from switchboard_stall.models import Base, Endpoint, NotifyHook, QueueStall, Todo

if TYPE_CHECKING:
    import uuid
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Engine

NOW = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)
"""The instant every scenario is told from; hand it to the sweep."""

LEASE = timedelta(seconds=300)

_UNITS = {
    "d": "days",
    "h": "hours",
    "m": "minutes",
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
}
_PART = re.compile(r"(\d+(?:\.\d+)?)(d|h|ms|us|m|s)")

Row = TypeVar("Row", bound=Base)


def duration(told: str | timedelta) -> timedelta:
    """``"7m"``, ``"1h30m"``, ``"4m59.999s"``, ``"-2s"``; a timedelta is itself."""
    if isinstance(told, timedelta):
        return told
    sign, parts = (-1, told[1:]) if told.startswith("-") else (1, told)
    found = _PART.findall(parts)
    if not found or "".join(number + unit for number, unit in found) != parts:
        raise ValueError(f"{told!r} is no duration; write for example '7m', '1h30m' or '90s'")
    return sign * timedelta(**{_UNITS[unit]: float(number) for number, unit in found})


@frozen
class World:
    """Everything in one database, at one instant."""

    engine: Engine
    now: datetime = NOW
    _numbers: Iterator[int] = field(factory=lambda: itertools.count(1), init=False, repr=False)

    def ago(self, told: str | timedelta) -> datetime:
        """The instant that long before now."""
        return self.now - duration(told)

    def after(self, told: str | timedelta) -> datetime:
        """The instant that long after now: what a later sweep is given."""
        return self.now + duration(told)

    def endpoint(
        self,
        *,
        scope: Sequence[str] = ("inbox",),
        state: str = "active",
        expires_in: str | timedelta | None = None,
        **columns: Any,
    ) -> EndpointBuilder:
        """An endpoint; ``expires_in`` may be negative: it expired."""
        number = next(self._numbers)
        given: dict[str, Any] = {
            "slug": f"endpoint-{number}",
            "scope_queues": list(scope),
            "state": state,
            "expires_at": None if expires_in is None else self.after(expires_in),
            "revoked_at": self.ago("1m") if state == "revoked" else None,
            "created_at": self.ago("30d"),
        }
        return EndpointBuilder(self, self.insert(Endpoint(**given | columns)))

    def queue(self, name: str = "inbox") -> QueueBuilder:
        """A queue whose consumer can be woken: an active endpoint with it in scope and an enabled hook."""
        endpoint = self.endpoint(scope=[name])
        endpoint.hook()
        return endpoint.queue(name)

    def stalls(self) -> dict[tuple[uuid.UUID, str], QueueStall]:
        """The ledger, by pair."""
        with Session(self.engine) as session:
            rows = session.scalars(select(QueueStall)).all()
            session.expunge_all()
            return {(row.endpoint_id, row.queue): row for row in rows}

    def insert(self, row: Row) -> Row:
        """Commit one row."""
        with Session(self.engine, expire_on_commit=False) as session:
            session.add(row)
            session.commit()
            session.expunge(row)
        return row


@frozen
class EndpointBuilder:
    """One endpoint; its row is ``row``."""

    world: World
    row: Endpoint

    @property
    def id(self) -> uuid.UUID:
        return self.row.id

    def hook(self, *, queues: Sequence[str] = (), enabled: bool = True, **columns: Any) -> NotifyHook:
        """A notify hook; no queues: every queue in scope."""
        given: dict[str, Any] = {
            "endpoint_id": self.id,
            "url": f"https://{self.row.slug}.example/hook",
            "secret": "enc:v1:AAECAwQFBgcICQoLBlhy8quCBW5uT9AkAf6U7E/yNNTKAgO2q0fxkQDepCG9ng",
            "queues": list(queues),
            "enabled": enabled,
            "disabled_reason": None if enabled else "operator",
            "disabled_at": None if enabled else self.world.ago("1d"),
            "created_at": self.world.ago("30d"),
        }
        return self.world.insert(NotifyHook(**given | columns))

    def queue(self, name: str = "inbox") -> QueueBuilder:
        return QueueBuilder(self, name)


@frozen
class QueueBuilder:
    """One pair: an endpoint and a queue's name. Further columns of a todo may be given by name."""

    endpoint: EndpointBuilder
    name: str

    @property
    def pair(self) -> tuple[uuid.UUID, str]:
        return (self.endpoint.id, self.name)

    @property
    def stall(self) -> QueueStall | None:
        """The pair's ledger row."""
        return self._world.stalls().get(self.pair)

    def pending(self, *, age: str | timedelta, vouched: bool = True, **columns: Any) -> Todo:
        """Claimable since its creation."""
        return self._todo(age, vouched, columns, state="pending")

    def requeued(
        self,
        *,
        ago: str | timedelta,
        claimed_ago: str | timedelta | None = None,
        age: str | timedelta | None = None,
        vouched: bool = True,
        **columns: Any,
    ) -> Todo:
        """Pending again since ``ago``; claimed one lease before that and made then, unless told."""
        claimed = duration(ago) + LEASE if claimed_ago is None else duration(claimed_ago)
        return self._todo(
            claimed if age is None else age,
            vouched,
            columns,
            state="pending",
            updated_at=self._world.ago(ago),
            claimed_at=self._world.ago(claimed),
            attempt=1,
        )

    def claimed(
        self,
        *,
        ago: str | timedelta,
        age: str | timedelta | None = None,
        owner: str = "worker",
        vouched: bool = True,
        **columns: Any,
    ) -> Todo:
        """Claimed ``ago``, under the default lease, which may have lapsed."""
        return self._todo(
            ago if age is None else age,
            vouched,
            columns,
            state="claimed",
            owner=owner,
            updated_at=self._world.ago(ago),
            claimed_at=self._world.ago(ago),
            lease_expires_at=self._world.ago(ago) + LEASE,
            attempt=1,
        )

    def done(
        self,
        *,
        ago: str | timedelta,
        claimed_ago: str | timedelta | None = None,
        age: str | timedelta | None = None,
        vouched: bool = True,
        **columns: Any,
    ) -> Todo:
        """Completed ``ago``; claimed and made at the same instant, unless told."""
        claimed = ago if claimed_ago is None else claimed_ago
        return self._todo(
            claimed if age is None else age,
            vouched,
            columns,
            state="done",
            owner="worker",
            updated_at=self._world.ago(ago),
            claimed_at=self._world.ago(claimed),
            completed_at=self._world.ago(ago),
            attempt=1,
        )

    def failed(
        self,
        *,
        ago: str | timedelta,
        retry_in: str | timedelta | None = None,
        age: str | timedelta | None = None,
        vouched: bool = True,
        **columns: Any,
    ) -> Todo:
        """Failed ``ago``, for good unless a retry is told."""
        return self._todo(
            ago if age is None else age,
            vouched,
            columns,
            state="failed",
            owner="worker",
            updated_at=self._world.ago(ago),
            claimed_at=self._world.ago(ago),
            next_retry_at=None if retry_in is None else self._world.after(retry_in),
            attempt=1,
        )

    def nudged(
        self, times: int, *, ago: str | timedelta, last_claim_ago: str | timedelta | None = None
    ) -> QueueStall:
        """A ledger row: charged so often, last ``ago``, having seen the claim ``last_claim_ago``, or none."""
        return self._world.insert(
            QueueStall(
                endpoint_id=self.endpoint.id,
                queue=self.name,
                nudges=times,
                last_nudged_at=self._world.ago(ago),
                last_claim_at=None if last_claim_ago is None else self._world.ago(last_claim_ago),
            )
        )

    @property
    def _world(self) -> World:
        return self.endpoint.world

    def _todo(self, age: str | timedelta, vouched: bool, columns: dict[str, Any], /, **given: Any) -> Todo:
        created = self._world.ago(age)
        defaults: dict[str, Any] = {
            "endpoint_id": self.endpoint.id,
            "queue": self.name,
            "title": "a piece of work",
            "vouched": vouched,
            "created_at": created,
            "updated_at": created,
        }
        return self._world.insert(Todo(**defaults | given | columns))
