"""Part 2, later: bloat after many claims, sweeps over dead rows, the reaper among done and claimed."""

from __future__ import annotations

import statistics
from datetime import timedelta
from typing import TYPE_CHECKING

from benchmarks.bench import (
    Bench,
    Result,
    circumstances,
    execute,
    scalar,
    server_cost,
    told,
    vacuum,
    wal,
)
from benchmarks.data import add_pairs, add_past, add_pending
from benchmarks.verbs import DROP, REQUEUED_GENERATED, Writer
from sqlalchemy import text
from sqlalchemy.orm import Session
from support.builders import NOW

from switchboard_stall import Todo, nudge_statement, queue

if TYPE_CHECKING:
    from sqlalchemy import Engine


# Bloat.


def bloat(bench: Bench) -> Result:
    """Many todos through their whole life, vacuumed ten times on the way; then each index beside a new one.

    The claim is the real verb, in batches; heartbeat and complete set the same columns for a batch at once.
    """
    result = Result(circumstances(bench))
    cycles, pairs = bench.scale.cycles, bench.scale.pairs
    table = result.table(
        "bloat", f"Indexes of todos after {cycles:,} claims", "index", "MiB", "MiB rebuilt", "ratio"
    )
    with bench.database() as engine:
        add_pairs(engine, pairs)
        writer = Writer(engine)
        for turn in range(10):
            add_pending(engine, cycles // 10, pairs, kind=f"cycle {turn} ")
            for endpoint in writer.endpoints:
                with Session(engine) as session:
                    held = [
                        todo.id
                        for todo in queue.claim(session, endpoint, "worker", limit=cycles // 10, now=NOW)
                    ]
                    session.commit()
                    for change in (
                        "lease_expires_at = :now, updated_at = :now",
                        "state = 'done', completed_at = :now, updated_at = :now",
                    ):
                        session.execute(
                            text(f"UPDATE todos SET {change} WHERE id = ANY (:held)"),
                            {"held": held, "now": NOW + timedelta(seconds=turn)},
                        )
                        session.commit()
            bench.say(f"upkeep: {(turn + 1) * cycles // 10:,} of {cycles:,} claims")
            vacuum(engine, "VACUUM (ANALYZE) todos")
        result.figures["cycles"] = cycles
        hot = scalar(
            engine,
            "SELECT round(100.0 * n_tup_hot_upd / greatest(n_tup_upd, 1), 1)::float"
            " FROM pg_stat_user_tables WHERE relname = 'todos'",
        )
        result.figures["cycles_hot_percent"] = hot
        before = _sizes(engine)
        execute(engine, "REINDEX TABLE todos")
        after = _sizes(engine)
        for name, size in before.items():
            table.add(
                name,
                round(size / 2**20, 2),
                round(after[name] / 2**20, 2),
                round(size / max(after[name], 1), 2),
            )
    return result


def _sizes(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        rows = connection.execute(
            text(
                "SELECT indexrelid::regclass::text, pg_relation_size(indexrelid) FROM pg_index"
                " WHERE indrelid = 'todos'::regclass ORDER BY 1"
            )
        ).all()
    return {row[0]: row[1] for row in rows}


# Dead rows.


def dead_rows(bench: Bench) -> Result:
    """Rows that are done since the last vacuum lie in the walk's way, before each pair's first."""
    result = Result(circumstances(bench))
    scale = bench.scale
    table = result.table(
        "dead",
        f"{scale.dead:,} claimed and done since the last vacuum, {scale.pairs:,} pairs",
        "when",
        "buffers a pair",
        "server ms",
    )
    with bench.database() as engine, engine.connect() as holder:
        add_pairs(engine, scale.pairs)
        add_pending(engine, scale.pairs * scale.rows_a_pair, scale.pairs)
        execute(
            engine, "UPDATE todos SET created_at = created_at + interval '30 min', updated_at = updated_at"
        )
        execute(engine, "UPDATE todos SET updated_at = created_at")
        add_pending(engine, scale.dead, scale.pairs, kind="dead")
        vacuum(engine)

        def swept(when: str) -> None:
            with engine.connect() as connection:
                plan = told(connection, nudge_statement(now=NOW), "ANALYZE, BUFFERS, TIMING OFF")
                connection.rollback()
            root = plan["Plan"]
            buffers = root["Shared Hit Blocks"] + root["Shared Read Blocks"]
            bench.say(f"upkeep: {when}: {plan['Execution Time']:.1f} ms")
            table.add(when, round(buffers / scale.pairs, 2), round(plan["Execution Time"], 1))

        swept("before")
        holder.execution_options(isolation_level="REPEATABLE READ")
        holder.execute(text("SELECT 1 FROM todos LIMIT 1"))
        execute(
            engine,
            "UPDATE todos SET state = 'done', claimed_at = created_at, completed_at = created_at,"
            " updated_at = created_at WHERE id IN (SELECT id FROM todos ORDER BY created_at LIMIT :dead)",
            dead=scale.dead,
        )
        swept("dead, an old transaction open: first sweep")
        swept("dead, an old transaction open: second sweep")
        holder.rollback()
        swept("dead, the transaction over: first sweep")
        swept("dead, the transaction over: second sweep")
        vacuum(engine)
        swept("after a vacuum")
    return result


# The reaper.


def reaper(bench: Bench) -> Result:
    """Lapsed leases are few; what it takes to see that there is none depends on the index."""
    result = Result(circumstances(bench))
    scale = bench.scale
    table = result.table(
        "reaper",
        f"Reap, claim and heartbeat beside {scale.done:,} done and {scale.claimed:,} claimed todos",
        "index for leases",
        "reap ms",
        "reap buffers",
        "claim ms",
        "claim buffers",
        "heartbeat WAL bytes",
        "MiB",
    )
    ways = {
        "none": (DROP["ix_todos_lease"],),
        "claimed_at, of claimed": (
            "CREATE INDEX ix_todos_held ON todos (claimed_at) WHERE state = 'claimed'",
        ),
        "lease_expires_at, of claimed": (
            "DROP INDEX ix_todos_held",
            "CREATE INDEX ix_todos_lease ON todos (lease_expires_at) WHERE state = 'claimed'",
        ),
    }
    with bench.database() as engine:
        execute(engine, *REQUEUED_GENERATED)
        add_pairs(engine, scale.pairs)
        add_past(engine, scale.done, scale.pairs)
        add_past(engine, scale.claimed, scale.pairs, state="claimed", kind="held")
        add_pending(engine, max(1_000, scale.pairs * scale.rows_a_pair), scale.pairs)
        writer = Writer(engine)
        with Session(engine) as session:
            held = session.query(Todo.id).where(Todo.state == "claimed").limit(100).all()
        for way, changes in ways.items():
            execute(engine, *changes)
            vacuum(engine)

            def reap(engine: Engine = engine) -> None:
                with Session(engine) as session:
                    queue.reap_lapsed_leases(session, now=NOW)
                    session.commit()

            reaps = [server_cost(engine, reap) for _ in range(5)]
            claims = [server_cost(engine, lambda: writer.batch("claim", 10)) for _ in range(5)]
            writer.held = [todo_id for (todo_id,) in held]
            with wal(engine) as written:
                writer.batch("heartbeat", len(held))
            size = scalar(
                engine,
                "SELECT coalesce(sum(pg_relation_size(indexrelid)), 0)::bigint FROM pg_index"
                " WHERE indexrelid::regclass::text IN ('ix_todos_held', 'ix_todos_lease')",
            )
            bench.say(f"upkeep: reaper with {way}: {statistics.median(r.client_ms for r in reaps):.1f} ms")
            table.add(
                way,
                round(statistics.median(cost.client_ms for cost in reaps), 1),
                reaps[-1].buffers,
                round(statistics.median(cost.client_ms for cost in claims) / 10, 2),
                None if claims[-1].buffers is None else claims[-1].buffers // 10,
                round(written[0] / len(held)),
                round(size / 2**20, 2),
            )
    return result
