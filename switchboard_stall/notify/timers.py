"""What happens later: retries, lookups to give up, log lines that stand for many."""

from __future__ import annotations

import heapq
import logging
import threading
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


class Timers:
    """Calls functions at their time, in one daemon thread. Thread-safe.

    :param monotonic: reads a clock in seconds that never goes back.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        """Make it; the class says of what."""
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._closed = False

    def after(self, seconds: float, action: Callable[[], None]) -> bool:
        """Call ``action`` in ``seconds``; return false, and never call it, once closed.

        :param action: quick. What it raises is logged by its type.
        """
        with self._changed:
            if self._closed:
                return False
            heapq.heappush(self._heap, (self._monotonic() + seconds, next(self._numbers), action))
            self._changed.notify()
            return True

    def run(self) -> None:
        """Call what is due until closed."""
        while True:
            with self._changed:
                while not self._closed and (wait := self._wait()) != 0:
                    self._changed.wait(wait)
                if self._closed:
                    return
                _, _, action = heapq.heappop(self._heap)
            try:
                action()
            except Exception as error:  # The timers of all other deliveries go on.
                _log.error("a timer failed: %s", type(error).__name__)

    def close(self) -> None:
        """Call nothing any more."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify_all()

    def _wait(self) -> float | None:
        return max(0.0, self._heap[0][0] - self._monotonic()) if self._heap else None
