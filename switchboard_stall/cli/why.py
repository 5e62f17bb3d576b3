"""``why``: one pair, its facts in one query, the rule in plain Python beside it, and both in plain words."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import click
from attrs import asdict, frozen
from sqlalchemy import and_, func, literal, or_, select, true

from switchboard_stall.cli.database import connected, database_option, now_option
from switchboard_stall.cli.output import duration, echo_json, moment, quoted, say, table
from switchboard_stall.clock import instant
from switchboard_stall.models import QUARANTINE, Endpoint, NotifyHook, QueueStall, Todo
from switchboard_stall.schedule import STALL_POLICY, StallPolicy
from switchboard_stall.statement import PENDING, latest_claim, latest_requeue, receiver, representative

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from sqlalchemy import Connection, FromClause, Select


@frozen
class Facts:
    """What the database knows of one pair, at one instant.

    The letters of the rule: ``oldest`` is O, ``claimed_at`` C, ``requeued_at`` R; ``nudges``,
    ``last_nudged_at`` and ``last_claim_at`` are n, L and K; ``now`` is N.
    """

    now: datetime
    endpoint_id: uuid.UUID
    slug: str
    state: str
    expires_at: datetime | None
    scope_queues: list[str]
    queue: str
    oldest: datetime | None
    claimed_at: datetime | None
    requeued_at: datetime | None
    nudges: int | None
    last_nudged_at: datetime | None
    last_claim_at: datetime | None
    representative: str | None
    receiver: uuid.UUID | None
    hooks: int
    enabled_hooks: int
    admitting_hooks: int


@frozen
class Reason:
    """One thing that keeps a pair from being nudged.

    :param code: for programs: drained, fresh, claimed, requeued, paced, capped, unvouched, revoked, expired,
        out_of_scope, quarantine, no_hook, hooks_disabled or not_admitted.
    :param text: for people.
    """

    code: str
    text: str


@frozen
class Judgement:
    """What the rule makes of the facts.

    :param spent: how many nudges of this stall were used.
    :param since: what the next wait counts from; ``None`` where no work is pending.
    :param next_due: when the pair will be due if nothing happens to it; ``None`` if never.
    :param due: whether it is due now.
    :param eligible: whether it may be nudged at all.
    :param reasons: everything that keeps it from being nudged now; empty exactly when it is due and eligible.
    """

    spent: int
    since: datetime | None
    next_due: datetime | None
    due: bool
    eligible: bool
    reasons: tuple[Reason, ...]


def facts_statement(pairs: FromClause, now: datetime | None) -> Select[Any]:
    """Build the query for the facts of each pair: a few probes a pair, however deep its backlog.

    :param pairs: rows with ``endpoint_id`` and ``queue``.
    :param now: an aware datetime; ``None`` for the database's clock.
    """
    pair = (pairs.c.endpoint_id, pairs.c.queue)
    oldest = (
        select(Todo.created_at)
        .where(Todo.endpoint_id == pair[0], Todo.queue == pair[1], Todo.state == PENDING)
        .order_by(Todo.created_at)
        .limit(1)
        .lateral("pending")
    )
    claim = latest_claim(*pair).lateral("claim")
    requeue = latest_requeue(*pair).lateral("requeue")
    named = representative(*pair).lateral("representative")
    hook = receiver(*pair, now).lateral("receiver")
    hooks = (
        select(
            func.count().label("hooks"),
            func.count().filter(NotifyHook.enabled).label("enabled_hooks"),
            func.count()
            .filter(
                NotifyHook.enabled,
                or_(func.cardinality(NotifyHook.queues) == 0, pair[1] == func.any(NotifyHook.queues)),
            )
            .label("admitting_hooks"),
        )
        .where(NotifyHook.endpoint_id == pair[0])
        .lateral("hooks")
    )
    found = pairs.join(Endpoint, Endpoint.id == pair[0]).outerjoin(
        QueueStall, and_(QueueStall.endpoint_id == pair[0], QueueStall.queue == pair[1])
    )
    for probe in (oldest, claim, requeue, named, hook):
        found = found.outerjoin(probe, true())
    return select(
        instant(now).label("now"),
        Endpoint.id.label("endpoint_id"),
        Endpoint.slug,
        Endpoint.state,
        Endpoint.expires_at,
        Endpoint.scope_queues,
        pair[1].label("queue"),
        oldest.c.created_at.label("oldest"),
        claim.c.claimed_at,
        requeue.c.updated_at.label("requeued_at"),
        QueueStall.nudges,
        QueueStall.last_nudged_at,
        QueueStall.last_claim_at,
        named.c.id.label("representative"),
        hook.c.id.label("receiver"),
        hooks.c.hooks,
        hooks.c.enabled_hooks,
        hooks.c.admitting_hooks,
    ).select_from(found.join(hooks, true()))


def facts_of(
    connection: Connection, endpoint: str, queue: str, *, now: datetime | None = None
) -> Facts | None:
    """Return the facts of one pair, or ``None`` if there is no such endpoint.

    :param endpoint: a slug or an id. A slug that reads like the id of another endpoint is that endpoint's id.
    :param queue: any text; a pair exists as soon as somebody asks about it.
    :param now: an aware datetime; ``None`` for the database's clock.
    """
    # A slug with NUL cannot be asked about, and cannot exist.
    if "\0" in endpoint:
        return None
    asked_for = select(Endpoint.id.label("endpoint_id"))
    try:
        asked = uuid.UUID(endpoint)
    except ValueError:
        chosen = asked_for.where(Endpoint.slug == endpoint)
    else:
        by_id = Endpoint.id == asked
        chosen = asked_for.where(or_(by_id, Endpoint.slug == endpoint)).order_by(by_id.desc())
    pair = chosen.add_columns(literal(queue, Todo.queue.type).label("queue")).limit(1).subquery("pair")
    row = connection.execute(facts_statement(pair, now)).one_or_none()
    return None if row is None else Facts(**row._mapping)


def judge(facts: Facts, policy: StallPolicy = STALL_POLICY) -> Judgement:
    """Apply the rule to the facts: the same decision as the statement's, and every reason for it.

    :param facts: of one pair.
    :param policy: the waits.
    """
    seen, claimed = facts.last_claim_at, facts.claimed_at
    progressed = claimed is not None and (seen is None or claimed > seen)
    spent = 0 if facts.nudges is None or progressed else facts.nudges
    eligible = facts.representative is not None and facts.receiver is not None
    reasons = [*_unfit(facts)]
    if facts.oldest is None:
        return Judgement(spent, None, None, False, eligible, (_drained(facts), *reasons))

    life = [at for at in (facts.oldest, claimed, facts.requeued_at) if at is not None]
    if spent > 0:
        assert facts.last_nudged_at is not None
        since = facts.last_nudged_at
    else:
        since = max([*life, *([facts.last_nudged_at] if facts.last_nudged_at is not None else [])])
    if spent >= policy.cap:
        capped = Reason(
            "capped",
            f"it had its {_nudges(policy.cap)}; now silence: until a claim or a drain",
        )
        return Judgement(spent, since, None, False, eligible, (capped, *reasons))

    number, first = spent + 1, policy.waits[0]
    wait = policy.wait(number)
    holds: list[tuple[str, datetime | None, timedelta, str]] = [
        ("fresh", facts.oldest, first, "its oldest pending todo is fresh"),
        (
            "requeued",
            facts.requeued_at,
            first,
            "a todo was put back to pending lately, which rings by itself",
        ),
    ]
    if spent > 0:
        holds.append(("paced", facts.last_nudged_at, wait, f"nudge {number} is paced after nudge {spent}"))
    else:
        holds.append(("claimed", claimed, wait, "it was claimed lately, so its consumer is alive"))
        holds.append(
            (
                "paced",
                facts.last_nudged_at,
                wait,
                "it was nudged lately: a claim does not bring nudges closer",
            )
        )
    next_due = max(at + length for _, at, length, _ in holds if at is not None)
    timing = [
        Reason(code, f"{text}: {duration(facts.now - at)} of {duration(length)}")
        for code, at, length, text in holds
        if at is not None and facts.now - at < length
    ]
    return Judgement(spent, since, next_due, not timing, eligible, (*timing, *reasons))


def _unfit(facts: Facts) -> list[Reason]:
    """Why the pair may not be nudged, due or not."""
    queue = quoted(facts.queue)
    reasons = []
    if facts.oldest is not None and facts.representative is None:
        reasons.append(
            Reason("unvouched", "no pending todo is vouched for by the sender gate, so none may name a wake")
        )
    if facts.queue == QUARANTINE:
        reasons.append(Reason("quarantine", "the queue is the quarantine, which is never rung"))
    if facts.state != "active":
        reasons.append(Reason("revoked", f"the endpoint is {facts.state}"))
    elif facts.expires_at is not None and facts.expires_at <= facts.now:
        reasons.append(
            Reason("expired", f"the endpoint expired {duration(facts.now - facts.expires_at)} ago")
        )
    if facts.queue not in facts.scope_queues:
        scope = ", ".join(quoted(name) for name in facts.scope_queues) or "empty"
        reasons.append(
            Reason("out_of_scope", f"queue {queue} is not in the endpoint's scope (the scope is: {scope})")
        )
    if not facts.hooks:
        reasons.append(Reason("no_hook", "the endpoint has no notify hook"))
    elif not facts.enabled_hooks:
        reasons.append(
            Reason("hooks_disabled", f"no notify hook of the endpoint is enabled (0 of {facts.hooks})")
        )
    elif not facts.admitting_hooks:
        reasons.append(Reason("not_admitted", f"no enabled notify hook of the endpoint admits queue {queue}"))
    return reasons


def _drained(facts: Facts) -> Reason:
    text = "no todo is pending, so there is nothing to wake for"
    if facts.nudges is not None:
        text += "; the next sweep forgets its nudges"
    if facts.claimed_at is None and facts.nudges is None:
        text += "; none was ever claimed either: is the queue's name right?"
    return Reason("drained", text)


def _nudges(count: int) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return f"{words[count] if count < len(words) else count} nudge{'' if count == 1 else 's'}"


def verdict(facts: Facts, judgement: Judgement, policy: StallPolicy = STALL_POLICY) -> str:
    """Return the decision in one line."""
    if not judgement.reasons:
        return f"It is nudged at the next sweep: nudge {judgement.spent + 1} of {policy.cap}."
    if judgement.due:
        return "It is due, and not nudged:"
    return "It is not nudged now:"


def lines(facts: Facts, judgement: Judgement, policy: StallPolicy = STALL_POLICY) -> list[str]:
    """Return the whole explanation, for people."""
    now = facts.now
    if facts.nudges is None or facts.last_nudged_at is None:
        ledger = "no row"
    else:
        saw = (
            "no claim"
            if facts.last_claim_at is None
            else f"the claim of {moment(facts.last_claim_at, now).partition('  ')[0]}"
        )
        ledger = f"{facts.nudges} of {policy.cap}, the last {moment(facts.last_nudged_at, now)}; it saw {saw}"
    if judgement.next_due is None:
        due = (
            "never, unless a todo arrives"
            if facts.oldest is None
            else "never, unless a claim or a drain comes"
        )
    elif judgement.due:
        due = f"since {moment(judgement.next_due, now)}"
    else:
        due = moment(judgement.next_due, now)
    rows = [
        ("endpoint", f"{quoted(facts.slug)} {facts.endpoint_id}, {facts.state}"),
        ("queue", quoted(facts.queue)),
        ("now", moment(now, now).partition("  ")[0]),
        ("oldest pending", moment(facts.oldest, now) if facts.oldest else "none"),
        ("latest claim", moment(facts.claimed_at, now)),
        ("latest requeue", moment(facts.requeued_at, now)),
        ("nudges charged", ledger),
        ("budget spent", f"{judgement.spent} of {policy.cap}"),
        ("waits since", moment(judgement.since, now) if judgement.since else "-"),
        ("next nudge due", due),
    ]
    return [
        table(rows),
        "",
        verdict(facts, judgement, policy),
        *(f"  - {reason.text}" for reason in judgement.reasons),
    ]


@click.command("why")
@click.argument("endpoint")
@click.argument("queue")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@now_option
@database_option
def why(endpoint: str, queue: str, as_json: bool, now: datetime | None) -> None:
    """Explain why one queue is nudged or not.

    ENDPOINT is a slug or an id, QUEUE a name. Reads a few index entries, however deep the backlog.
    """
    with connected() as engine, engine.connect() as connection:
        facts = facts_of(connection, endpoint, queue, now=now)
    if facts is None:
        raise click.ClickException(f"there is no endpoint with the slug or id {quoted(endpoint)}")
    judgement = judge(facts)
    if as_json:
        judged = asdict(judgement)
        echo_json({**asdict(facts), **judged, "nudged_now": not judgement.reasons, "cap": STALL_POLICY.cap})
    else:
        for line in lines(facts, judgement):
            say(line)
