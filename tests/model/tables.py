"""The twin's rows in a real database, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from model import twin
from sqlalchemy import Connection, insert, select

from switchboard_stall.models import Endpoint, NotifyHook, QueueStall, Todo

if TYPE_CHECKING:
    from collections.abc import Iterable

    from switchboard_stall.sweep import Nudge


def store_endpoints(connection: Connection, endpoints: Iterable[twin.Endpoint]) -> None:
    rows = [
        {
            "id": endpoint.id,
            "slug": str(endpoint.id),
            "scope_queues": list(endpoint.scope),
            "state": endpoint.state,
            "expires_at": endpoint.expires_at,
        }
        for endpoint in endpoints
    ]
    if rows:
        connection.execute(insert(Endpoint), rows)


def store_hooks(connection: Connection, hooks: Iterable[twin.Hook]) -> None:
    rows = [
        {
            "id": hook.id,
            "endpoint_id": hook.endpoint,
            "url": "https://receiver.example/hook",
            "secret": "enc:v1:none",
            "enabled": hook.enabled,
            "queues": list(hook.queues),
        }
        for hook in hooks
    ]
    if rows:
        connection.execute(insert(NotifyHook), rows)


def store(connection: Connection, state: twin.Twin) -> None:
    """Insert everything, in one statement a table."""
    store_endpoints(connection, state.endpoints.values())
    store_hooks(connection, state.hooks.values())
    if state.todos:
        connection.execute(
            insert(Todo),
            [
                {"title": "a piece of work", "endpoint_id": told.pop("endpoint"), **told}
                for told in map(attrs.asdict, state.todos.values())
            ],
        )
    if state.ledger:
        connection.execute(
            insert(QueueStall),
            [
                {"endpoint_id": endpoint, "queue": queue, **attrs.asdict(charge)}
                for (endpoint, queue), charge in state.ledger.items()
            ],
        )


def ledger(connection: Connection) -> dict[twin.Pair, twin.Charge]:
    rows = connection.execute(select(*QueueStall.__table__.columns))
    return {
        (row.endpoint_id, row.queue): twin.Charge(row.nudges, row.last_nudged_at, row.last_claim_at)
        for row in rows
    }


def todos(connection: Connection) -> dict[str, twin.Todo]:
    names = {name: name for name in attrs.fields_dict(twin.Todo)} | {"endpoint": "endpoint_id"}
    rows = connection.execute(select(*(getattr(Todo, name) for name in names.values()))).all()
    return {row.id: twin.Todo(**dict(zip(names, row, strict=True))) for row in rows}


def wake(nudge: Nudge) -> twin.Wake:
    """A nudge in the words of the twin."""
    pair = (nudge.endpoint_id, nudge.queue)
    assert (nudge.todo.endpoint_id, nudge.todo.queue) == pair
    return twin.Wake(pair, nudge.todo.id, nudge.number, nudge.stalled_since, nudge.next_wait)
