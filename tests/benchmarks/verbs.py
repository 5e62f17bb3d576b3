"""Part 2: what the indexes cost those who write: enqueue, claim, heartbeat, complete, by the real verbs."""

from __future__ import annotations

import random
import statistics
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field
from benchmarks.bench import (
    SEED,
    Bench,
    Result,
    ServerCost,
    circumstances,
    execute,
    extension,
    scalar,
    server_cost,
    timed,
    vacuum,
    wal,
)
from benchmarks.data import add_pairs, add_past, add_pending
from sqlalchemy import text
from sqlalchemy.orm import Session

from switchboard_stall import Endpoint, queue
from switchboard_stall.models import STALL_INDEXES

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable

    from sqlalchemy import Engine

VERBS: Final = ("enqueue", "claim", "heartbeat", "complete")
BARE: Final = "none of them"
LEASE: Final = "lease alone"
ALL: Final = "all of them"

NAMES: Final = [str(index.name) for index in STALL_INDEXES]
DROP: Final = {name: f"DROP INDEX {name}" for name in NAMES}

REQUEUED_GENERATED: Final = (
    DROP["ix_todos_stall_requeued"],
    "ALTER TABLE todos ADD COLUMN requeued_at timestamptz GENERATED ALWAYS AS"
    " (CASE WHEN state = 'pending' AND updated_at > created_at THEN updated_at END) STORED",
    "CREATE INDEX ix_todos_requeued_at ON todos (endpoint_id, queue, requeued_at)"
    " WHERE requeued_at IS NOT NULL",
)
_HELD: Final = (
    DROP["ix_todos_lease"],
    "CREATE INDEX ix_todos_held ON todos (claimed_at) WHERE state = 'claimed'",
)
_HASH: Final = "hashtextextended(queue, uuid_hash_extended(endpoint_id, 0))"

VARIANTS: Final[dict[str, tuple[str, ...]]] = {
    BARE: tuple(DROP.values()),
    LEASE: tuple(drop for name, drop in DROP.items() if name != "ix_todos_lease"),
    ALL: (),
    **{f"all but {name.removeprefix('ix_todos_')}": (drop,) for name, drop in DROP.items()},
    "requeued as a generated column": REQUEUED_GENERATED,
    "lease by claimed_at": _HELD,
    "both of these": (*REQUEUED_GENERATED, *_HELD),
    "vouched without id": (
        DROP["ix_todos_stall_vouched"],
        "CREATE INDEX ix_todos_vouched ON todos (endpoint_id, queue, created_at)"
        " WHERE state = 'pending' AND vouched",
    ),
    "keys hashed": (
        *(DROP[f"ix_todos_stall_{name}"] for name in ("vouched", "claimed", "requeued")),
        f"CREATE INDEX ix_todos_vouched ON todos ({_HASH}, created_at, id)"
        " WHERE state = 'pending' AND vouched",
        f"CREATE INDEX ix_todos_claimed ON todos ({_HASH}, claimed_at) WHERE claimed_at IS NOT NULL",
        f"CREATE INDEX ix_todos_requeued ON todos ({_HASH}, updated_at)"
        " WHERE state = 'pending' AND updated_at > created_at",
    ),
    "pending split by vouched": (
        "DROP INDEX ix_todos_pending",
        DROP["ix_todos_stall_vouched"],
        "CREATE INDEX ix_todos_vouched ON todos (endpoint_id, queue, created_at, id)"
        " WHERE state = 'pending' AND vouched",
        "CREATE INDEX ix_todos_unvouched ON todos (endpoint_id, queue, created_at)"
        " WHERE state = 'pending' AND NOT vouched",
    ),
}
"""Each way to have the indexes, as what is done to a migrated database."""

ROWS: Final = 100_000
"""Rows of each kind that are there before anybody writes."""


@define
class Writer:
    """One client of one database, who does every verb in a transaction of its own."""

    engine: Engine
    dice: random.Random = field(factory=lambda: random.Random(SEED))
    endpoints: list[uuid.UUID] = field(factory=list)
    held: list[str] = field(factory=list)
    sent: int = 0

    def __attrs_post_init__(self) -> None:
        with Session(self.engine) as session:
            self.endpoints = list(session.scalars(Endpoint.__table__.select().with_only_columns(Endpoint.id)))
        self.endpoints.sort()

    def batch(self, verb: str, count: int) -> None:
        """Do the verb so many times."""
        if verb in ("heartbeat", "complete"):
            for todo_id in self.held[:count]:
                self.once(lambda session, held=todo_id: getattr(queue, verb)(session, held, "worker"))  # type: ignore[misc]
            done, self.held = self.held[:count], self.held[count:]
            if verb == "heartbeat":
                self.held += done
            return
        for _ in range(count):
            self.once(self.enqueue if verb == "enqueue" else self.claim)

    def once(self, act: Callable[[Session], object]) -> None:
        with Session(self.engine) as session:
            act(session)
            session.commit()

    def pair(self) -> tuple[uuid.UUID, str]:
        return self.dice.choice(self.endpoints), f"queue-{self.dice.randrange(4)}"

    def enqueue(self, session: Session) -> None:
        endpoint, name = self.pair()
        self.sent += 1
        queue.enqueue(
            session,
            endpoint,
            name,
            "invoice 4711 was paid",
            source="billing",
            kind="invoice.paid",
            payload={"invoice": self.sent, "amount": "129.00", "currency": "EUR", "customer": "c_1234567890"},
            idempotency_key=f"delivery-{self.sent:012}",
            vouched=True,
        )

    def claim(self, session: Session) -> None:
        while True:
            endpoint, name = self.pair()
            todos = queue.claim(session, endpoint, "worker", queues=[name])
            if todos:
                self.held += [todo.id for todo in todos]
                return


def run(bench: Bench) -> Result:
    """The verbs under every set of indexes, and where the bytes go."""
    result = Result(circumstances(bench))
    _verbs(bench, result)
    return result


def _verbs(bench: Bench, result: Result) -> None:
    scale = bench.scale
    rows = min(ROWS, scale.pairs * scale.rows_a_pair)
    with ExitStack() as stack:
        filled = stack.enter_context(bench.database())
        add_pairs(filled, scale.pairs)
        add_pending(filled, rows, scale.pairs)
        add_past(filled, rows, scale.pairs)
        vacuum(filled)
        template = str(filled.url.database)
        filled.dispose()

        def writer(name: str) -> Writer:
            engine = stack.enter_context(bench.database(template))
            execute(engine, *VARIANTS[name])
            vacuum(engine)
            return Writer(engine)

        writers = {name: writer(name) for name in VARIANTS}
        seen = {name: _Seen() for name in VARIANTS}
        dice = random.Random(SEED)
        for number in range(scale.rounds + 1):
            bench.say(f"verbs: round {number} of {scale.rounds}")
            for name in dice.sample(list(VARIANTS), len(VARIANTS)):
                for verb in VERBS:
                    measured = _batch(writers[name], verb, scale.verbs)
                    if number:
                        seen[name].of(verb, *measured)
        _report_verbs(result, seen)
        _in_turn(result, [writer(name) for name in (BARE, BARE, LEASE, ALL)], 8 * scale.verbs)
        _anatomy(bench, result, {name: writers[name] for name in (BARE, ALL, "both of these")})


@define
class _Seen:
    """What each verb took in each round, in microseconds and bytes per verb."""

    together: dict[str, list[float]] = field(factory=dict)
    server: dict[str, list[float]] = field(factory=dict)
    wal: dict[str, list[float]] = field(factory=dict)

    def of(self, verb: str, cost: ServerCost, written: float, count: int) -> None:
        self.wal.setdefault(verb, []).append(written / count)
        if cost.server_cpu_ms is not None:
            together = cost.client_cpu_ms + cost.server_cpu_ms
            self.together.setdefault(verb, []).append(together * 1000 / count)
            self.server.setdefault(verb, []).append(cost.server_cpu_ms * 1000 / count)


def _batch(writer: Writer, verb: str, count: int) -> tuple[ServerCost, float, int]:
    with wal(writer.engine) as written:
        cost = server_cost(writer.engine, lambda: writer.batch(verb, count))
    return cost, written[0], count


def _more(rounds: list[float], bare: list[float]) -> float:
    """How much more than without the indexes, in percent: the median of the rounds."""
    return round((statistics.median(a / b for a, b in zip(rounds, bare, strict=True)) - 1) * 100, 1)


def _report_verbs(result: Result, seen: dict[str, _Seen]) -> None:
    columns = ("indexes", *VERBS)
    log = result.table("wal", "WAL bytes per verb, commit included", *columns)
    more = result.table("wal_loss", "WAL over none of them, %", *columns)
    rate = result.table("rate", "Verbs a second, one client and one server core", *columns)
    slower = result.table("rate_loss", "Time on a core over none of them, client and server, %", *columns)
    server = result.table("server_loss", "Time on a core over none of them, server alone, %", *columns)
    bare = seen[BARE]
    for name, of in seen.items():
        log.add(name, *(round(statistics.mean(of.wal[verb])) for verb in VERBS))
        share = [statistics.mean(of.wal[verb]) / statistics.mean(bare.wal[verb]) for verb in VERBS]
        more.add(name, *(round((each - 1) * 100, 1) for each in share))
        if of.server:
            rate.add(name, *(round(1e6 / statistics.median(of.together[verb])) for verb in VERBS))
            slower.add(name, *(_more(of.together[verb], bare.together[verb]) for verb in VERBS))
            server.add(name, *(_more(of.server[verb], bare.server[verb]) for verb in VERBS))


def _in_turn(result: Result, writers: list[Writer], count: int) -> None:
    """One verb at a time, in turn on four databases: with no index, with none again, with lease, with all.

    What the machine does meanwhile hits all alike; the two with none show what chance can do.
    """
    table = result.table(
        "in_turn",
        f"{count:,} of each verb in turn, by the clock",
        "verb",
        "per second with none",
        "with lease alone",
        "with all",
        "lost to all, %",
        "lost to the sweep's three, %",
        "between two with none, %",
    )
    dice = random.Random(SEED)
    for verb in VERBS:
        times: list[list[float]] = [[] for _ in writers]
        for _ in range(count):
            for place in dice.sample(range(len(writers)), len(writers)):
                times[place].append(timed(partial(writers[place].batch, verb, 1)))
        none, again, lease, every = (statistics.median(of) for of in times)
        lost = (
            round((1 - less / more) * 100, 1) for less, more in ((none, every), (lease, every), (none, again))
        )
        table.add(verb, *(round(1000 / each) for each in (none, lease, every)), *lost)


def _anatomy(bench: Bench, result: Result, writers: dict[str, Writer]) -> None:
    """Where the bytes of one verb go, record by record, as the server's own reader of its log tells."""
    table = result.table(
        "anatomy",
        "Records of one verb in the log",
        "indexes",
        "verb",
        "B-tree entries",
        "bytes an entry",
        "B-tree bytes",
        "heap bytes",
        "other bytes",
        "HOT, %",
    )
    for name, writer in writers.items():
        if not extension(writer.engine, "pg_walinspect"):
            return
        for verb in VERBS:
            lsn = "SELECT pg_current_wal_insert_lsn()::text"
            start = scalar(writer.engine, lsn)
            writer.batch(verb, bench.scale.verbs)
            end = scalar(writer.engine, lsn)
            with writer.engine.connect() as connection:
                records = connection.execute(
                    text(
                        "SELECT resource_manager, record_type, count(*), sum(record_length)::bigint"
                        " FROM pg_get_wal_records_info(CAST(:start AS pg_lsn), CAST(:end AS pg_lsn))"
                        " GROUP BY 1, 2"
                    ),
                    {"start": start, "end": end},
                ).all()
            table.add(name, verb, *_shares(records, bench.scale.verbs))


def _shares(records: Any, verbs: int) -> tuple[float | None, ...]:
    def total(manager: str, kinds: tuple[str, ...] = (), place: int = 3) -> int:
        return sum(row[place] for row in records if row[0] in manager and (not kinds or row[1] in kinds))

    leaves = ("INSERT_LEAF", "INSERT_POST")
    entries = total("Btree", leaves, 2)
    hot, cold = (total("Heap", (kind, f"{kind}+INIT"), 2) for kind in ("HOT_UPDATE", "UPDATE"))
    every = sum(row[3] for row in records)
    trees, heap = total("Btree"), total("Heap2")
    return (
        round(entries / verbs, 2),
        round(total("Btree", leaves) / entries) if entries else None,
        round(trees / verbs),
        round(heap / verbs),
        round((every - trees - heap) / verbs),
        round(hot * 100 / (hot + cold)) if hot + cold else None,
    )
