"""Which database a command works on, how it connects, and how it says that it could not."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, quote_plus

import click
from attrs import define
from sqlalchemy import URL, Engine, create_engine

from switchboard_stall.clock import check_instant
from switchboard_stall.migrations import DATABASE_URL, database_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.exc import DBAPIError

LINK: Final[dict[str, int]] = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 20_000,
}
"""What libpq is told about the link: a half-open connection is found dead within one tick of the reaper.

In seconds, ``tcp_user_timeout`` in milliseconds. What the URL says of the same parameter goes first.
"""

_UNDEFINED: Final = frozenset({"42P01", "42703", "3F000"})
_SECRET_PARAMETERS: Final = ("password", "sslpassword")
_F = TypeVar("_F", bound="Callable[..., Any]")


class DatabaseMissing(click.ClickException):
    """No database was named, and no embedded one was made yet."""


@define
class Settings:
    """What the command line said about the database, for the whole invocation."""

    named: str | None = None
    resolved: URL | None = None


def database_option(command: _F) -> _F:
    """Give a command ``--database-url``; the group has it too, and the nearer one counts."""
    return click.option(
        "--database-url",
        metavar="URL",
        expose_value=False,
        callback=_remember,
        help=f"PostgreSQL to work on; else {DATABASE_URL} says it, which keeps a password off the "
        "process list. Without either: an embedded PostgreSQL.",
    )(command)


def now_option(command: _F) -> _F:
    """Give a command ``--now``, the instant of a simulation."""
    return click.option(
        "--now",
        metavar="INSTANT",
        hidden=True,
        callback=_instant,
        help="An ISO 8601 instant with its offset, for simulations; without it the database's clock.",
    )(command)


@contextmanager
def database(*, make: bool = False) -> Iterator[URL]:
    """Give the URL of the database to work on; an embedded one runs as long as the context.

    :param make: whether an embedded database that does not exist yet is made.
    :raises DatabaseMissing: none was named, and there is no embedded one.
    """
    settings = click.get_current_context().ensure_object(Settings)
    named = settings.named or os.environ.get(DATABASE_URL)
    if named:
        settings.resolved = database_url(named)
        yield settings.resolved
        return
    folder = data_folder()
    if not make and not (folder / "pgdata").is_dir():
        raise DatabaseMissing(
            f"no database is named, and there is no embedded one in {folder} yet.\n"
            f"Name yours with --database-url or {DATABASE_URL}, or make an embedded one: "
            "switchboard-stall db upgrade"
        )
    with embedded(folder) as url:
        settings.resolved = url
        click.echo(f"No database is named: using the embedded PostgreSQL in {folder}", err=True)
        yield url


@contextmanager
def embedded(folder: Path | None, *, durable: bool = True) -> Iterator[URL]:
    """Run an embedded PostgreSQL for the length of the context, and give its URL.

    :param folder: where its data are kept; ``None`` throws them away.
    :param durable: whether the data survive a crash of the machine.
    :raises click.ClickException: it cannot run here, or did not start.
    """
    try:
        # Refuses to be imported where it cannot run, and the other commands run there.
        from switchboard_stall.embedded import EmbeddedPostgres, EmbeddedPostgresError
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    try:
        server = EmbeddedPostgres(folder, durable=durable).start()
    except EmbeddedPostgresError as error:
        raise click.ClickException(str(error)) from error
    with server:
        yield server.url


@contextmanager
def connected(*, make: bool = False) -> Iterator[Engine]:
    """Give an engine on the database to work on.

    :param make: as for :func:`database`.
    """
    with database(make=make) as url:
        engine = make_engine(url)
        try:
            yield engine
        finally:
            engine.dispose()


def make_engine(url: URL) -> Engine:
    """Return an engine for a long life beside an unreliable network, or behind a transaction pooler.

    :param url: with the psycopg driver. Parameters of :data:`LINK` in its query are kept.
    """
    link = {name: value for name, value in LINK.items() if name not in url.query}
    # Nothing is prepared on a session: behind a pooler the next statement may meet another one.
    return create_engine(url, pool_pre_ping=True, connect_args={**link, "prepare_threshold": None})


def data_folder() -> Path:
    """Return the folder of the embedded database that is kept between commands: one for each user.

    ``$XDG_DATA_HOME/switchboard-stall/postgres``; without that variable below ``~/.local/share``, on macOS
    below ``~/Library/Application Support``.
    """
    named = os.environ.get("XDG_DATA_HOME")
    if named and os.path.isabs(named):
        base = Path(named)
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path.home() / ".local" / "share"
    return base / "switchboard-stall" / "postgres"


def explained(error: DBAPIError, url: URL | None) -> str:
    """Return what a database error means and what to do, without a password in it."""
    cause = error.orig
    sqlstate = getattr(cause, "sqlstate", None)
    said = " ".join(str(cause).split())
    if sqlstate in _UNDEFINED:
        return redacted(
            f"the database is not migrated ({said.partition(' LINE ')[0]}). "
            "Migrate it: switchboard-stall db upgrade",
            url,
        )
    where = "the database" if url is None else f"the database {place(url)}"
    if sqlstate is None or error.connection_invalidated or sqlstate[:2] in ("08", "28", "57", "3D"):
        return redacted(f"cannot work with {where}: {said}", url)
    return redacted(f"{where} refused ({sqlstate}): {said}", url)


def place(url: URL) -> str:
    """Return where a database is, without user, password and parameters."""
    host = url.host or ", ".join(_texts(url.query.get("host", ()))) or "the local socket"
    port = f":{url.port}" if url.port else ""
    return f"{url.database or '(the default)'!r} at {host}{port}"


def redacted(text: str, url: URL | None) -> str:
    """Return ``text`` with every password of ``url`` replaced, however it is written."""
    if url is None:
        return text
    secrets = {str(url.password or "")}
    for name in _SECRET_PARAMETERS:
        secrets.update(_texts(url.query.get(name, ())))
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        for written in (secret, quote(secret), quote(secret, safe=""), quote_plus(secret)):
            text = text.replace(written, "***")
    return text


def _texts(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def _remember(context: click.Context, _: click.Parameter, value: str | None) -> None:
    if value:
        context.ensure_object(Settings).named = value


def _instant(_: click.Context, __: click.Parameter, value: str | None) -> datetime | None:
    if value is None:
        return None
    try:
        return check_instant(datetime.fromisoformat(value))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
