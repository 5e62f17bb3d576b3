"""``run``: the real thing, the reaper and the dispatcher against a database."""

from __future__ import annotations

import logging
import os
import signal
import traceback
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import click
from sqlalchemy import func, select
from sqlalchemy.orm import sessionmaker

from switchboard_stall import migrations
from switchboard_stall.cli.database import connected, database_option, place, redacted
from switchboard_stall.cli.wake import Allowed, allow_options, dispatcher, waking
from switchboard_stall.duties import standard_duties
from switchboard_stall.notify.secrets import SecretKeyError
from switchboard_stall.reaper import Reaper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import URL, Engine

_log = logging.getLogger(__name__)
PATIENCE: Final = timedelta(seconds=30)
"""The least that a duty may take before the tick goes on without it."""

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@click.command("run")
@click.option(
    "--tick",
    type=click.FloatRange(min=0.1, max=3600),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="The mean time between two ticks, jittered by a tenth.",
)
@allow_options
@database_option
def run(tick: float, allow_cidr: tuple[str, ...], allow_http: bool) -> None:
    """Run the reaper and the dispatcher until SIGTERM or SIGINT.

    Any number of instances may run; one is enough. Logs go to standard error, a line each.
    SWITCHBOARD_SECRET_ENCRYPTION_KEY opens the hooks' secrets.
    """
    with connected() as engine:
        require_migrated(engine)
        try:
            sender = dispatcher(engine, Allowed(allow_cidr, allow_http))
        except SecretKeyError as error:
            raise click.ClickException(str(error)) from None
        log_to_stderr(engine.url)
        duties = standard_duties(sessionmaker(engine))
        interval = timedelta(seconds=tick)
        reaper = Reaper(duties, interval=interval, patience=max(interval, PATIENCE))
        with stop_signals() as wait, waking(sender), reaper:
            _log.info("running on %s: a tick every %g s, the first one after that", place(engine.url), tick)
            wait()
            _log.info("stopping")
        _log.info("stopped")


def require_migrated(engine: Engine) -> None:
    """Refuse a database whose tables are not what this release works on.

    :raises click.ClickException: with every difference.
    """
    with engine.connect() as connection:
        schema = connection.scalar(select(func.current_schema()))
        if schema is None:
            raise click.ClickException("the search path of this database's user names no schema that exists")
        missing = migrations.differences(connection, schema, migrations.head())
    if missing:
        listed = "".join(f"\n  - {sentence}" for sentence in missing)
        raise click.ClickException(
            "the database is not migrated. Migrate it: switchboard-stall db upgrade\n"
            f"What is not as revision {migrations.head()} makes it:{listed}"
        )


@contextmanager
def stop_signals() -> Iterator[Callable[[], None]]:
    """Give a function that waits for SIGTERM or SIGINT. A second signal ends the process at once."""
    # A pipe and no threading.Event: a handler that runs while its own thread holds the event's lock hangs.
    reading, writing = os.pipe()
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def stop(_: int, __: object) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        os.write(writing, b".")

    def wait() -> None:
        os.read(reading, 1)

    for number in _SIGNALS:
        signal.signal(number, stop)
    try:
        yield wait
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


class OneLine(logging.Formatter):
    """Formats each record as one line, with the error that caused it and without a password.

    :param url: whose passwords are not shown.
    """

    def __init__(self, url: URL | None = None) -> None:
        """Keep what must not be shown."""
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._url = url

    def formatException(self, ei: object) -> str:
        """Return the error without its traceback."""
        error = ei[1] if isinstance(ei, tuple) else None
        if not isinstance(error, BaseException):
            return ""
        return "".join(traceback.format_exception_only(error))

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        # A traceback that another handler has cached is not one line.
        record.exc_text = None
        lines = super().format(record).splitlines()
        record.exc_text = None
        return redacted(" | ".join(line.strip() for line in lines if line.strip()), self._url)


def log_to_stderr(url: URL | None) -> None:
    """Send this package's log lines to standard error, a line each.

    :param url: whose passwords are not shown.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(url))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("switchboard_stall").setLevel(logging.INFO)
