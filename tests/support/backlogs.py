"""Large tables made on the server in one statement each: pending work of many pairs, with a past.

Told from ``NOW``: the work was created an hour ago, and each pair was last claimed 20 minutes ago. What the
pairs are depends on when one looks: ``FRESH``, ``BEING_CLAIMED`` and ``STALLED`` are instants.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen
from sqlalchemy import ColumnElement, func, insert, literal, literal_column, select, text
from support.builders import NOW

from switchboard_stall import Todo

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable
    from datetime import datetime

    from sqlalchemy import Connection, Engine

CREATED: Final = NOW - timedelta(hours=1)
CLAIMED: Final = NOW - timedelta(minutes=20)

FRESH: Final = CREATED + timedelta(minutes=1)
BEING_CLAIMED: Final = CLAIMED + timedelta(minutes=1)
STALLED: Final = NOW

PAIRS: Final = 500
ROWS: Final = 50_000
QUEUE: Final = "inbox"
CLAIMS_EACH: Final = 20


def add_pairs(connection: Connection, count: int) -> None:
    """Endpoints that may be woken, each for one queue, each with done work that was claimed."""
    for statement in (
        "INSERT INTO endpoints (slug, scope_queues)"
        " SELECT 'endpoint ' || number, ARRAY[:queue] FROM generate_series(1, :count) AS number",
        "INSERT INTO notify_hooks (endpoint_id, url, secret)"
        " SELECT id, 'https://example.org/', 'sealed' FROM endpoints",
        "INSERT INTO todos"
        " (id, endpoint_id, queue, title, state, vouched, created_at, updated_at, claimed_at)"
        " SELECT 'td_' || gen_random_uuid(), id, :queue, 'done', 'done', true, :created, :claimed,"
        " :claimed - number * interval '1 ms' FROM endpoints, generate_series(0, :claims - 1) AS number",
    ):
        values = {"count": count, "claims": CLAIMS_EACH, "claimed": CLAIMED}
        _run(connection, statement, **values)


def add_pending(connection: Connection, each: int, *, pairs: int | None = None, vouched: bool = True) -> None:
    """Pending work: ``each`` todos in the first ``pairs`` of the pairs, or in all."""
    _run(
        connection,
        "INSERT INTO todos (id, endpoint_id, queue, title, vouched, created_at, updated_at)"
        " SELECT 'td_' || gen_random_uuid(), id, :queue, 'pending', :vouched, at, at"
        " FROM (SELECT id FROM endpoints ORDER BY id LIMIT :pairs) AS pair,"
        " generate_series(1, :each) AS number,"
        " LATERAL (SELECT :created + number * interval '1 us' AS at) AS instant",
        each=each,
        pairs=pairs,
        vouched=vouched,
    )


def fill(engine: Engine, endpoint_id: uuid.UUID, count: int, **columns: Any) -> None:
    """Many todos, one a second, the newest a second old."""
    number = func.generate_series(1, count).column_valued("number")
    second: ColumnElement[timedelta] = literal_column("interval '1 second'")
    made = literal(NOW) - (count - number + 1) * second
    values: dict[str, Any] = {
        "id": func.concat("td_", func.gen_random_uuid()),
        "endpoint_id": literal(endpoint_id),
        "queue": literal("inbox"),
        "title": literal("t"),
        "created_at": made,
        "updated_at": made,
    }
    values |= {name: value if hasattr(value, "label") else literal(value) for name, value in columns.items()}
    with engine.begin() as connection:
        connection.execute(insert(Todo).from_select(list(values), select(*values.values())))


def add_charges(connection: Connection) -> None:
    """A first nudge for each pair, ten minutes ago, which saw the claim: none is due."""
    _run(
        connection,
        "INSERT INTO queue_stalls (endpoint_id, queue, nudges, last_nudged_at, last_claim_at)"
        " SELECT id, :queue, 1, :claimed + interval '10 min', :claimed FROM endpoints",
        claimed=CLAIMED,
    )


def requeue_one(connection: Connection) -> None:
    """One todo of one pair went back to pending long before anybody looks."""
    _run(
        connection,
        "UPDATE todos SET updated_at = created_at + interval '1 ms'"
        " WHERE id = (SELECT id FROM todos WHERE state = 'pending' LIMIT 1)",
    )


def _run(connection: Connection, statement: str, **values: object) -> None:
    given: dict[str, object | datetime] = {"queue": QUEUE, "created": CREATED, **values}
    connection.execute(
        text(statement), {name: value for name, value in given.items() if f":{name}" in statement}
    )


@frozen
class Backlog:
    """How a backlog is made: what is there when the statistics are taken, and what comes after."""

    before: Callable[[Connection], None]
    then: str | None
    after: Callable[[Connection], None] = lambda _: None


def _evenly(connection: Connection, rows: int = ROWS, *, vouched: bool = True) -> None:
    add_pairs(connection, PAIRS)
    add_pending(connection, rows // PAIRS, vouched=vouched)


def _skewed(connection: Connection) -> None:
    add_pairs(connection, PAIRS)
    add_pending(connection, 1)
    add_pending(connection, ROWS - PAIRS, pairs=1, vouched=False)


def _tiny(connection: Connection) -> None:
    add_pairs(connection, PAIRS)
    add_pending(connection, 1, pairs=5)


ANALYZED = "VACUUM (ANALYZE)"
BACKLOGS = {
    "50,000 rows evenly": Backlog(_evenly, ANALYZED),
    "a tenth of them": Backlog(lambda c: _evenly(c, ROWS // 10), ANALYZED),
    "one pair with nearly all rows, unvouched": Backlog(_skewed, ANALYZED),
    "all rows unvouched": Backlog(lambda c: _evenly(c, vouched=False), ANALYZED),
    "never analysed": Backlog(_evenly, None),
    "a burst after an analysis of nothing": Backlog(lambda _: None, "ANALYZE", _evenly),
    "a burst after an analysis of five rows": Backlog(
        _tiny, ANALYZED, lambda c: add_pending(c, ROWS // PAIRS)
    ),
}
