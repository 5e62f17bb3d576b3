"""The stages of a dispatcher: ready todos, their deliveries, and the threads that move them along."""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections import deque
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypeVar

from attrs import frozen
from sqlalchemy.exc import SQLAlchemyError

from switchboard_stall.notify import health
from switchboard_stall.notify.attempt import Outcome, post, tls_context
from switchboard_stall.notify.body import BodyTooLarge, Notification
from switchboard_stall.notify.deliveries import Deliveries, Delivery
from switchboard_stall.notify.eligible import Receiver, SkipReason, receiver, receivers
from switchboard_stall.notify.hooks import destroy_expired_secrets
from switchboard_stall.notify.lookup import Answer, Lookups
from switchboard_stall.notify.rate import TokenBuckets
from switchboard_stall.notify.secrets import SealedSecretError, SecretBox
from switchboard_stall.notify.signing import SecretInvalid, SigningKey, message_id, signed_headers
from switchboard_stall.notify.tally import Counts, Tally
from switchboard_stall.notify.target import HostUnresolved, Resolver, TargetPolicy, TargetRefused
from switchboard_stall.notify.timers import Timers
from switchboard_stall.transaction import in_transaction

if TYPE_CHECKING:
    import ssl
    import uuid
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from sqlalchemy.orm import Session

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

CAPACITY: Final = 1024
"""How many ready todos are held at most, and again how many deliveries."""

_BATCH: Final = 64
_SECRETS_EVERY: Final = 900.0
_JOIN_MARGIN: Final = 1.0

DropReason: TypeAlias = Literal[
    "ready queue full",
    "delivery queue full",
    "rate limit",
    "too large",
    "database",
    "secret",
    "closed",
    "internal",
]
"""Why a notification was given up although the receiver is not at fault."""

NotSent: TypeAlias = SkipReason | Literal["no receiver", "quarantine"]
"""Why there was nothing to send."""


@frozen
class Settings:
    """What a pipeline is given; :class:`Dispatcher` says what each is. Times are seconds."""

    sessions: Callable[[], Session]
    box: SecretBox
    policy: TargetPolicy
    resolver: Resolver
    clock: Callable[[], datetime]
    monotonic: Callable[[], float]
    uniform: Callable[[float, float], float]
    token_bytes: Callable[[int], bytes]
    tls: ssl.SSLContext | None
    workers: int
    retry_waits: tuple[float, ...]
    attempt_timeout: float


@frozen
class DispatcherStats:
    """What a dispatcher has done since it was made, or since the fork, and what it holds.

    :param accepted: todos taken from the ready hook.
    :param attempts: attempts that came to an end, whether or not a request was sent.
    :param delivered: notifications answered with a 2xx.
    :param failed: notifications given up because of the receiver, by class.
    :param dropped: notifications given up although the receiver is not at fault, by reason.
    :param skipped: notifications with nothing, or nothing left, to wake for, by reason.
    :param ready: todos held in the first stage.
    :param deliveries: deliveries held in the second stage, those that wait for a retry included.
    :param running: attempts under way.
    """

    accepted: int
    attempts: int
    delivered: int
    failed: Mapping[health.FailureClass, int]
    dropped: Mapping[DropReason, int]
    skipped: Mapping[NotSent, int]
    ready: int
    deliveries: int
    running: int


class Pipeline:
    """The two stages, their threads and their counters: all that a forked child must not share.

    One thread routes: it looks up who is to be told of a ready todo. One keeps the timers. The workers make
    the attempts. All are daemons, started with the first todo.
    """

    def __init__(self, settings: Settings) -> None:
        """Make it; the class says of what."""
        self._settings = settings
        self._timers = Timers(settings.monotonic)
        self._lookups = Lookups(settings.resolver)
        self._buckets = TokenBuckets(monotonic=settings.monotonic)
        self._deliveries = Deliveries(capacity=CAPACITY, workers=settings.workers)
        self.dropped: Tally[DropReason] = Tally(self._timers, settings.monotonic, _log_dropped)
        self._errors: Tally[str] = Tally(self._timers, settings.monotonic, _log_error)
        self.skipped: Counts[NotSent] = Counts()
        self._failed: Counts[health.FailureClass] = Counts()
        self._counts: Counts[Literal["attempts", "delivered"]] = Counts()
        self._accepted = 0
        self._ready: deque[Notification] = deque()
        self._ready_lock = threading.Lock()
        self._ready_changed = threading.Condition(self._ready_lock)
        self._router_waits = False
        self._routing = 0
        self._secrets_due = settings.monotonic()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._tls = settings.tls
        self._tls_lock = threading.Lock()

    def renewed(self) -> Pipeline:
        """Return an empty one of the same settings, without touching a lock of this one."""
        renewed = Pipeline(self._settings)
        renewed._closed = self._closed
        return renewed

    @property
    def full(self) -> bool:
        """Whether the first stage is full: also asked without the lock, before anything is copied."""
        return len(self._ready) + self._routing >= CAPACITY

    def accept(self, notification: Notification) -> None:
        """Hold a notification for the router, or drop and count it."""
        drop: DropReason
        with self._ready_lock:
            if self._closed:
                drop = "closed"
            elif self.full:
                drop = "ready queue full"
            else:
                self._ready.append(notification)
                self._accepted += 1
                if self._router_waits:
                    self._ready_changed.notify()
                elif not self._threads:
                    self._start()
                return
        self.dropped.add(drop)

    def start(self) -> bool:
        """Start the threads, if they are not running; return false once closed."""
        with self._ready_changed:
            if not (self._closed or self._threads):
                self._start()
            return not self._closed

    def close(self) -> None:
        """End: drop what is held, let the attempts under way end, and return within one attempt's time."""
        with self._ready_changed:
            if self._closed:
                return
            self._closed = True
            given_up = len(self._ready)
            self._ready.clear()
            self._ready_changed.notify_all()
        given_up += self._deliveries.close()
        if given_up:
            self.dropped.add("closed", given_up)
        self._lookups.close()
        self._timers.close()
        self.dropped.flush()
        self._errors.flush()
        end = self._settings.monotonic() + self._settings.attempt_timeout + _JOIN_MARGIN
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - self._settings.monotonic()))
        self.dropped.flush()
        self._errors.flush()
        late = sum(thread.is_alive() for thread in self._threads)
        if late:
            _log.warning("closed while %d threads still wait for the database; they are left behind", late)

    def wait_idle(self, timeout: float | None) -> bool:
        """Wait until nothing is held or under way; return whether that came about in time."""

        def idle() -> bool:
            with self._ready_lock:
                return not (self._ready or self._routing or len(self._deliveries))

        return self._deliveries.wait_until(idle, timeout)

    def stats(self) -> DispatcherStats:
        """Return what has been done and what is held."""
        counts = self._counts.totals()
        return DispatcherStats(
            accepted=self._accepted,
            attempts=counts.get("attempts", 0),
            delivered=counts.get("delivered", 0),
            failed=self._failed.totals(),
            dropped=self.dropped.totals(),
            skipped=self.skipped.totals(),
            ready=len(self._ready) + self._routing,
            deliveries=len(self._deliveries),
            running=self._deliveries.running,
        )

    def _start(self) -> None:
        work = [("router", self._route), ("timers", self._timers.run)]
        work += [(f"worker-{number + 1}", self._work) for number in range(self._settings.workers)]
        self._threads = [
            threading.Thread(target=target, name=f"switchboard-notify-{name}", daemon=True)
            for name, target in work
        ]
        for thread in self._threads:
            thread.start()

    # The router: from ready todos to deliveries.

    def _route(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                if batch:
                    self._queue(batch)
                else:
                    self._in_session(destroy_expired_secrets)
            except Exception as error:
                self._report("looking up receivers" if batch else "destroying old secrets", error)
                if batch:
                    self.dropped.add(_blamed(error), len(batch))
            finally:
                self._routing = 0
                self._deliveries.poke()

    def _next_batch(self) -> list[Notification] | None:
        """The next todos to look up; none of them when it is time to destroy old secrets."""
        with self._ready_changed:
            while not self._closed:
                if self._settings.monotonic() >= self._secrets_due:
                    self._secrets_due = self._settings.monotonic() + _SECRETS_EVERY
                    return []
                if self._ready:
                    batch = [self._ready.popleft() for _ in range(min(_BATCH, len(self._ready)))]
                    self._routing = len(batch)
                    return batch
                self._router_waits = True
                self._ready_changed.wait(self._secrets_due - self._settings.monotonic())
                self._router_waits = False
            return None

    def _queue(self, batch: list[Notification]) -> None:
        found = self._in_session(partial(receivers, todo_ids=[each.todo_id for each in batch]))
        for notification in batch:
            hooks = found.get(notification.todo_id, [])
            if not hooks:
                self.skipped.add("no receiver")
            for hook_id, url, endpoint in hooks:
                self._queue_for(notification, hook_id, url, endpoint)

    def _queue_for(self, notification: Notification, hook_id: uuid.UUID, url: str, endpoint: str) -> None:
        if not self._buckets.take(hook_id):
            self.dropped.add("rate limit")
            return
        try:
            body = notification.body(endpoint)
        except BodyTooLarge:
            self.dropped.add("too large")
            return
        delivery = Delivery(
            notification, hook_id, message_id(self._settings.clock(), self._settings.token_bytes), body, url
        )
        loser = self._deliveries.admit(delivery)
        if loser is not None:
            self.dropped.add("closed" if self._closed else "delivery queue full")
        if loser is not delivery:
            self._resolve(delivery)

    # Name resolution: before each attempt, and on no worker.

    def _resolve(self, delivery: Delivery) -> None:
        """Look the delivery's host up, if it has a name, and offer the delivery to the workers."""
        delivery.resolution = delivery.destination = None
        try:
            target = self._settings.policy.target(delivery.url)
        except TargetRefused:
            self._deliveries.offer(delivery)  # A worker judges, with the URL it reads then.
            return
        delivery.destination = (target.host, target.port)
        if target.literal is not None:
            self._deliveries.offer(delivery)
            return
        began = self._settings.monotonic()
        first = threading.Lock()

        def answered(answer: Answer) -> None:
            if first.acquire(blocking=False):
                delivery.resolution = (answer, self._settings.monotonic() - began)
                self._deliveries.offer(delivery)

        def stalled() -> None:
            if first.acquire(blocking=False):
                give_up()
                delivery.resolution = "stalled"
                self._deliveries.offer(delivery)

        give_up = self._lookups.start(target.host, answered)
        self._timers.after(self._settings.attempt_timeout, stalled)

    # The workers: one attempt at a time.

    def _work(self) -> None:
        while (delivery := self._deliveries.take()) is not None:
            wait = None
            try:
                wait = self._attempt(delivery)
            except Exception as error:
                self._report("an attempt", error)
                self.dropped.add(_blamed(error))
            if wait is None:
                self._deliveries.finish(delivery)
            elif self._deliveries.put_back(delivery):
                self._timers.after(wait, partial(self._resolve, delivery))
            else:
                self.dropped.add("closed")

    def _attempt(self, delivery: Delivery) -> float | None:
        """Make one attempt; return in how many seconds the next one begins, or ``None`` for no other."""
        notification = delivery.notification
        found = self._in_session(
            partial(
                receiver,
                hook_id=delivery.hook_id,
                todo_id=notification.todo_id,
                queue=notification.queue,
            )
        )
        if not isinstance(found, Receiver):
            self.skipped.add(found)
            return None
        if found.url != delivery.url:
            delivery.url = found.url
            return 0.0
        try:
            keys = [SigningKey(self._settings.box.open(sealed)) for sealed in found.secrets]
        except (SealedSecretError, SecretInvalid) as error:
            self._report("opening a hook's secret", error)
            self.dropped.add("secret")
            return None
        outcome = self._send(delivery, keys)
        self._counts.add("attempts")
        self._deliveries.suspect(delivery.hook_id, outcome.error is not None)
        if (
            outcome.error is not None
            and outcome.retry
            and delivery.attempt <= len(self._settings.retry_waits)
        ):
            wait = self._settings.retry_waits[delivery.attempt - 1]
            delivery.attempt += 1
            return self._settings.uniform(wait * 0.8, wait * 1.2)
        self._record(delivery, outcome)
        return None

    def _send(self, delivery: Delivery, keys: list[SigningKey]) -> Outcome:
        settings = self._settings
        resolution, seconds = delivery.resolution, 0.0
        try:
            target = settings.policy.target(delivery.url)
            if target.literal is not None:
                answer: Answer = (target.host,)
            elif resolution is None or resolution == "stalled":
                return Outcome("timeout", retry=True)
            else:
                answer, seconds = resolution
            addresses = settings.policy.check(target, answer or ())
        except TargetRefused:
            return Outcome("rejected_ssrf")
        except HostUnresolved:
            return Outcome("network", retry=True)
        headers = {
            "user-agent": _USER_AGENT,
            "content-type": "application/json",
            **signed_headers(keys, delivery.message_id, int(settings.clock().timestamp()), delivery.body),
        }
        return post(
            target,
            addresses,
            headers,
            delivery.body,
            timeout=settings.attempt_timeout - seconds,
            tls=self._tls_context(),
            monotonic=settings.monotonic,
        )

    def _record(self, delivery: Delivery, outcome: Outcome) -> None:
        """Count how the delivery ended, and tell the hook's health."""
        hook_id, error, status = delivery.hook_id, outcome.error, outcome.status
        disabled = False
        try:
            if error is None:
                self._counts.add("delivered")
                self._in_session(partial(health.record_success, hook_id=hook_id, status=status))
                return
            self._failed.add(error)
            _log.info("notify hook %s: %s at attempt %d, status %s", hook_id, error, delivery.attempt, status)
            disabled = self._in_session(
                partial(health.record_failure, hook_id=hook_id, error=error, status=status)
            )
        except SQLAlchemyError as failure:
            self._report("recording a hook's health", failure)
        if disabled:
            _log.warning(
                "notify hook %s: disabled after %d failed deliveries in a row, the last by %s",
                hook_id,
                health.MAX_FAILURES,
                error,
            )

    def _tls_context(self) -> ssl.SSLContext:
        with self._tls_lock:
            if self._tls is None:
                self._tls = tls_context()
            return self._tls

    def _in_session(self, work: Callable[[Session], _T]) -> _T:
        return in_transaction(self._settings.sessions, work)

    def _report(self, what: str, error: Exception) -> None:
        # Its text may quote a URL or a parameter, so only its type and place are told.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        self._errors.add(
            f"{what}: {type(error).__name__} at {os.path.basename(frame.filename)}:{frame.lineno}"
        )


def _blamed(error: Exception) -> DropReason:
    return "database" if isinstance(error, SQLAlchemyError) else "internal"


def _user_agent() -> str:
    try:
        return f"switchboard-stall/{version('switchboard-stall')}"
    except PackageNotFoundError:  # A checkout that was never installed.
        return "switchboard-stall/0"


_USER_AGENT: Final = _user_agent()


def _log_dropped(reason: DropReason, number: int) -> None:
    _log.warning("dropped %d notifications: %s", number, reason)


def _log_error(what: str, number: int) -> None:
    _log.error("%s, %d times", what, number)
