"""How healthy a hook is: one UPDATE after each delivery, which also disables a hook that keeps failing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from sqlalchemy import and_, case, func, update

from switchboard_stall.clock import instant
from switchboard_stall.models import NotifyHook

if TYPE_CHECKING:
    import uuid

    from sqlalchemy.orm import Session

MAX_FAILURES: Final = 10
"""So many failed deliveries in a row disable a hook."""

FailureClass: TypeAlias = Literal[
    "redirect", "client_error", "server_error", "timeout", "network", "tls", "rejected_ssrf"
]
"""Why a delivery failed: the words that ``notify_hooks.last_error`` may hold."""


def record_success(session: Session, hook_id: uuid.UUID, status: int | None) -> None:
    """Record a delivery that succeeded, in one UPDATE: it zeroes the failures in a row.

    :param status: the HTTP status the receiver answered with.

    Source: wake chain, "Delivery of a notification", health.
    """
    session.execute(
        update(NotifyHook)
        .where(NotifyHook.id == hook_id)
        .values(
            consecutive_failures=0,
            last_attempt_at=instant(None),
            last_status=status,
            last_error=None,
        )
    )


def record_failure(session: Session, hook_id: uuid.UUID, error: FailureClass, status: int | None) -> bool:
    """Record a delivery that failed, in one UPDATE; return whether that disabled the hook.

    The database counts, on the row it has locked, so that no instance loses another's failure or misses the
    threshold of 10. A hook that an operator has disabled meanwhile stays the operator's.

    :param error: why it failed.
    :param status: the HTTP status, if the receiver answered at all.

    Source: wake chain, "Delivery of a notification", health.
    """
    failures = NotifyHook.consecutive_failures + 1
    disables = and_(NotifyHook.enabled, failures >= MAX_FAILURES)
    disabled = session.execute(
        update(NotifyHook)
        .where(NotifyHook.id == hook_id)
        .values(
            consecutive_failures=failures,
            last_attempt_at=instant(None),
            last_status=status,
            last_error=error,
            enabled=and_(NotifyHook.enabled, failures < MAX_FAILURES),
            disabled_reason=case((disables, "consecutive_failures"), else_=NotifyHook.disabled_reason),
            disabled_at=case((disables, instant(None)), else_=NotifyHook.disabled_at),
        )
        # The row after the update: only this very statement can have disabled it at this instant.
        .returning(func.coalesce(NotifyHook.disabled_at == instant(None), False))
    )
    return bool(disabled.scalar_one_or_none())
