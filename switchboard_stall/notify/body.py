"""The body of a notification: which fields leave, how sender text is made harmless, how it stays small."""

from __future__ import annotations

import json
import re
from datetime import UTC
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from switchboard_stall.models import MAX_QUEUE_BYTES, Todo

if TYPE_CHECKING:
    import uuid
    from datetime import datetime

    from switchboard_stall.ready import Reason

MAX_BODY_BYTES: Final = 4096
"""The longest body, in bytes."""

MAX_SUMMARY: Final = 200
"""The longest summary, in code points."""

MAX_LABEL: Final = 128
"""The longest kind or source, in code points."""

MAX_ID: Final = 256
"""The longest id of a todo, in code points: far over ``td_`` and a UUID, far under a body."""

_CHANNEL_END: Final = re.compile(r"</channel>", re.IGNORECASE)
_NEWLINES: Final = str.maketrans("\r\n", "  ")
_SURROGATES: Final = re.compile("[\ud800-\udfff]")


_COLUMNS: Final = ("id", "endpoint_id", "queue", "kind", "source", "title", "attempt")
# The caller waits for this copy: the mapper's own attributes cost five times as much.
_FROM_LOADED: Final = itemgetter(*_COLUMNS)
_FROM_ATTRIBUTES: Final = attrgetter(*_COLUMNS)


class BodyTooLarge(ValueError):
    """What names the todo is alone too long for a body: its id, its queue or the endpoint's slug."""


class Notification(NamedTuple):
    """What is kept of a todo that became ready: bounded text, never its payload.

    :param summary: at most 200 code points of the title, as the sender wrote them.
    :param kind: at most 128 code points, as the sender wrote them; empty for none.
    :param source: likewise.
    :param made_at: when the notification was made, aware.
    """

    todo_id: str
    endpoint_id: uuid.UUID
    queue: str
    kind: str
    source: str
    summary: str
    attempt: int
    reason: Reason
    made_at: datetime

    @classmethod
    def of(cls, todo: Todo, reason: Reason, made_at: datetime) -> Notification:
        """Copy what a notification needs out of a todo, in time that does not depend on the todo's size.

        :raises BodyTooLarge: its id or queue is longer than any body could carry.
        """
        try:
            columns = _FROM_LOADED(todo.__dict__)
        except KeyError:  # A column was never set, or has to be loaded.
            columns = _FROM_ATTRIBUTES(todo)
        todo_id, endpoint_id, queue, kind, source, title, attempt = columns
        if len(todo_id) > MAX_ID or len(queue) > MAX_QUEUE_BYTES:
            raise BodyTooLarge("the todo's id or queue is too long for a notification")
        return cls(
            todo_id,
            endpoint_id,
            queue,
            (kind or "")[:MAX_LABEL],
            (source or "")[:MAX_LABEL],
            (title or "")[:MAX_SUMMARY],
            attempt or 0,
            reason,
            made_at,
        )

    def body(self, endpoint: str) -> bytes:
        """Return the body, one line of ASCII JSON of at most 4096 bytes; the same input gives the same bytes.

        Text that would not fit is cut at a code point: first the summary, then the source, then the kind.

        :param endpoint: the endpoint's slug.
        :raises BodyTooLarge: the id, the queue and the slug alone do not fit.
        """
        fields: dict[str, str | int] = {
            "type": "todo.ready",
            "reason": self.reason,
            "todo_id": self.todo_id,
            "queue": self.queue,
            "kind": neutralised(self.kind),
            "source": neutralised(self.source),
            "summary": neutralised(self.summary),
            "endpoint": endpoint,
            "attempt": self.attempt,
            "created_at": self.made_at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        for name in ("summary", "source", "kind"):
            excess = len(_encoded(fields)) - MAX_BODY_BYTES
            if excess > 0:
                fields[name] = _shortened(str(fields[name]), excess)
        body = _encoded(fields)
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge("the todo's id, queue and endpoint are too long for a notification")
        return body


def neutralised(text: str) -> str:
    """Return sender text that cannot end a channel or a line: ``</channel>`` in any case, CR and LF replaced.

    Source: wake chain, "Delivery of a notification", sender text.
    """
    return _CHANNEL_END.sub("«/channel»", text.translate(_NEWLINES))


def _encoded(fields: dict[str, str | int]) -> bytes:
    kept = {name: value for name, value in fields.items() if value != "" or name not in ("kind", "source")}
    # A lone surrogate can be escaped but not decoded: strict receivers would refuse the whole body.
    kept = {
        name: _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", value) if isinstance(value, str) else value
        for name, value in kept.items()
    }
    # ASCII only, so no line separator, C1 or bidi control is ever raw in a receiver's log.
    return json.dumps(kept, ensure_ascii=True, separators=(",", ":")).encode("ascii")


def _shortened(text: str, excess: int) -> str:
    """Cut whole code points off the end until the JSON form of ``text`` is ``excess`` bytes shorter."""
    end = len(text)
    while end and excess > 0:
        end -= 1
        excess -= len(json.dumps(text[end])) - len('""')
    return text[:end]
