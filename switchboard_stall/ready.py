"""The ready hook: collected in the session while its transaction runs, fired after it has committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias

from attrs import define, field
from sqlalchemy import event, inspect
from sqlalchemy.orm import Session, SessionTransaction, make_transient_to_detached

from switchboard_stall.models import Todo

Reason: TypeAlias = Literal["created", "requeued"]
"""Why a todo is ready: it is new, or it went back to pending."""

ReadyHook: TypeAlias = Callable[[Todo, Reason], object]
"""Called with a detached todo and the reason. What it returns is ignored."""

_log = logging.getLogger(__name__)
_hook: ReadyHook | None = None


def set_todo_ready_hook(hook: ReadyHook | None) -> ReadyHook | None:
    """Set the one hook of this process that is fired for each todo that became ready; return the one before.

    The hook runs in the thread that committed, after the commit, so it must hand its work off and return.
    What it raises is logged and reaches nobody.

    :param hook: called with a detached copy of the todo and the reason; ``None`` for no hook.

    Source: design, "The wake is a ready hook, not a NOTIFY".
    """
    global _hook
    previous, _hook = _hook, hook
    return previous


def reason_for(attempt: int) -> Reason:
    """Return the reason that goes on the wire for a todo with this many attempts.

    :param attempt: how often the todo was claimed.

    Source: the wire contract: ``created`` while ``attempt`` is 0, ``requeued`` after.
    """
    return "created" if attempt == 0 else "requeued"


def detached(todo: Todo) -> Todo:
    """Return a copy of ``todo`` with every column loaded that belongs to no session.

    It can be read after the session has committed, expired or closed, from any thread, and never emits SQL.
    A column that is not loaded is loaded now, through the session that ``todo`` belongs to.

    :raises sqlalchemy.orm.exc.DetachedInstanceError: a column is not loaded and ``todo`` has no session.
    """
    return detached_of({each.key: getattr(todo, each.key) for each in inspect(Todo).column_attrs})


def detached_of(columns: Mapping[str, Any]) -> Todo:
    """Return a todo of these values that belongs to no session, as if it had been loaded and let go.

    :param columns: a value for each column, by its attribute's name.
    """
    todo = Todo(**columns)
    make_transient_to_detached(todo)
    return todo


def announce(session: Session, todo: Todo, reason: Reason) -> None:
    """Fire the ready hook for ``todo`` once the session's transaction has committed.

    The todo is copied now, as the transaction sees it. The hook is the one set at the time of the commit.
    Nothing fires if the transaction, or the savepoint it stands in, rolls back.

    :param session: the session whose transaction makes the todo ready. Flushed if ``todo`` is new in it.
    :param todo: the todo that became ready.
    :param reason: why.

    Source: wake chain, "Lifecycle of a todo": the ready hook fires after commit.
    """
    if todo in session.new:
        session.flush()
    copy = detached(todo)

    def fire() -> None:
        if _hook is not None:
            _hook(copy, reason)

    after_commit(session, fire)


def after_commit(session: Session, action: Callable[[], None]) -> None:
    """Run ``action`` once, after the outermost commit of the session's current transaction.

    An action registered within a savepoint is dropped when the savepoint rolls back. Actions run in the
    order they were registered, in the committing thread, when the transaction is over and its connections
    are free. One that raises is logged and the others still run; the commit stands. Under an
    ``AsyncSession``, call it within ``run_sync``, or with its ``sync_session``.

    :param session: begun if it is in no transaction.
    :param action: called without arguments.
    """
    current = _innermost(session) or session.begin()
    pending: _Pending = session.info.setdefault(_KEY, _Pending())
    pending.actions.setdefault(current, []).append(action)


@define
class _Pending:
    """What one session will do after commit, by the transaction or savepoint each action stands in."""

    actions: dict[SessionTransaction, list[Callable[[], None]]] = field(factory=dict)
    committed: SessionTransaction | None = None


_KEY: Final = f"{__name__}.after_commit"


def _innermost(session: Session) -> SessionTransaction | None:
    return session.get_nested_transaction() or session.get_transaction()


# On the class once, not on each session: nothing to unregister, so nothing leaks, and a session that
# registered no action pays one look into its `info`.
@event.listens_for(Session, "after_commit")
def _note_commit(session: Session) -> None:
    pending: _Pending | None = session.info.get(_KEY)
    if pending is not None:
        pending.committed = _innermost(session)


# "after_commit" cannot run the actions: it also comes for savepoints, and the connection is still held.
@event.listens_for(Session, "after_transaction_end")
def _settle(session: Session, transaction: SessionTransaction) -> None:
    pending: _Pending | None = session.info.get(_KEY)
    if pending is None:
        return
    actions = pending.actions.pop(transaction, [])
    committed = pending.committed is transaction
    parent = transaction.parent
    if parent is None:
        del session.info[_KEY]
        if committed:
            _run(actions)
    elif committed and actions:
        # A flush stands between as a transaction of its own that neither commits nor rolls back alone.
        while not parent.nested and parent.parent is not None:
            parent = parent.parent
        pending.actions.setdefault(parent, []).extend(actions)


def _run(actions: list[Callable[[], None]]) -> None:
    for action in actions:
        try:
            action()
        except Exception:
            _log.exception("after commit: an action raised; the commit stands and the other actions run")
