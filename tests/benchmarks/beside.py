"""Part 4: other ways to find work that nobody takes, on one server, on the same rows, in one run.

The peers run as they are installed: their schema, their call, their SQL. Where one is not installed it is
left out. Their rows are as many, in as many queues, as ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import statistics
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
import psycopg.conninfo
from attrs import define, field
from benchmarks.bench import (
    Bench,
    Result,
    alternately,
    circumstances,
    driver,
    execute,
    extension,
    generic_plans,
    median_ratio,
    scalar,
    server_cost,
    told,
    vacuum,
)
from benchmarks.data import CREATED, add_pairs, add_past, add_pending
from benchmarks.per_pair import WALK
from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import distinct_on
from support.builders import NOW

from switchboard_stall import Todo, nudge_statement
from switchboard_stall.statement import PENDING

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import ClauseElement, Connection, Engine

PAIR: Final = (Todo.endpoint_id, Todo.queue)
_RANKED: Final = (
    select(
        *PAIR,
        Todo.created_at,
        func.row_number().over(partition_by=PAIR, order_by=Todo.created_at).label("turn"),
    )
    .where(Todo.state == PENDING)
    .subquery()
)


def _past(cutoff: object) -> ClauseElement:
    return select(*PAIR).where(Todo.state == PENDING, Todo.created_at <= cutoff).distinct()


def statements(pairs: int) -> dict[str, ClauseElement]:
    """Ours first; each of the others finds the pairs with pending work, and decides nothing."""
    return {
        "the sweep, whole": nudge_statement(now=NOW),
        "the walk alone": WALK,
        "GROUP BY": select(*PAIR, func.min(Todo.created_at)).where(Todo.state == PENDING).group_by(*PAIR),
        "DISTINCT ON": select(*PAIR, Todo.created_at)
        .ext(distinct_on(*PAIR))
        .where(Todo.state == PENDING)
        .order_by(*PAIR, Todo.created_at),
        "window rank": select(_RANKED).where(_RANKED.c.turn == 1),
        "skip scan, every row old": _past(NOW - timedelta(minutes=5)),
        "skip scan, one row of each pair old": _past(CREATED + timedelta(microseconds=pairs - 1)),
    }


KEDA: Final = text(
    "SELECT count(*) FROM todos WHERE state = 'pending' AND endpoint_id = :endpoint_id AND queue = :queue"
)


@define
class Peer:
    """A package's own question, asked through the package."""

    title: str
    ask: Callable[[], object]
    found: list[str] = field(factory=list)


def run(bench: Bench) -> Result:
    """Each of them in turn with the sweep."""
    scale, result = bench.scale, Result(circumstances(bench))
    table = result.table(
        "beside",
        f"{scale.beside:,} pending in {scale.pairs:,} pairs",
        "what",
        "ms",
        "in sweeps",
        "buffers",
        "what its plan reads",
    )
    plans: dict[str, Any] = {}
    runs = max(2, scale.runs // 3)
    with bench.database() as engine, asyncio.Runner() as loop, contextlib.ExitStack() as last:
        last.callback(lambda: loop.run(_close()))
        add_pairs(engine, scale.pairs)
        add_pending(engine, scale.beside, scale.pairs)
        add_past(engine, scale.pairs, scale.pairs)
        vacuum(engine)
        ours = statements(scale.pairs)
        with engine.connect() as connection:
            generic_plans(connection)
            sweep = _fetch(connection, ours["the sweep, whole"])
            for title, statement in ours.items():
                plan = told(connection, statement, "ANALYZE, BUFFERS, TIMING OFF")["Plan"]
                connection.rollback()
                sweeps, times = alternately(runs, sweep, _fetch(connection, statement))
                plans[title] = plan
                buffers = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
                _add(bench, result, title, times, sweeps, buffers, _reads(plan))
            keda = _keda(connection)
            sweeps, times = alternately(2, sweep, keda)
            cost = server_cost(engine, keda)
            _add(
                bench,
                result,
                "count per queue, as KEDA asks",
                times,
                sweeps,
                cost.buffers,
                "each queue whole",
            )
            for peer in _peers(engine, loop, scale.pairs, scale.beside):
                if not _ends(peer):
                    bench.say(f"beside: {peer.title}: given up")
                    table.add(peer.title, f"over {PATIENCE_MS:,}", None, None, "given up")
                    continue
                sweeps, times = alternately(runs, sweep, peer.ask)
                cost = server_cost(engine, peer.ask)
                plan = _plan_of_last(engine)
                plans[peer.title] = plan
                _add(bench, result, peer.title, times, sweeps, cost.buffers, _reads(plan) if plan else "")
    result.figures["plans"] = plans
    assert table.rows
    return result


def _add(
    bench: Bench,
    result: Result,
    title: str,
    times: list[float],
    sweeps: list[float],
    buffers: int | None,
    reads: str,
) -> None:
    ratio = median_ratio(times, sweeps)
    bench.say(f"beside: {title}: {ratio:.2f} sweeps")
    result.tables["beside"].add(title, round(statistics.median(times), 1), round(ratio, 2), buffers, reads)


def _fetch(connection: Connection, statement: Any) -> Callable[[], object]:
    def act() -> None:
        connection.execute(statement).all()
        connection.commit()

    return act


def _keda(connection: Connection) -> Callable[[], object]:
    """One query for each queue, as a scaler for each would send."""
    pairs = connection.execute(select(*PAIR).where(Todo.state == PENDING).distinct()).all()
    connection.commit()

    def act() -> None:
        for endpoint_id, queue in pairs:
            connection.execute(KEDA, {"endpoint_id": endpoint_id, "queue": queue}).scalar()
        connection.commit()

    return act


def _reads(plan: dict[str, Any]) -> str:
    """The scans of a plan that read most, with the rows they read and the descents they took."""
    scans: list[tuple[float, str]] = []

    def visit(node: dict[str, Any]) -> None:
        relation = node.get("Index Name") or node.get("Relation Name")
        if relation and "Scan" in node["Node Type"] and "CTE" not in node["Node Type"]:
            rows = (node.get("Actual Rows", 0) + node.get("Rows Removed by Filter", 0)) * node.get(
                "Actual Loops", 0
            )
            searches = f", {node['Index Searches']:,} descents" if "Index Searches" in node else ""
            said = f"{node['Node Type']} {relation}"
            scans.append((rows, f"{said}: {rows:,.0f} rows{searches}" if "Actual Rows" in node else said))
        for child in node.get("Plans", ()):
            visit(child)

    visit(plan)
    scans.sort(key=lambda scan: -scan[0])
    return "; ".join(said for _, said in scans[:3])


# The peers.


def _peers(engine: Engine, loop: asyncio.Runner, pairs: int, rows: int) -> list[Peer]:
    found: list[Peer] = []
    for prepare in (_procrastinate, _pgqueuer):
        try:
            found += prepare(engine, loop, pairs, rows)
        except ModuleNotFoundError:
            continue
    vacuum(engine, "VACUUM (ANALYZE)")
    return found


_OPEN: Final[list[Any]] = []

PATIENCE_MS: Final = 20_000
"""How long a peer's statement may take."""


def _ends(peer: Peer) -> bool:
    """Whether the peer answers in time."""
    try:
        peer.ask()
    except Exception as error:
        if "statement timeout" in f"{error} {error.__cause__}":
            return False
        raise
    return True


async def _close() -> None:
    while _OPEN:
        await _OPEN.pop()()


def _dsn(engine: Engine) -> str:
    url = engine.url
    return psycopg.conninfo.make_conninfo(
        host=url.host,
        port=url.port,
        user=url.username,
        password=url.password,
        dbname=url.database,
        options=f"-c statement_timeout={PATIENCE_MS}",
    )


def _procrastinate(engine: Engine, loop: asyncio.Runner, pairs: int, rows: int) -> list[Peer]:
    """Its jobs have a queue; those that run belong to a worker, whose heartbeat may be old."""
    procrastinate = importlib.import_module("procrastinate")
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=_dsn(engine)))

    async def opened() -> None:
        await app.open_async()
        _OPEN.append(app.close_async)
        await app.schema_manager.apply_schema_async()

    loop.run(opened())
    execute(
        engine,
        "ALTER TABLE procrastinate_jobs DISABLE TRIGGER USER",
        "INSERT INTO procrastinate_workers DEFAULT VALUES",
        "INSERT INTO procrastinate_jobs (queue_name, task_name)"
        " SELECT 'queue-' || turn % :pairs, 'work' FROM generate_series(1, :rows) AS turn",
        "INSERT INTO procrastinate_jobs (queue_name, task_name, status, worker_id)"
        " SELECT 'queue-' || turn % :pairs, 'work', 'doing', (SELECT id FROM procrastinate_workers)"
        " FROM generate_series(1, :pairs) AS turn",
        pairs=pairs,
        rows=rows,
    )
    jobs = app.job_manager
    return [
        Peer(
            "procrastinate: get_stalled_jobs",
            lambda: loop.run(jobs.get_stalled_jobs(seconds_since_heartbeat=86_400)),
        ),
        Peer("procrastinate: list_queues", lambda: loop.run(jobs.list_queues_async())),
    ]


def _pgqueuer(engine: Engine, loop: asyncio.Runner, pairs: int, rows: int) -> list[Peer]:
    """What a queue is to us, an entrypoint is to it."""
    wrapped = importlib.import_module("pgqueuer.db").PsycopgDriver
    queries = importlib.import_module("pgqueuer.queries").Queries

    async def opened() -> Any:
        connection = await psycopg.AsyncConnection.connect(_dsn(engine), autocommit=True)
        _OPEN.append(connection.close)
        made = queries(wrapped(connection))
        await made.install()
        return made

    made = loop.run(opened())
    execute(
        engine,
        "ALTER TABLE pgqueuer DISABLE TRIGGER USER",
        "INSERT INTO pgqueuer (priority, status, entrypoint)"
        " SELECT 0, 'queued', 'queue-' || turn % :pairs FROM generate_series(1, :rows) AS turn",
        pairs=pairs,
        rows=rows,
    )
    return [
        Peer("pgqueuer: queue_size", lambda: loop.run(made.queue_size())),
        Peer("pgqueuer: queue_age", lambda: loop.run(made.queue_age())),
    ]


def _plan_of_last(engine: Engine) -> dict[str, Any] | None:
    """Explain the dearest statement that the server has counted since, as its client wrote it."""
    if not extension(engine, "pg_stat_statements"):
        return None
    sql = scalar(
        engine,
        "SELECT query FROM pg_stat_statements WHERE dbid ="
        " (SELECT oid FROM pg_database WHERE datname = current_database())"
        " AND query NOT LIKE '%pg_stat_statements%' AND query ~* '^\\s*(select|with)'"
        " ORDER BY total_exec_time DESC LIMIT 1",
    )
    # Its parameters have no values here, which only the simple protocol lets pass.
    with engine.connect() as connection, psycopg.ClientCursor(driver(connection)) as cursor:
        try:
            answer = cursor.execute(f"EXPLAIN (GENERIC_PLAN, FORMAT JSON) {sql}".encode()).fetchone()
        except psycopg.errors.SyntaxError:  # The server wrote a parameter where none may stand.
            return None
    assert answer is not None
    found: dict[str, Any] = answer[0][0]["Plan"]
    return found
