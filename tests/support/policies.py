"""Policies for properties: of any length, their waits from one microsecond to years."""

from __future__ import annotations

from datetime import timedelta
from itertools import accumulate

from hypothesis import strategies as st

from switchboard_stall.schedule import StallPolicy

MOMENT = timedelta(microseconds=1)
"""The smallest time that PostgreSQL and Python tell apart."""


def _widening(first: timedelta, growth: list[timedelta], sweep_limit: int) -> StallPolicy:
    return StallPolicy(waits=tuple(accumulate([first, *growth])), sweep_limit=sweep_limit)


def policies(
    *,
    longest: timedelta = timedelta(days=1000),
    unit: timedelta = MOMENT,
    most_waits: int = 7,
    most_pairs: int = 6,
) -> st.SearchStrategy[StallPolicy]:
    """Valid policies whose waits are multiples of ``unit``; a step may be nothing, so waits may repeat."""

    def times(least: int) -> st.SearchStrategy[timedelta]:
        return st.integers(least, longest // unit).map(lambda count: count * unit)

    return st.builds(
        _widening,
        times(1),
        st.lists(times(0), max_size=most_waits - 1),
        st.integers(1, most_pairs),
    )
