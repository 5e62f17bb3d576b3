"""Seeded rows, made on the server in a few statements, told from ``NOW``.

Pair ``n`` is queue ``n % 4`` of endpoint ``n / 4``. Pending work was created an hour ago.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from benchmarks.bench import SEED, execute, vacuum
from sqlalchemy import text
from support.builders import NOW

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

CREATED: Final = NOW - timedelta(hours=1)
CLAIMED: Final = NOW - timedelta(minutes=20)
FRESH: Final = CREATED + timedelta(minutes=1)
BEING_CLAIMED: Final = CLAIMED + timedelta(minutes=1)

BULK: Final = 200_000
"""From so many rows on it is faster to make the indexes anew."""

_PAIR: Final = (
    "(SELECT number, md5(:seed || ' endpoint ' || number / 4)::uuid AS endpoint_id,"
    " 'queue-' || number % 4 AS queue FROM generate_series(:first, :first + :pairs - 1) AS number) AS pair"
)
_SAID: Final[dict[str, Any]] = {"seed": str(SEED), "created": CREATED, "claimed": CLAIMED, "first": 0}


def add_pairs(engine: Engine, pairs: int) -> None:
    """Endpoints with a hook each, and four queues in scope."""
    execute(
        engine,
        "INSERT INTO endpoints (id, slug, scope_queues)"
        " SELECT md5(:seed || ' endpoint ' || number)::uuid, 'endpoint ' || number,"
        " ARRAY['queue-0', 'queue-1', 'queue-2', 'queue-3']"
        " FROM generate_series(0, (:pairs + 3) / 4 - 1) AS number",
        "INSERT INTO notify_hooks (id, endpoint_id, url, secret)"
        " SELECT md5('hook ' || id)::uuid, id, 'https://example.org/', 'sealed' FROM endpoints",
        **_SAID,
        pairs=pairs,
    )


def add_pending(
    engine: Engine, rows: int, pairs: int, *, first: int = 0, vouched: bool = True, kind: str = "pending"
) -> None:
    """Pending todos, dealt to the pairs in turn; none was ever claimed."""
    _add(
        engine,
        rows,
        "INSERT INTO todos (id, endpoint_id, queue, title, vouched, created_at, updated_at)"
        " SELECT 'td_' || md5(:seed || :kind || turn)::uuid, endpoint_id, queue, 'a piece of work',"
        " :vouched, at, at"
        f" FROM generate_series(0, :rows - 1) AS turn JOIN {_PAIR} ON pair.number = :first + turn % :pairs,"
        " LATERAL (SELECT CAST(:created AS timestamptz) + turn * interval '1 us' AS at) AS instant",
        pairs=pairs,
        first=first,
        vouched=vouched,
        kind=kind,
    )


def add_past(engine: Engine, rows: int, pairs: int, *, state: str = "done", kind: str = "past") -> None:
    """Todos that were claimed 20 minutes ago and before, and are done, or claimed still."""
    _add(
        engine,
        rows,
        "INSERT INTO todos (id, endpoint_id, queue, title, state, vouched, owner, attempt,"
        " lease_expires_at, created_at, updated_at, claimed_at, completed_at)"
        " SELECT 'td_' || md5(:seed || :kind || turn)::uuid, endpoint_id, queue, 'a piece of work', :state,"
        " true, 'worker', 1, at + interval '10 days', at - interval '1 min', at, at,"
        " CASE WHEN :state = 'done' THEN at END"
        f" FROM generate_series(0, :rows - 1) AS turn JOIN {_PAIR} ON pair.number = :first + turn % :pairs,"
        " LATERAL (SELECT CAST(:claimed AS timestamptz) - turn * interval '1 us' AS at) AS instant",
        pairs=pairs,
        state=state,
        kind=kind,
    )


def add_charges(engine: Engine, nudges: int, ago: str) -> None:
    """A ledger row for each pair with pending work, which saw the claim."""
    execute(
        engine,
        "DELETE FROM queue_stalls",
        "INSERT INTO queue_stalls (endpoint_id, queue, nudges, last_nudged_at, last_claim_at)"
        " SELECT endpoint_id, queue, :nudges, CAST(:now AS timestamptz) - CAST(:ago AS interval), :claimed"
        " FROM todos WHERE state = 'pending' GROUP BY endpoint_id, queue",
        nudges=nudges,
        now=NOW,
        ago=ago,
        claimed=CLAIMED,
    )
    vacuum(engine, "VACUUM (ANALYZE) queue_stalls")


def clear_charges(engine: Engine) -> None:
    """Forget every nudge."""
    execute(engine, "TRUNCATE queue_stalls")


def requeue_oldest(engine: Engine) -> None:
    """In each pair the oldest todo went back to pending ten minutes ago."""
    execute(
        engine,
        "UPDATE todos SET updated_at = CAST(:now AS timestamptz) - interval '10 min' WHERE id IN"
        " (SELECT DISTINCT ON (endpoint_id, queue) id FROM todos WHERE state = 'pending'"
        " ORDER BY endpoint_id, queue, created_at)",
        now=NOW,
    )
    vacuum(engine)


def _add(engine: Engine, rows: int, statement: str, **values: Any) -> None:
    surrounding = _without_indexes(engine) if rows >= BULK else contextlib.nullcontext()
    with surrounding, engine.begin() as connection:
        # No look at the endpoint for each row: they are known to be there.
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        given = {**_SAID, **values, "rows": rows}
        connection.execute(
            text(statement), {name: value for name, value in given.items() if f":{name}" in statement}
        )


@contextlib.contextmanager
def _without_indexes(engine: Engine) -> Iterator[None]:
    with engine.connect() as connection:
        made = connection.execute(
            text(
                "SELECT indexrelid::regclass::text, pg_get_indexdef(indexrelid) FROM pg_index"
                " WHERE indrelid = 'todos'::regclass AND NOT indisprimary"
            )
        ).all()
    with engine.begin() as connection:
        for name, _ in made:
            connection.execute(text(f"DROP INDEX {name}"))
    yield
    with engine.begin() as connection:
        for _, definition in made:
            connection.execute(text(definition.replace(":", r"\:")))
