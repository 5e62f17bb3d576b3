"""The backoff, in Python and in SQL."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import Connection, DateTime, Integer, bindparam, literal, select
from support.policies import MOMENT, policies

from switchboard_stall.schedule import MAX_WAIT, STALL_POLICY, StallPolicy
from switchboard_stall.sql import inlined
from switchboard_stall.statement import wait_after

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.databases import DatabaseServer

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)


@pytest.fixture(scope="module")
def postgres(server: DatabaseServer) -> Iterator[Connection]:
    """A connection that only computes, for all examples of the properties."""
    engine = server.engine(server.url.database or "postgres").execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def waits_of_one_stall(policy: StallPolicy) -> Iterator[timedelta]:
    """The waits before the nudges of a stall that nobody answers, as the results of the sweep tell them."""
    number, wait = 1, policy.wait(1)
    while True:
        yield wait
        following = policy.next_wait(number)
        if following is None:
            return
        number, wait = number + 1, following


# The schedule in force


def test_the_schedule_in_force_is_5_min_20_min_1_h_6_h_6_h_for_4_pairs_a_sweep() -> None:
    assert STALL_POLICY.waits == (5 * MINUTE, 20 * MINUTE, HOUR, 6 * HOUR, 6 * HOUR)
    assert STALL_POLICY.sweep_limit == 4
    assert STALL_POLICY.cap == 5


def test_a_stall_that_nobody_answers_falls_silent_after_13_h_25_min() -> None:
    assert sum(waits_of_one_stall(STALL_POLICY), timedelta()) == 13 * HOUR + 25 * MINUTE


# Every schedule


@given(policies())
def test_a_wait_is_never_shorter_than_the_one_before_it(policy: StallPolicy) -> None:
    for number, following in pairwise(range(1, policy.cap + 1)):
        assert policy.wait(number) <= policy.wait(following)


@given(policies())
def test_a_stall_that_nobody_answers_gets_one_nudge_a_wait_and_then_silence(policy: StallPolicy) -> None:
    told = tuple(waits_of_one_stall(policy))
    assert told == policy.waits
    assert len(told) == policy.cap


@given(policies())
def test_the_wait_after_a_nudge_is_the_wait_of_the_next(policy: StallPolicy) -> None:
    for number in range(1, policy.cap):
        assert policy.next_wait(number) == policy.wait(number + 1)
    assert policy.next_wait(policy.cap) is None


@given(policies(), st.integers())
def test_there_is_no_nudge_before_the_first_or_past_the_cap(policy: StallPolicy, number: int) -> None:
    if 1 <= number <= policy.cap:
        assert policy.wait(number) in policy.waits
        return
    for ask in (policy.wait, policy.next_wait):
        with pytest.raises(ValueError, match=rf"no nudge {number}; this policy has 1 to {policy.cap}"):
            ask(number)


@given(policies())
def test_a_policy_is_a_value(policy: StallPolicy) -> None:
    twin = StallPolicy(waits=list(policy.waits), sweep_limit=policy.sweep_limit)
    assert twin == policy
    assert hash(twin) == hash(policy)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        policy.sweep_limit = 1  # type: ignore[misc]


# A bad one cannot exist


@pytest.mark.parametrize(
    ("waits", "error", "told"),
    [
        ((), ValueError, "waits is empty; give at least one wait"),
        ((timedelta(0),), ValueError, "waits holds 0:00:00; each wait must be longer than nothing"),
        ((MINUTE, -MINUTE), ValueError, "waits holds -1 day, 23:59:00; each wait must be longer"),
        ((timedelta.max,), ValueError, "waits holds 999999999 days, .*, the longest is 100000000 days"),
        ((HOUR, MINUTE), ValueError, "waits shrinks from 1:00:00 to 0:01:00; a backoff may only widen"),
        ((MINUTE, 300), TypeError, "waits holds 300; each wait is a datetime.timedelta"),
    ],
)
def test_bad_waits_are_named_with_the_remedy(waits: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        StallPolicy(waits=waits)


@pytest.mark.parametrize(
    ("limit", "error", "told"),
    [
        (0, ValueError, "sweep_limit=0; a sweep that may nudge nobody"),
        (-4, ValueError, "sweep_limit=-4; a sweep that may nudge nobody"),
        (2**31, ValueError, "sweep_limit=2147483648, the most is 2147483647"),
        (2.5, TypeError, "sweep_limit=2.5; it is a whole number of pairs"),
        (True, TypeError, "sweep_limit=True; it is a whole number of pairs"),
        ("4", TypeError, "sweep_limit='4'; it is a whole number of pairs"),
    ],
)
def test_a_bad_limit_is_named_with_the_remedy(limit: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        StallPolicy(waits=(MINUTE,), sweep_limit=limit)


@given(st.lists(st.timedeltas(timedelta(-1), timedelta(1)), max_size=4), st.integers(-2, 6))
def test_exactly_the_policies_with_positive_waits_that_never_shrink_exist(
    waits: list[timedelta], limit: int
) -> None:
    valid = bool(waits) and min(waits) > timedelta(0) and sorted(waits) == waits and limit >= 1
    try:
        StallPolicy(waits=tuple(waits), sweep_limit=limit)
    except ValueError:
        assert not valid
    else:
        assert valid


# The same schedule in SQL


@given(policies())
@example(STALL_POLICY)
@example(StallPolicy(waits=(MOMENT,)))
@example(StallPolicy(waits=(MAX_WAIT - MOMENT, MAX_WAIT)))
def test_a_wait_in_sql_is_the_wait_in_python_for_every_count(
    postgres: Connection, policy: StallPolicy
) -> None:
    counts = range(-1, policy.cap + 3)
    in_sql = postgres.execute(select(*(wait_after(literal(spent), policy) for spent in counts))).one()
    in_python = [policy.wait(spent + 1) if 0 <= spent < policy.cap else None for spent in counts]
    assert list(in_sql) == in_python


@given(policies(), st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)))
def test_in_sql_nothing_is_due_a_microsecond_early_and_everything_is_due_on_time(
    postgres: Connection, policy: StallPolicy, since: datetime
) -> None:
    for spent, wait in enumerate(policy.waits):
        elapsed = bindparam("present", type_=DateTime(timezone=True)) - literal(since)
        is_due = select(elapsed >= wait_after(literal(spent), policy))
        assert postgres.scalar(is_due, {"present": since + wait - MOMENT}) is False
        assert postgres.scalar(is_due, {"present": since + wait}) is True


@given(policies())
def test_in_sql_a_pair_past_the_cap_has_no_wait_and_is_never_due(
    postgres: Connection, policy: StallPolicy
) -> None:
    beyond = wait_after(literal(policy.cap, Integer()), policy)
    assert postgres.scalar(select(literal(timedelta(days=999_999)) >= beyond)) is None


# What is written into the SQL


storable = st.text(st.characters(exclude_characters="\0\\", exclude_categories=["Cs"]))


@given(storable)
def test_a_text_written_into_sql_is_the_text(postgres: Connection, value: str) -> None:
    assert postgres.scalar(select(inlined(value))) == value


@given(st.integers(-(2**30), 2**30))
def test_a_number_written_into_sql_is_the_number(postgres: Connection, value: int) -> None:
    assert postgres.scalar(select(inlined(value))) == value
    assert postgres.scalar(select(inlined(7) - inlined(value))) == 7 - value


@given(st.timedeltas(timedelta(days=-100_000), timedelta(days=100_000)))
@example(MOMENT)
@example(-MOMENT)
def test_a_time_written_into_sql_is_the_time(postgres: Connection, value: timedelta) -> None:
    assert postgres.scalar(select(inlined(value))) == value


@pytest.mark.parametrize("value", ["a\\b", "a\0b"])
def test_a_text_whose_meaning_hangs_on_a_setting_is_not_written_into_sql(value: str) -> None:
    with pytest.raises(ValueError, match=r"cannot write 'a\\.+b' into SQL; bind it"):
        inlined(value)
