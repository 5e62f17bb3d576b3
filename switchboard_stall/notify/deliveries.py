"""The second stage: notifications on their way to one hook each, and which of them a worker takes next."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from attrs import define, field

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable, Iterator

    from switchboard_stall.notify.body import Notification
    from switchboard_stall.notify.lookup import Answer

_MAX_SUSPECTS: Final = 8192

Resolution: TypeAlias = tuple["Answer", float] | Literal["stalled"]
"""What a host resolved to and the seconds it took, or that it was given up."""


@define(eq=False)
class Delivery:
    """One notification on its way to one hook.

    :param message_id: the same for all its attempts.
    :param url: the hook's URL as last read. Not shown by ``repr``.
    :param attempt: 1 for the first.
    :param destination: what the attempt will connect to; equal for equal hosts and ports.
    :param resolution: of the host of ``url``, for the attempt at hand.
    """

    notification: Notification = field(repr=False)
    hook_id: uuid.UUID
    message_id: str
    body: bytes = field(repr=False)
    url: str = field(repr=False)
    attempt: int = 1
    destination: object = None
    resolution: Resolution | None = None
    evicted: bool = False
    running: bool = False


class Deliveries:
    """Holds a bounded number of deliveries and hands them to workers. Thread-safe.

    First attempts go first, and hooks take turns. What hangs leaves room for what does not: one hook has one
    attempt under way, one endpoint and one destination at most half of the workers, and retries share half
    of them with the hooks whose last attempt failed; one worker serves these even when first attempts queue.

    :param capacity: the most deliveries held, waiting for a retry included.
    :param workers: how many threads call :meth:`take`.
    """

    def __init__(self, *, capacity: int, workers: int) -> None:
        """Make it; the class says of what."""
        self._capacity = capacity
        self._half = max(1, workers // 2)
        self._reserved = 1 if workers > 1 else 0
        self._lock = threading.Lock()
        self._takeable = threading.Condition(self._lock)
        self._settled = threading.Condition(self._lock)
        self._held: dict[uuid.UUID, dict[Delivery, None]] = {}
        self._count = 0
        self._running = 0
        self._prompt: OrderedDict[uuid.UUID, deque[Delivery]] = OrderedDict()
        self._slow: OrderedDict[uuid.UUID, deque[Delivery]] = OrderedDict()
        self._slow_running: set[Delivery] = set()
        self._shares: Counter[object] = Counter()
        self._suspects: OrderedDict[uuid.UUID, None] = OrderedDict()
        self._closed = False

    def __len__(self) -> int:
        """How many deliveries are held."""
        return self._count

    @property
    def running(self) -> int:
        """How many attempts are under way."""
        return self._running

    def admit(self, delivery: Delivery) -> Delivery | None:
        """Hold one more; return the one that lost its place, which may be this one, or ``None``.

        When the stage is full, the hook that holds the most gives up its newest, so that one hook's crowd
        costs no other hook its place.
        """
        with self._lock:
            if self._closed:
                return delivery
            loser = None
            if self._count >= self._capacity:
                loser = self._evict_for(delivery.hook_id)
                if loser is None:
                    return delivery
            self._held.setdefault(delivery.hook_id, {})[delivery] = None
            self._count += 1
            return loser

    def offer(self, delivery: Delivery) -> None:
        """Let workers take a delivery that is held and whose host is resolved."""
        with self._lock:
            if delivery.evicted or self._closed:
                return
            slow = delivery.attempt > 1 or delivery.hook_id in self._suspects
            lane = self._slow if slow else self._prompt
            lane.setdefault(delivery.hook_id, deque()).append(delivery)
            self._takeable.notify()

    def take(self) -> Delivery | None:
        """Wait for a delivery to attempt; ``None`` once closed. Each one taken is put back or finished."""
        with self._lock:
            while not self._closed:
                delivery = self._pick()
                if delivery is not None:
                    return delivery
                self._takeable.wait()
            return None

    def put_back(self, delivery: Delivery) -> bool:
        """Keep holding a delivery that was taken, to be offered again; return false once closed."""
        with self._lock:
            self._release(delivery)
            if self._closed:
                self._forget(delivery)
            return not self._closed

    def suspect(self, hook_id: uuid.UUID, failed: bool) -> None:
        """Remember whether the hook's last attempt failed."""
        with self._lock:
            self._suspects.pop(hook_id, None)
            if failed:
                self._suspects[hook_id] = None
                if len(self._suspects) > _MAX_SUSPECTS:
                    self._suspects.popitem(last=False)

    def finish(self, delivery: Delivery) -> None:
        """Hold a delivery that was taken no longer."""
        with self._lock:
            self._release(delivery)
            self._forget(delivery)
            self._settled.notify_all()

    def close(self) -> int:
        """Hand out nothing any more; return how many deliveries that were not under way are given up."""
        with self._lock:
            self._closed = True
            self._prompt.clear()
            self._slow.clear()
            given_up = [each for held in self._held.values() for each in held if not each.running]
            for delivery in given_up:
                self._forget(delivery)
            self._takeable.notify_all()
            self._settled.notify_all()
            return len(given_up)

    def wait_until(self, settled: Callable[[], bool], timeout: float | None) -> bool:
        """Wait for a condition that is asked again whenever a delivery ends, or somebody pokes."""
        with self._lock:
            return self._settled.wait_for(settled, timeout)

    def poke(self) -> None:
        """Ask the condition of :meth:`wait_until` again."""
        with self._lock:
            self._settled.notify_all()

    def _pick(self) -> Delivery | None:
        slow_running = len(self._slow_running)
        if slow_running < self._reserved and (delivery := self._pick_from(self._slow)) is not None:
            self._slow_running.add(delivery)
            return delivery
        if (delivery := self._pick_from(self._prompt)) is not None:
            return delivery
        if slow_running < self._half and (delivery := self._pick_from(self._slow)) is not None:
            self._slow_running.add(delivery)
            return delivery
        return None

    def _pick_from(self, lane: OrderedDict[uuid.UUID, deque[Delivery]]) -> Delivery | None:
        for hook_id, queue in lane.items():
            if any(self._shares[key] >= most for key, most in self._shares_of(queue[0])):
                continue
            delivery = queue.popleft()
            del lane[hook_id]
            if queue:
                lane[hook_id] = queue
            self._shares.update(key for key, _ in self._shares_of(delivery))
            self._running += 1
            delivery.running = True
            return delivery
        return None

    def _shares_of(self, delivery: Delivery) -> Iterator[tuple[object, int]]:
        """Whose attempt this is, and how many each of them may have under way."""
        yield ("hook", delivery.hook_id), 1
        yield ("endpoint", delivery.notification.endpoint_id), self._half
        yield ("destination", delivery.destination), self._half

    def _release(self, delivery: Delivery) -> None:
        delivery.running = False
        self._slow_running.discard(delivery)
        self._running -= 1
        for key, _ in self._shares_of(delivery):
            self._shares[key] -= 1
            if not self._shares[key]:
                del self._shares[key]
        self._takeable.notify_all()

    def _forget(self, delivery: Delivery) -> None:
        held = self._held[delivery.hook_id]
        del held[delivery]
        if not held:
            del self._held[delivery.hook_id]
        self._count -= 1

    def _evict_for(self, hook_id: uuid.UUID) -> Delivery | None:
        most = max(self._held, key=lambda held: len(self._held[held]))
        if len(self._held[most]) <= len(self._held.get(hook_id, ())) + 1:
            return None
        for delivery in reversed(self._held[most]):
            if not delivery.running:
                delivery.evicted = True
                for lane in (self._prompt, self._slow):
                    queue = lane.get(most)
                    if queue is not None and delivery in queue:
                        queue.remove(delivery)
                        if not queue:
                            del lane[most]
                self._forget(delivery)
                return delivery
        return None
