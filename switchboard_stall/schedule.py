"""The backoff: how long a pair waits before each nudge of one stall, and when it falls silent. Pure."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attrs import Attribute

MAX_WAIT: Final = timedelta(days=100_000_000)
"""The longest wait: somewhat less than PostgreSQL's interval can hold."""

MAX_SWEEP_LIMIT: Final = 2**31 - 1
"""The most pairs a sweep may be allowed: more than any ledger holds, and a number every LIMIT takes."""


def _as_tuple(waits: Iterable[timedelta]) -> tuple[timedelta, ...]:
    return tuple(waits)


def _check_waits(_: StallPolicy, __: Attribute[tuple[timedelta, ...]], waits: tuple[timedelta, ...]) -> None:
    if not waits:
        raise ValueError("waits is empty; give at least one wait, the one before the first nudge")
    for wait in waits:
        if not isinstance(wait, timedelta):
            raise TypeError(f"waits holds {wait!r}; each wait is a datetime.timedelta")
        if wait <= timedelta(0):
            raise ValueError(f"waits holds {wait}; each wait must be longer than nothing")
        if wait > MAX_WAIT:
            raise ValueError(f"waits holds {wait}, the longest is {MAX_WAIT}; give fewer waits for silence")
    for earlier, later in pairwise(waits):
        if later < earlier:
            raise ValueError(f"waits shrinks from {earlier} to {later}; a backoff may only widen")


def _check_sweep_limit(_: StallPolicy, __: Attribute[int], limit: int) -> None:
    if not isinstance(limit, int) or isinstance(limit, bool):
        raise TypeError(f"sweep_limit={limit!r}; it is a whole number of pairs")
    if limit < 1:
        raise ValueError(f"sweep_limit={limit}; a sweep that may nudge nobody is a reaper without this duty")
    if limit > MAX_SWEEP_LIMIT:
        raise ValueError(f"sweep_limit={limit}, the most is {MAX_SWEEP_LIMIT}; give the number you mean")


@frozen
class StallPolicy:
    """When a stalled pair is nudged, and how many pairs one sweep may nudge.

    A value that exists is valid: it is checked where it is made.

    :param waits: the wait before each nudge of one stall: the first since the pair last showed life,
        each later one since the nudge before it. Positive, at most 100,000,000 days, never shrinking, at
        least one.
    :param sweep_limit: the most pairs one sweep nudges, least-nudged first. 1 to 2147483647.
    :raises ValueError: a wait or the limit is out of range.
    :raises TypeError: a wait is not a ``timedelta``, or the limit is not an ``int``.

    Source: design, "Where the sweep runs" and "Risks".
    """

    waits: tuple[timedelta, ...] = field(converter=_as_tuple, validator=_check_waits)
    sweep_limit: int = field(default=4, validator=_check_sweep_limit)

    @property
    def cap(self) -> int:
        """The most nudges one stall gets: one for each wait."""
        return len(self.waits)

    def wait(self, number: int) -> timedelta:
        """Return how long the nudge with this number waits.

        :param number: 1 for the first nudge of a stall, up to :attr:`cap`.
        :raises ValueError: there is no nudge of that number.
        """
        if not 1 <= number <= self.cap:
            raise ValueError(f"there is no nudge {number}; this policy has 1 to {self.cap}")
        return self.waits[number - 1]

    def next_wait(self, number: int) -> timedelta | None:
        """Return the wait from nudge ``number`` to the one after it, or ``None`` after the last.

        :param number: 1 for the first nudge of a stall, up to :attr:`cap`.
        :raises ValueError: there is no nudge of that number.
        """
        self.wait(number)
        return None if number == self.cap else self.waits[number]


STALL_POLICY: Final = StallPolicy(
    waits=(
        timedelta(minutes=5),
        timedelta(minutes=20),
        timedelta(hours=1),
        timedelta(hours=6),
        timedelta(hours=6),
    ),
    sweep_limit=4,
)
"""The schedule in force: 5 min, 20 min, 1 h, 6 h, 6 h, and 4 pairs a sweep. A constant, not a setting."""
