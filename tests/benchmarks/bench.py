"""What every part of the benchmarks stands on: a server, fresh databases, two ways to measure, results."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
from attrs import asdict, define, field, frozen
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from support.databases import DatabaseServer, database_copy, migrated_template
from support.variants import VARIANTS

from switchboard_stall.embedded import EmbeddedPostgres
from switchboard_stall.migrations import database_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sqlalchemy import ClauseElement, Connection

SEED: Final = 20261201
"""Everything random hangs on it."""

SETTINGS: Final[Mapping[str, str]] = {
    # Nothing may run in between: the parts vacuum and analyse when they mean to.
    "autovacuum": "off",
    "checkpoint_timeout": "1h",
    "max_wal_size": "16GB",
    "shared_buffers": "2GB",
    "maintenance_work_mem": "512MB",
    "max_connections": "60",
    "shared_preload_libraries": "pg_stat_statements",
}
"""How the embedded server is started."""


VACUUM: Final = "VACUUM (ANALYZE) endpoints, notify_hooks, todos, queue_stalls"


@frozen
class Scale:
    """How much of everything. ``QUICK`` only shows that the harness works."""

    name: str
    pairs: int
    backlogs: tuple[int, ...]
    pair_counts: tuple[int, ...]
    rows_a_pair: int
    flood_one: int
    flood_fifty: int
    done: int
    claimed: int
    runs: int
    verbs: int
    rounds: int
    dead: int
    cycles: int
    instances: tuple[int, ...]
    seconds: float
    beside: int
    wakes: int
    receivers: int
    partitions: tuple[int, ...]


QUICK: Final = Scale(
    name="quick",
    pairs=20,
    backlogs=(200, 2_000),
    pair_counts=(10, 40),
    rows_a_pair=10,
    flood_one=500,
    flood_fifty=20,
    done=500,
    claimed=100,
    runs=2,
    verbs=5,
    rounds=1,
    dead=200,
    cycles=200,
    instances=(1, 2),
    seconds=0.3,
    beside=2_000,
    wakes=8,
    receivers=4,
    partitions=(4,),
)
DEFAULT: Final = Scale(
    name="default",
    pairs=4_000,
    backlogs=(100_000, 1_000_000),
    pair_counts=(100, 1_000, 4_000, 10_000),
    rows_a_pair=25,
    flood_one=1_000_000,
    flood_fifty=10_000,
    done=500_000,
    claimed=10_000,
    runs=15,
    verbs=50,
    rounds=5,
    dead=100_000,
    cycles=50_000,
    instances=(1, 2, 4, 8, 16),
    seconds=3.0,
    beside=1_000_000,
    wakes=200,
    receivers=200,
    partitions=(4, 16),
)
LARGE: Final = Scale(
    name="large",
    pairs=4_000,
    backlogs=(100_000, 1_000_000, 10_000_000),
    pair_counts=(100, 1_000, 4_000, 10_000, 100_000),
    rows_a_pair=25,
    flood_one=1_000_000,
    flood_fifty=100_000,
    done=5_000_000,
    claimed=100_000,
    runs=15,
    verbs=50,
    rounds=5,
    dead=1_000_000,
    cycles=1_000_000,
    instances=(1, 2, 4, 8, 16),
    seconds=5.0,
    beside=1_000_000,
    wakes=400,
    receivers=200,
    partitions=(4, 16),
)


@define
class Table:
    """Rows under named columns, with a line of explanation."""

    title: str
    columns: Sequence[str]
    rows: list[list[Any]] = field(factory=list)

    def add(self, *cells: Any) -> None:
        self.rows.append(list(cells))


@define
class Result:
    """What one part measured: figures by name, and tables by name."""

    figures: dict[str, Any] = field(factory=dict)
    tables: dict[str, Table] = field(factory=dict)

    def table(self, name: str, title: str, *columns: str) -> Table:
        """Begin a table."""
        return self.tables.setdefault(name, Table(title, columns))


@frozen
class Bench:
    """One run: its scale and its server."""

    scale: Scale
    server: DatabaseServer
    template: str
    say: Callable[[str], None] = print

    @contextlib.contextmanager
    def database(self, template: str | None = None) -> Iterator[Engine]:
        """A database of its own, migrated, with an engine that prepares at once and keeps generic plans."""
        with database_copy(self.server, template or self.template) as name, self.connected(name) as engine:
            yield engine

    @contextlib.contextmanager
    def connected(self, name: str) -> Iterator[Engine]:
        """An engine on a database that exists."""
        engine = create_engine(
            self.server.url.set(database=name), connect_args={"prepare_threshold": 0}, pool_size=4
        )
        try:
            yield engine
        finally:
            engine.dispose()


@contextlib.contextmanager
def bench(scale: Scale, *, named: str | None = None, bin_dir: Path | None = None) -> Iterator[Bench]:
    """A run on an embedded server, or on the one that ``named`` is the URL of."""
    with contextlib.ExitStack() as stack:
        if named:
            url = database_url(named)
        else:
            server = EmbeddedPostgres(bin_dir=bin_dir, settings=SETTINGS, durable=False)
            try:
                url = stack.enter_context(server).url
            except Exception:
                # Binaries without contrib have no pg_stat_statements; its columns then stay empty.
                plain = {name: value for name, value in SETTINGS.items() if "preload" not in name}
                server = EmbeddedPostgres(bin_dir=bin_dir, settings=plain, durable=False)
                url = stack.enter_context(server).url
        databases = DatabaseServer(url, variant=VARIANTS[""])
        stack.callback(databases.disconnect)
        template = stack.enter_context(migrated_template(databases))
        yield Bench(scale, databases, template)


# Ways to measure.


def timed(act: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how many milliseconds ``act`` took."""
    began = clock()
    act()
    return (clock() - began) * 1000


def alternately(
    runs: int, *acts: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Run the acts in turn, so many rounds after one to warm up; return the milliseconds of each act.

    What the machine does meanwhile then hits all of them alike.
    """
    for act in acts:
        act()
    rounds = [[timed(act, clock) for act in acts] for _ in range(runs)]
    return [list(times) for times in zip(*rounds, strict=True)]


def median_ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over the rounds of what an act took in multiples of its neighbour."""
    return statistics.median(one / other for one, other in zip(times, base, strict=True))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def generic_plans(connection: Connection) -> Connection:
    """Let the session plan each statement once, without its parameters, as production comes to do."""
    connection.exec_driver_sql("SET plan_cache_mode = force_generic_plan")
    connection.commit()
    return connection


def scalar(engine: Engine, statement: str, **values: Any) -> Any:
    """Ask for one value."""
    with engine.connect() as connection:
        return connection.scalar(text(statement), values)


def execute(engine: Engine, *statements: str, **values: Any) -> None:
    """Run each statement and commit."""
    with engine.begin() as connection:
        for statement in statements:
            given = {name: value for name, value in values.items() if f":{name}" in statement}
            connection.execute(text(statement), given)


def vacuum(engine: Engine, how: str = VACUUM) -> None:
    """Run it outside a transaction."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(how))


@contextlib.contextmanager
def wal(engine: Engine) -> Iterator[list[int]]:
    """Fill the list with the bytes that were written to the log meanwhile. Nobody else may write."""
    ask = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"
    written: list[int] = []
    before = scalar(engine, ask)
    yield written
    written.append(int(scalar(engine, ask)) - int(before))


@frozen
class ServerCost:
    """What something took: on the clock, of this thread's core, of the server's core, and in buffers.

    What the server spent is ``None`` where it cannot be told.
    """

    client_ms: float
    client_cpu_ms: float
    server_cpu_ms: float | None
    buffers: int | None


def server_cost(engine: Engine, act: Callable[[], object]) -> ServerCost:
    """Do it on the engine's one connection, and ask the system and the server what they spent.

    Time on a core, since on a busy machine the clock tells mostly of others.
    """
    counted = extension(engine, "pg_stat_statements")
    mine = "(SELECT oid FROM pg_database WHERE datname = current_database())"
    if counted:
        scalar(engine, f"SELECT pg_stat_statements_reset(0, {mine}, 0)")
    backend = scalar(engine, "SELECT pg_backend_pid()")
    server, own, began = _on_core(backend), time.thread_time(), time.perf_counter()
    act()
    took, mine_ms = time.perf_counter() - began, time.thread_time() - own
    after = _on_core(backend)
    buffers = None
    if counted:
        buffers = scalar(
            engine,
            "SELECT sum(shared_blks_hit + shared_blks_read)::bigint FROM pg_stat_statements"
            f" WHERE dbid = {mine} AND query NOT LIKE '%pg_stat_statements%'",
        )
    spent = None if server is None or after is None else after - server
    return ServerCost(took * 1000, mine_ms * 1000, spent, buffers)


def _on_core(pid: int) -> float | None:
    """How many milliseconds a process of this machine was on a core, if the system tells."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e6
    except OSError:
        return None


def extension(engine: Engine, name: str) -> bool:
    """Make the extension, and return whether the server has it."""
    try:
        execute(engine, f"CREATE EXTENSION IF NOT EXISTS {name}")
        if name == "pg_stat_statements":
            scalar(engine, "SELECT count(*) FROM pg_stat_statements")
    except DBAPIError:
        return False
    return True


def told(connection: Connection, statement: ClauseElement, options: str) -> dict[str, Any]:
    """Explain the statement, its parameters written into it."""
    compiled = statement.compile(connection, compile_kwargs={"literal_binds": True})
    answer = connection.exec_driver_sql(f"EXPLAIN ({options}, FORMAT JSON) {compiled}").scalar()
    assert answer is not None
    found: dict[str, Any] = answer[0]
    return found


def process(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a script of this folder as a process of its own, which imports what this one can."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


# Where it was measured.


def circumstances(bench: Bench) -> dict[str, Any]:
    """The kind of machine, and the versions: nothing that names it."""
    engine = create_engine(bench.server.url)
    try:
        server = scalar(engine, "SHOW server_version")
        buffers = scalar(engine, "SHOW shared_buffers")
        durable = scalar(engine, "SHOW fsync")
    finally:
        engine.dispose()
    return {
        "scale": asdict(bench.scale),
        "seed": SEED,
        "machine": {
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {
            "postgresql": server.split()[0],
            "python": platform.python_version(),
            **{name: _version(name) for name in ("sqlalchemy", "psycopg", "procrastinate", "pgqueuer")},
        },
        "server": {"shared_buffers": buffers, "fsync": durable, "autovacuum": SETTINGS["autovacuum"]},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def driver(connection: Connection) -> psycopg.Connection[Any]:
    """The driver's own connection."""
    found = connection.connection.driver_connection
    assert isinstance(found, psycopg.Connection)
    return found
