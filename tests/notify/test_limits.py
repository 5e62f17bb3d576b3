"""The rate of one hook, and log lines that stand for many; by an injected clock."""

from __future__ import annotations

from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from switchboard_stall.notify.rate import BURST, PER_MINUTE, TokenBuckets
from switchboard_stall.notify.tally import Counts, Tally
from switchboard_stall.notify.timers import Timers


@define
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_quiet_hook_gets_120_at_once_and_then_two_a_second() -> None:
    clock = Clock()
    buckets = TokenBuckets(monotonic=clock)
    assert sum(buckets.take("hook") for _ in range(500)) == 120
    clock.now += 1
    assert sum(buckets.take("hook") for _ in range(500)) == 2
    clock.now += 3600
    assert sum(buckets.take("hook") for _ in range(500)) == 120


def test_one_hooks_rate_is_not_anothers() -> None:
    buckets = TokenBuckets(monotonic=Clock())
    assert sum(buckets.take("a") for _ in range(500)) == 120
    assert buckets.take("b")


@given(st.lists(st.floats(0, 5), min_size=1, max_size=300))
def test_in_no_minute_does_a_hook_get_more_than_a_burst_and_a_minutes_worth(pauses: list[float]) -> None:
    clock = Clock()
    buckets = TokenBuckets(monotonic=clock)
    taken: list[float] = []
    for pause in pauses:
        clock.now += pause
        taken += [clock.now for _ in range(40) if buckets.take("hook")]
    for begin in taken:
        assert sum(begin <= at < begin + 60 for at in taken) <= BURST + PER_MINUTE


def test_the_buckets_of_many_hooks_are_bounded() -> None:
    buckets = TokenBuckets(monotonic=Clock())
    for key in range(20_000):
        buckets.take(key)
    assert len(buckets._buckets) <= 8192


@define
class Log:
    """A tally whose timers run only when the test lets time pass."""

    clock: Clock = field(factory=Clock)
    lines: list[tuple[str, int]] = field(factory=list)
    timers: Timers = field(init=False)
    tally: Tally[str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.timers = Timers(self.clock)
        self.tally = Tally(
            self.timers, self.clock, lambda reason, number: self.lines.append((reason, number))
        )

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        heap = self.timers._heap
        for entry in sorted(heap):
            if entry[0] <= self.clock.now:
                heap.remove(entry)
                entry[2]()


def test_a_reason_is_logged_at_once_and_then_at_most_once_in_10_seconds_with_its_number() -> None:
    log = Log()
    log.tally.add("full")
    log.wait(0)
    assert log.lines == [("full", 1)]
    for _ in range(5000):
        log.tally.add("full")
    log.wait(9.9)
    assert log.lines == [("full", 1)]
    log.wait(0.1)
    assert log.lines == [("full", 1), ("full", 5000)]
    log.wait(60)
    assert len(log.lines) == 2


def test_reasons_are_logged_apart() -> None:
    log = Log()
    log.tally.add("full", 3)
    log.tally.add("rate")
    log.wait(0)
    assert sorted(log.lines) == [("full", 3), ("rate", 1)]


def test_counting_never_logs_in_the_thread_that_counts() -> None:
    log = Log()
    log.tally.add("full")
    assert log.lines == []
    assert log.tally.totals() == {"full": 1}


def test_what_was_counted_is_logged_by_the_end_and_after_it() -> None:
    log = Log()
    log.tally.add("full")
    log.wait(0)
    log.tally.add("full", 7)
    log.timers.close()
    log.tally.flush()
    assert log.lines == [("full", 1), ("full", 7)]
    log.clock.now += 10
    log.tally.add("closed")
    assert log.lines[-1] == ("closed", 1)
    assert log.tally.totals() == {"full": 8, "closed": 1}


def test_counts_add_up() -> None:
    counts: Counts[str] = Counts()
    counts.add("a")
    counts.add("a", 4)
    assert counts.totals() == {"a": 5}
