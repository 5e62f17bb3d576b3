"""The duties of the tick against a real database, and a connection that is cut between two ticks."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from attrs import define, field
from sqlalchemy import create_engine, func, select, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session, sessionmaker

from switchboard_stall.duties import in_session, standard_duties
from switchboard_stall.models import Endpoint, Todo
from switchboard_stall.ready import set_todo_ready_hook
from switchboard_stall.reaper import Reaper
from switchboard_stall.schedule import StallPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection, Engine
    from support.builders import QueueBuilder, World

SOON = 10.0
"""Seconds after which something that must happen has not."""


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="switchboard_stall")


def told(caplog: pytest.LogCaptureFixture, module: str = "reaper") -> list[str]:
    name = f"switchboard_stall.{module}"
    return [f"{r.levelname} {r.getMessage()}" for r in caplog.records if r.name == name]


def count_todos(session: Session) -> int:
    return session.scalar(select(func.count()).select_from(Todo)) or 0


# The tick


def test_the_five_duties_stand_in_order(session_factory: sessionmaker[Session]) -> None:
    assert [duty.name for duty in standard_duties(session_factory)] == [
        "reap lapsed leases",
        "requeue due retries",
        "re-ring unclaimed todos",
        "expire endpoints",
        "nudge stalled queues",
    ]


def test_a_tick_sweeps_what_is_due(
    session_factory: sessionmaker[Session], present: World, caplog: pytest.LogCaptureFixture
) -> None:
    rung: dict[str, Any] = {"ring_attempts": 1, "last_ringed_at": present.ago("1m")}
    lapsed = present.queue().claimed(ago="6m", **rung)
    due = present.queue().failed(ago="6m", retry_in="-1s", **rung)
    stalled = present.queue().pending(age="7m", **rung)
    unrung = present.queue().pending(age="6m", vouched=True)
    expired = present.endpoint(expires_in="-1s")
    fired: list[tuple[str, str]] = []
    previous = set_todo_ready_hook(lambda todo, reason: fired.append((todo.id, reason)))
    try:
        Reaper(standard_duties(session_factory)).tick()
    finally:
        set_todo_ready_hook(previous)
    assert fired[:2] == [(lapsed.id, "requeued"), (due.id, "requeued")]
    assert sorted(fired[2:]) == sorted([(stalled.id, "created"), (unrung.id, "created")])
    with session_factory() as session:
        assert session.get_one(Todo, unrung.id).ring_attempts == 1
        assert session.get_one(Endpoint, expired.id).state == "revoked"
    assert told(caplog) == [
        "INFO reap lapsed leases: 1",
        "INFO requeue due retries: 1",
        "INFO re-ring unclaimed todos: 1",
        "INFO expire endpoints: 1",
        "INFO nudge stalled queues: 2",
    ]


def test_a_tick_over_nothing_says_nothing(
    session_factory: sessionmaker[Session], present: World, caplog: pytest.LogCaptureFixture
) -> None:
    present.queue().pending(age="1m")
    present.queue().claimed(ago="1m")
    Reaper(standard_duties(session_factory)).tick()
    assert told(caplog) == []


def test_the_policy_reaches_the_stall_sweep(session_factory: sessionmaker[Session], present: World) -> None:
    queue = present.queue()
    queue.pending(age="2m")
    Reaper(standard_duties(session_factory)).tick()
    assert queue.stall is None
    Reaper(standard_duties(session_factory, policy=StallPolicy([timedelta(minutes=1)]))).tick()
    assert queue.stall is not None


def test_a_sweep_whose_tables_are_locked_does_not_stop_the_others(
    engine: Engine,
    session_factory: sessionmaker[Session],
    present: World,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expired = present.endpoint(expires_in="-1s")
    duties = standard_duties(session_factory)
    reaper = Reaper([duties[0], duties[3]], patience=timedelta(milliseconds=300))
    with engine.connect() as holder:
        holder.execute(text("LOCK TABLE todos IN ACCESS EXCLUSIVE MODE"))
        reaper.tick()
        reaper.tick()
        assert told(caplog) == [
            f"WARNING {duty.name}: still running after 0:00:00.300000; left out until it is over"
            for duty in reaper.duties
        ]
    for thread in threading.enumerate():
        if thread.name.startswith("reaper: "):
            thread.join(SOON)
    reaper.patience = timedelta(seconds=SOON)
    reaper.tick()
    with session_factory() as session:
        assert session.get_one(Endpoint, expired.id).state == "revoked"


# A session for each run


def test_work_that_raises_writes_nothing(session_factory: sessionmaker[Session], world: World) -> None:
    endpoint_id = world.endpoint().id

    def work(session: Session) -> None:
        session.add(Todo(endpoint_id=endpoint_id, queue="inbox", title="t"))
        session.flush()
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        in_session(session_factory, work)()
    with session_factory() as session:
        assert count_todos(session) == 0


def isolation(connection: Connection) -> tuple[str, bool]:
    driver = connection.connection.driver_connection
    assert driver is not None
    return connection.get_isolation_level(), driver.autocommit


@pytest.mark.parametrize("level", ["SERIALIZABLE", "AUTOCOMMIT"])
def test_work_runs_in_read_committed_whatever_the_engine_says(engine: Engine, level: str) -> None:
    other = create_engine(engine.url, isolation_level=level)
    with other.connect() as connection:
        before = isolation(connection)
    run = in_session(sessionmaker(other), lambda session: isolation(session.connection()))
    assert before != ("READ COMMITTED", False)
    assert run() == ("READ COMMITTED", False)
    with other.connect() as connection:
        assert isolation(connection) == before
    other.dispose()


def test_an_error_that_lost_no_connection_is_not_tried_again(session_factory: sessionmaker[Session]) -> None:
    calls = []

    def work(session: Session) -> None:
        calls.append(session)
        session.execute(text("SELECT 1 / 0"))

    with pytest.raises(DBAPIError):
        in_session(session_factory, work)()
    assert len(calls) == 1


def test_a_connection_that_is_lost_again_is_not_tried_a_third_time(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    calls = []

    def work(session: Session) -> None:
        calls.append(session)
        terminate_all(engine)
        session.execute(text("SELECT 1"))

    with pytest.raises(OperationalError):
        in_session(session_factory, work)()
    assert len(calls) == 2


# A connection that is cut


def terminate_all(engine: Engine) -> None:
    """End every session of the database, the engine's own too."""
    engine.dispose()
    killer = create_engine(engine.url, isolation_level="AUTOCOMMIT")
    with killer.connect() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )
    killer.dispose()


@define
class Proxy:
    """Stands between the client and the server, and can cut what runs through it."""

    host: str
    port: int
    away: bool = False
    _listener: socket.socket = field(factory=lambda: socket.create_server(("127.0.0.1", 0)))
    _open: list[socket.socket] = field(factory=list)
    _lock: threading.Lock = field(factory=threading.Lock)

    def address(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                if self.away:
                    client.close()
                    continue
                server = socket.create_connection((self.host, self.port))
            except OSError:
                return
            with self._lock:
                self._open += [client, server]
            threading.Thread(target=self._carry, args=(client, server), daemon=True).start()

    def cut(self) -> None:
        """Drop every connection, as a firewall or a fail-over does."""
        with self._lock:
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        with client, server:
            back = threading.Thread(target=_pump, args=(server, client), daemon=True)
            back.start()
            _pump(client, server)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(engine: Engine) -> Iterator[Proxy]:
    assert engine.url.host is not None
    proxy = Proxy(engine.url.host, engine.url.port or 5432)
    serving = threading.Thread(target=proxy.serve, daemon=True)
    serving.start()
    yield proxy
    proxy.close()
    serving.join(SOON)


@pytest.fixture
def proxied(engine: Engine, proxy: Proxy) -> Iterator[Engine]:
    proxied = create_engine(engine.url.set(host="127.0.0.1", port=proxy.address()))
    yield proxied
    proxied.dispose()


def nudges(queue: QueueBuilder) -> int:
    return 0 if queue.stall is None else queue.stall.nudges


@pytest.mark.parametrize("how", ["terminated", "cut"])
def test_a_connection_cut_between_two_ticks_costs_no_tick(
    engine: Engine,
    proxied: Engine,
    proxy: Proxy,
    present: World,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    cut: Callable[[], None] = proxy.cut if how == "cut" else lambda: terminate_all(engine)
    reaper = Reaper(standard_duties(sessionmaker(proxied)))
    reaper.tick()
    cut()
    stalled = present.queue()
    stalled.pending(age="7m")
    lapsed = present.queue()
    lapsed.claimed(ago="6m")
    reaper.tick()
    assert nudges(stalled) == 1
    assert [line for line in told(caplog) if line.startswith("WARNING")] == []
    assert "INFO reap lapsed leases: 1" in told(caplog)


def test_while_the_database_is_away_every_duty_fails_and_the_next_tick_sweeps(
    proxied: Engine, proxy: Proxy, present: World, caplog: pytest.LogCaptureFixture
) -> None:
    queue = present.queue()
    queue.pending(age="7m")
    reaper = Reaper(standard_duties(sessionmaker(proxied)))
    proxy.away = True
    reaper.tick()
    assert told(caplog) == [f"WARNING {duty.name}: failed" for duty in reaper.duties]
    assert nudges(queue) == 0
    proxy.away = False
    reaper.tick()
    assert nudges(queue) == 1
