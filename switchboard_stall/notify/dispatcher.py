"""The dispatcher: what a service holds. Its threads and stages stand in ``pipeline``."""

from __future__ import annotations

import os
import random
import secrets
import time
import weakref
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Self

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from switchboard_stall.models import QUARANTINE, Todo
from switchboard_stall.notify.attempt import narrowed
from switchboard_stall.notify.body import BodyTooLarge, Notification
from switchboard_stall.notify.pipeline import DispatcherStats, Pipeline, Settings
from switchboard_stall.notify.secrets import SecretBox, secret_box
from switchboard_stall.notify.target import Network, Resolver, TargetPolicy, resolve

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from switchboard_stall.ready import Reason


class Dispatcher:
    """Sends each todo that became ready to the hooks that admit it: a ready hook, and a context manager.

    ::

        with Dispatcher(session_factory) as dispatcher:
            set_todo_ready_hook(dispatcher.enqueue)
            serve()

    It holds at most 1024 todos that wait to be looked up and 1024 deliveries, in memory only: what does not
    fit, and what is held when it closes, is dropped and counted. The next nudge brings it again.

    Thread-safe. After ``os.fork()`` the child's dispatcher is empty and open, and starts threads of its own
    when it is first used; the parent's goes on undisturbed. The child must not share the parent's database
    connections: give it ``engine.dispose(close=False)``, as SQLAlchemy asks.

    :param sessions: an engine, or what makes a session, such as a ``sessionmaker``. Up to ``workers`` + 1
        short sessions are open at once; none is open while a request is under way.
    :param key: opens the hooks' secrets: a :class:`SecretBox`, or base64 or hex of 32 bytes; ``None`` for
        the one in ``SWITCHBOARD_SECRET_ENCRYPTION_KEY``.
    :param allow_http: call ``http`` URLs too.
    :param allow_cidrs: private addresses the operator opens; see :class:`TargetPolicy`.
    :param listening: addresses and ports this process listens on, which no hook may name.
    :param resolver: turns a host name into addresses. Called in threads of its own; it may hang.
    :param clock: the present, aware: for timestamps and ids. What has expired is the database's to tell.
    :param monotonic: reads a clock in seconds that never goes back, for deadlines, waits and rates.
    :param uniform: draws a number between two others, for the jitter of retries.
    :param token_bytes: gives so many random bytes, for message ids.
    :param tls: a context that verifies, narrowed to TLS 1.2 or newer; ``None`` for this machine's trust.
    :param workers: how many attempts run at once.
    :param retry_waits: the wait before each further attempt, jittered by a fifth.
    :param attempt_timeout: the time for one attempt in all, name resolution included.
    :raises SecretKeyError: there is no key, or it is not one.
    :raises NotifyExtraMissing: the extra ``notify`` is not installed.
    :raises ValueError: an entry of ``allow_cidrs`` is no CIDR, ``tls`` does not verify, or a number is out of
        range.
    :raises TypeError: ``sessions`` makes no sessions.

    Source: wake chain, "Delivery of a notification".
    """

    def __init__(
        self,
        sessions: Engine | Callable[[], Session],
        *,
        key: SecretBox | str | None = None,
        allow_http: bool = False,
        allow_cidrs: Iterable[str | Network] = (),
        listening: Iterable[tuple[str, int]] = (),
        resolver: Resolver = resolve,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
        token_bytes: Callable[[int], bytes] = secrets.token_bytes,
        tls: ssl.SSLContext | None = None,
        workers: int = 8,
        retry_waits: Sequence[timedelta] = (timedelta(seconds=1), timedelta(seconds=5)),
        attempt_timeout: timedelta = timedelta(seconds=5),
    ) -> None:
        """Make it; the class says of what. No thread starts yet."""
        if workers < 1:
            raise ValueError(f"workers={workers}; at least one is needed to deliver anything")
        if attempt_timeout <= timedelta(0):
            raise ValueError(f"attempt_timeout={attempt_timeout}; it must be longer than nothing")
        self._settings = Settings(
            sessions=_session_factory(sessions),
            box=secret_box(key),
            policy=TargetPolicy(allow_http=allow_http, allow_cidrs=allow_cidrs, listening=listening),
            resolver=resolver,
            clock=clock,
            monotonic=monotonic,
            uniform=uniform,
            token_bytes=token_bytes,
            tls=narrowed(tls) if tls is not None else None,
            workers=workers,
            retry_waits=tuple(wait.total_seconds() for wait in retry_waits),
            attempt_timeout=attempt_timeout.total_seconds(),
        )
        self._clock = clock
        self._pipeline = Pipeline(self._settings)
        if hasattr(os, "register_at_fork"):
            # The interpreter keeps the function for ever, so it must not keep the dispatcher.
            this = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _renew(this()))

    def enqueue(self, todo: Todo, reason: Reason) -> None:
        """Take a todo that became ready and return at once; the ready hook to set.

        Nothing is looked up here, and nothing raised: what cannot be taken is counted.

        :param todo: detached, its columns loaded. Only bounded text is copied out of it.
        :param reason: ``created`` or ``requeued``, as it goes on the wire.
        """
        pipeline = self._pipeline
        try:
            if pipeline.full:
                pipeline.dropped.add("ready queue full")
                return
            notification = Notification.of(todo, reason, self._clock())
            if notification.queue == QUARANTINE:
                pipeline.skipped.add("quarantine")
            else:
                pipeline.accept(notification)
        except BodyTooLarge:
            pipeline.dropped.add("too large")
        except Exception:  # The caller has committed and can mend nothing.
            pipeline.dropped.add("internal")

    @property
    def stats(self) -> DispatcherStats:
        """What it has done and what it holds, now."""
        return self._pipeline.stats()

    def wait_idle(self, timeout: timedelta | None = None) -> bool:
        """Wait until nothing is held or under way; return whether that came about in time.

        For tests, and for a service that would rather deliver than drop before it closes.

        :param timeout: the longest wait; ``None`` for any time, which hostile receivers can stretch.
        """
        return self._pipeline.wait_idle(None if timeout is None else timeout.total_seconds())

    def start(self) -> None:
        """Start the threads now rather than with the first todo.

        :raises RuntimeError: it has been closed.
        """
        if not self._pipeline.start():
            raise RuntimeError("this dispatcher has been closed; make another one")

    def close(self) -> None:
        """Stop: let the attempts under way end, drop what is held, and return within one attempt's time."""
        self._pipeline.close()

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def _renew(dispatcher: Dispatcher | None) -> None:
    if dispatcher is not None:
        dispatcher._pipeline = dispatcher._pipeline.renewed()


def _session_factory(sessions: Engine | Callable[[], Session]) -> Callable[[], Session]:
    if isinstance(sessions, Engine):
        engine = sessions
        return lambda: Session(engine)
    if not callable(sessions):
        raise TypeError(
            f"sessions is {type(sessions).__name__}; give an Engine or what makes a Session. An AsyncEngine"
            " does not serve threads: make an Engine from its URL"
        )
    return sessions
