"""The reaper against fake duties: no database."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from attrs import define, field

from switchboard_stall.reaper import Duty, Reaper

if TYPE_CHECKING:
    from collections.abc import Callable

SOON = 10.0
"""Seconds after which something that must happen has not."""

SHORT = timedelta(milliseconds=20)


@define
class Pauses:
    """Stands in for the wait between ticks: it ends when the test says so, or the reaper is stopped."""

    seconds: list[float] = field(factory=list)
    _begun: threading.Semaphore = field(factory=lambda: threading.Semaphore(0))
    _over: threading.Semaphore = field(factory=lambda: threading.Semaphore(0))

    def __call__(self, stopped: threading.Event, seconds: float) -> None:
        self.seconds.append(seconds)
        self._begun.release()
        while not stopped.is_set() and not self._over.acquire(timeout=0.01):
            pass

    def wait_for_one(self) -> None:
        assert self._begun.acquire(timeout=SOON), "the reaper does not pause"

    def end_one(self) -> None:
        self._over.release()


def duties(log: list[str], *names: str) -> list[Duty]:
    return [Duty(name, lambda name=name: log.append(name)) for name in names]  # type: ignore[misc]


def raising(error: BaseException) -> Callable[[], object]:
    def run() -> object:
        raise error

    return run


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


@pytest.fixture(autouse=True)
def everything_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


# One tick


def test_a_tick_runs_the_duties_in_order() -> None:
    log: list[str] = []
    Reaper(duties(log, "one", "two", "three")).tick()
    assert log == ["one", "two", "three"]


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(1), KeyboardInterrupt()], ids=repr)
def test_a_duty_that_raises_is_logged_once_and_the_next_still_runs(
    caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    log: list[str] = []
    Reaper([Duty("bad", raising(error)), *duties(log, "good")]).tick()
    assert log == ["good"]
    assert told(caplog) == [("WARNING", "bad: failed")]
    assert caplog.records[0].exc_info is not None
    assert caplog.records[0].exc_info[1] is error


@pytest.mark.parametrize(("result", "count"), [(3, 3), ([1, 2], 2), ({"a"}, 1), ((None,), 1)], ids=repr)
def test_a_count_over_zero_is_logged(caplog: pytest.LogCaptureFixture, result: Any, count: int) -> None:
    Reaper([Duty("reap", lambda: result)]).tick()
    assert told(caplog) == [("INFO", f"reap: {count}")]


@pytest.mark.parametrize("result", [None, 0, -1, [], (), 0.5, object()], ids=lambda it: type(it).__name__)
def test_a_duty_with_nothing_to_do_logs_nothing(caplog: pytest.LogCaptureFixture, result: Any) -> None:
    Reaper([Duty("reap", lambda: result)]).tick()
    assert told(caplog) == []


def test_a_duty_that_hangs_is_left_out_until_it_has_come_back(caplog: pytest.LogCaptureFixture) -> None:
    release, runs, log = threading.Event(), threading.Semaphore(0), list[str]()
    calls = []

    def hang() -> int:
        calls.append(threading.current_thread())
        runs.release()
        assert release.wait(SOON)
        return 7

    reaper = Reaper([Duty("stuck", hang), *duties(log, "next")], patience=SHORT)
    reaper.tick()
    reaper.tick()
    assert log == ["next", "next"]
    assert len(calls) == 1
    assert told(caplog) == [
        ("WARNING", "stuck: still running after 0:00:00.020000; left out until it is over")
    ]
    caplog.clear()

    release.set()
    calls[0].join(SOON)
    reaper.patience = timedelta(seconds=SOON)
    reaper.tick()
    assert len(calls) == 2
    assert log == ["next"] * 3
    assert told(caplog) == [
        ("INFO", "stuck: came back"),
        ("INFO", "stuck: 7"),
        ("INFO", "stuck: 7"),
    ]


def test_a_duty_that_hung_and_then_failed_is_logged_as_failed(caplog: pytest.LogCaptureFixture) -> None:
    release, threads = threading.Event(), []

    def hang() -> None:
        threads.append(threading.current_thread())
        if len(threads) == 1:
            assert release.wait(SOON)
            raise ValueError("late")

    reaper = Reaper([Duty("stuck", hang)], patience=SHORT)
    reaper.tick()
    release.set()
    threads[0].join(SOON)
    caplog.clear()
    reaper.patience = timedelta(seconds=SOON)
    reaper.tick()
    assert [level for level, _ in told(caplog)] == ["INFO", "WARNING"]
    assert len(threads) == 2


def test_no_thread_left_is_a_duty_that_fails(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    reaper = Reaper(duties(log, "one", "two"))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda _: raising(RuntimeError("can't start"))())
        reaper.tick()
    assert told(caplog) == [("WARNING", f"{name}: no thread to run it on") for name in ("one", "two")]
    reaper.tick()
    assert log == ["one", "two"]


# From start to stop


def test_the_first_tick_comes_after_one_interval() -> None:
    log: list[str] = []
    pauses = Pauses()
    with Reaper(duties(log, "one"), pause=pauses, jitter=0):
        pauses.wait_for_one()
        assert (log, pauses.seconds) == ([], [30.0])
        pauses.end_one()
        pauses.wait_for_one()
        assert (log, pauses.seconds) == (["one"], [30.0, 30.0])


@pytest.mark.parametrize("end", [0, 1])
def test_each_wait_is_drawn_from_the_interval_and_its_jitter(end: int) -> None:
    drawn: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        drawn.append((low, high))
        return (low, high)[end]

    pauses = Pauses()
    interval = timedelta(seconds=20)
    with Reaper([], pause=pauses, interval=interval, jitter=0.25, uniform=uniform):
        for _ in range(3):
            pauses.wait_for_one()
            pauses.end_one()
    assert set(drawn) == {(0.75, 1.25)}
    assert set(pauses.seconds) == {(15.0, 25.0)[end]}


def test_two_reapers_do_not_tick_together_by_default() -> None:
    pauses = Pauses()
    with Reaper([], pause=pauses):
        for _ in range(20):
            pauses.wait_for_one()
            pauses.end_one()
    assert len(set(pauses.seconds)) > 1
    assert all(27 <= seconds <= 33 for seconds in pauses.seconds)


def test_it_keeps_time_by_itself() -> None:
    ticked = threading.Event()
    with Reaper([Duty("tick", ticked.set)], interval=SHORT):
        assert ticked.wait(SOON)


def test_stop_wakes_the_pause_and_ends_the_thread() -> None:
    reaper = Reaper([Duty("never", raising(AssertionError()))], interval=timedelta(hours=1))
    reaper.start()
    before = {thread for thread in threading.enumerate() if thread.name == "reaper"}
    stopping = threading.Thread(target=reaper.stop, daemon=True)
    stopping.start()
    stopping.join(SOON)
    assert not stopping.is_alive()
    assert len(before) == 1
    assert not any(thread.is_alive() for thread in before)


def test_stop_lets_the_duty_at_hand_end_and_begins_no_other() -> None:
    log: list[str] = []
    running, release = threading.Event(), threading.Event()

    def slow() -> None:
        running.set()
        assert release.wait(SOON)
        log.append("slow")

    pauses = Pauses()
    reaper = Reaper([Duty("slow", slow), *duties(log, "next")], pause=pauses)
    reaper.start()
    pauses.end_one()
    assert running.wait(SOON)
    stopping = threading.Thread(target=reaper.stop)
    stopping.start()
    ticker = next(thread for thread in threading.enumerate() if thread.name == "reaper")
    assert ticker.stopped.wait(SOON)  # type: ignore[attr-defined]
    assert stopping.is_alive()
    release.set()
    stopping.join(SOON)
    assert not stopping.is_alive()
    assert log == ["slow"]


def test_stop_does_not_outwait_the_patience() -> None:
    release = threading.Event()
    stuck = threading.Event()

    def hang() -> None:
        stuck.set()
        release.wait(SOON)

    pauses = Pauses()
    reaper = Reaper([Duty("stuck", hang)], pause=pauses, patience=SHORT)
    reaper.start()
    pauses.end_one()
    assert stuck.wait(SOON)
    stopping = threading.Thread(target=reaper.stop, daemon=True)
    stopping.start()
    stopping.join(SOON / 2)
    assert not stopping.is_alive()
    release.set()


def test_a_duty_may_stop_its_reaper() -> None:
    pauses = Pauses()
    over = threading.Event()

    def last() -> None:
        reaper.stop()
        over.set()

    reaper = Reaper([Duty("last", last)], pause=pauses)
    reaper.start()
    pauses.end_one()
    assert over.wait(SOON)


def test_it_can_be_started_again_after_a_stop_and_not_before() -> None:
    log: list[str] = []
    pauses = Pauses()
    reaper = Reaper(duties(log, "one"), pause=pauses)
    reaper.stop()
    for _ in range(2):
        reaper.start()
        with pytest.raises(RuntimeError, match="stop it"):
            reaper.start()
        pauses.wait_for_one()
        pauses.end_one()
        pauses.wait_for_one()
        reaper.stop()
    assert log == ["one", "one"]


def test_none_of_its_threads_keeps_the_process_alive() -> None:
    seen = []
    pauses = Pauses()
    with Reaper([Duty("look", lambda: seen.extend(threading.enumerate()))], pause=pauses):
        pauses.end_one()
        pauses.wait_for_one()
        pauses.wait_for_one()
    ours = {thread.name: thread.daemon for thread in seen if thread.name.startswith("reaper")}
    assert ours == {"reaper": True, "reaper: look": True}


@pytest.mark.parametrize(
    ("options", "told_"),
    [
        ({"interval": timedelta(0)}, "interval=0:00:00"),
        ({"patience": timedelta(seconds=-1)}, "patience=-1 day"),
        ({"jitter": 1.0}, r"jitter=1\.0"),
        ({"jitter": -0.1}, r"jitter=-0\.1"),
    ],
    ids=str,
)
def test_a_reaper_that_cannot_keep_time_does_not_exist(options: dict[str, Any], told_: str) -> None:
    with pytest.raises(ValueError, match=told_):
        Reaper([], **options)


def test_two_duties_do_not_share_a_name() -> None:
    with pytest.raises(ValueError, match="'one'"):
        Reaper(duties([], "one", "two", "one"))
