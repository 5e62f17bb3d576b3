"""Part 3: many instances on one database: sweeps and wakes a second, lock waits, and what others lose."""

from __future__ import annotations

import json
import statistics
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from attrs import frozen
from benchmarks.bench import Bench, Result, circumstances, process, quantile, scalar, vacuum
from benchmarks.data import FRESH, add_pairs, add_past, add_pending, clear_charges
from sqlalchemy import text
from support.builders import NOW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Engine


@frozen
class Order:
    """A process to start: what it does, on which database, and from when it looks."""

    role: str
    engine: Engine
    now: str = NOW.isoformat()
    give_up_after: int = 10**9


@frozen
class Crowd:
    """What the processes did, and what the server was seen waiting for."""

    told: list[dict[str, Any]]
    waits: Counter[str]
    samples: int


def crowd(orders: Sequence[Order], seconds: float) -> Crowd:
    """Let all of them act at once, and sample what they wait for."""
    running = []
    for number, order in enumerate(orders, start=1):
        written = {
            "url": order.engine.url.render_as_string(hide_password=False),
            "now": order.now,
            "seconds": seconds,
            "seed": number,
            "give_up_after": order.give_up_after,
        }
        running.append(process("instance.py", order.role, json.dumps(written)))
    for started in running:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n", "an instance did not come up"
    over = threading.Event()
    waits: Counter[str] = Counter()
    samples = [0]
    watcher = threading.Thread(target=_watch, args=(orders[0].engine, over, waits, samples))
    watcher.start()
    for started in running:
        assert started.stdin is not None
        started.stdin.write("\n")
        started.stdin.flush()
    said = [started.communicate(timeout=seconds * 20 + 600)[0] for started in running]
    over.set()
    watcher.join()
    assert all(started.returncode == 0 for started in running), "an instance failed"
    return Crowd([json.loads(line) for line in said], waits, samples[0])


def _watch(engine: Engine, over: threading.Event, waits: Counter[str], samples: list[int]) -> None:
    ask = text(
        "SELECT wait_event_type || ': ' || wait_event, count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND state = 'active' AND pid <> pg_backend_pid()"
        " AND wait_event_type IN ('Lock', 'LWLock') GROUP BY 1"
    )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while not over.wait(0.02):
            samples[0] += 1
            for event, count in connection.execute(ask):
                waits[event] += count


def _said(found: Crowd, sweepers: int) -> tuple[float, str]:
    """The share of an instance's time spent waiting for row locks, in percent, and all kinds seen."""
    moments = max(found.samples * sweepers, 1)
    locked = sum(count for event, count in found.waits.items() if event.startswith("Lock"))
    kinds = ", ".join(event for event, _ in found.waits.most_common(3))
    return round(locked * 100 / moments, 1), kinds or "none"


def run(bench: Bench) -> Result:
    """Nothing due; all due at once; and workers beside sweeps that never rest."""
    scale, result = bench.scale, Result(circumstances(bench))
    pairs = min(scale.pairs, 1_000)
    with bench.database() as engine, bench.database() as other:
        for each in (engine, other):
            add_pairs(each, pairs)
            add_pending(each, pairs * scale.rows_a_pair, pairs)
            add_past(each, pairs, pairs)
            vacuum(each)
        _flat_out(bench, result, engine, pairs)
        _race(bench, result, engine, pairs)
        _beside_work(bench, result, engine, other)
    return result


def _flat_out(bench: Bench, result: Result, engine: Engine, pairs: int) -> None:
    table = result.table(
        "sweeps",
        f"Sweeps that never rest, {pairs:,} pairs, nothing due",
        "instances",
        "sweeps/s",
        "median ms",
        "p99 ms",
        "waiting for a row, %",
        "waits seen",
    )
    for instances in bench.scale.instances:
        found = crowd([Order("sweep", engine, now=FRESH.isoformat())] * instances, bench.scale.seconds)
        times = [time for told in found.told for time in told["times"]]
        rate = sum(told["acts"] / told["took"] for told in found.told)
        bench.say(f"contention: {instances} instances: {rate:.0f} sweeps/s")
        table.add(
            instances,
            round(rate),
            round(statistics.median(times), 1),
            round(quantile(times, 0.99), 1),
            *_said(found, instances),
        )


def _race(bench: Bench, result: Result, engine: Engine, pairs: int) -> None:
    table = result.table(
        "wakes",
        f"{pairs:,} pairs due at once: until each was nudged",
        "instances",
        "wakes",
        "wakes/s",
        "sweeps",
        "sweeps that won nothing",
        "waiting for a row, %",
        "waits seen",
    )
    for instances in bench.scale.instances:
        clear_charges(engine)
        vacuum(engine)
        found = crowd([Order("sweep", engine, give_up_after=20)] * instances, 120)
        wakes = sum(told["came"] for told in found.told)
        assert wakes == pairs == scalar(engine, "SELECT sum(nudges) FROM queue_stalls"), "not exactly once"
        took = max(told["last"] for told in found.told)
        sweeps = sum(told["acts"] for told in found.told) - 20 * instances
        bench.say(f"contention: {instances} instances: {wakes} wakes in {took:.1f} s")
        table.add(
            instances,
            wakes,
            round(wakes / took),
            sweeps,
            max(0, sweeps - wakes // 4),
            *_said(found, instances),
        )
    clear_charges(engine)


def _beside_work(bench: Bench, result: Result, engine: Engine, other: Engine) -> None:
    """A worker beside sweeps on its own database, and beside the same sweeps on another one.

    Both share the machine; only the first can be in the worker's way.
    """
    table = result.table(
        "work",
        "One worker that enqueues and claims, beside sweeps that never rest",
        "sweeping instances",
        "verbs/s",
        "verbs/s, sweeps elsewhere",
        "lost to sweeps, %",
        "p99 ms a pair of verbs",
        "p99 ms, sweeps elsewhere",
        "waits seen",
    )
    for sweepers in (0, *bench.scale.instances[: bench.scale.rounds // 2]):
        rates: dict[str, list[float]] = {"here": [], "elsewhere": []}
        times: dict[str, list[float]] = {"here": [], "elsewhere": []}
        waits: Counter[str] = Counter()
        for _ in range(max(1, bench.scale.rounds // 2)):
            for where, database in (("here", engine), ("elsewhere", other)):
                orders = [Order("work", engine), *[Order("sweep", database)] * sweepers]
                found = crowd(orders, bench.scale.seconds)
                worker = found.told[0]
                rates[where].append(worker["came"] / worker["took"])
                times[where] += worker["times"]
                if where == "here":
                    waits += found.waits
                clear_charges(engine)
                clear_charges(other)
        here, elsewhere = (statistics.median(rates[where]) for where in ("here", "elsewhere"))
        lost = statistics.median(1 - h / e for h, e in zip(rates["here"], rates["elsewhere"], strict=True))
        bench.say(f"contention: {sweepers} sweeping: {here:.0f} verbs/s, {elsewhere:.0f} elsewhere")
        table.add(
            sweepers,
            round(here),
            round(elsewhere),
            round(lost * 100, 1),
            round(quantile(times["here"], 0.99), 1),
            round(quantile(times["elsewhere"], 0.99), 1),
            ", ".join(event for event, _ in waits.most_common(3)) or "none",
        )
