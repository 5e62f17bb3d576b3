"""Managing the notify hooks of an endpoint: functions in the caller's transaction, which never commit."""

from __future__ import annotations

import secrets as random_source
import uuid
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen
from sqlalchemy import (
    ColumnElement,
    Executable,
    Row,
    and_,
    case,
    delete,
    false,
    func,
    insert,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError, StatementError

from switchboard_stall.clock import instant
from switchboard_stall.models import Endpoint, NotifyHook
from switchboard_stall.notify.lookup import look_up
from switchboard_stall.notify.secrets import SecretBox, secret_box
from switchboard_stall.notify.signing import mint_secret
from switchboard_stall.notify.target import Resolver, TargetPolicy, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sqlalchemy.orm import Session

MAX_HOOKS: Final = 5
"""The most hooks of one endpoint, disabled ones included."""

ROTATION_DAY: Final = timedelta(hours=24)
"""How long the old secret still signs beside the new one."""


class EndpointNotFound(LookupError):
    """There is no such endpoint, or it is not active."""


class HookNotFound(LookupError):
    """The endpoint has no such hook; whether another endpoint has it is not told."""

    def __init__(self) -> None:
        """Make it; the class says of what."""
        super().__init__("this endpoint has no such notify hook")


class TooManyHooks(ValueError):
    """The endpoint has as many hooks as one may have."""


class HookRefused(RuntimeError):
    """A constraint that this package did not make refuses the row of the hook."""


class StaleSnapshot(RuntimeError):
    """The session's isolation level would count hooks as they were, not as they are."""


def _without_query(url: str) -> str:
    return repr(url.partition("?")[0])


@frozen
class Hook:
    """A notify hook as its owner may see it: everything but its secrets.

    :param url: where it calls; ``repr`` leaves the query out.
    :param queues: the queues it admits; none for every queue in the endpoint's scope.
    :param disabled_reason: ``consecutive_failures`` or ``operator`` while it is disabled.
    :param rotating_until: until when the old secret signs too.
    """

    id: uuid.UUID
    url: str = field(repr=_without_query)
    queues: tuple[str, ...] = field(converter=tuple)
    ignore_presence: bool
    enabled: bool
    disabled_reason: str | None
    disabled_at: datetime | None
    consecutive_failures: int
    last_attempt_at: datetime | None
    last_status: int | None
    last_error: str | None
    created_at: datetime
    rotated_at: datetime | None
    rotating_until: datetime | None


@frozen
class MintedSecret:
    """A hook with its new signing secret, which is shown this once and stored sealed.

    :param secret: ``whsec_`` and base64. Not shown by ``repr``.
    """

    hook: Hook
    secret: str = field(repr=False)


def create_hook(
    session: Session,
    endpoint_id: uuid.UUID,
    url: str,
    *,
    queues: Iterable[str] = (),
    ignore_presence: bool = False,
    key: SecretBox | str | None = None,
    policy: TargetPolicy | None = None,
    resolver: Resolver = resolve,
    token_bytes: Callable[[int], bytes] = random_source.token_bytes,
) -> MintedSecret:
    """Make a hook with a fresh signing secret, at an active endpoint that has fewer than 5.

    The URL is judged as it will be before each attempt, which takes up to 5 s for its name, before anything
    is locked. The endpoint's row is then locked until the caller's transaction ends, so that two creates
    cannot both take the last place; work on its todos goes on.

    :param url: where to call.
    :param queues: the queues to admit; none for every queue in the endpoint's scope.
    :param ignore_presence: stored for the chain around this package, which alone reads it.
    :param key: seals the secret; see :class:`Dispatcher`. Without one no hook comes to be.
    :param policy: which URLs may be called; give what the dispatcher was given.
    :param resolver: turns a host name into addresses.
    :param token_bytes: gives so many random bytes.
    :raises TargetRefused: the URL, or an address behind it, is never called.
    :raises HostUnresolved: its host has no address now.
    :raises EndpointNotFound: there is no active endpoint of that id.
    :raises TooManyHooks: the endpoint has 5.
    :raises SecretKeyError: there is no key, or it is not one.
    :raises StaleSnapshot: the transaction is REPEATABLE READ.
    :raises HookRefused: a constraint of the host's refuses the row.
    :raises TypeError: ``queues`` is one text.
    """
    admitted = _queue_list(queues)
    box = secret_box(key)
    policy = TargetPolicy() if policy is None else policy
    target = policy.target(url)
    if target.literal is None:
        policy.check(target, look_up(target.host, resolver))
    locked = session.execute(
        select(func.current_setting("transaction_isolation"))
        .where(Endpoint.id == endpoint_id, Endpoint.state == "active")
        # Not FOR UPDATE: foreign keys of new todos check this row meanwhile.
        .with_for_update(key_share=True, of=Endpoint)
    ).scalar_one_or_none()
    if locked is None:
        raise EndpointNotFound(f"there is no active endpoint {endpoint_id}")
    if locked == "repeatable read":
        raise StaleSnapshot("create_hook counts hooks under a lock: use READ COMMITTED or SERIALIZABLE")
    count = select(func.count()).select_from(NotifyHook).where(NotifyHook.endpoint_id == endpoint_id)
    if session.execute(count).scalar_one() >= MAX_HOOKS:
        raise TooManyHooks(
            f"the endpoint has {MAX_HOOKS} notify hooks, as many as one may have; delete one first"
        )
    secret = mint_secret(token_bytes)
    (hook,) = _written(
        session,
        insert(NotifyHook)
        .values(
            endpoint_id=endpoint_id,
            url=url,
            secret=box.seal(secret),
            queues=admitted,
            ignore_presence=ignore_presence,
        )
        .returning(*_VISIBLE),
    )
    return MintedSecret(hook, secret)


def list_hooks(session: Session, endpoint_id: uuid.UUID) -> list[Hook]:
    """Return the endpoint's hooks, the oldest first, without their secrets."""
    rows = session.execute(
        select(*_VISIBLE)
        .where(NotifyHook.endpoint_id == endpoint_id)
        .order_by(NotifyHook.created_at, NotifyHook.id)
    )
    return [_hook(row) for row in rows]


def rotate_hook(
    session: Session,
    endpoint_id: uuid.UUID,
    hook_id: uuid.UUID | str,
    *,
    now: datetime | None = None,
    key: SecretBox | str | None = None,
    token_bytes: Callable[[int], bytes] = random_source.token_bytes,
) -> MintedSecret:
    """Give the hook a new signing secret; for 24 hours the old one signs beside it.

    A hook that failures disabled is enabled again. One that an operator disabled stays disabled. A secret
    that was still signing from an earlier rotation is destroyed now; the old one when its day is over, by
    :func:`destroy_expired_secrets`.

    :param now: for tests and simulations; ``None`` for the database's clock.
    :raises HookNotFound: the endpoint has no such hook.
    :raises SecretKeyError: there is no key, or it is not one.
    """
    box = secret_box(key)
    secret = mint_secret(token_bytes)
    recovers = NotifyHook.disabled_reason.is_not_distinct_from("consecutive_failures")
    hook = _changed(
        session,
        endpoint_id,
        hook_id,
        {
            "secret": box.seal(secret),
            "prev_secret": NotifyHook.secret,
            "prev_secret_expires_at": instant(now) + ROTATION_DAY,
            "rotated_at": instant(now),
            "enabled": or_(NotifyHook.enabled, recovers),
            "disabled_reason": case((recovers, null()), else_=NotifyHook.disabled_reason),
            "disabled_at": case((recovers, null()), else_=NotifyHook.disabled_at),
            "consecutive_failures": case((recovers, 0), else_=NotifyHook.consecutive_failures),
        },
    )
    return MintedSecret(hook, secret)


def disable_hook(session: Session, endpoint_id: uuid.UUID, hook_id: uuid.UUID | str) -> Hook:
    """Disable the hook as its operator: it is not called, and only :func:`enable_hook` brings it back.

    :raises HookNotFound: the endpoint has no such hook.
    """
    already = NotifyHook.disabled_reason.is_not_distinct_from("operator")
    return _changed(
        session,
        endpoint_id,
        hook_id,
        {
            "enabled": False,
            "disabled_reason": "operator",
            "disabled_at": case((already, NotifyHook.disabled_at), else_=instant(None)),
        },
    )


def enable_hook(session: Session, endpoint_id: uuid.UUID, hook_id: uuid.UUID | str) -> Hook:
    """Enable the hook, whoever or whatever disabled it, with no failures counted.

    :raises HookNotFound: the endpoint has no such hook.
    """
    return _changed(
        session,
        endpoint_id,
        hook_id,
        {"enabled": True, "disabled_reason": None, "disabled_at": None, "consecutive_failures": 0},
    )


def delete_hook(session: Session, endpoint_id: uuid.UUID, hook_id: uuid.UUID | str) -> None:
    """Delete the hook and its secrets. A delivery under way may make the attempt at hand, and no other.

    :raises HookNotFound: the endpoint has no such hook.
    """
    statement = delete(NotifyHook).where(_is(endpoint_id, hook_id)).returning(NotifyHook.id)
    if session.execute(statement).one_or_none() is None:
        raise HookNotFound


def destroy_expired_secrets(session: Session, *, now: datetime | None = None) -> int:
    """Destroy the old secrets whose day after a rotation is over; return how many there were.

    They sign no longer from that instant on, destroyed or not. A dispatcher does this every quarter of an
    hour, so a service that runs one need not.

    :param now: for tests and simulations; ``None`` for the database's clock.

    Source: wake chain, "Delivery of a notification", signature.
    """
    destroyed = session.execute(
        update(NotifyHook)
        .where(NotifyHook.prev_secret.is_not(None), NotifyHook.prev_secret_expires_at <= instant(now))
        .values(prev_secret=None, prev_secret_expires_at=None)
        .returning(NotifyHook.id)
    )
    return len(destroyed.all())


_VISIBLE: Final = (
    NotifyHook.id,
    NotifyHook.url,
    NotifyHook.queues,
    NotifyHook.ignore_presence,
    NotifyHook.enabled,
    NotifyHook.disabled_reason,
    NotifyHook.disabled_at,
    NotifyHook.consecutive_failures,
    NotifyHook.last_attempt_at,
    NotifyHook.last_status,
    NotifyHook.last_error,
    NotifyHook.created_at,
    NotifyHook.rotated_at,
    NotifyHook.prev_secret_expires_at.label("rotating_until"),
)


def _hook(row: Row[*tuple[Any, ...]]) -> Hook:
    return Hook(**row._asdict())


def _changed(
    session: Session, endpoint_id: uuid.UUID, hook_id: uuid.UUID | str, values: dict[str, Any]
) -> Hook:
    statement = update(NotifyHook).where(_is(endpoint_id, hook_id)).values(**values).returning(*_VISIBLE)
    for hook in _written(session, statement):
        return hook
    raise HookNotFound


def _is(endpoint_id: uuid.UUID, hook_id: uuid.UUID | str) -> ColumnElement[bool]:
    """The endpoint's hook of that id: one test, so that another's hook is found as little as none."""
    if isinstance(hook_id, str):
        try:
            hook_id = uuid.UUID(hook_id)
        except ValueError:
            return false()
    return and_(NotifyHook.id == hook_id, NotifyHook.endpoint_id == endpoint_id)


def _queue_list(queues: Iterable[str]) -> list[str]:
    if isinstance(queues, str):
        raise TypeError(f"queues={queues!r} is one text; give a list of queue names")
    return list(queues)


def _written(session: Session, statement: Executable) -> list[Hook]:
    """Run what writes hooks, and keep URLs' queries and sealed secrets out of the text of any error."""
    try:
        return [_hook(row) for row in session.execute(statement)]
    except IntegrityError as error:
        # PostgreSQL quotes the whole row, so nothing of this error may be chained.
        violated = getattr(getattr(error.orig, "diag", None), "constraint_name", None) or "unnamed"
    except StatementError as error:
        error.hide_parameters = True
        raise
    raise HookRefused(f"the database refused the notify hook: constraint {violated}")
