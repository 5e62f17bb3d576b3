"""Managing hooks, against a real database."""

from __future__ import annotations

import threading
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session

from switchboard_stall import Endpoint, NotifyHook, Todo
from switchboard_stall.notify import (
    EndpointNotFound,
    HookNotFound,
    HookRefused,
    HostUnresolved,
    SecretBox,
    SecretKeyError,
    StaleSnapshot,
    TargetRefused,
    TooManyHooks,
    create_hook,
    delete_hook,
    destroy_expired_secrets,
    disable_hook,
    enable_hook,
    list_hooks,
    rotate_hook,
)
from switchboard_stall.notify.secrets import KEY_VARIABLE
from switchboard_stall.notify.signing import SigningKey

from .conftest import KEY, MARKER, Stage

if TYPE_CHECKING:
    from collections.abc import Callable

URL = "https://93.184.216.34/hook"
NOW = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)


def failing(stage: Stage, hook_id: uuid.UUID) -> None:
    """As ten failures in a row leave a hook."""
    stage.set_hook(
        hook_id,
        enabled=False,
        disabled_reason="consecutive_failures",
        disabled_at=NOW,
        consecutive_failures=10,
        last_error="timeout",
    )


def test_a_new_hook_is_enabled_and_its_secret_is_stored_sealed(stage: Stage) -> None:
    minted = stage.hook(URL, queues=["inbox"], ignore_presence=True)
    SigningKey(minted.secret)
    row = stage.row(minted.hook.id)
    assert row.secret.startswith("enc:v1:")
    assert stage.box.open(row.secret) == minted.secret
    assert (row.enabled, row.queues, row.ignore_presence, row.prev_secret) == (True, ["inbox"], True, None)
    assert minted.hook.queues == ("inbox",)


def test_no_hook_exists_without_a_key(
    stage: Stage, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(SecretKeyError, match=KEY_VARIABLE):
        create_hook(session, stage.endpoint.id, URL)
    assert list_hooks(session, stage.endpoint.id) == []


def test_the_key_may_come_from_the_environment(
    stage: Stage, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    minted = create_hook(session, stage.endpoint.id, URL)
    stored = session.scalars(select(NotifyHook.secret).where(NotifyHook.id == minted.hook.id)).one()
    assert SecretBox(KEY).open(stored) == minted.secret


@pytest.mark.parametrize(
    "url", ["https://10.0.0.1/", "http://93.184.216.34/", "https://me@93.184.216.34/", "x" * 9]
)
def test_a_url_that_would_never_be_called_makes_no_hook(stage: Stage, session: Session, url: str) -> None:
    with pytest.raises(TargetRefused):
        create_hook(session, stage.endpoint.id, url, key=KEY)
    assert list_hooks(session, stage.endpoint.id) == []


def test_a_name_is_resolved_when_the_hook_is_made_and_judged_by_its_addresses(stage: Stage) -> None:
    stage.names |= {"inside.example": ["93.184.216.34", "10.0.0.1"], "outside.example": ["93.184.216.34"]}
    stage.hook("https://outside.example/")
    with pytest.raises(TargetRefused):
        stage.hook("https://inside.example/")
    with pytest.raises(HostUnresolved):
        stage.hook("https://nowhere.example/")


def test_the_endpoint_must_exist_and_be_active(stage: Stage, session: Session) -> None:
    revoked = stage.world.endpoint(state="revoked")
    for endpoint_id in (uuid.uuid4(), revoked.id):
        with pytest.raises(EndpointNotFound):
            create_hook(session, endpoint_id, URL, key=KEY)


def test_one_text_is_no_list_of_queues(stage: Stage, session: Session) -> None:
    with pytest.raises(TypeError, match="queues"):
        create_hook(session, stage.endpoint.id, URL, key=KEY, queues="inbox")


# The ceiling.


def test_an_endpoint_has_five_hooks_at_most_disabled_ones_included(stage: Stage, session: Session) -> None:
    hooks = [stage.hook(URL).hook for _ in range(5)]
    disable_hook(session, stage.endpoint.id, hooks[0].id)
    with pytest.raises(TooManyHooks):
        create_hook(session, stage.endpoint.id, URL, key=KEY)
    delete_hook(session, stage.endpoint.id, hooks[1].id)
    create_hook(session, stage.endpoint.id, URL, key=KEY)


def test_of_two_creates_that_race_for_the_last_place_one_wins(stage: Stage) -> None:
    for _ in range(4):
        stage.hook(URL)
    with Session(stage.engine) as first, Session(stage.engine) as second, ThreadPoolExecutor(1) as pool:
        create_hook(first, stage.endpoint.id, URL, key=KEY)
        pid = second.scalar(text("SELECT pg_backend_pid()"))
        racing = pool.submit(create_hook, second, stage.endpoint.id, URL, key=KEY)
        wait_for_lock(stage, pid)
        first.commit()
        with pytest.raises(TooManyHooks):
            racing.result(timeout=10)
        second.rollback()
    with Session(stage.engine) as session:
        assert len(list_hooks(session, stage.endpoint.id)) == 5


def test_many_creates_at_once_never_pass_the_ceiling(stage: Stage) -> None:
    barrier = threading.Barrier(8)

    def create() -> bool:
        with Session(stage.engine) as session:
            barrier.wait(10)
            try:
                create_hook(session, stage.endpoint.id, URL, key=KEY)
            except TooManyHooks:
                return False
            session.commit()
            return True

    with ThreadPoolExecutor(8) as pool:
        made = [made.result(30) for made in [pool.submit(create) for _ in range(8)]]
    assert made.count(True) == 5


def test_work_for_the_endpoint_goes_on_while_a_hook_is_made(stage: Stage) -> None:
    with Session(stage.engine) as creating, Session(stage.engine) as working:
        create_hook(creating, stage.endpoint.id, URL, key=KEY)
        working.execute(text("SET LOCAL lock_timeout = '1s'"))
        working.add(Todo(endpoint_id=stage.endpoint.id, queue="inbox", title="meanwhile"))
        working.commit()  # Its foreign key is checked against the locked row.


def test_a_snapshot_that_cannot_count_is_refused(stage: Stage) -> None:
    with Session(stage.engine) as session:
        session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        with pytest.raises(StaleSnapshot):
            create_hook(session, stage.endpoint.id, URL, key=KEY)


def wait_for_lock(stage: Stage, pid: int | None) -> None:
    """Until that session really waits for a lock."""
    deadline = datetime.now(UTC) + timedelta(seconds=10)
    with Session(stage.engine) as session:
        while not session.scalar(
            text("SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = :pid"), {"pid": pid}
        ):
            assert datetime.now(UTC) < deadline, "it never waited"
            session.rollback()


# Rotation.


def test_a_rotation_keeps_the_old_secret_for_a_day_beside_the_new(stage: Stage, session: Session) -> None:
    minted = stage.hook(URL)
    rotated = rotate_hook(session, stage.endpoint.id, minted.hook.id, key=stage.box, now=NOW)
    session.commit()
    row = stage.row(minted.hook.id)
    assert rotated.secret != minted.secret
    assert stage.box.open(row.secret) == rotated.secret
    assert row.prev_secret is not None
    assert stage.box.open(row.prev_secret) == minted.secret
    assert (row.rotated_at, row.prev_secret_expires_at) == (NOW, NOW + timedelta(hours=24))
    assert rotated.hook.rotating_until == NOW + timedelta(hours=24)


def test_a_second_rotation_within_the_day_leaves_two_secrets_not_three(
    stage: Stage, session: Session
) -> None:
    minted = stage.hook(URL)
    second = rotate_hook(session, stage.endpoint.id, minted.hook.id, key=stage.box)
    third = rotate_hook(session, stage.endpoint.id, minted.hook.id, key=stage.box)
    session.commit()
    row = stage.row(minted.hook.id)
    assert stage.box.open(row.secret) == third.secret
    assert stage.box.open(row.prev_secret or "") == second.secret


def test_the_old_secret_is_destroyed_when_its_day_is_over_and_not_before(
    stage: Stage, session: Session
) -> None:
    minted, other = stage.hook(URL), stage.hook(URL)
    rotate_hook(session, stage.endpoint.id, minted.hook.id, key=stage.box, now=NOW)
    assert destroy_expired_secrets(session, now=NOW + timedelta(hours=23, minutes=59)) == 0
    assert destroy_expired_secrets(session, now=NOW + timedelta(hours=24)) == 1
    assert destroy_expired_secrets(session, now=NOW + timedelta(hours=25)) == 0
    session.commit()
    row = stage.row(minted.hook.id)
    assert (row.prev_secret, row.prev_secret_expires_at) == (None, None)
    assert stage.row(other.hook.id).secret


def test_a_rotation_enables_what_failures_disabled(stage: Stage, session: Session) -> None:
    minted = stage.hook(URL)
    failing(stage, minted.hook.id)
    hook = rotate_hook(session, stage.endpoint.id, minted.hook.id, key=stage.box).hook
    assert (hook.enabled, hook.disabled_reason, hook.disabled_at, hook.consecutive_failures) == (
        True,
        None,
        None,
        0,
    )


def test_a_rotation_never_enables_what_an_operator_disabled(stage: Stage, session: Session) -> None:
    minted = stage.hook(URL)
    failing(stage, minted.hook.id)
    disable_hook(session, stage.endpoint.id, minted.hook.id)
    hook = rotate_hook(session, stage.endpoint.id, minted.hook.id, key=stage.box).hook
    assert (hook.enabled, hook.disabled_reason) == (False, "operator")


def test_a_rotation_needs_a_key(stage: Stage, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    minted = stage.hook(URL)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(SecretKeyError):
        rotate_hook(session, stage.endpoint.id, minted.hook.id)


# Disable, enable, delete, list.


def test_an_operator_disables_once_and_the_first_time_stays(stage: Stage, session: Session) -> None:
    minted = stage.hook(URL)
    first = disable_hook(session, stage.endpoint.id, minted.hook.id)
    session.commit()
    again = disable_hook(session, stage.endpoint.id, minted.hook.id)
    assert (first.enabled, first.disabled_reason) == (False, "operator")
    assert again.disabled_at == first.disabled_at is not None


def test_enabling_forgets_who_disabled_it_and_the_failures(stage: Stage, session: Session) -> None:
    minted = stage.hook(URL)
    failing(stage, minted.hook.id)
    hook = enable_hook(session, stage.endpoint.id, str(minted.hook.id))
    assert (hook.enabled, hook.disabled_reason, hook.disabled_at, hook.consecutive_failures) == (
        True,
        None,
        None,
        0,
    )


def test_a_deleted_hook_is_gone_with_its_secrets(stage: Stage, session: Session) -> None:
    minted = stage.hook(URL)
    delete_hook(session, stage.endpoint.id, minted.hook.id)
    assert list_hooks(session, stage.endpoint.id) == []
    with pytest.raises(HookNotFound):
        delete_hook(session, stage.endpoint.id, minted.hook.id)


def test_a_list_shows_the_endpoints_own_hooks_in_order_and_no_secret(stage: Stage, session: Session) -> None:
    other = stage.world.endpoint()
    stage.hook(URL, endpoint=other)
    minted = [stage.hook(URL) for _ in range(3)]
    hooks = list_hooks(session, stage.endpoint.id)
    assert [hook.id for hook in hooks] == [each.hook.id for each in minted]
    assert not any("secret" in name for name in vars(type(hooks[0])))
    assert hooks[0].url.endswith(MARKER)  # Its owner may see it; repr may not.


CHANGES: dict[str, Callable[[Session, uuid.UUID, uuid.UUID | str], object]] = {
    "rotate": lambda session, endpoint, hook: rotate_hook(session, endpoint, hook, key=KEY),
    "disable": disable_hook,
    "enable": enable_hook,
    "delete": delete_hook,
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_endpoints_hook_is_exactly_like_an_unknown_one(
    stage: Stage, session: Session, change: str
) -> None:
    other = stage.world.endpoint()
    theirs = stage.hook(URL, endpoint=other)
    before = stage.row(theirs.hook.id)
    told = []
    for hook_id in (theirs.hook.id, uuid.uuid4(), str(theirs.hook.id), "no uuid at all"):
        with pytest.raises(HookNotFound) as caught:
            CHANGES[change](session, stage.endpoint.id, hook_id)
        told.append((type(caught.value), caught.value.args, caught.value.__cause__, caught.value.__context__))
    assert len(set(map(repr, told))) == 1
    session.commit()
    after = stage.row(theirs.hook.id)
    assert (after.secret, after.enabled, after.rotated_at) == (
        before.secret,
        before.enabled,
        before.rotated_at,
    )


# What is never shown.


def test_neither_repr_shows_a_secret_or_a_query(stage: Stage, session: Session) -> None:
    minted = stage.hook(URL)
    listed = list_hooks(session, stage.endpoint.id)
    for shown in (repr(minted), repr(listed), str(minted)):
        assert minted.secret not in shown
        assert MARKER not in shown
        assert "https://93.184.216.34/hook" in shown


def test_a_database_error_shows_neither_query_nor_secret(stage: Stage, session: Session) -> None:
    session.execute(text("ALTER TABLE notify_hooks ADD CONSTRAINT never CHECK (url = 'x') NOT VALID"))
    with pytest.raises(HookRefused, match="never") as caught:
        create_hook(session, stage.endpoint.id, f"{URL}?token={MARKER}", key=KEY)
    shown = "".join(traceback.format_exception(caught.value))
    assert caught.value.__context__ is None
    assert MARKER not in shown
    assert "enc:v1:" not in shown
    session.rollback()
    session.execute(text("ALTER TABLE notify_hooks RENAME COLUMN ignore_presence TO gone"))
    with pytest.raises(ProgrammingError) as failed:
        create_hook(session, stage.endpoint.id, f"{URL}?token={MARKER}", key=KEY)
    shown = "".join(traceback.format_exception(failed.value))
    assert MARKER not in shown
    assert "enc:v1:" not in shown
    session.rollback()


def test_an_endpoint_that_goes_takes_its_hooks_along(stage: Stage, session: Session) -> None:
    stage.hook(URL)
    session.delete(session.get_one(Endpoint, stage.endpoint.id))
    session.flush()
    assert list_hooks(session, stage.endpoint.id) == []
