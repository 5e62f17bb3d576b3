"""The one UPDATE after each delivery, against a real database."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, get_args

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from switchboard_stall.notify import disable_hook
from switchboard_stall.notify.health import FailureClass, record_failure, record_success

if TYPE_CHECKING:
    import uuid

    from .conftest import Stage

URL = "https://93.184.216.34/hook"


@pytest.fixture
def hook_id(stage: Stage) -> uuid.UUID:
    return stage.hook(URL).hook.id


def fail(stage: Stage, hook_id: uuid.UUID, times: int = 1) -> list[bool]:
    with Session(stage.engine) as session:
        disabled = []
        for _ in range(times):
            disabled.append(record_failure(session, hook_id, "server_error", 503))
            session.commit()
        return disabled


@pytest.mark.parametrize("error", get_args(FailureClass))
def test_a_failure_counts_and_tells_its_class_and_status(
    stage: Stage, hook_id: uuid.UUID, error: FailureClass
) -> None:
    status = 503 if error == "server_error" else None
    with Session(stage.engine) as session:
        assert record_failure(session, hook_id, error, status) is False
        session.commit()
    row = stage.row(hook_id)
    assert (row.consecutive_failures, row.last_error, row.last_status, row.enabled) == (
        1,
        error,
        status,
        True,
    )
    assert row.last_attempt_at is not None


def test_a_success_zeroes_the_failures_in_a_row(stage: Stage, hook_id: uuid.UUID) -> None:
    fail(stage, hook_id, 9)
    with Session(stage.engine) as session:
        record_success(session, hook_id, 204)
        session.commit()
    row = stage.row(hook_id)
    assert (row.consecutive_failures, row.last_error, row.last_status, row.enabled) == (0, None, 204, True)
    assert fail(stage, hook_id, 9) == [False] * 9


def test_the_tenth_failure_in_a_row_disables_the_hook_in_the_same_statement(
    stage: Stage, hook_id: uuid.UUID
) -> None:
    statements: list[str] = []
    fail(stage, hook_id, 9)
    event.listen(stage.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    assert fail(stage, hook_id) == [True]
    assert [statement.split()[0] for statement in statements] == ["UPDATE"]
    row = stage.row(hook_id)
    assert (row.enabled, row.disabled_reason, row.consecutive_failures) == (False, "consecutive_failures", 10)
    assert row.disabled_at == row.last_attempt_at is not None


def test_a_disabled_hook_is_disabled_once(stage: Stage, hook_id: uuid.UUID) -> None:
    assert fail(stage, hook_id, 12) == [False] * 9 + [True] + [False] * 2


def test_what_an_operator_disabled_stays_the_operators(stage: Stage, hook_id: uuid.UUID) -> None:
    fail(stage, hook_id, 9)
    with Session(stage.engine) as session:
        disabled = disable_hook(session, stage.endpoint.id, hook_id)
        session.commit()
    assert fail(stage, hook_id, 3) == [False] * 3
    row = stage.row(hook_id)
    assert (row.disabled_reason, row.disabled_at) == ("operator", disabled.disabled_at)


def test_instances_that_fail_one_hook_at_once_lose_no_count_and_disable_it_once(
    stage: Stage, hook_id: uuid.UUID
) -> None:
    barrier = threading.Barrier(5)

    def instance() -> list[bool]:
        barrier.wait(10)
        return fail(stage, hook_id, 2)

    with ThreadPoolExecutor(5) as pool:
        disabled = [each for done in [pool.submit(instance) for _ in range(5)] for each in done.result(30)]
    row = stage.row(hook_id)
    assert (row.consecutive_failures, row.enabled) == (10, False)
    assert disabled.count(True) == 1


def test_a_hook_that_is_gone_is_no_error(stage: Stage, hook_id: uuid.UUID) -> None:
    with Session(stage.engine) as session:
        session.delete(session.get_one(type(stage.row(hook_id)), hook_id))
        session.commit()
        assert record_failure(session, hook_id, "network", None) is False
        record_success(session, hook_id, 200)
