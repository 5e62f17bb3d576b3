"""Part 1: what a sweep costs for each pair, in every state a pair can be in, against the bare walk."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from attrs import frozen
from benchmarks.bench import (
    Bench,
    Result,
    Table,
    alternately,
    circumstances,
    driver,
    generic_plans,
    median_ratio,
    told,
    vacuum,
)
from benchmarks.data import (
    BEING_CLAIMED,
    FRESH,
    add_charges,
    add_pairs,
    add_past,
    add_pending,
    clear_charges,
    requeue_oldest,
)
from sqlalchemy import func, select
from sqlalchemy.orm import Session
from support.builders import NOW
from support.plans import explain
from support.variants import PARTITIONS, build_partitioned

from switchboard_stall import nudge_stalled_queues, nudge_statement
from switchboard_stall.statement import pending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from sqlalchemy import ClauseElement, Connection, Engine, Executable

WALK: Final = select(func.count()).select_from(pending())
"""The floor: nothing but the walk from pair to pair."""

COLUMNS: Final = (
    "pairs",
    "pending",
    "state",
    "walk: buffers a pair",
    "sweep: buffers a pair",
    "walk ms",
    "sweep ms",
    "sweep / walk",
    "plan ms",
)


@frozen
class Cost:
    """What one sweep took, and the walk beside it."""

    walk_buffers: int
    sweep_buffers: int
    walk_ms: float
    sweep_ms: float
    ratio: float
    planning_ms: float


def measure(engine: Engine, runs: int, *, now: datetime = NOW) -> Cost:
    """Measure one sweep of what is there at ``now``, and the walk in turn with it.

    Each sweep commits, since a rollback would make the driver prepare anew; the few pairs that it charged
    are forgotten at the end.
    """
    sweep = nudge_statement(now=now)
    buffers, planning = [], 0.0
    with engine.connect() as connection:
        for statement in (WALK, sweep):
            modes = [explain(connection, statement, mode=mode) for mode in ("auto", "force_generic_plan")]
            connection.rollback()
            buffers.append(max(plan.buffers for plan in modes))
        planning = _planning_ms(connection, sweep)
        generic_plans(connection)

        def run(statement: Executable) -> Callable[[], object]:
            def act() -> None:
                connection.execute(statement).all()
                connection.commit()

            return act

        walks, sweeps = alternately(runs, run(WALK), run(sweep))
    walk_buffers, sweep_buffers = buffers
    return Cost(
        walk_buffers,
        sweep_buffers,
        statistics.median(walks),
        statistics.median(sweeps),
        median_ratio(sweeps, walks),
        planning,
    )


def _planning_ms(connection: Connection, statement: ClauseElement) -> float:
    """Plan it a few times on a warm catalogue and take the median."""
    times = [told(connection, statement, "SUMMARY")["Planning Time"] for _ in range(4)]
    connection.rollback()
    return float(statistics.median(times[1:]))


def _row(table: Table, pairs: int, backlog: int, state: str, cost: Cost) -> None:
    table.add(
        pairs,
        backlog,
        state,
        round(cost.walk_buffers / pairs, 2),
        round(cost.sweep_buffers / pairs, 2),
        round(cost.walk_ms, 1),
        round(cost.sweep_ms, 1),
        round(cost.ratio, 2),
        round(cost.planning_ms, 2),
    )


def states(engine: Engine, pairs: int, runs: int) -> Iterator[tuple[str, Cost]]:
    """Take the pairs through every state, and measure each."""
    yield "fresh", measure(engine, runs, now=FRESH)
    yield "stalled, never claimed", measure(engine, runs)
    clear_charges(engine)
    add_past(engine, 20 * pairs, pairs)
    vacuum(engine)
    yield "stalled, old claims", measure(engine, runs)
    clear_charges(engine)
    yield "being claimed", measure(engine, runs, now=BEING_CLAIMED)
    clear_charges(engine)
    add_charges(engine, 1, "10 min")
    yield "paced", measure(engine, runs)
    add_charges(engine, 1, "1 min")
    yield "just nudged", measure(engine, runs)
    add_charges(engine, 5, "10 h")
    yield "capped", measure(engine, runs)
    clear_charges(engine)
    requeue_oldest(engine)
    yield "requeued", measure(engine, runs)
    clear_charges(engine)


def run(bench: Bench) -> Result:
    """Every state at every backlog; then against pairs; an idle database, and Python."""
    scale, result = bench.scale, Result(circumstances(bench))
    against_backlog = result.table("states", "Every state, at every backlog", *COLUMNS)
    for backlog in scale.backlogs:
        with bench.database() as engine:
            add_pairs(engine, scale.pairs)
            add_pending(engine, backlog, scale.pairs)
            vacuum(engine)
            for state, cost in states(engine, scale.pairs, scale.runs):
                bench.say(f"per pair: {backlog:,} pending, {state}: {cost.sweep_ms:.1f} ms")
                _row(against_backlog, scale.pairs, backlog, state, cost)

    against_pairs = result.table("pairs", "Against the number of pairs, stalled with old claims", *COLUMNS)
    memory = result.table(
        "memory", "Temporary files of one sweep, MiB", "pairs", "work_mem 4 MB", "work_mem 64 MB"
    )
    for pairs in scale.pair_counts:
        with bench.database() as engine:
            _fill(engine, pairs, pairs * scale.rows_a_pair)
            cost = measure(engine, scale.runs)
            bench.say(f"per pair: {pairs:,} pairs: {cost.sweep_ms:.1f} ms")
            _row(against_pairs, pairs, pairs * scale.rows_a_pair, "stalled, old claims", cost)
            memory.add(pairs, *(_temporary(engine, size) for size in ("4MB", "64MB")))

    _idle(bench, result)
    _goals(result)
    return result


def _temporary(engine: Engine, work_mem: str) -> float:
    """How much one sweep writes to temporary files."""
    with engine.connect() as connection:
        connection.exec_driver_sql(f"SET LOCAL work_mem = '{work_mem}'")
        plan = told(connection, nudge_statement(now=NOW), "ANALYZE, BUFFERS, TIMING OFF")["Plan"]
        connection.rollback()
    return round(float(plan["Temp Written Blocks"]) * 8 / 1024, 1)


def _goals(result: Result) -> None:
    """What the goals are about, each as one figure: the worst that was seen."""
    fresh, quiet = ("fresh", "just nudged"), ("fresh", "just nudged", "paced", "capped", "being claimed")
    buffers: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}
    ratios = []
    for _, _, state, _, swept, _, milliseconds, ratio, _ in result.tables["states"].rows:
        buffers.setdefault(state, []).append(swept)
        times.setdefault(state, []).append(milliseconds)
        if state in quiet:
            ratios.append(ratio)
    growth = [after / before for seen in times.values() for before, after in pairwise(seen)]
    result.figures["goals"] = {
        "old_buffers": max(max(seen) for state, seen in buffers.items() if state not in (*fresh, "requeued")),
        "requeued_buffers": max(buffers["requeued"]),
        "fresh_buffers": max(max(seen) for state, seen in buffers.items() if state in fresh),
        "quiet_ratio": max(ratios),
        "quiet_ratio_median": round(statistics.median(ratios), 2),
        "ten_times_buffers": round(
            max(after - before for seen in buffers.values() for before, after in pairwise(seen)), 2
        ),
        "ten_times_ms": round(statistics.median(growth), 2),
    }


def _fill(engine: Engine, pairs: int, rows: int) -> None:
    add_pairs(engine, pairs)
    add_pending(engine, rows, pairs)
    add_past(engine, pairs, pairs)
    vacuum(engine)


def floods(bench: Bench) -> Result:
    """Each flood comes on top of the same pairs; the first row is without one."""
    scale, result = bench.scale, Result(circumstances(bench))
    rows = scale.pairs * scale.rows_a_pair
    table = result.table("floods", "Floods and history: stalled with old claims", "on top", *COLUMNS)
    fifty = min(50, scale.pairs)

    def history(engine: Engine) -> None:
        add_past(engine, scale.done, scale.pairs, kind="history")
        add_past(engine, scale.claimed, scale.pairs, state="claimed", kind="held")

    kinds: dict[str, Callable[[Engine], object]] = {
        "nothing": lambda engine: None,
        f"{scale.flood_one:,} unvouched in one pair": lambda engine: add_pending(
            engine, scale.flood_one, 1, vouched=False, kind="flood"
        ),
        f"{scale.flood_fifty:,} unvouched in each of {fifty}": lambda engine: add_pending(
            engine, scale.flood_fifty * fifty, fifty, vouched=False, kind="flood"
        ),
        f"{scale.done:,} done and {scale.claimed:,} claimed": history,
    }
    for title, flood in kinds.items():
        with bench.database() as engine:
            _fill(engine, scale.pairs, rows)
            flood(engine)
            vacuum(engine)
            cost = measure(engine, scale.runs)
            bench.say(f"per pair: {title} on top: {cost.sweep_ms:.1f} ms")
            within = Table("", ())
            _row(within, scale.pairs, rows, "stalled, old claims", cost)
            table.add(title, *within.rows[0])
    base, *flooded, past = (row[5] for row in table.rows)
    result.figures["flood_buffers"] = round(max(flooded) - base, 2)
    result.figures["history_buffers"] = round(past - base, 2)
    return result


def partitions(bench: Bench) -> Result:
    """The same rows in hash partitions by endpoint."""
    scale, result = bench.scale, Result(circumstances(bench))
    rows = scale.pairs * scale.rows_a_pair
    table = result.table("partitions", "Todos hash-partitioned by endpoint", "partitions", *COLUMNS)
    for count in (1, *scale.partitions):
        with bench.database(bench.template if count == 1 else "template0") as engine:
            if count > 1:
                with engine.connect() as connection:
                    build_partitioned(connection)
                    _repartition(connection, count)
            _fill(engine, scale.pairs, rows)
            cost = measure(engine, scale.runs)
            bench.say(f"per pair: {count} partitions: {cost.sweep_ms:.1f} ms")
            within = Table("", ())
            _row(within, scale.pairs, rows, "stalled, old claims", cost)
            table.add(count, *within.rows[0])
    return result


def _repartition(connection: Connection, partitions: int) -> None:
    """Replace the empty partitions by so many."""
    with connection.begin():
        for number in range(PARTITIONS):
            connection.exec_driver_sql(f"DROP TABLE todos_{number}")
        for number in range(partitions):
            connection.exec_driver_sql(
                f"CREATE TABLE todos_{number} PARTITION OF todos"
                f" FOR VALUES WITH (MODULUS {partitions}, REMAINDER {number})"
            )


def _idle(bench: Bench, result: Result) -> None:
    """A database with nothing pending, and what Python adds to the driver's round trips, on a warm cache."""
    with bench.database() as engine:
        add_pairs(engine, bench.scale.pairs)
        add_past(engine, bench.scale.pairs, bench.scale.pairs)
        vacuum(engine)
        statement = nudge_statement()
        with engine.connect() as connection:
            runs = [told(connection, statement, "ANALYZE, BUFFERS, TIMING OFF") for _ in range(9)]
            connection.rollback()
        result.figures["idle_buffers"] = runs[-1]["Plan"]["Shared Hit Blocks"]
        result.figures["idle_server_ms"] = round(statistics.median(run["Execution Time"] for run in runs), 3)

        def empty() -> None:
            with Session(engine) as session:
                session.connection()
                session.commit()

        def sweep() -> None:
            with Session(engine) as session:
                nudge_stalled_queues(session)
                session.commit()

        sql = str(statement.compile(engine))
        with engine.connect() as connection:
            raw = driver(connection)

            def bare() -> None:
                raw.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                raw.execute(sql, prepare=True).fetchall()
                raw.commit()

            for _ in range(20):
                sweep()
            whole, trips = alternately(20 * bench.scale.runs, sweep, bare)
            # In seconds of this thread on a core, since waiting for the server or a core is nobody's share.
            own, driven, held = (
                statistics.median(times)
                for times in alternately(40 * bench.scale.runs, sweep, bare, empty, clock=time.thread_time)
            )
        result.figures["idle_sweep_ms"] = round(statistics.median(whole), 3)
        result.figures["idle_round_trips_ms"] = round(statistics.median(trips), 3)
        result.figures["idle_driver_cpu_ms"] = round(driven, 3)
        result.figures["idle_session_cpu_ms"] = round(held, 3)
        result.figures["idle_python_ms"] = round(own - driven - held, 3)
