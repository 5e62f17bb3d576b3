"""Which delivery a worker takes next, and which is given up when the stage is full. No threads, no clock."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

from switchboard_stall.notify.body import Notification
from switchboard_stall.notify.deliveries import Deliveries, Delivery

A, B, C, D, E = (uuid.UUID(int=number) for number in range(1, 6))


class Scene:
    """Deliveries told by their hook; each has an endpoint and a destination of its own unless told."""

    def __init__(self, *, capacity: int = 1024, workers: int = 8) -> None:
        self.deliveries = Deliveries(capacity=capacity, workers=workers)

    def admit(
        self,
        hook: uuid.UUID,
        *,
        to: object = None,
        of: uuid.UUID | None = None,
        attempt: int = 1,
    ) -> tuple[Delivery, Delivery | None]:
        made = Notification("td", of or hook, "inbox", "", "", "", 0, "created", datetime.now(UTC))
        delivery = Delivery(made, hook, "msg", b"", "https://a.example/", attempt)
        delivery.destination = to or hook
        return delivery, self.deliveries.admit(delivery)

    def offer(
        self, hook: uuid.UUID, *, to: object = None, of: uuid.UUID | None = None, attempt: int = 1
    ) -> Delivery:
        delivery, loser = self.admit(hook, to=to, of=of, attempt=attempt)
        assert loser is None
        self.deliveries.offer(delivery)
        return delivery

    def taken_by_one(self) -> Delivery | None:
        """What an idle worker takes, if there is anything for it."""
        with self.deliveries._lock:
            return self.deliveries._pick()

    def taken(self) -> list[Delivery]:
        """What idle workers take until there is nothing for one more."""
        return list(iter(self.taken_by_one, None))


def test_hooks_take_turns_and_each_has_one_attempt_under_way() -> None:
    scene = Scene()
    first = [scene.offer(A) for _ in range(3)]
    second = [scene.offer(B) for _ in range(2)]
    assert scene.taken() == [first[0], second[0]]
    scene.deliveries.finish(first[0])
    assert scene.taken() == [first[1]]
    scene.deliveries.finish(second[0])
    scene.deliveries.finish(first[1])
    assert scene.taken() == [second[1], first[2]]


def test_the_hook_that_waited_longest_is_next() -> None:
    scene = Scene(workers=1)
    first = [scene.offer(A) for _ in range(3)]
    second = scene.offer(B)
    order = []
    while (delivery := scene.taken_by_one()) is not None:
        order.append(delivery)
        scene.deliveries.finish(delivery)
    assert order == [first[0], second, first[1], first[2]]


def test_a_destination_of_many_hooks_has_half_of_the_workers_at_most() -> None:
    scene = Scene(workers=8)
    for _ in range(8):
        scene.offer(uuid.uuid4(), to="one black hole")
    other = scene.offer(E)
    taken = scene.taken()
    assert len(taken) == 5
    assert other in taken


def test_an_endpoint_of_many_hooks_has_half_of_the_workers_at_most() -> None:
    scene = Scene(workers=8)
    for _ in range(8):
        scene.offer(uuid.uuid4(), of=A)
    other = scene.offer(E)
    taken = scene.taken()
    assert len(taken) == 5
    assert other in taken


def test_retries_and_hooks_that_failed_share_half_of_the_workers_however_many_wait() -> None:
    scene = Scene(workers=8)
    for _ in range(10):
        scene.offer(uuid.uuid4(), attempt=2)
        failing = uuid.uuid4()
        scene.deliveries.suspect(failing, True)
        scene.offer(failing)
    assert len(scene.taken()) == 4
    first = scene.offer(A)
    assert scene.taken() == [first]


def test_a_hook_that_succeeds_again_is_prompt_again() -> None:
    scene = Scene(workers=2)
    scene.offer(A, attempt=2)
    assert len(scene.taken()) == 1
    scene.deliveries.suspect(B, True)
    held = scene.offer(B)
    assert scene.taken() == []
    scene.deliveries.suspect(C, True)
    scene.deliveries.suspect(C, False)
    prompt = scene.offer(C)
    assert scene.taken() == [prompt]
    assert not held.running


def test_first_attempts_without_end_leave_one_worker_to_retries() -> None:
    scene = Scene(workers=8)
    firsts = [scene.offer(uuid.uuid4()) for _ in range(20)]
    retry = scene.offer(A, attempt=2)
    taken = list(scene.taken()[:8])
    assert retry in taken
    assert len(set(taken) & set(firsts)) == 7


def test_a_full_stage_drops_the_newcomer_of_a_hook_that_holds_as_much_as_any() -> None:
    scene = Scene(capacity=2)
    scene.admit(A)
    scene.admit(A)
    newcomer, loser = scene.admit(A)
    assert loser is newcomer
    assert len(scene.deliveries) == 2


def test_a_full_stage_takes_the_newest_of_the_hook_that_crowds_it() -> None:
    scene = Scene(capacity=3)
    crowd = [scene.offer(A) for _ in range(3)]
    newcomer, loser = scene.admit(B)
    assert loser is crowd[2]
    scene.deliveries.offer(newcomer)
    assert scene.taken() == [crowd[0], newcomer]
    assert len(scene.deliveries) == 3


def test_an_attempt_under_way_never_loses_its_place() -> None:
    scene = Scene(capacity=2)
    scene.offer(A)
    scene.offer(B)
    assert len(scene.taken()) == 2
    newcomer, loser = scene.admit(C)
    assert loser is newcomer


def test_what_lost_its_place_while_it_was_resolved_or_waited_is_not_offered_again() -> None:
    scene = Scene(capacity=2)
    scene.admit(A)
    waiting, _ = scene.admit(A)
    _, loser = scene.admit(B)
    assert loser is waiting
    scene.deliveries.offer(waiting)
    assert scene.taken() == []


def test_closing_gives_up_all_but_what_is_under_way() -> None:
    scene = Scene()
    running = scene.offer(A)
    assert scene.taken() == [running]
    scene.offer(A)
    scene.admit(B)
    assert scene.deliveries.close() == 2
    assert scene.deliveries.take() is None
    assert len(scene.deliveries) == 1
    scene.deliveries.finish(running)
    assert len(scene.deliveries) == 0
    newcomer, loser = scene.admit(C)
    assert loser is newcomer
