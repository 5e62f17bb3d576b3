"""Name resolution off the workers: in bounded threads, one at a time for each host."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import OrderedDict, deque
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

    One lookup of a host runs at a time; the others of that host wait for it. Hosts whose last lookup was
    given up as stalled share half of the threads.

    Thread-safe. The threads start on demand, end when idle, and are daemons: none holds up an exit.

    :param resolver: called in these threads, one host a call.
    :param threads: the most of them; at least 2.
    """

    def __init__(self, resolver: Resolver, *, threads: int = MAX_THREADS) -> None:
        """Make it; the class says of what."""
        self._resolver = resolver
        self._limit = threads
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[_Lookup]] = OrderedDict()
        self._running: dict[str, _Lookup] = {}
        self._stalled: OrderedDict[str, None] = OrderedDict()
        self._threads = 0
        self._idle = 0
        self._closed = False

    def start(self, host: str, done: Callable[[Answer], None]) -> Callable[[], None]:
        """Look a host up; return what gives the lookup up as stalled.

        :param done: called once with the answer, in another thread, unless the lookup was given up before.
        """
        lookup = _Lookup(host, done)
        with self._changed:
            self._waiting.setdefault(host, deque()).append(lookup)
            # A thread that was woken counts as idle until it runs, so idle alone does not tell.
            wanted = sum(host not in self._running for host in self._waiting)
            if self._idle < wanted and self._threads < self._limit:
                # Without a thread to spare, this lookup waits for a running one, or is given up.
                with contextlib.suppress(RuntimeError):
                    threading.Thread(target=self._run, name="switchboard-notify-dns", daemon=True).start()
                    self._threads += 1
            self._changed.notify()
        return lambda: self._give_up(lookup)

    def close(self) -> None:
        """Begin no lookup any more. Those under way are left to end by themselves; nobody hears of them."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            for lookup in self._running.values():
                lookup.given_up = True
            self._changed.notify_all()

    def _give_up(self, lookup: _Lookup) -> None:
        with self._changed:
            lookup.given_up = True
            self._stalled[lookup.host] = None
            self._stalled.move_to_end(lookup.host)
            if len(self._stalled) > _MAX_STALLED_HOSTS:
                self._stalled.popitem(last=False)
            lookups = self._waiting.get(lookup.host)
            if lookups is not None and lookup in lookups:
                lookups.remove(lookup)
                if not lookups:
                    del self._waiting[lookup.host]

    def _run(self) -> None:
        while (lookup := self._next()) is not None:
            try:
                answer: Answer = tuple(self._resolver(lookup.host))
            except (
                Exception
            ):  # A resolver of the caller's may raise anything; a name without an answer it is.
                answer = None
            with self._changed:
                del self._running[lookup.host]
                heard = not lookup.given_up
                if heard:
                    self._stalled.pop(lookup.host, None)
                self._changed.notify()
            if heard:
                lookup.done(answer)

    def _next(self) -> _Lookup | None:
        with self._changed:
            while not self._closed:
                for host, lookups in self._waiting.items():
                    if host not in self._running and self._has_room_for(host):
                        lookup = lookups.popleft()
                        # To the end, so that hosts take turns.
                        del self._waiting[host]
                        if lookups:
                            self._waiting[host] = lookups
                        self._running[host] = lookup
                        return lookup
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
        return sum(running in self._stalled for running in self._running) < self._limit // 2


class _Lookup:
    __slots__ = ("done", "given_up", "host")

    def __init__(self, host: str, done: Callable[[Answer], None]) -> None:
        """Make it; the class says of what."""
        self.host = host
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
