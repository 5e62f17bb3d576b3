"""Counters by reason, and log lines that stand for many."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from switchboard_stall.notify.timers import Timers

SECONDS_BETWEEN_LINES: Final = 10.0
"""One reason is logged at most once in this time."""

_K = TypeVar("_K", bound=Hashable)


class Counts(Generic[_K]):
    """Counts what happened, by reason. Thread-safe."""

    def __init__(self) -> None:
        """Make it; the class says of what."""
        self._lock = threading.Lock()
        self._counter: Counter[_K] = Counter()

    def add(self, reason: _K, number: int = 1) -> None:
        """Count ``number`` more of this reason."""
        with self._lock:
            self._counter[reason] += number

    def totals(self) -> dict[_K, int]:
        """How often each reason happened."""
        with self._lock:
            return dict(self._counter)


class Tally(Generic[_K]):
    """Counts, and logs each reason at most once in 10 s with the number it stands for. Thread-safe.

    Nothing is logged in the thread that counts, which may be a caller in a hurry, until the timers have
    closed.

    :param timers: log the lines at their time.
    :param monotonic: reads a clock in seconds that never goes back.
    :param line: logs one line, given the reason and how often it happened since its last line.
    """

    def __init__(
        self, timers: Timers, monotonic: Callable[[], float], line: Callable[[_K, int], None]
    ) -> None:
        """Make it; the class says of what."""
        self._timers = timers
        self._monotonic = monotonic
        self._line = line
        self._lock = threading.Lock()
        self._logged: Counter[_K] = Counter()
        self._unlogged: dict[_K, int] = {}
        self._next_line: dict[_K, float] = {}
        self._scheduled: set[_K] = set()

    def add(self, reason: _K, number: int = 1) -> None:
        """Count ``number`` more of this reason."""
        with self._lock:
            self._unlogged[reason] = self._unlogged.get(reason, 0) + number
            if reason in self._scheduled:
                return
            now = self._monotonic()
            wait = max(0.0, self._next_line.get(reason, now) - now)
            if self._timers.after(wait, lambda: self._log(reason)):
                self._scheduled.add(reason)
                return
        if not wait:
            self._log(reason)

    def totals(self) -> dict[_K, int]:
        """How often each reason happened."""
        with self._lock:
            return dict(self._logged + Counter(self._unlogged))

    def flush(self) -> None:
        """Log at once what no line stands for yet."""
        with self._lock:
            reasons = list(self._unlogged)
        for reason in reasons:
            self._log(reason)

    def _log(self, reason: _K) -> None:
        with self._lock:
            self._scheduled.discard(reason)
            number = self._unlogged.pop(reason, 0)
            self._logged[reason] += number
            self._next_line[reason] = self._monotonic() + SECONDS_BETWEEN_LINES
        if number:
            self._line(reason, number)
