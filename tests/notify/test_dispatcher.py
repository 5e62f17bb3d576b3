"""The dispatcher against a real database and real receivers on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.orm import Session, sessionmaker
from standardwebhooks import Webhook, WebhookVerificationError
from support.receiver import LOOPBACK, Authority, Receiver, Request, Wire, status

from switchboard_stall import Todo, set_todo_ready_hook
from switchboard_stall.models import QUARANTINE
from switchboard_stall.notify import (
    Dispatcher,
    SecretKeyError,
    TargetPolicy,
    delete_hook,
    disable_hook,
    rotate_hook,
)
from switchboard_stall.notify.pipeline import CAPACITY
from switchboard_stall.notify.secrets import KEY_VARIABLE
from switchboard_stall.queue import claim, enqueue

from .conftest import HOST, KEY, MARKER, Stage

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable

SOON = timedelta(seconds=15)


def idle(dispatcher: Dispatcher) -> None:
    assert dispatcher.wait_idle(SOON), f"it never came to rest: {dispatcher.stats}"


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.002)


class Answers:
    """Gives each request the next status of a list, the last one for ever."""

    def __init__(self, *codes: int, then: Callable[[int], None] = lambda number: None) -> None:
        self.codes = list(codes)
        self.then = then
        self.number = 0

    def __call__(self, request: Request, wire: Wire) -> None:
        self.number += 1
        self.then(self.number)
        wire.answer(self.codes.pop(0) if len(self.codes) > 1 else self.codes[0])


# Delivery.


def test_a_ready_todo_arrives_signed_at_the_hook(stage: Stage, receiver: Receiver) -> None:
    minted = stage.hook(receiver.url(HOST))
    todo = stage.todo(title="build it", kind="build", source="forge")
    with stage.dispatcher() as dispatcher:
        dispatcher.enqueue(todo, "created")
        (request,) = receiver.wait_for(1)
        idle(dispatcher)
    assert Webhook(minted.secret).verify(request.body, request.headers) == {
        "type": "todo.ready",
        "reason": "created",
        "todo_id": todo.id,
        "queue": "inbox",
        "kind": "build",
        "source": "forge",
        "summary": "build it",
        "endpoint": stage.endpoint.row.slug,
        "attempt": 0,
        "created_at": request.json["created_at"],
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", request.json["created_at"])
    assert re.fullmatch(r"msg_[0-9A-HJKMNP-TV-Z]{26}", request.headers["webhook-id"])
    assert request.headers["webhook-timestamp"].isdigit()
    assert request.headers["content-type"] == "application/json"
    assert re.fullmatch(r"switchboard-stall/\S+", request.headers["user-agent"])
    row = stage.row(minted.hook.id)
    assert (row.consecutive_failures, row.last_status, row.last_error) == (0, 204, None)
    assert row.last_attempt_at is not None
    stats = dispatcher.stats
    assert (stats.accepted, stats.attempts, stats.delivered) == (1, 1, 1)
    assert not stats.dropped
    assert not stats.failed


def test_the_ready_hook_of_the_queue_rings_after_commit(stage: Stage, receiver: Receiver) -> None:
    stage.hook(receiver.url())
    with stage.dispatcher() as dispatcher:
        previous = set_todo_ready_hook(dispatcher.enqueue)
        try:
            with Session(stage.engine) as session:
                enqueue(session, endpoint_id=stage.endpoint.id, queue="inbox", title="fresh", vouched=True)
                session.commit()
        finally:
            set_todo_ready_hook(previous)
        (request,) = receiver.wait_for(1)
    assert (request.json["summary"], request.json["reason"]) == ("fresh", "created")


def test_each_hook_that_admits_the_queue_is_called_once_with_an_id_of_its_own(
    stage: Stage, receiver: Receiver
) -> None:
    stage.hook(receiver.url(path="/every"))
    stage.hook(receiver.url(path="/inbox"), queues=["outbox", "inbox"])
    stage.hook(receiver.url(path="/outbox"), queues=["outbox"])
    off = stage.hook(receiver.url(path="/off"))
    stage.set_hook(off.hook.id, enabled=False)
    stage.hook(receiver.url(path="/another"), endpoint=stage.world.endpoint())
    with stage.dispatcher() as dispatcher:
        dispatcher.enqueue(stage.todo(), "requeued")
        idle(dispatcher)
    assert sorted(request.line.split("?")[0] for request in receiver.requests) == [
        "POST /every",
        "POST /inbox",
    ]
    assert len({request.headers["webhook-id"] for request in receiver.requests}) == 2


def test_a_queue_of_any_name_is_rung_but_quarantine_never_is(stage: Stage, receiver: Receiver) -> None:
    names = ["", "a:b", "it's", "new\nline", "schlüssel", '"', "\\", "{inbox}", "x" * 512]
    endpoint = stage.world.endpoint(scope=[*names, QUARANTINE])
    stage.hook(receiver.url(), endpoint=endpoint)
    with stage.dispatcher() as dispatcher:
        for name in [*names, QUARANTINE]:
            dispatcher.enqueue(endpoint.queue(name).pending(age="1m"), "created")
        idle(dispatcher)
    assert sorted(request.json["queue"] for request in receiver.requests) == sorted(names)
    assert dispatcher.stats.skipped == {"quarantine": 1}


# Retries.


def test_an_attempt_that_may_be_retried_has_two_more_of_one_id_and_fresh_timestamps(
    stage: Stage, receiver: Receiver
) -> None:
    minted = stage.hook(receiver.url())
    receiver.behave = Answers(503, 429, 200)
    seconds = iter(range(10))
    start = datetime.now(UTC).replace(microsecond=0)
    ticking = lambda: start + timedelta(seconds=next(seconds))  # noqa: E731
    with stage.dispatcher(clock=ticking) as dispatcher:
        dispatcher.enqueue(stage.todo(), "created")
        idle(dispatcher)
    requests = receiver.requests
    assert len(requests) == 3
    assert len({request.headers["webhook-id"] for request in requests}) == 1
    assert len({request.headers["webhook-timestamp"] for request in requests}) == 3
    assert len({request.body for request in requests}) == 1
    for request in requests:
        Webhook(minted.secret).verify(request.body, request.headers)
    row = stage.row(minted.hook.id)
    assert (row.consecutive_failures, row.last_status) == (0, 200)


def test_after_three_attempts_it_is_given_up_and_counts_as_one_failure(
    stage: Stage, receiver: Receiver
) -> None:
    minted = stage.hook(receiver.url())
    receiver.behave = status(500)
    with stage.dispatcher() as dispatcher:
        dispatcher.enqueue(stage.todo(), "created")
        idle(dispatcher)
    assert len(receiver.requests) == 3
    row = stage.row(minted.hook.id)
    assert (row.consecutive_failures, row.last_status, row.last_error) == (1, 500, "server_error")
    assert dispatcher.stats.failed == {"server_error": 1}


def test_the_waits_are_1_s_and_5_s_each_jittered_by_a_fifth(stage: Stage, receiver: Receiver) -> None:
    stage.hook(receiver.url())
    receiver.behave = status(500)
    drawn: list[tuple[float, float]] = []

    def shortest(low: float, high: float) -> float:
        drawn.append((low, high))
        return 0.0

    default = Dispatcher(stage.engine, key=KEY)
    with stage.dispatcher(
        uniform=shortest, retry_waits=(timedelta(seconds=1), timedelta(seconds=5))
    ) as dispatcher:
        assert dispatcher._settings.retry_waits == default._settings.retry_waits == (1.0, 5.0)
        dispatcher.enqueue(stage.todo(), "created")
        idle(dispatcher)
    assert drawn == [(0.8, 1.2), (4.0, 6.0)]


@pytest.mark.parametrize("code", [302, 400, 401, 404, 410])
def test_what_is_not_retried_is_one_request(stage: Stage, receiver: Receiver, code: int) -> None:
    minted = stage.hook(receiver.url())
    receiver.behave = status(code)
    with stage.dispatcher() as dispatcher:
        dispatcher.enqueue(stage.todo(), "created")
        idle(dispatcher)
    assert len(receiver.requests) == 1
    row = stage.row(minted.hook.id)
    assert (row.last_status, row.last_error) == (code, "redirect" if code == 302 else "client_error")


def test_a_302_to_loopback_is_one_request(stage: Stage, receiver: Receiver, authority: Authority) -> None:
    stage.hook(receiver.url())
    with Receiver(authority.server_context(LOOPBACK)) as inside, stage.dispatcher() as dispatcher:
        receiver.behave = status(302, f"location: {inside.url()}\r\n")
        dispatcher.enqueue(stage.todo(), "created")
        idle(dispatcher)
        assert (len(receiver.requests), inside.connections) == (1, 0)


def test_a_certificate_for_another_name_is_not_retried(stage: Stage, authority: Authority) -> None:
    with Receiver(authority.server_context(LOOPBACK)) as receiver, stage.dispatcher() as dispatcher:
        minted = stage.hook(receiver.url(HOST))
        dispatcher.enqueue(stage.todo(), "created")
        idle(dispatcher)
        assert (receiver.connections, receiver.bytes_after_handshake) == (1, 0)
    assert stage.row(minted.hook.id).last_error == "tls"


def test_a_host_without_an_address_is_retried(stage: Stage, receiver: Receiver) -> None:
    minted = stage.hook(receiver.url(HOST))
    del stage.names[HOST]
    stage.asked.clear()
    with stage.dispatcher() as dispatcher:
        dispatcher.enqueue(stage.todo(), "created")
        idle(dispatcher)
    assert stage.asked == [HOST] * 3
    assert stage.row(minted.hook.id).last_error == "network"


def test_every_attempt_resolves_again_and_dials_that_answer(stage: Stage, receiver: Receiver) -> None:
    stage.hook(receiver.url(HOST))
    receiver.behave = Answers(503, 200)
    stage.asked.clear()
    with stage.dispatcher() as dispatcher:
        dispatcher.enqueue(stage.todo(), "created")
        idle(dispatcher)
    assert stage.asked == [HOST, HOST]
    assert receiver.connections == 2


# Addresses at delivery.


@pytest.mark.parametrize(
    "answers",
    [
        ["10.0.0.1"],
        ["93.184.216.34", "10.0.0.1"],
        ["10.0.0.1", "93.184.216.34"],
        ["::ffff:127.0.0.1"],
        ["64:ff9b::7f00:1"],
        ["127.0.0.1", "169.254.169.254"],
    ],
    ids=str,
)
def test_a_name_that_was_harmless_at_creation_is_refused_at_delivery_without_dial_or_retry(
    stage: Stage, receiver: Receiver, answers: list[str]
) -> None:
    minted = stage.hook(receiver.url(HOST))
    stage.names[HOST] = answers
    stage.asked.clear()
    with stage.dispatcher() as dispatcher:
        dispatcher.enqueue(stage.todo(), "created")
        idle(dispatcher)
    assert (stage.asked, receiver.connections) == ([HOST], 0)
    row = stage.row(minted.hook.id)
    assert (row.last_error, row.last_status, row.consecutive_failures) == ("rejected_ssrf", None, 1)


def test_a_name_that_answers_public_at_creation_and_loopback_at_delivery_is_not_dialled(
    stage: Stage, receiver: Receiver
) -> None:
    stage.policy = TargetPolicy()
    stage.names[HOST] = ["93.184.216.34"]
    minted = stage.hook(receiver.url(HOST))
    stage.names[HOST] = [LOOPBACK]
    with stage.dispatcher() as dispatcher:
        dispatcher.enqueue(stage.todo(), "created")
        idle(dispatcher)
    assert receiver.connections == 0
    assert stage.row(minted.hook.id).last_error == "rejected_ssrf"


def test_a_name_that_turns_to_loopback_between_two_attempts_has_one(
    stage: Stage, authority: Authority
) -> None:
    def turn(number: int) -> None:
        stage.names[HOST] = ["10.0.0.1"]

    with Receiver(authority.server_context(HOST), Answers(503, then=turn)) as receiver:
        minted = stage.hook(receiver.url(HOST))
        with stage.dispatcher() as dispatcher:
            dispatcher.enqueue(stage.todo(), "created")
            idle(dispatcher)
        assert receiver.connections == 1
    assert stage.row(minted.hook.id).last_error == "rejected_ssrf"


@pytest.mark.parametrize(
    "url", ["http://hooks.example/", "https://me@hooks.example/", "https://0177.0.0.1/", "not a url"]
)
def test_a_stored_url_that_would_not_be_accepted_today_is_not_called(stage: Stage, url: str) -> None:
    minted = stage.hook("https://93.184.216.34/")
    stage.set_hook(minted.hook.id, url=url)
    stage.asked.clear()
    with stage.dispatcher() as dispatcher:
        dispatcher.enqueue(stage.todo(), "created")
        idle(dispatcher)
    assert stage.row(minted.hook.id).last_error == "rejected_ssrf"
    assert stage.asked == []


def test_what_this_process_listens_on_is_not_called(stage: Stage, receiver: Receiver) -> None:
    minted = stage.hook(receiver.url())
    with stage.dispatcher(listening=[("0.0.0.0", receiver.port)]) as dispatcher:
        dispatcher.enqueue(stage.todo(), "created")
        idle(dispatcher)
    assert receiver.connections == 0
    assert stage.row(minted.hook.id).last_error == "rejected_ssrf"


def test_http_is_called_where_the_operator_allows_it(stage: Stage) -> None:
    stage.policy = TargetPolicy(allow_http=True, allow_cidrs=["127.0.0.0/8"])
    with Receiver() as receiver, stage.dispatcher(allow_http=True) as dispatcher:
        stage.hook(receiver.url())
        dispatcher.enqueue(stage.todo(), "created")
        receiver.wait_for(1)


# Still true at fire time.

CHANGES: dict[str, tuple[str, Callable[[Stage, uuid.UUID, str], object]]] = {
    "endpoint revoked": ("endpoint inactive", lambda stage, hook, todo: stage.set_endpoint(state="revoked")),
    "endpoint expired": (
        "endpoint inactive",
        lambda stage, hook, todo: stage.set_endpoint(expires_at=datetime(2020, 1, 1, tzinfo=UTC)),
    ),
    "scope shrunk": ("out of scope", lambda stage, hook, todo: stage.set_endpoint(scope_queues=["outbox"])),
    "hook disabled": ("hook disabled", lambda stage, hook, todo: managed(stage, disable_hook, hook)),
    "hook narrowed": ("hook disabled", lambda stage, hook, todo: stage.set_hook(hook, queues=["outbox"])),
    "hook deleted": ("hook gone", lambda stage, hook, todo: managed(stage, delete_hook, hook)),
    "todo claimed": ("not pending", lambda stage, hook, todo: claimed(stage)),
    "todo gone": ("not pending", lambda stage, hook, todo: deleted(stage, todo)),
}


def managed(stage: Stage, change: Callable[..., object], hook_id: uuid.UUID) -> None:
    with Session(stage.engine) as session:
        change(session, stage.endpoint.id, hook_id)
        session.commit()


def claimed(stage: Stage) -> None:
    with Session(stage.engine) as session:
        assert claim(session, stage.endpoint.id, "worker")
        session.commit()


def deleted(stage: Stage, todo_id: str) -> None:
    with Session(stage.engine) as session:
        session.delete(session.get_one(Todo, todo_id))
        session.commit()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_first_attempt_means_no_second_one(
    stage: Stage, receiver: Receiver, change: str
) -> None:
    minted = stage.hook(receiver.url())
    todo = stage.todo()
    reason, do = CHANGES[change]
    receiver.behave = Answers(503, then=lambda number: do(stage, minted.hook.id, todo.id))  # type: ignore[arg-type]
    with stage.dispatcher() as dispatcher:
        dispatcher.enqueue(todo, "created")
        idle(dispatcher)
    assert len(receiver.requests) == 1
    assert dispatcher.stats.skipped == {reason: 1}
    assert not dispatcher.stats.failed
    assert not dispatcher.stats.dropped


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_the_sweep_and_the_attempt_means_none(
    stage: Stage, receiver: Receiver, change: str
) -> None:
    minted = stage.hook(receiver.url())
    todo = stage.todo()
    CHANGES[change][1](stage, minted.hook.id, todo.id)
    with stage.dispatcher() as dispatcher:
        dispatcher.enqueue(todo, "requeued")
        idle(dispatcher)
    assert receiver.connections == 0
    assert dispatcher.stats.skipped == {"no receiver": 1}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_while_the_host_is_resolved_means_no_attempt(
    stage: Stage, receiver: Receiver, change: str
) -> None:
    minted = stage.hook(receiver.url(HOST))
    todo = stage.todo()
    reason, do = CHANGES[change]

    def change_then_answer(host: str) -> list[str]:
        do(stage, minted.hook.id, todo.id)
        return [LOOPBACK]

    with stage.dispatcher(resolver=change_then_answer) as dispatcher:
        dispatcher.enqueue(todo, "created")
        idle(dispatcher)
    assert receiver.connections == 0
    assert dispatcher.stats.skipped == {reason: 1}


def test_a_url_that_changes_before_the_attempt_is_the_one_that_is_called(
    stage: Stage, authority: Authority, receiver: Receiver
) -> None:
    with Receiver(authority.server_context("moved.example")) as moved:
        minted = stage.hook(receiver.url(HOST))
        stage.names["moved.example"] = [LOOPBACK]

        def move(host: str) -> list[str]:
            stage.set_hook(minted.hook.id, url=moved.url("moved.example"))
            return stage.names[host]

        with stage.dispatcher(resolver=move) as dispatcher:
            dispatcher.enqueue(stage.todo(), "created")
            moved.wait_for(1)
            idle(dispatcher)
    assert receiver.connections == 0


# Rotation.


def test_for_a_day_after_a_rotation_both_secrets_verify_and_then_only_the_new(
    stage: Stage, receiver: Receiver
) -> None:
    old = stage.hook(receiver.url())
    with Session(stage.engine) as session:
        new = rotate_hook(session, stage.endpoint.id, old.hook.id, key=stage.box)
        session.commit()
    with stage.dispatcher() as dispatcher:
        dispatcher.enqueue(stage.todo(), "created")
        (both,) = receiver.wait_for(1)
        idle(dispatcher)
        stage.set_hook(old.hook.id, prev_secret_expires_at=datetime.now(UTC) - timedelta(seconds=1))
        dispatcher.enqueue(stage.todo(), "created")
        _, one = receiver.wait_for(2)
    Webhook(new.secret).verify(both.body, both.headers)
    Webhook(old.secret).verify(both.body, both.headers)
    first, second = both.headers["webhook-signature"].split(" ")
    Webhook(new.secret).verify(both.body, both.headers | {"webhook-signature": first})
    Webhook(old.secret).verify(both.body, both.headers | {"webhook-signature": second})
    Webhook(new.secret).verify(one.body, one.headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(old.secret).verify(one.body, one.headers)


def test_a_dispatcher_destroys_old_secrets_whose_day_is_over(stage: Stage) -> None:
    minted = stage.hook("https://93.184.216.34/")
    with Session(stage.engine) as session:
        rotate_hook(
            session, stage.endpoint.id, minted.hook.id, key=stage.box, now=datetime(2020, 1, 1, tzinfo=UTC)
        )
        session.commit()
    assert stage.row(minted.hook.id).prev_secret is not None
    with stage.dispatcher():
        wait_until(lambda: stage.row(minted.hook.id).prev_secret is None)


@pytest.mark.parametrize("stored", ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "enc:v1:AAAA", ""])
def test_a_stored_secret_that_is_not_sealed_signs_nothing_and_is_no_fault_of_the_receiver(
    stage: Stage, receiver: Receiver, stored: str
) -> None:
    minted = stage.hook(receiver.url())
    stage.set_hook(minted.hook.id, secret=stored)
    with stage.dispatcher() as dispatcher:
        dispatcher.enqueue(stage.todo(), "created")
        idle(dispatcher)
    assert receiver.connections == 0
    assert dispatcher.stats.dropped == {"secret": 1}
    assert stage.row(minted.hook.id).consecutive_failures == 0


# Health.


def test_ten_failed_deliveries_disable_the_hook_and_it_is_not_called_again(
    stage: Stage, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    minted = stage.hook(receiver.url())
    receiver.behave = status(404)
    todos = [stage.todo() for _ in range(12)]
    with stage.dispatcher() as dispatcher, caplog.at_level(logging.INFO, "switchboard_stall"):
        for todo in todos[:10]:
            dispatcher.enqueue(todo, "created")
        idle(dispatcher)
        for todo in todos[10:]:
            dispatcher.enqueue(todo, "created")
        idle(dispatcher)
    assert len(receiver.requests) == 10
    row = stage.row(minted.hook.id)
    assert (row.enabled, row.disabled_reason, row.consecutive_failures) == (False, "consecutive_failures", 10)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [str(minted.hook.id) in record.getMessage() for record in warnings] == [True]


def test_two_dispatchers_that_fail_one_hook_at_once_disable_it_at_ten(
    stage: Stage, receiver: Receiver
) -> None:
    minted = stage.hook(receiver.url())
    receiver.behave = status(400)
    todos = [stage.todo() for _ in range(10)]
    with stage.dispatcher() as one, stage.dispatcher() as other:
        for number, todo in enumerate(todos):
            (one, other)[number % 2].enqueue(todo, "created")
        idle(one)
        idle(other)
    row = stage.row(minted.hook.id)
    assert (row.enabled, row.disabled_reason, row.consecutive_failures) == (False, "consecutive_failures", 10)


# Black holes and floods.


def stall(request: Request, wire: Wire) -> None:
    wire.stall()


def test_a_black_hole_delays_nobody(stage: Stage, authority: Authority, receiver: Receiver) -> None:
    hole_endpoint = stage.world.endpoint(scope=["inbox"])
    with Receiver(authority.server_context(LOOPBACK), stall) as hole:
        stage.hook(hole.url(), endpoint=hole_endpoint)
        stage.hook(receiver.url())
        with stage.dispatcher(attempt_timeout=timedelta(seconds=2)) as dispatcher:
            for _ in range(30):
                dispatcher.enqueue(stage.todo(endpoint=hole_endpoint), "created")
            wait_until(lambda: dispatcher.stats.running >= 1)
            began = time.monotonic()
            dispatcher.enqueue(stage.todo(), "created")
            receiver.wait_for(1)
            assert time.monotonic() - began < 1


def test_as_many_black_holes_as_an_endpoint_may_have_delay_nobody(
    stage: Stage, authority: Authority, receiver: Receiver
) -> None:
    hole_endpoint = stage.world.endpoint(scope=["inbox"])
    with contextlib.ExitStack() as holes:
        for _ in range(5):
            hole = holes.enter_context(Receiver(authority.server_context(LOOPBACK), stall))
            stage.hook(hole.url(), endpoint=hole_endpoint)
        stage.hook(receiver.url())
        with stage.dispatcher(workers=4, attempt_timeout=timedelta(seconds=2)) as dispatcher:
            for _ in range(10):
                dispatcher.enqueue(stage.todo(endpoint=hole_endpoint), "created")
            wait_until(lambda: dispatcher.stats.running >= 2)
            began = time.monotonic()
            dispatcher.enqueue(stage.todo(), "created")
            receiver.wait_for(1)
            assert time.monotonic() - began < 1


def test_one_black_hole_behind_many_hooks_delays_nobody(
    stage: Stage, authority: Authority, receiver: Receiver
) -> None:
    with Receiver(authority.server_context(LOOPBACK), stall) as hole:
        holes = [stage.world.endpoint(scope=["inbox"]) for _ in range(6)]
        for endpoint in holes:
            stage.hook(hole.url(), endpoint=endpoint)
        stage.hook(receiver.url())
        with stage.dispatcher(attempt_timeout=timedelta(seconds=2)) as dispatcher:
            for endpoint in holes * 5:
                dispatcher.enqueue(stage.todo(endpoint=endpoint), "created")
            wait_until(lambda: dispatcher.stats.running >= 4)
            began = time.monotonic()
            dispatcher.enqueue(stage.todo(), "created")
            receiver.wait_for(1)
            assert time.monotonic() - began < 1


def test_retries_that_wait_occupy_no_worker(stage: Stage, authority: Authority, receiver: Receiver) -> None:
    failing = [stage.world.endpoint(scope=["inbox"]) for _ in range(4)]
    with Receiver(authority.server_context(LOOPBACK), status(503)) as bad:
        for endpoint in failing:
            stage.hook(bad.url(), endpoint=endpoint)
        stage.hook(receiver.url())
        with stage.dispatcher(workers=1, retry_waits=(timedelta(seconds=30),)) as dispatcher:
            for endpoint in failing:
                dispatcher.enqueue(stage.todo(endpoint=endpoint), "created")
            bad.wait_for(4)
            dispatcher.enqueue(stage.todo(), "created")
            receiver.wait_for(1)
            assert dispatcher.stats.deliveries >= 4


def test_stalled_lookups_of_many_hosts_delay_no_healthy_host(stage: Stage, receiver: Receiver) -> None:
    held = threading.Event()
    stalled = [stage.world.endpoint(scope=["inbox"]) for _ in range(20)]
    for number, endpoint in enumerate(stalled):
        stage.names[f"stalled-{number}.example"] = ["93.184.216.34"]
        stage.hook(f"https://stalled-{number}.example/", endpoint=endpoint)
    stage.hook(receiver.url(HOST))

    def resolver(host: str) -> list[str]:
        if host.startswith("stalled"):
            held.wait(30)
            raise OSError("no answer")
        return [LOOPBACK]

    try:
        with stage.dispatcher(resolver=resolver) as dispatcher:
            for endpoint in stalled:
                dispatcher.enqueue(stage.todo(endpoint=endpoint), "created")
            wait_until(lambda: dispatcher.stats.deliveries == 20)
            began = time.monotonic()
            dispatcher.enqueue(stage.todo(), "created")
            receiver.wait_for(1)
            assert time.monotonic() - began < 1
    finally:
        held.set()


def test_a_lookup_that_stalls_is_a_timeout_of_the_whole_attempt(stage: Stage, receiver: Receiver) -> None:
    held = threading.Event()
    minted = stage.hook(receiver.url(HOST))

    def resolver(host: str) -> list[str]:
        held.wait(30)
        return [LOOPBACK]

    try:
        with stage.dispatcher(
            resolver=resolver, attempt_timeout=timedelta(seconds=0.1), retry_waits=()
        ) as dispatcher:
            began = time.monotonic()
            dispatcher.enqueue(stage.todo(), "created")
            idle(dispatcher)
            assert time.monotonic() - began < 2
    finally:
        held.set()
    assert receiver.connections == 0
    assert stage.row(minted.hook.id).last_error == "timeout"


def test_the_time_a_lookup_takes_is_taken_from_the_attempt(stage: Stage, authority: Authority) -> None:
    def slow(host: str) -> list[str]:
        time.sleep(0.4)
        return [LOOPBACK]

    lasted: list[float] = []

    def measure(request: Request, wire: Wire) -> None:
        began = time.monotonic()
        wire.sock.recv(1)  # Until the other side gives up.
        lasted.append(time.monotonic() - began)

    with Receiver(authority.server_context(HOST), measure) as receiver:
        stage.hook(receiver.url(HOST))
        with stage.dispatcher(
            resolver=slow, attempt_timeout=timedelta(seconds=0.8), retry_waits=()
        ) as dispatcher:
            dispatcher.enqueue(stage.todo(), "created")
            idle(dispatcher)
        wait_until(lambda: bool(lasted))
    assert lasted[0] < 0.6


def test_over_120_at_once_a_hooks_notifications_are_dropped_and_counted_in_few_lines(
    stage: Stage, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    stage.hook(receiver.url())
    todo = stage.todo()
    still = lambda: 1000.0  # noqa: E731
    with caplog.at_level(logging.WARNING, "switchboard_stall"):
        dispatcher = Dispatcher(
            stage.engine,
            key=stage.box,
            allow_cidrs=stage.policy.allow_cidrs,
            tls=stage.authority.client_context(),
        )
        dispatcher._pipeline._buckets._monotonic = still
        with dispatcher:
            for _ in range(200):
                dispatcher.enqueue(todo, "created")
            idle(dispatcher)
    assert len(receiver.requests) == 120
    assert dispatcher.stats.dropped == {"rate limit": 80}
    lines = [record.getMessage() for record in caplog.records if "rate limit" in record.getMessage()]
    assert 1 <= len(lines) <= 2
    assert told(lines) == 80


def test_ready_todos_over_1024_are_dropped_counted_and_logged_in_few_lines(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    todo = stage.todo()
    blocked = threading.Event()

    def sessions() -> Session:
        blocked.wait(30)
        return Session(stage.engine)

    with (
        caplog.at_level(logging.WARNING, "switchboard_stall"),
        Dispatcher(sessions, key=stage.box) as dispatcher,
    ):
        for _ in range(10_000):
            dispatcher.enqueue(todo, "created")
        stats = dispatcher.stats
        assert stats.ready == stats.accepted == CAPACITY
        assert stats.dropped == {"ready queue full": 10_000 - CAPACITY}
        blocked.set()
    assert dispatcher.stats.ready == 0
    lines = [record.getMessage() for record in caplog.records if "queue full" in record.getMessage()]
    assert 1 <= len(lines) <= 2
    assert told(lines) == stats.dropped["ready queue full"]


def test_what_is_held_is_text_of_bounded_length_and_never_a_payload(stage: Stage) -> None:
    todo = stage.todo(
        title="t" * 1_000_000, kind="k" * 100_000, source="s" * 100_000, payload={"card": "4111" * 100_000}
    )
    blocked = threading.Event()

    def sessions() -> Session:
        blocked.wait(30)
        return Session(stage.engine)

    with Dispatcher(sessions, key=stage.box) as dispatcher:
        dispatcher.enqueue(todo, "created")  # The router is destroying old secrets, or about to.
        (held,) = dispatcher._pipeline._ready
        blocked.set()
    assert len(repr(tuple(held))) < 1_000
    assert "4111" not in repr(tuple(held))


def told(lines: list[str]) -> int:
    """How many notifications these lines stand for."""
    return sum(int(number) for line in lines for number in re.findall(r"dropped (\d+) ", line))


# Lifetime.


def test_closing_takes_no_longer_than_the_attempt_under_way(stage: Stage, authority: Authority) -> None:
    with Receiver(authority.server_context(LOOPBACK), stall) as hole:
        stage.hook(hole.url())
        dispatcher = Dispatcher(
            stage.engine,
            key=stage.box,
            allow_cidrs=stage.policy.allow_cidrs,
            tls=stage.authority.client_context(),
            attempt_timeout=timedelta(seconds=1),
        )
        for _ in range(50):
            dispatcher.enqueue(stage.todo(), "created")
        hole.wait_for(1)
        began = time.monotonic()
        dispatcher.close()
        assert time.monotonic() - began < 1.5
    stats = dispatcher.stats
    assert (stats.ready, stats.deliveries, stats.running) == (0, 0, 0)
    assert stats.accepted == stats.dropped["closed"] == 50
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("switchboard-notify-w")]


def test_closing_waits_neither_for_retries_nor_for_lookups(stage: Stage, receiver: Receiver) -> None:
    held = threading.Event()
    stage.hook(receiver.url())
    receiver.behave = status(503)
    stage.names["stalled.example"] = ["93.184.216.34"]
    stage.hook("https://stalled.example/")

    def resolver(host: str) -> list[str]:
        held.wait(30)
        return []

    try:
        with stage.dispatcher(resolver=resolver, retry_waits=(timedelta(seconds=60),)) as dispatcher:
            dispatcher.enqueue(stage.todo(), "created")
            receiver.wait_for(1)
            wait_until(lambda: dispatcher.stats.running == 0)
            began = time.monotonic()
        assert time.monotonic() - began < 1
    finally:
        held.set()
    assert dispatcher.stats.dropped == {"closed": 2}


def test_a_database_that_hangs_does_not_hold_the_close(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    asked, blocked = threading.Event(), threading.Event()

    def sessions() -> Session:
        asked.set()
        blocked.wait(30)
        return Session(stage.engine)

    dispatcher = Dispatcher(sessions, key=stage.box, attempt_timeout=timedelta(seconds=0.1))
    dispatcher.enqueue(stage.todo(), "created")
    assert asked.wait(10)
    began = time.monotonic()
    try:
        dispatcher.close()
        assert time.monotonic() - began < 2
        assert "left behind" in caplog.text
    finally:
        blocked.set()
        for thread in dispatcher._pipeline._threads:
            thread.join(10)


def test_once_closed_it_takes_nothing_and_says_so(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    dispatcher = Dispatcher(stage.engine, key=stage.box)
    dispatcher.close()
    dispatcher.close()
    dispatcher.enqueue(stage.todo(), "created")
    assert dispatcher.stats.dropped == {"closed": 1}
    assert "closed" in caplog.text
    with pytest.raises(RuntimeError, match="closed"):
        dispatcher.start()


def test_no_thread_starts_before_there_is_work(stage: Stage) -> None:
    before = threading.active_count()
    dispatcher = Dispatcher(stage.engine, key=stage.box)
    assert threading.active_count() == before
    dispatcher.enqueue(stage.todo(), "created")
    assert threading.active_count() > before
    dispatcher.close()


def test_enqueue_raises_nothing_whatever_it_is_given(stage: Stage) -> None:
    dispatcher = Dispatcher(stage.engine, key=stage.box)
    dispatcher.enqueue(Todo(), "created")
    dispatcher.enqueue(object(), "created")  # type: ignore[arg-type]
    dispatcher.enqueue(Todo(id="t", queue="q" * 10_000, title=""), "created")
    assert dispatcher.stats.dropped == {"internal": 2, "too large": 1}
    dispatcher.close()


def test_many_threads_may_enqueue_at_once(stage: Stage, receiver: Receiver) -> None:
    stage.hook(receiver.url())
    todo = stage.todo()
    with stage.dispatcher() as dispatcher, ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(dispatcher.enqueue, todo, "created") for _ in range(80)]:
            done.result(10)
        idle(dispatcher)
    assert len(receiver.requests) == dispatcher.stats.delivered == dispatcher.stats.accepted == 80
    assert len({request.headers["webhook-id"] for request in receiver.requests}) == 80


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_has_an_empty_dispatcher_that_works_and_the_parents_goes_on(
    stage: Stage, receiver: Receiver
) -> None:
    stage.hook(receiver.url())
    todo = stage.todo(title="from the parent")
    child_todo = stage.todo(title="from the child")
    receiver.behave = Answers(503, 503, 204)
    with stage.dispatcher(retry_waits=(timedelta(milliseconds=300),) * 3) as dispatcher:
        dispatcher.enqueue(todo, "created")
        receiver.wait_for(1)  # A retry is held now: the child must not send it too.
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            told = b"failed"
            try:
                logging.disable()
                stage.engine.dispose(close=False)
                held = dispatcher.stats.deliveries + dispatcher.stats.accepted
                dispatcher.enqueue(child_todo, "created")
                worked = dispatcher.wait_idle(SOON) and dispatcher.stats.delivered == 1
                dispatcher.close()
                told = f"{held} {worked}".encode()
            finally:
                os.write(writable, told)
                os._exit(0)
        os.close(writable)
        assert select.select([readable], [], [], 20)[0], "the child hangs"
        assert os.read(readable, 100) == b"0 True"
        os.close(readable)
        os.waitpid(child, 0)
        idle(dispatcher)
        assert dispatcher.stats.delivered == 1
    summaries = [request.json["summary"] for request in receiver.requests]
    assert summaries.count("from the parent") + summaries.count("from the child") == len(summaries)
    assert len({request.headers["webhook-id"] for request in receiver.requests}) == 2


def test_a_dispatcher_that_is_dropped_can_be_collected(stage: Stage) -> None:
    import gc
    import weakref

    gone = weakref.ref(Dispatcher(stage.engine, key=stage.box))
    gc.collect()
    assert gone() is None


# Databases that fail, and settings that are wrong.


def test_a_connection_that_was_cut_costs_no_notification(stage: Stage, receiver: Receiver) -> None:
    stage.hook(receiver.url())
    first, second = stage.todo(), stage.todo()
    with stage.dispatcher() as dispatcher:
        dispatcher.enqueue(first, "created")
        receiver.wait_for(1)
        idle(dispatcher)
        with Session(stage.engine) as session:
            session.connection().exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        dispatcher.enqueue(second, "created")
        receiver.wait_for(2)
        idle(dispatcher)
    assert dispatcher.stats.delivered == 2
    assert not dispatcher.stats.dropped


def test_a_database_that_is_away_costs_the_notification_and_nothing_else(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = create_engine("postgresql+psycopg://nobody:secret-password@127.0.0.1:1/nothing")
    with Dispatcher(nowhere, key=stage.box) as dispatcher:
        dispatcher.enqueue(stage.todo(), "created")
        idle(dispatcher)
    assert dispatcher.stats.dropped == {"database": 1}
    assert "OperationalError" in caplog.text
    assert "secret-password" not in caplog.text
    nowhere.dispose()


def test_no_session_is_open_while_a_request_is_under_way(stage: Stage, authority: Authority) -> None:
    with Receiver(authority.server_context(LOOPBACK), stall) as hole:
        stage.hook(hole.url())
        with stage.dispatcher(attempt_timeout=timedelta(seconds=0.5), retry_waits=()) as dispatcher:
            dispatcher.enqueue(stage.todo(), "created")
            hole.wait_for(1)
            assert stage.engine.pool.checkedout() == 0  # type: ignore[attr-defined]


def test_each_attempt_reads_once_and_each_delivery_writes_once(stage: Stage, receiver: Receiver) -> None:
    stage.hook(receiver.url())
    receiver.behave = Answers(503, 204)
    statements: list[str] = []
    todo, gone = stage.todo(), Todo(id="gone", endpoint_id=stage.endpoint.id, queue="inbox", title="")
    with stage.dispatcher() as dispatcher:
        dispatcher.enqueue(gone, "created")  # Old secrets are destroyed before it.
        idle(dispatcher)
        event.listen(
            stage.engine, "before_cursor_execute", lambda *args: statements.append(args[2].split()[0])
        )
        dispatcher.enqueue(todo, "created")
        idle(dispatcher)
    # Whom to call; twice, whether it still may be called; and how that went.
    assert statements == ["SELECT", "SELECT", "SELECT", "UPDATE"]


def test_a_sessionmaker_serves_as_well_as_an_engine(stage: Stage, receiver: Receiver) -> None:
    stage.hook(receiver.url())
    with Dispatcher(
        sessionmaker(stage.engine),
        key=KEY,
        allow_cidrs=["127.0.0.0/8"],
        tls=stage.authority.client_context(),
    ) as dispatcher:
        dispatcher.enqueue(stage.todo(), "created")
        receiver.wait_for(1)
        idle(dispatcher)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"workers": 0}, ValueError, "workers"),
        ({"attempt_timeout": timedelta(0)}, ValueError, "attempt_timeout"),
        ({"allow_cidrs": ["nonsense"]}, ValueError, "allow_cidrs"),
        ({"key": "too short"}, SecretKeyError, "32 bytes"),
    ],
)
def test_a_wrong_setting_is_an_error_where_it_is_made(
    given: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Dispatcher(create_engine("postgresql+psycopg://"), **{"key": KEY} | given)


def test_without_a_key_there_is_no_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(SecretKeyError, match=KEY_VARIABLE):
        Dispatcher(create_engine("postgresql+psycopg://"))


def test_what_makes_no_sessions_is_refused() -> None:
    with pytest.raises(TypeError, match="AsyncEngine"):
        Dispatcher("postgresql://", key=KEY)  # type: ignore[arg-type]


# What is never shown.


def test_nothing_of_a_dispatcher_that_is_shown_shows_a_secret(stage: Stage, receiver: Receiver) -> None:
    minted = stage.hook(receiver.url())
    receiver.behave = status(503)
    with stage.dispatcher(retry_waits=(timedelta(seconds=60),)) as dispatcher:
        dispatcher.enqueue(stage.todo(), "created")
        receiver.wait_for(1)
        wait_until(lambda: dispatcher.stats.running == 0)
        held = [delivery for each in dispatcher._pipeline._deliveries._held.values() for delivery in each]
        shown = (
            repr(held)
            + repr(dispatcher._settings)
            + repr(dispatcher.stats)
            + repr(vars(dispatcher._pipeline))
        )
    assert held
    for hidden in (minted.secret, MARKER, KEY, "whsec_", "v1,"):
        assert hidden not in shown


def test_a_resolver_or_receiver_that_fails_oddly_is_logged_by_type_only(
    stage: Stage, receiver: Receiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.hook(receiver.url())

    def broken(*args: object, **kwargs: object) -> None:
        raise KeyError(f"{receiver.url()}?token={MARKER}")

    monkeypatch.setattr("switchboard_stall.notify.pipeline.post", broken)
    with stage.dispatcher() as dispatcher:
        dispatcher.enqueue(stage.todo(), "created")
        idle(dispatcher)
    assert dispatcher.stats.dropped == {"internal": 1}
    assert "KeyError" in caplog.text
    assert MARKER not in caplog.text
