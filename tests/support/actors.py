"""Sessions that act at the same time, in an order that the test decides: no sleeps, nothing left to chance.

    with stage(engine) as actor:
        first, second = actor("first"), actor("second")
        first.does(sweep)
        waiting = second.starts(sweep)
        second.waits_for(first)
        first.does(Session.commit)
        assert waiting.result(PATIENCE) == []

Each actor is one thread with one session on one connection.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import psycopg
from attrs import define, field
from sqlalchemy import Connection, Engine, func, select, text
from sqlalchemy.orm import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Stage: TypeAlias = Callable[[str], "Actor"]
    """Makes an actor of a name."""

T = TypeVar("T")

PATIENCE: Final = 30.0
"""Seconds after which something that should have happened is taken never to happen."""


@define(eq=False)
class Actor:
    """One session that acts in a thread of its own; ``name`` is how the server knows it, pooler or not."""

    name: str
    observer: Engine
    _connection: Connection
    _session: Session = field(init=False)
    _thread: ThreadPoolExecutor = field(init=False, factory=lambda: ThreadPoolExecutor(max_workers=1))
    _acts: list[Future[object]] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        self._connection.execute(select(func.set_config("application_name", self.name, False)))
        self._connection.commit()
        self._session = Session(self._connection, expire_on_commit=False)

    def starts(self, act: Callable[[Session], T]) -> Future[T]:
        """Begin ``act`` in the actor's session; the test goes on."""
        started = self._thread.submit(act, self._session)
        self._acts.append(started)  # type: ignore[arg-type]
        return started

    def does(self, act: Callable[[Session], T]) -> T:
        """Do ``act`` to its end.

        :raises TimeoutError: it did not end: it waits for somebody.
        """
        return self.starts(act).result(PATIENCE)

    def waits_for(self, other: Actor) -> None:
        """Return once the server says that this actor's statement waits for a lock that ``other`` holds.

        :raises AssertionError: the act ended instead, or did not come to wait.
        """
        act = self._acts[-1]
        deadline = time.monotonic() + PATIENCE
        while not wait([act], timeout=0.002).done:
            if self._blocked_by(other):
                return
            assert time.monotonic() < deadline, f"{self.name} never came to wait for {other.name}"
        raise AssertionError(f"{self.name} did not wait for {other.name}: {_outcome(act)}")

    def leaves(self) -> None:
        """End whatever the actor still does, and its session."""
        driver = self._connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        while wait(self._acts, timeout=0.05).not_done:
            driver.cancel_safe()
        self._thread.submit(self._session.close).result(PATIENCE)
        self._thread.shutdown()
        self._connection.close()

    def _blocked_by(self, other: Actor) -> bool:
        with self.observer.connect() as connection:
            return bool(
                connection.scalar(
                    text(
                        "SELECT count(*) FROM pg_stat_activity AS waiting, pg_stat_activity AS holding "
                        "WHERE waiting.application_name = :waiting AND holding.application_name = :holding "
                        "AND holding.pid = ANY (pg_blocking_pids(waiting.pid))"
                    ),
                    {"waiting": self.name, "holding": other.name},
                )
            )


@contextlib.contextmanager
def stage(engine: Engine) -> Iterator[Stage]:
    """Yield a function that makes an actor of a name; every actor leaves at the end."""
    with contextlib.ExitStack() as exits:

        def actor(name: str) -> Actor:
            connection = exits.enter_context(engine.connect())
            made = Actor(f"{name}-{secrets.token_hex(4)}", engine, connection)
            exits.callback(made.leaves)
            return made

        yield actor


def _outcome(act: Future[T]) -> str:
    error = act.exception()
    return f"it raised {error!r}" if error else f"it returned {act.result()!r}"
