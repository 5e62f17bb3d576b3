"""``run``: wakes are sent, signals end it, and it says what it cannot work with."""

from __future__ import annotations

import base64
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from sqlalchemy import make_url
from sqlalchemy.orm import Session
from support.builders import World

from switchboard_stall.cli import main
from switchboard_stall.cli.receiver import make_certificates, receiver
from switchboard_stall.cli.run import OneLine
from switchboard_stall.migrations import downgrade
from switchboard_stall.notify import TargetPolicy, create_hook

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cli.conftest import Command
    from sqlalchemy import Engine

KEY = base64.b64encode(bytes(range(32))).decode()
LOOPBACK = "127.0.0.0/8"


class Process:
    """``switchboard-stall run`` as an operator starts it."""

    def __init__(self, url: str, *arguments: str, **environment: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from switchboard_stall.cli import main; main()", "run", *arguments],
            env=os.environ
            | {
                "DATABASE_URL": url,
                "SWITCHBOARD_SECRET_ENCRYPTION_KEY": KEY,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            }
            | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._grown = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._grown:
                self.lines.append(line)
                self._grown.notify_all()

    def wait_for(self, words: str, *, patience: float = 30) -> str:
        """The first log line that holds these words."""
        with self._grown:
            came = self._grown.wait_for(lambda: any(words in line for line in self.lines), patience)
            assert came, f"no line holds {words!r}: {self.lines}"
            return next(line for line in self.lines if words in line)

    def end(self, number: signal.Signals) -> int:
        """Send a signal; the exit code, once it has exited."""
        self.process.send_signal(number)
        code = self.process.wait(timeout=15)
        self._reader.join()
        return code

    def discard(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def started() -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for each in processes:
        each.discard()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_and_cleanly(
    url: str, started: list[Process], number: signal.Signals
) -> None:
    running = Process(url, "--tick", "3600")
    started.append(running)
    running.wait_for("running on")
    began = time.monotonic()
    assert running.end(number) == 0
    assert time.monotonic() - began < 5
    assert "stopped" in running.lines[-1]


def test_wakes_the_consumer_of_a_stalled_queue(
    engine: Engine, url: str, started: list[Process], tmp_path: Path
) -> None:
    certificates = make_certificates()
    authority = tmp_path / "authority.pem"
    authority.write_text(certificates.authority)
    world = World(engine, now=datetime.now(UTC))
    endpoint = world.endpoint()
    todo = endpoint.queue().pending(age="7m")
    with receiver(tmp_path, certificates) as receiving:
        with Session(engine) as session:
            minted = create_hook(
                session, endpoint.id, receiving.url, key=KEY, policy=TargetPolicy(allow_cidrs=[LOOPBACK])
            )
            session.commit()
        receiving.trust(minted.secret)
        running = Process(url, "--tick", "0.2", "--allow-cidr", LOOPBACK, SSL_CERT_FILE=str(authority))
        started.append(running)
        (wake,) = receiving.wakes(1, patience=30)
        line = running.wait_for("queue stalled")
        assert running.end(signal.SIGTERM) == 0
    assert (wake.verified, wake.body["todo_id"]) == (True, todo.id)
    assert "nudge 1 of 5" in line
    assert minted.secret not in "".join(running.lines)


def test_each_log_line_is_one_line_without_the_password() -> None:
    formatter = OneLine(make_url("postgresql://u:p%40ss@h/d"))
    try:
        raise RuntimeError("cannot connect with\n  password p@ss, written p%40ss")
    except RuntimeError:
        record = logging.LogRecord(
            "switchboard_stall.reaper", logging.WARNING, __file__, 1, "%s: failed", ("nudge",), sys.exc_info()
        )
    line = formatter.format(record)
    assert line.endswith(
        "WARNING switchboard_stall.reaper: nudge: failed"
        " | RuntimeError: cannot connect with | password ***, written ***"
    )


def test_refuses_a_database_that_is_not_migrated(engine: Engine, command: Command) -> None:
    with engine.connect() as connection:
        downgrade(connection, "base")
    result = command("run")
    assert result.exit_code == 1
    assert "not migrated. Migrate it: switchboard-stall db upgrade" in result.stderr
    assert "table todos is missing" in result.stderr


def test_refuses_to_run_without_the_key(command: Command) -> None:
    result = command("run")
    assert result.exit_code == 1
    assert "SWITCHBOARD_SECRET_ENCRYPTION_KEY is not set" in result.stderr


def test_an_allow_entry_that_is_no_network_is_wrong_use() -> None:
    result = CliRunner().invoke(main, ["run", "--allow-cidr", "10.0.0.1/8"])
    assert result.exit_code == 2


def test_an_hour_is_the_longest_tick() -> None:
    assert CliRunner().invoke(main, ["run", "--tick", str(timedelta(hours=2).total_seconds())]).exit_code == 2
