"""What the command prints: durations and instants for people, JSON for programs, ASCII where it must."""

from __future__ import annotations

import json
import sys
import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_UNITS: Final = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
_ASCII: Final = {"✓": "ok", "✗": "FAILED"}


def duration(value: timedelta) -> str:
    """Return a duration in its two largest units, such as ``1 h 25 min``; the rest is cut off.

    :param value: any duration; a negative one is said with a minus.
    """
    seconds = int(abs(value).total_seconds())
    parts: list[tuple[int, str]] = []
    for name, size in _UNITS:
        count, seconds = divmod(seconds, size)
        if count or (parts and len(parts) < 2):
            parts.append((count, name))
    words = " ".join(f"{count} {name}" for count, name in parts[:2] if count) or "0 s"
    return f"-{words}" if value < timedelta(0) else words


def moment(value: datetime | None, now: datetime) -> str:
    """Return an instant in UTC with its distance from ``now``; ``never`` for ``None``."""
    if value is None:
        return "never"
    away = now - value
    distance = f"{duration(away)} ago" if away >= timedelta(0) else f"in {duration(-away)}"
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z  ({distance})"


def quoted(text: str) -> str:
    """Return a sender's text as one quoted line of ASCII, as the log lines show it."""
    return json.dumps(text)


def table(rows: Iterable[Sequence[str]]) -> str:
    """Return rows as aligned columns, the last one unpadded; the first row is the heading."""
    lines = [list(row) for row in rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]) - 1)]

    def padded(line: list[str]) -> str:
        cells = [cell.ljust(width) for cell, width in zip(line[:-1], widths, strict=True)]
        return "  ".join([*cells, line[-1]]).rstrip()

    return "\n".join(padded(line) for line in lines)


def echo_json(value: Any) -> None:
    """Print one JSON document. Instants are RFC 3339 in UTC, durations seconds, ids text."""
    click.echo(json.dumps(value, default=_jsonable, indent=2))


def say(text: str = "", *, err: bool = False) -> None:
    """Print a line; signs that the stream cannot show are said in ASCII."""
    encoding = (sys.stderr if err else sys.stdout).encoding or "ascii"
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        for sign, word in _ASCII.items():
            text = text.replace(sign, word)
        text = text.encode("ascii", "backslashreplace").decode()
    click.echo(text, err=err)


def _jsonable(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, uuid.UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form here")
