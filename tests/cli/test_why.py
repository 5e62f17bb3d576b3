"""``why``: the decision in Python is the statement's, and every reason is said."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, union
from sqlalchemy.orm import Session
from support.builders import NOW
from support.databases import empty

from switchboard_stall.cli.status import standings
from switchboard_stall.cli.why import Facts, facts_of, facts_statement, judge
from switchboard_stall.models import QUARANTINE, Endpoint, NotifyHook, QueueStall, Todo
from switchboard_stall.schedule import STALL_POLICY, StallPolicy
from switchboard_stall.statement import due_statement, nudge_statement

if TYPE_CHECKING:
    import uuid

    from cli.conftest import Command
    from sqlalchemy import Engine
    from support.builders import QueueBuilder, World

NOBODY_CUT = StallPolicy(waits=STALL_POLICY.waits, sweep_limit=1000)
MILLISECOND = timedelta(milliseconds=1)
QUEUES = ("inbox", 'a:b "c"\n', QUARANTINE)
EVERY_PAIR = union(
    select(Todo.endpoint_id, Todo.queue), select(QueueStall.endpoint_id, QueueStall.queue)
).subquery("pairs")

# On every wait, and a millisecond either side of it.
ages = st.sampled_from(
    [timedelta(0)]
    + [
        wait + step
        for wait in {*STALL_POLICY.waits, timedelta(days=1)}
        for step in (-MILLISECOND, timedelta(0), MILLISECOND)
    ]
)


@st.composite
def todos(draw: st.DrawFn) -> dict[str, Any]:
    state = draw(st.sampled_from(["pending", "pending", "claimed", "done", "failed"]))
    created = NOW - draw(ages)
    return {
        "state": state,
        "vouched": draw(st.booleans()),
        "created_at": created,
        "updated_at": draw(st.sampled_from([created, max(created, NOW - draw(ages))])),
        "claimed_at": draw(st.none() | ages.map(lambda age: NOW - age)),
        "title": "a piece of work",
    }


@st.composite
def endpoints(draw: st.DrawFn) -> tuple[list[Any], list[tuple[uuid.UUID, str]]]:
    """The rows of one endpoint, and its pairs."""
    endpoint = Endpoint(
        id=draw(st.uuids()),
        slug=str(draw(st.uuids())),
        state=draw(st.sampled_from(["active", "active", "active", "revoked"])),
        expires_at=draw(st.sampled_from([None, None, NOW, NOW + MILLISECOND, NOW - MILLISECOND])),
        scope_queues=draw(st.sampled_from([QUEUES, QUEUES, QUEUES[:1], ()])),
    )
    rows: list[Any] = [endpoint]
    for queues, enabled in draw(
        st.lists(st.tuples(st.sampled_from([(), (), QUEUES[:1], ("other",)]), st.booleans()), max_size=2)
    ):
        rows.append(
            NotifyHook(
                endpoint_id=endpoint.id,
                url="https://hooks.example/",
                secret="enc:v1:",
                queues=queues,
                enabled=enabled,
            )
        )
    pairs = []
    for queue in draw(st.lists(st.sampled_from(QUEUES), min_size=1, max_size=2, unique=True)):
        pairs.append((endpoint.id, queue))
        work = draw(st.lists(todos(), max_size=3))
        rows += [Todo(endpoint_id=endpoint.id, queue=queue, **each) for each in work]
        claims = [each["claimed_at"] for each in work]
        if draw(st.booleans()):
            rows.append(
                QueueStall(
                    endpoint_id=endpoint.id,
                    queue=queue,
                    nudges=draw(st.integers(0, STALL_POLICY.cap + 1)),
                    last_nudged_at=NOW - draw(ages),
                    last_claim_at=draw(st.sampled_from([None, *claims]) | ages.map(lambda age: NOW - age)),
                )
            )
    return rows, pairs


@given(found=st.lists(endpoints(), min_size=1, max_size=4, unique_by=lambda each: each[0][0].id))
@settings(
    max_examples=settings.default.max_examples // 2 if settings.default else 100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_agrees_with_the_statement_on_every_state(
    engine: Engine, found: list[tuple[list[Any], list[tuple[uuid.UUID, str]]]]
) -> None:
    empty(engine)
    with Session(engine) as session:
        for rows, _ in found:
            session.add_all(rows)
        session.commit()
    with engine.connect() as connection:
        due = {
            (row.endpoint_id, row.queue): (row.spent, row.since)
            for row in connection.execute(due_statement(NOBODY_CUT, now=NOW))
        }
        explained = {
            (row.endpoint_id, row.queue): Facts(**row._mapping)
            for row in connection.execute(facts_statement(EVERY_PAIR, NOW))
        }
        listed = {(each.facts.endpoint_id, each.facts.queue): each for each in standings(connection, now=NOW)}

    assert due.keys() <= explained.keys()
    for pair, facts in explained.items():
        judgement = judge(facts)
        assert (pair in due) == (judgement.reasons == ())
        assert (judgement.reasons == ()) == (judgement.due and judgement.eligible)
        if pair in due:
            assert due[pair] == (judgement.spent, judgement.since)
        if facts.nudges is not None:
            assert listed[pair].judgement == judgement
        # When it will be due is the instant at which the decision turns.
        if judgement.next_due is not None:
            assert judgement.due == (judgement.next_due <= NOW)


@pytest.fixture
def inbox(world: World) -> QueueBuilder:
    return world.queue("inbox")


def explain(engine: Engine, queue: QueueBuilder) -> tuple[Facts, list[str]]:
    with engine.connect() as connection:
        facts = facts_of(connection, queue.endpoint.row.slug, queue.name, now=NOW)
    assert facts is not None
    return facts, [reason.code for reason in judge(facts).reasons]


def test_a_stalled_queue_has_no_reason_against_it(engine: Engine, inbox: QueueBuilder) -> None:
    inbox.pending(age="7m")
    assert explain(engine, inbox)[1] == []


@pytest.mark.parametrize(
    ("arrange", "codes"),
    [
        (lambda inbox: inbox.done(ago="1h"), ["drained"]),
        (lambda inbox: inbox.pending(age="4m59s"), ["fresh"]),
        (lambda inbox: (inbox.pending(age="1h"), inbox.claimed(ago="1m")), ["claimed"]),
        (lambda inbox: inbox.requeued(ago="1m", age="1h"), ["requeued"]),
        (lambda inbox: (inbox.pending(age="1h"), inbox.nudged(1, ago="19m")), ["paced"]),
        (lambda inbox: (inbox.pending(age="1d"), inbox.nudged(5, ago="9h")), ["capped"]),
        (lambda inbox: inbox.pending(age="1h", vouched=False), ["unvouched"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_says_what_keeps_the_queue_quiet(
    engine: Engine, inbox: QueueBuilder, arrange: Any, codes: list[str]
) -> None:
    arrange(inbox)
    assert explain(engine, inbox)[1] == codes


def test_says_what_forbids_the_wake(engine: Engine, world: World) -> None:
    def codes(queue: QueueBuilder) -> list[str]:
        queue.pending(age="1h")
        return explain(engine, queue)[1]

    revoked = world.endpoint(state="revoked")
    revoked.hook()
    expired = world.endpoint(expires_in="-1s")
    expired.hook()
    elsewhere = world.endpoint(scope=["outbox"])
    elsewhere.hook()
    hookless = world.endpoint()
    disabled = world.endpoint()
    disabled.hook(enabled=False)
    filtered = world.endpoint()
    filtered.hook(queues=["outbox"])

    assert codes(revoked.queue()) == ["revoked"]
    assert codes(expired.queue()) == ["expired"]
    assert codes(elsewhere.queue()) == ["out_of_scope"]
    assert codes(hookless.queue()) == ["no_hook"]
    assert codes(disabled.queue()) == ["hooks_disabled"]
    assert codes(filtered.queue()) == ["not_admitted"]
    assert codes(world.queue(QUARANTINE)) == ["quarantine"]


def test_says_every_reason_at_once(engine: Engine, world: World) -> None:
    queue = world.endpoint(state="revoked", scope=[]).queue()
    queue.pending(age="1m", vouched=False)
    assert explain(engine, queue)[1] == ["fresh", "unvouched", "revoked", "out_of_scope", "no_hook"]


def test_finds_the_endpoint_by_slug_and_by_id(engine: Engine, inbox: QueueBuilder) -> None:
    with engine.connect() as connection:
        by_slug = facts_of(connection, inbox.endpoint.row.slug, "inbox", now=NOW)
        by_id = facts_of(connection, str(inbox.endpoint.id), "inbox", now=NOW)
    assert by_slug == by_id
    assert by_slug is not None


def test_prefers_the_id_where_a_slug_reads_like_one(engine: Engine, world: World) -> None:
    wanted = world.endpoint()
    world.endpoint(slug=str(wanted.id))
    with engine.connect() as connection:
        facts = facts_of(connection, str(wanted.id), "inbox", now=NOW)
    assert facts is not None
    assert facts.endpoint_id == wanted.id


def test_explains_in_plain_words(command: Command, inbox: QueueBuilder) -> None:
    inbox.pending(age="1d")
    inbox.nudged(5, ago="9h")
    result = command("why", inbox.endpoint.row.slug, "inbox", "--now", NOW.isoformat())
    assert result.exit_code == 0
    assert "it had its five nudges; now silence: until a claim or a drain" in result.stdout


def test_answers_a_program_in_json(command: Command, inbox: QueueBuilder) -> None:
    inbox.pending(age="1h")
    inbox.nudged(1, ago="19m")
    answer = command.json("why", str(inbox.endpoint.id), "inbox", "--now", NOW.isoformat())
    assert (answer["queue"], answer["nudged_now"], answer["spent"]) == ("inbox", False, 1)
    assert [reason["code"] for reason in answer["reasons"]] == ["paced"]
    assert answer["next_due"] == "2026-12-01T12:01:00Z"


def test_an_unknown_endpoint_is_a_failure(command: Command) -> None:
    result = command("why", "nobody", "inbox")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == 'Error: there is no endpoint with the slug or id "nobody"\n'


def test_the_next_sweep_takes_what_it_calls_due(
    engine: Engine, command: Command, inbox: QueueBuilder
) -> None:
    inbox.pending(age="7m")
    assert command.json("why", inbox.endpoint.row.slug, "inbox", "--now", NOW.isoformat())["nudged_now"]
    with Session(engine) as session:
        assert len(session.execute(nudge_statement(now=NOW)).all()) == 1
