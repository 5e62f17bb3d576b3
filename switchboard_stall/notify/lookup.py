"""Name resolution off the workers: in bounded threads, one at a time for each host."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, TypeAlias

from switchboard_stall.notify.target import HostUnresolved

if TYPE_CHECKING:
    from collections.abc import Callable

    from switchboard_stall.notify.target import Resolver

MAX_THREADS: Final = 64
"""The most lookups under way at once. Each may hang for as long as the system's resolver lets it."""

_MAX_STALLED_HOSTS: Final = 4096
_IDLE_SECONDS: Final = 10.0

Answer: TypeAlias = tuple[str, ...] | None
"""The texts of a host's addresses, or ``None`` if it has none."""


class Lookups:
    """Resolves host names in threads of its own, so that a resolver that hangs holds up its own host only.

    One lookup of a host runs at a time. It answers all who had asked when it began; whoever asks later is
    answered by the next. Hosts whose last lookup was given up as stalled share half of the threads.

    Thread-safe. The threads start on demand, end when idle, and are daemons: none holds up an exit.

    :param resolver: called in these threads, one host a call.
    :param threads: the most of them.
    """

    def __init__(self, resolver: Resolver, *, threads: int = MAX_THREADS) -> None:
        """Make it; the class says of what. No thread starts yet."""
        self._resolver = resolver
        self._limit = threads
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, list[_Asked]] = OrderedDict()
        self._running: set[str] = set()
        self._stalled: OrderedDict[str, None] = OrderedDict()
        self._threads = 0
        self._idle = 0
        self._closed = False

    def start(self, host: str, done: Callable[[Answer], None]) -> Callable[[], None]:
        """Look a host up; return what gives it up as stalled.

        :param done: called with the answer in another thread, perhaps even after it was given up.
        """
        asked = _Asked(done)
        with self._changed:
            self._waiting.setdefault(host, []).append(asked)
            # A thread that was woken counts as idle until it runs, so idle alone does not tell.
            wanted = sum(each not in self._running for each in self._waiting)
            if self._idle < wanted and self._threads < self._limit:
                # Without a thread to spare, this lookup waits for a running one, or is given up.
                with contextlib.suppress(RuntimeError):
                    threading.Thread(target=self._run, name="switchboard-notify-dns", daemon=True).start()
                    self._threads += 1
            self._changed.notify()
        return lambda: self._give_up(host, asked)

    def close(self) -> None:
        """Begin no lookup any more. Those under way are left to end by themselves."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _give_up(self, host: str, asked: _Asked) -> None:
        with self._changed:
            asked.given_up = True
            self._stalled[host] = None
            self._stalled.move_to_end(host)
            if len(self._stalled) > _MAX_STALLED_HOSTS:
                self._stalled.popitem(last=False)
            waiting = self._waiting.get(host, [])
            if asked in waiting:
                waiting.remove(asked)
                if not waiting:
                    del self._waiting[host]

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            host, askers = taken
            answer: Answer = None
            # A resolver that is passed in may raise anything; all of it means that there is no address.
            with contextlib.suppress(Exception):
                answer = tuple(self._resolver(host))
            with self._changed:
                self._running.discard(host)
                if not all(asked.given_up for asked in askers):
                    self._stalled.pop(host, None)
                self._changed.notify()
            for asked in askers:
                asked.done(answer)

    def _next(self) -> tuple[str, list[_Asked]] | None:
        with self._changed:
            while not self._closed:
                for host in self._waiting:
                    if host not in self._running and self._has_room_for(host):
                        self._running.add(host)
                        return host, self._waiting.pop(host)
                self._idle += 1
                woken = self._changed.wait(_IDLE_SECONDS)
                self._idle -= 1
                if not woken and not self._waiting:
                    break
            self._threads -= 1
            return None

    def _has_room_for(self, host: str) -> bool:
        if host not in self._stalled:
            return True
        return sum(running in self._stalled for running in self._running) < max(1, self._limit // 2)


class _Asked:
    __slots__ = ("done", "given_up")

    def __init__(self, done: Callable[[Answer], None]) -> None:
        self.done = done
        self.given_up = False


def look_up(host: str, resolver: Resolver, *, seconds: float = 5.0) -> tuple[str, ...]:
    """Return the addresses of one host, in the caller's time.

    :param seconds: the longest wait.
    :raises HostUnresolved: it has none, or none in time.
    """
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    lookups = Lookups(resolver, threads=1)
    lookups.start(host, answers.put)
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        answer = None
    finally:
        lookups.close()
    if answer is None:
        raise HostUnresolved(f"{host} has no address now")
    return answer
