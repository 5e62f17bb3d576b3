"""How many notifications one hook gets a minute."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

PER_MINUTE: Final = 120
"""Notifications a minute for one hook."""

BURST: Final = 120
"""Notifications at once for a hook that was quiet."""

_MAX_KEYS: Final = 8192


class TokenBuckets:
    """One token bucket for each key. Not thread-safe: one thread asks.

    :param per_minute: how many tokens a bucket gains in a minute.
    :param burst: how many it holds, and begins with.
    :param monotonic: reads a clock in seconds that never goes back.

    Source: wake chain, "Delivery of a notification", rate.
    """

    def __init__(
        self,
        *,
        per_minute: float = PER_MINUTE,
        burst: int = BURST,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make it; the class says of what."""
        self._per_second = per_minute / 60
        self._burst = burst
        self._monotonic = monotonic
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, key: Hashable) -> bool:
        """Take one token from the bucket of ``key``; return whether there was one."""
        now = self._monotonic()
        tokens, then = self._buckets.pop(key, (float(self._burst), now))
        tokens = min(float(self._burst), tokens + (now - then) * self._per_second)
        taken = tokens >= 1
        self._buckets[key] = (tokens - taken, now)
        # The least recently used bucket is the fullest, or nearly: forgetting it grants little.
        if len(self._buckets) > _MAX_KEYS:
            self._buckets.popitem(last=False)
        return taken
