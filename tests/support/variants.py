"""Ways in which a run's database differs from the plain one; ``SWITCHBOARD_TEST_VARIANT`` chooses one.

The same tests run under each. What a variant is stands here alone: how its server is started, how the
schema is built, and how engines are made.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen
from sqlalchemy import URL, Connection, text

from switchboard_stall import Todo
from switchboard_stall.migrations import BASE_REVISION, upgrade

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

TEST_VARIANT: Final = "SWITCHBOARD_TEST_VARIANT"

SCHEMA: Final = "elsewhere"
PARTITIONS: Final = 4


class Missing(RuntimeError):
    """What a variant needs is not installed; the message names the package."""


def build_plainly(connection: Connection) -> None:
    """Let the migrations build the schema."""
    upgrade(connection)


def build_partitioned(connection: Connection) -> None:
    """Let a host partition ``todos`` by endpoint, before it adds the ledger."""
    upgrade(connection, BASE_REVISION)
    table = Todo.__tablename__
    with connection.begin():
        keys, indexes = _definitions(connection, table)
        for statement in (
            f"ALTER TABLE {table} RENAME TO flat",
            f"CREATE TABLE {table} (LIKE flat INCLUDING DEFAULTS INCLUDING CONSTRAINTS)"
            " PARTITION BY HASH (endpoint_id)",
            "DROP TABLE flat",
            f"ALTER TABLE {table} ADD CONSTRAINT pk_{table} PRIMARY KEY (id, endpoint_id)",
            *keys,
            *(
                f"CREATE TABLE {table}_{number} PARTITION OF {table}"
                f" FOR VALUES WITH (MODULUS {PARTITIONS}, REMAINDER {number})"
                for number in range(PARTITIONS)
            ),
            *indexes,
        ):
            connection.execute(text(statement.replace(":", "\\:")))
    upgrade(connection)


def _definitions(connection: Connection, table: str) -> tuple[list[str], list[str]]:
    keys = connection.execute(
        text(
            "SELECT format('ALTER TABLE %s ADD CONSTRAINT %I %s', CAST(:t AS text), conname,"
            " pg_get_constraintdef(oid)) FROM pg_constraint"
            " WHERE conrelid = CAST(:t AS regclass) AND contype = 'f'"
        ),
        {"t": table},
    )
    indexes = connection.execute(
        text(
            "SELECT pg_get_indexdef(indexrelid) FROM pg_index"
            " WHERE indrelid = CAST(:t AS regclass) AND NOT indisprimary"
        ),
        {"t": table},
    )
    return list(keys.scalars()), list(indexes.scalars())


def build_elsewhere(connection: Connection) -> None:
    """Build into a schema that no search path names."""
    with connection.begin():
        connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
    upgrade(connection, schema=SCHEMA)


@contextlib.contextmanager
def no_pooler(_: URL) -> Iterator[None]:
    """Tests talk to the server."""
    yield None


@contextlib.contextmanager
def pgbouncer(server: URL) -> Iterator[URL]:
    """A real PgBouncer in transaction mode before the server.

    :raises Missing: it is not installed.
    """
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        raise Missing("there is no pgbouncer: apt-get install pgbouncer")
    with tempfile.TemporaryDirectory(prefix="switchboard-stall-pgbouncer-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        users = folder / "users"
        users.write_text(f'"{server.username}" "{server.password}"\n')
        config = folder / "pgbouncer.ini"
        config.write_text(
            f"[databases]\n* = host={server.host} port={server.port}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = scram-sha-256\nauth_file = {users}\npool_mode = transaction\n"
            "max_client_conn = 200\ndefault_pool_size = 20\nserver_round_robin = 1\n"
        )
        command = [program, *(["-u", "nobody"] if os.geteuid() == 0 else []), str(config)]
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 10
            while not _listens(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"pgbouncer did not start:\n{(folder / 'log').read_text()}")
            yield server.set(host="127.0.0.1", port=port)
        finally:
            process.terminate()
            process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def clock_set(by: str) -> Iterator[None]:
    """Whatever process is started within has a clock that is wrong ``by`` so much; this one's is not.

    :raises Missing: libfaketime is not installed.
    """
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if library is None:
        raise Missing("there is no libfaketime: apt-get install faketime")
    wrong = {"LD_PRELOAD": str(library), "FAKETIME": by, "DONT_FAKE_MONOTONIC": "1"}
    before = {name: os.environ.get(name) for name in wrong}
    os.environ.update(wrong)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@frozen
class Variant:
    """One way to differ; every part has the plain way as its default.

    ``while_starting`` surrounds the start of the server; ``engine`` is how the engines of tests are made.
    """

    says: str
    build: Callable[[Connection], None] = build_plainly
    while_starting: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    pooler: Callable[[URL], contextlib.AbstractContextManager[URL | None]] = no_pooler
    engine: Mapping[str, Any] = field(factory=dict)
    partitions: int = 1
    server_is_ahead_hours: int = 0


VARIANTS: Final[Mapping[str, Variant]] = {
    "": Variant("plain"),
    "partitioned": Variant(
        "todos hash-partitioned by endpoint", build=build_partitioned, partitions=PARTITIONS
    ),
    "pgbouncer": Variant(
        "through PgBouncer, transaction mode",
        pooler=pgbouncer,
        engine={"connect_args": {"prepare_threshold": None}},
    ),
    "serializable": Variant("engine at SERIALIZABLE", engine={"isolation_level": "SERIALIZABLE"}),
    "repeatable-read": Variant("engine at REPEATABLE READ", engine={"isolation_level": "REPEATABLE READ"}),
    "timezone": Variant(
        "session in Asia/Kathmandu, DateStyle ISO, DMY",
        engine={"connect_args": {"options": "-c timezone=Asia/Kathmandu -c datestyle=ISO,DMY"}},
    ),
    "schema": Variant(
        "schema_translate_map to another schema",
        build=build_elsewhere,
        engine={"execution_options": {"schema_translate_map": {None: SCHEMA}}},
    ),
    "clock-ahead": Variant(
        "database's clock an hour ahead", while_starting=lambda: clock_set("+1h"), server_is_ahead_hours=1
    ),
    "clock-behind": Variant(
        "database's clock an hour behind", while_starting=lambda: clock_set("-1h"), server_is_ahead_hours=-1
    ),
}


def variant_of_this_run() -> Variant:
    """The variant that the environment names.

    :raises KeyError: there is none of that name.
    """
    return VARIANTS[os.environ.get(TEST_VARIANT, "")]
