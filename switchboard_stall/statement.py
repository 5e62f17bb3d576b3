"""The sweep as one statement: find the stalled pairs, decide, charge the ledger, name one todo each.

Each stage is a function from its inputs to one CTE, in the order in which a pair travels::

    pending  ->  pairs  ->  drained
                   |
                   +----->  due  ->  charged  ->  named

Nothing here runs anything. Source: design, "One statement decides, charges and names".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    CTE,
    ColumnElement,
    FromClause,
    Row,
    Select,
    SQLColumnExpression,
    and_,
    case,
    column,
    delete,
    func,
    literal,
    or_,
    select,
    true,
    tuple_,
    values,
)
from sqlalchemy.dialects.postgresql import Insert, insert

from switchboard_stall.clock import instant
from switchboard_stall.models import QUARANTINE, Endpoint, NotifyHook, QueueStall, Todo
from switchboard_stall.schedule import STALL_POLICY, StallPolicy
from switchboard_stall.sql import inlined

if TYPE_CHECKING:
    import uuid
    from collections.abc import Iterable
    from datetime import datetime, timedelta

    from sqlalchemy.sql.dml import ReturningInsert

PENDING: Final = inlined("pending")
ACTIVE: Final = inlined("active")
NONE: Final = inlined(0)
ONE: Final = inlined(1)


def latest_claim(endpoint_id: Any, queue: Any) -> Select[datetime | None]:
    """Select the latest ``claimed_at`` of one pair over all its todos, in any state: no row if never."""
    return (
        select(Todo.claimed_at)
        .where(Todo.endpoint_id == endpoint_id, Todo.queue == queue, Todo.claimed_at.is_not(None))
        .order_by(Todo.claimed_at.desc())
        .limit(ONE)
    )


def latest_requeue(endpoint_id: Any, queue: Any) -> Select[datetime]:
    """Select when a todo of one pair last became pending again after its creation: no row if never.

    Asks once whether any todo anywhere did, since in a healthy database none did, and then probes no
    pair. The order makes that question one descent; without it the planner, who believes that a third
    of all rows match, would look for the first one in a scan of the table.
    """
    requeued = and_(Todo.state == PENDING, Todo.updated_at > Todo.created_at)
    order = (Todo.endpoint_id, Todo.queue, Todo.updated_at)
    anywhere = (
        select(Todo.updated_at).where(requeued).order_by(*order).limit(ONE).correlate(None).scalar_subquery()
    )
    return (
        select(Todo.updated_at)
        .where(anywhere.is_not(None), Todo.endpoint_id == endpoint_id, Todo.queue == queue, requeued)
        .order_by(Todo.updated_at.desc())
        .limit(ONE)
    )


def representative(endpoint_id: Any, queue: Any) -> Select[str]:
    """Select the id of one pair's oldest pending todo that the sender gate vouches for."""
    return (
        select(Todo.id)
        .where(Todo.endpoint_id == endpoint_id, Todo.queue == queue, Todo.state == PENDING, Todo.vouched)
        .order_by(Todo.created_at, Todo.id)
        .limit(ONE)
    )


def receiver(endpoint_id: Any, queue: Any, now: datetime | None) -> Select[uuid.UUID]:
    """Select a hook that may be told of one pair: no row if its endpoint or its hooks forbid the wake."""
    return (
        select(NotifyHook.id)
        .join(Endpoint, Endpoint.id == NotifyHook.endpoint_id)
        .where(
            Endpoint.id == endpoint_id,
            Endpoint.state == ACTIVE,
            or_(Endpoint.expires_at.is_(None), Endpoint.expires_at > instant(now)),
            queue == func.any(Endpoint.scope_queues),
            queue != inlined(QUARANTINE),
            NotifyHook.endpoint_id == endpoint_id,
            NotifyHook.enabled,
            or_(func.cardinality(NotifyHook.queues) == NONE, queue == func.any(NotifyHook.queues)),
        )
        .limit(ONE)
    )


def progressed(
    claimed_at: ColumnElement[datetime | None], seen: SQLColumnExpression[datetime | None]
) -> ColumnElement[bool]:
    """Return whether the pair was claimed since the charge: a claim that the charge had not seen.

    Not whether the claim is later than the charge: one that began before the sweep and committed after
    it is progress, and retention that deletes old rows is none (design, "Progress is a claim").
    """
    return and_(claimed_at.is_not(None), or_(seen.is_(None), claimed_at > seen))


def wait_after(spent: SQLColumnExpression[int], policy: StallPolicy) -> ColumnElement[timedelta]:
    """Return ``policy.waits[spent]`` in SQL: null where the budget is spent, and null is never due.

    A searched CASE, because the simple form is deparsed wrongly where the ledger is sharded.
    """
    return case(*((spent == inlined(number), inlined(wait)) for number, wait in enumerate(policy.waits)))


def pending() -> CTE:
    """List the pairs with pending work and when the oldest of it was created.

    A walk that skips from pair to pair through the partial index: one descent each, however deep the
    backlog. Grouping would read every pending row, and so would ``DISTINCT``.
    """
    order = (Todo.endpoint_id, Todo.queue, Todo.created_at)
    first = select(*order).where(Todo.state == PENDING).order_by(*order).limit(ONE)
    walk = first.cte("pending", recursive=True)
    beyond = tuple_(Todo.endpoint_id, Todo.queue) > tuple_(walk.c.endpoint_id, walk.c.queue)
    step = select(*order).where(Todo.state == PENDING, beyond).order_by(*order).limit(ONE).lateral("step")
    return walk.union_all(select(*step.c).select_from(walk.join(step, true())))


def pairs(pending: CTE) -> CTE:
    """Set each pair with pending work beside its ledger row, and each without beside nothing.

    A full join is never planned as a nested loop, so walk and ledger are read once each, whatever the
    planner believes of a recursion it cannot estimate. Feeds two stages, hence materialized.
    """
    both = pending.join(
        QueueStall,
        and_(QueueStall.endpoint_id == pending.c.endpoint_id, QueueStall.queue == pending.c.queue),
        full=True,
    )
    return (
        select(
            func.coalesce(pending.c.endpoint_id, QueueStall.endpoint_id).label("endpoint_id"),
            func.coalesce(pending.c.queue, QueueStall.queue).label("queue"),
            pending.c.created_at.label("oldest"),
            QueueStall.nudges,
            QueueStall.last_nudged_at,
            QueueStall.last_claim_at,
        )
        .select_from(both)
        .cte("pairs")
        .prefix_with("MATERIALIZED")
    )


def drained(pairs: CTE) -> CTE:
    """Delete the ledger rows of pairs with no pending work, so that the next stall has a fresh budget.

    Runs whatever the rest selects, and after it: nothing reads it. A row that another sweep holds, or
    has charged since this snapshot, is that sweep's to judge; skipping it also means that two sweeps
    can never wait for each other here. Its keys and those of ``charged`` are disjoint: a pair has
    pending work in this snapshot or it has none.
    """
    unchanged = (
        select(QueueStall.endpoint_id, QueueStall.queue)
        .where(
            QueueStall.endpoint_id == pairs.c.endpoint_id,
            QueueStall.queue == pairs.c.queue,
            QueueStall.nudges == pairs.c.nudges,
            QueueStall.last_nudged_at == pairs.c.last_nudged_at,
        )
        .limit(ONE)
        .with_for_update(skip_locked=True)
        .lateral("unchanged")
    )
    emptied = (
        select(*unchanged.c)
        .select_from(pairs.join(unchanged, true()))
        .where(pairs.c.oldest.is_(None))
        .cte("emptied")
    )
    return (
        delete(QueueStall)
        .where(QueueStall.endpoint_id == emptied.c.endpoint_id, QueueStall.queue == emptied.c.queue)
        .returning(QueueStall.endpoint_id, QueueStall.queue)
        .cte("drained")
    )


def due(pairs: CTE, policy: StallPolicy = STALL_POLICY, *, now: datetime | None = None) -> CTE:
    """Keep the pairs that are due and may be nudged, cut them to the limit, and name a todo for each.

    The tests stand in the order of their cost: what the walk and the ledger know, then one probe for
    the claim, then one for the requeue, and the receiver and the representative only for pairs that
    stand in line for a place. A probe is a LATERAL with a limit: an EXISTS would be flattened into a
    join that reads the endpoint's whole backlog. Feeds two stages, hence materialized.
    """
    present = instant(now)
    first_wait = inlined(policy.waits[0])

    # No pair is due within the first wait of its oldest todo or of its last nudge, whatever its claims.
    claim = latest_claim(pairs.c.endpoint_id, pairs.c.queue).lateral("claim")
    fresh_budget = or_(pairs.c.nudges.is_(None), progressed(claim.c.claimed_at, pairs.c.last_claim_at))
    known = (
        select(
            *pairs.c,
            claim.c.claimed_at,
            case((fresh_budget, NONE), else_=pairs.c.nudges).label("spent"),
        )
        .select_from(pairs.outerjoin(claim, true()))
        .where(
            present - pairs.c.oldest >= first_wait,
            or_(pairs.c.last_nudged_at.is_(None), present - pairs.c.last_nudged_at >= first_wait),
        )
        .subquery("known")
    )

    requeue = latest_requeue(known.c.endpoint_id, known.c.queue).lateral("requeue")
    again = known.c.spent > NONE
    life = func.greatest(known.c.oldest, known.c.claimed_at)
    since = case((again, known.c.last_nudged_at), else_=func.greatest(life, known.c.last_nudged_at))
    stalled = (
        select(
            known.c.endpoint_id,
            known.c.queue,
            known.c.claimed_at,
            known.c.spent,
            case(
                (again, known.c.last_nudged_at),
                else_=func.greatest(life, known.c.last_nudged_at, requeue.c.updated_at),
            ).label("since"),
            func.greatest(life, requeue.c.updated_at).label("stalled_since"),
        )
        .select_from(known.outerjoin(requeue, true()))
        .where(
            known.c.spent < inlined(policy.cap),
            present - since >= wait_after(known.c.spent, policy),
            or_(requeue.c.updated_at.is_(None), present - requeue.c.updated_at >= first_wait),
        )
        .order_by("spent", "since", "endpoint_id", "queue")
        .subquery("stalled")
    )

    hook = receiver(stalled.c.endpoint_id, stalled.c.queue, now).lateral("hook")
    named = representative(stalled.c.endpoint_id, stalled.c.queue).lateral("representative")
    return (
        select(*stalled.c, named.c.id.label("todo_id"))
        .select_from(stalled.join(named, true()).join(hook, true()))
        .order_by(stalled.c.spent, stalled.c.since, stalled.c.endpoint_id, stalled.c.queue)
        .limit(inlined(policy.sweep_limit))
        .cte("due")
        .prefix_with("MATERIALIZED")
    )


def charge(due: FromClause, policy: StallPolicy = STALL_POLICY, *, now: datetime | None = None) -> Insert:
    """Insert or raise the charge of each due pair, only where the locked row is still due.

    A pair that another instance charged a moment ago fails that test and is not returned. The test
    names nothing but the locked row and ``excluded``. Rows are charged in key order, so that two
    instances wait for each other in one direction only.

    :param due: rows with ``endpoint_id``, ``queue`` and ``claimed_at``: the stage of that name, or the
        rows of :func:`due_statement` as a ``VALUES`` list.
    """
    new = insert(QueueStall).from_select(
        [column.key for column in QueueStall.__table__.columns],
        select(
            due.c.endpoint_id,
            due.c.queue,
            ONE,
            instant(now),
            due.c.claimed_at,
        ).order_by(due.c.endpoint_id, due.c.queue),
    )
    fresh_budget = progressed(new.excluded.last_claim_at, QueueStall.last_claim_at)
    spent = case((fresh_budget, NONE), else_=QueueStall.nudges)
    wait = case((fresh_budget, inlined(policy.waits[0])), else_=wait_after(QueueStall.nudges, policy))
    return new.on_conflict_do_update(
        index_elements=[QueueStall.endpoint_id, QueueStall.queue],
        set_={
            "nudges": spent + ONE,
            "last_nudged_at": new.excluded.last_nudged_at,
            "last_claim_at": new.excluded.last_claim_at,
        },
        where=and_(
            spent < inlined(policy.cap),
            new.excluded.last_nudged_at - QueueStall.last_nudged_at >= wait,
        ),
    )


def charged(due: CTE, policy: StallPolicy = STALL_POLICY, *, now: datetime | None = None) -> CTE:
    """Charge the due pairs whose endpoint still stands, and keep those whose charge this instance won.

    An endpoint deleted since the snapshot would fail the whole charge by the ledger's foreign key. So each
    one is held first, as that key holds it, against nothing but deletion. One that is gone, or that somebody
    is about to delete, is left out and never waited for: this cannot be one side of a deadlock.
    """
    held = (
        select(Endpoint.id)
        .where(Endpoint.id == due.c.endpoint_id)
        .limit(ONE)
        .with_for_update(read=True, key_share=True, skip_locked=True)
        .lateral("held")
    )
    standing = (
        select(due.c.endpoint_id, due.c.queue, due.c.claimed_at)
        .select_from(due.join(held, true()))
        .subquery("standing")
    )
    return charge(standing, policy, now=now).returning(*QueueStall.__table__.columns).cte("charged")


def named(due: CTE, charged: CTE) -> Select[Todo, int, datetime, datetime]:
    """Select the named todos with their charge, in the order of the cut."""
    return (
        select(
            Todo,
            charged.c.nudges.label("number"),
            charged.c.last_nudged_at.label("nudged_at"),
            due.c.stalled_since,
        )
        .select_from(charged)
        .join(due, and_(due.c.endpoint_id == charged.c.endpoint_id, due.c.queue == charged.c.queue))
        .join(Todo, and_(Todo.endpoint_id == due.c.endpoint_id, Todo.id == due.c.todo_id))
        .order_by(due.c.spent, due.c.since, due.c.endpoint_id, due.c.queue)
    )


def nudge_statement(
    policy: StallPolicy = STALL_POLICY, *, now: datetime | None = None
) -> Select[Todo, int, datetime, datetime]:
    """Build the sweep: one statement that resets drained pairs, charges the due ones, and names todos.

    Pure: needs no connection. Rows are ``(Todo, number, nudged_at, stalled_since)``.

    :param policy: the waits and the limit.
    :param now: an aware datetime, for tests and simulations; ``None`` means the database's
        ``statement_timestamp()``.
    :raises ValueError: ``now`` is naive.
    """
    all_pairs = pairs(pending())
    all_due = due(all_pairs, policy, now=now)
    return named(all_due, charged(all_due, policy, now=now)).add_cte(drained(all_pairs))


def due_statement(
    policy: StallPolicy = STALL_POLICY, *, now: datetime | None = None
) -> Select[uuid.UUID, str, datetime | None, int, datetime, datetime, str]:
    """Build the dry run: what the sweep would nudge, without a charge and without a write.

    Rows are ``(endpoint_id, queue, claimed_at, spent, since, stalled_since, todo_id)``, in the order of
    the cut. Followed by :func:`charge_statement` of its rows in one transaction it is the same sweep in
    two statements, for engines that cannot plan it as one; :func:`drain_statement` is its reset.

    :param policy: the waits and the limit.
    :param now: an aware datetime; ``None`` means the database's ``statement_timestamp()``.
    :raises ValueError: ``now`` is naive.
    """
    found = due(pairs(pending()), policy, now=now)
    return select(*found.c).order_by(found.c.spent, found.c.since, found.c.endpoint_id, found.c.queue)


def charge_statement(
    rows: Iterable[Row[uuid.UUID, str, datetime | None, int, datetime, datetime, str]],
    policy: StallPolicy = STALL_POLICY,
    *,
    now: datetime | None = None,
) -> ReturningInsert[uuid.UUID, str, int, datetime, datetime | None]:
    """Build the charge of the rows of :func:`due_statement`; it returns the ledger rows it won.

    An endpoint deleted since the dry run fails it as a whole, by the ledger's foreign key.

    :param rows: at least one row of the dry run.
    :param policy: the policy of the dry run.
    :param now: the instant of the dry run if one was injected, else ``None``.
    :raises ValueError: there is no row, or ``now`` is naive.
    """
    claim_type = QueueStall.last_claim_at.type
    # A list in which nobody was ever claimed has no type of its own, so each instant brings one.
    listed = [(row.endpoint_id, row.queue, literal(row.claimed_at, claim_type)) for row in rows]
    if not listed:
        raise ValueError("there is no due row to charge; skip the charge when the dry run is empty")
    found = values(
        column("endpoint_id", QueueStall.endpoint_id.type),
        column("queue", QueueStall.queue.type),
        column("claimed_at", claim_type),
        name="due",
    ).data(listed)
    return charge(found, policy, now=now).returning(
        QueueStall.endpoint_id,
        QueueStall.queue,
        QueueStall.nudges,
        QueueStall.last_nudged_at,
        QueueStall.last_claim_at,
    )


def drain_statement() -> Select[uuid.UUID, str]:
    """Build the reset alone: deletes the ledger rows of pairs with no pending work and returns their keys."""
    gone = drained(pairs(pending()))
    return select(*gone.c)
