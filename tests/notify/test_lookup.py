from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest

from switchboard_stall.notify.lookup import Lookups, look_up
from switchboard_stall.notify.target import HostUnresolved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT = 5.0


class Resolver:
    """Answers at once, except for hosts that are held until they are let go."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.released = threading.Event()
        self.began: SimpleQueue[str] = SimpleQueue()

    def __call__(self, host: str) -> list[str]:
        self.calls.append(host)
        self.began.put(host)
        if host.startswith("stalled"):
            self.released.wait(30)
        if host.startswith("broken"):
            raise ValueError("not even an OSError")
        return [f"address of {host}"]


@pytest.fixture
def resolver() -> Iterator[Resolver]:
    resolver = Resolver()
    yield resolver
    resolver.released.set()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.001)


def asked(lookups: Lookups, host: str) -> SimpleQueue[Any]:
    answers: SimpleQueue[Any] = SimpleQueue()
    lookups.start(host, answers.put)
    return answers


def test_a_host_is_answered_with_its_addresses(resolver: Resolver) -> None:
    assert asked(Lookups(resolver), "a").get(timeout=WAIT) == ("address of a",)


def test_whatever_a_resolver_raises_is_no_address(resolver: Resolver) -> None:
    lookups = Lookups(resolver)
    assert asked(lookups, "broken").get(timeout=WAIT) is None
    assert asked(lookups, "a").get(timeout=WAIT) == ("address of a",)


def test_as_many_stalled_hosts_as_half_the_threads_delay_no_healthy_host(resolver: Resolver) -> None:
    lookups = Lookups(resolver, threads=64)
    for number in range(32):
        for _ in range(20):
            lookups.start(f"stalled-{number}", lambda answer: None)
    began = time.monotonic()
    assert asked(lookups, "healthy").get(timeout=WAIT) == ("address of healthy",)
    assert time.monotonic() - began < 1


def test_one_stalled_host_takes_one_thread_however_often_it_is_asked_for(resolver: Resolver) -> None:
    lookups = Lookups(resolver, threads=2)
    for _ in range(100):
        lookups.start("stalled", lambda answer: None)
    assert asked(lookups, "healthy").get(timeout=WAIT) == ("address of healthy",)
    assert resolver.calls.count("stalled") == 1


def test_all_who_asked_before_a_lookup_began_are_answered_by_it(resolver: Resolver) -> None:
    lookups = Lookups(resolver, threads=8)
    first = asked(lookups, "stalled")
    assert resolver.began.get(timeout=WAIT) == "stalled"
    others = [asked(lookups, "stalled") for _ in range(50)]
    resolver.released.set()
    assert first.get(timeout=WAIT) is not None
    for answers in others:
        assert answers.get(timeout=WAIT) is not None
    # An answer is never older than the question: those who asked meanwhile share a second lookup.
    assert resolver.calls == ["stalled", "stalled"]


def test_hosts_that_stalled_before_share_half_of_the_threads(resolver: Resolver) -> None:
    lookups = Lookups(resolver, threads=4)
    for number in range(4):
        give_up = lookups.start(f"stalled-{number}", lambda answer: None)
        assert resolver.began.get(timeout=WAIT) == f"stalled-{number}"
        give_up()
    resolver.released.set()
    wait_until(lambda: not lookups._running)
    resolver.released.clear()
    for number in range(4):
        lookups.start(f"stalled-{number}", lambda answer: None)
    assert asked(lookups, "healthy").get(timeout=WAIT) == ("address of healthy",)
    assert len(resolver.calls) == 4 + 2 + 1


def test_a_stalled_host_that_answers_in_time_again_is_as_good_as_any(resolver: Resolver) -> None:
    lookups = Lookups(resolver, threads=2)
    lookups.start("a", lambda answer: None)()
    assert list(lookups._stalled) == ["a"]
    assert asked(lookups, "a").get(timeout=WAIT) == ("address of a",)
    assert not lookups._stalled


def test_a_lookup_given_up_before_it_began_never_begins(resolver: Resolver) -> None:
    lookups = Lookups(resolver, threads=1)
    lookups.start("stalled", lambda answer: None)
    assert resolver.began.get(timeout=WAIT) == "stalled"
    lookups.start("forgotten", lambda answer: None)()
    wanted = asked(lookups, "wanted")
    resolver.released.set()
    assert wanted.get(timeout=WAIT) == ("address of wanted",)
    assert resolver.calls == ["stalled", "wanted"]


def test_closed_it_begins_nothing(resolver: Resolver) -> None:
    lookups = Lookups(resolver, threads=1)
    lookups.start("stalled", lambda answer: None)
    assert resolver.began.get(timeout=WAIT) == "stalled"
    lookups.start("late", lambda answer: None)
    lookups.close()
    resolver.released.set()
    wait_until(lambda: not lookups._threads)
    assert "late" not in resolver.calls


def test_looking_up_in_the_callers_time_ends_in_time(resolver: Resolver) -> None:
    assert look_up("a", resolver) == ("address of a",)
    began = time.monotonic()
    with pytest.raises(HostUnresolved):
        look_up("stalled", resolver, seconds=0.05)
    with pytest.raises(HostUnresolved):
        look_up("broken", resolver)
    assert time.monotonic() - began < 1
