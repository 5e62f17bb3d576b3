"""The tick: named duties, in order, every half minute, each failing alone."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Sized
from datetime import timedelta
from typing import TYPE_CHECKING, Self

from attrs import Attribute, define, field, frozen

if TYPE_CHECKING:
    from types import TracebackType

_log = logging.getLogger(__name__)


@frozen
class Duty:
    """One thing to do on every tick.

    :param name: what log lines call it.
    :param run: called without arguments, on a thread of its own. A result that is a number above zero, or a
        collection with something in it, gets one line at INFO with the count; anything else gets none.
    """

    name: str
    run: Callable[[], object]


def _as_tuple(duties: Iterable[Duty]) -> tuple[Duty, ...]:
    return tuple(duties)


def _check_names(_: Reaper, __: Attribute[tuple[Duty, ...]], duties: tuple[Duty, ...]) -> None:
    names = [duty.name for duty in duties]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two duties are named {name!r}; a log line must tell which of them failed")


def _check_time(_: Reaper, attribute: Attribute[timedelta], value: timedelta) -> None:
    if value <= timedelta(0):
        raise ValueError(f"{attribute.name}={value}; it must be longer than nothing")


def _check_jitter(_: Reaper, __: Attribute[float], jitter: float) -> None:
    if not 0 <= jitter < 1:
        raise ValueError(f"jitter={jitter}; it is a fraction of the interval, at least 0 and less than 1")


@define(eq=False)
class Reaper:
    """Runs its duties in order, on every tick, from :meth:`start` to :meth:`stop`.

    Every instance of a service has one; there is no leader. As a context manager it starts and stops with
    the block::

        with Reaper(standard_duties(session_factory)):
            serve()

    The first tick comes after one interval. A duty that raises is logged at WARNING, and the next one still
    runs. One that hangs is logged at WARNING once, the tick goes on without it, and later ticks leave it
    out until it has come back. Nothing here listens for a notification, or runs on the queue it watches.

    Threads do not survive ``os.fork()``: start it in the process that serves, after the fork.

    :param duties: what to do, in order. No two share a name.
    :param interval: the mean time from the end of one tick to the beginning of the next.
    :param jitter: the fraction of ``interval`` by which each wait is shortened or lengthened at random:
        instances that tick together lock each other's rows.
    :param patience: the longest that a tick waits for one duty; by default ``interval``.
    :param uniform: draws a number between two others; for tests.
    :param pause: waits for an event, at most so many seconds; for tests.
    :raises ValueError: a time is not positive, ``jitter`` is not in [0, 1), or two duties share a name.

    Source: design, "Where the sweep runs"; wake chain, "The reaper tick today".
    """

    duties: tuple[Duty, ...] = field(converter=_as_tuple, validator=_check_names)
    interval: timedelta = field(default=timedelta(seconds=30), validator=_check_time, kw_only=True)
    jitter: float = field(default=0.1, validator=_check_jitter, kw_only=True)
    patience: timedelta = field(validator=_check_time, kw_only=True)
    uniform: Callable[[float, float], float] = field(default=random.uniform, kw_only=True, repr=False)
    pause: Callable[[threading.Event, float], object] = field(
        default=threading.Event.wait, kw_only=True, repr=False
    )
    _ticker: _Ticker | None = field(default=None, init=False, repr=False)
    _late: dict[str, _Run] = field(factory=dict, init=False, repr=False)
    _ticking: threading.Lock = field(factory=threading.Lock, init=False, repr=False)

    @patience.default
    def _default_patience(self) -> timedelta:
        return self.interval

    def start(self) -> None:
        """Begin to tick, on a thread of its own. It may be started again after :meth:`stop`.

        :raises RuntimeError: it has been started already.
        """
        if self._ticker is not None:
            raise RuntimeError("this reaper has been started; stop it before it is started again")
        self._ticker = _Ticker(self)
        self._ticker.start()

    def stop(self) -> None:
        """Stop ticking: at once between ticks, else when the duty at hand is over or ``patience`` is.

        The duties after it are not begun. A reaper that has not been started is left as it is.
        """
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.stopped.set()
            # A duty may stop the reaper that runs it, and must not wait for itself.
            if not isinstance(threading.current_thread(), _Run):
                ticker.join()

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self.stop()

    def tick(self) -> None:
        """Run each duty once, in order, now; for tests, and for hosts that keep time themselves.

        Needs no :meth:`start`. It waits for a tick that is under way.
        """
        self._tick(threading.Event())

    def _tick(self, stopped: threading.Event) -> None:
        with self._ticking:
            for duty in self.duties:
                if stopped.is_set():
                    return
                self._do(duty)

    def _do(self, duty: Duty) -> None:
        late = self._late.get(duty.name)
        if late is not None:
            if late.is_alive():
                return
            del self._late[duty.name]
            _log.info("%s: came back", duty.name)
            late.report()
        run = _Run(duty)
        try:
            run.start()
        except RuntimeError:
            _log.warning("%s: no thread to run it on", duty.name, exc_info=True)
            return
        run.join(self.patience.total_seconds())
        if run.is_alive():
            self._late[duty.name] = run
            _log.warning("%s: still running after %s; left out until it is over", duty.name, self.patience)
        else:
            run.report()


class _Ticker(threading.Thread):
    """One life of a reaper, from a start to its stop."""

    def __init__(self, reaper: Reaper) -> None:
        super().__init__(name="reaper", daemon=True)
        self.reaper = reaper
        self.stopped = threading.Event()

    def run(self) -> None:
        reaper = self.reaper
        while True:
            stretch = reaper.uniform(1 - reaper.jitter, 1 + reaper.jitter)
            reaper.pause(self.stopped, reaper.interval.total_seconds() * stretch)
            if self.stopped.is_set():
                return
            reaper._tick(self.stopped)


class _Run(threading.Thread):
    """One run of one duty, on a thread of its own, so that whoever waits for it can give up."""

    def __init__(self, duty: Duty) -> None:
        super().__init__(name=f"reaper: {duty.name}", daemon=True)
        self.duty = duty
        self.result: object = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.duty.run()
        except BaseException as error:  # SystemExit too: it would end this thread without a word.
            self.error = error

    def report(self) -> None:
        """Log what came of it, when it is over."""
        if self.error is not None:
            _log.warning("%s: failed", self.duty.name, exc_info=self.error)
            return
        count = len(self.result) if isinstance(self.result, Sized) else self.result
        if isinstance(count, int) and count > 0:
            _log.info("%s: %d", self.duty.name, count)
