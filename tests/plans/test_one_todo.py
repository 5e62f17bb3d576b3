"""What concerns one todo reads a handful of pages, whatever lies around it, whatever the planner believes.

A partial index that the statistics call empty looks as cheap as the primary key; one burst later it is not.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import pytest
from attrs import frozen
from sqlalchemy import NullPool, create_engine, func, select, text, update
from sqlalchemy.orm import Session
from support.backlogs import fill
from support.builders import NOW, World
from support.databases import DatabaseServer, database_copy, leave_to_us, vacuum

from switchboard_stall import Endpoint, Todo, queue
from switchboard_stall import plans as kept
from switchboard_stall.notify.eligible import Receiver, receiver, receivers

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine

PAGES: Final = text(
    "SELECT sum(pg_stat_get_xact_blocks_fetched(part)) FROM ("
    " SELECT indexrelid AS part FROM pg_index WHERE indrelid = 'todos'::regclass"
    " UNION ALL SELECT 'todos'::regclass) parts"
)
"""Pages of todos and its indexes that this transaction touched, as the server counts them."""

EACH: Final = 20_000


@frozen
class Crowd:
    """An endpoint with todos of every kind, and one of them to act on."""

    engine: Engine
    endpoint_id: uuid.UUID
    hook_id: uuid.UUID
    spare_id: uuid.UUID
    """Another endpoint, which has nothing of the kind."""

    def one(self, state: str) -> str:
        """A todo in that state, from the midst of them."""
        with Session(self.engine) as session:
            return session.scalars(
                select(Todo.id)
                .where(Todo.endpoint_id == self.endpoint_id, Todo.state == state)
                .order_by(func.md5(Todo.id))
                .limit(1)
            ).one()


NOTHING_MOVED: Final = "of a table where nothing was claimed or pending"
STATISTICS: Final = ("taken now", "missing", "of an empty table", "of others", NOTHING_MOVED)


@pytest.fixture(scope="module", params=STATISTICS, ids=lambda which: f"statistics {which}")
def crowd(request: pytest.FixtureRequest, server: DatabaseServer, template: str) -> Iterator[Crowd]:
    """Made once; whatever is written there is rolled back."""
    with database_copy(server, template) as name:
        engine = server.engine(name)
        with engine.begin() as connection:
            leave_to_us(connection)
        if request.param == "of an empty table":
            vacuum(engine, "VACUUM (ANALYZE)", Todo)
        world = World(engine)
        endpoint, other = world.endpoint(scope=["inbox", "other"]), world.endpoint()
        lease = NOW + timedelta(days=1)
        if request.param == "of others":
            fill(engine, other.id, EACH, state="done", claimed_at=NOW - timedelta(days=1))
            fill(engine, other.id, EACH)
            vacuum(engine, "VACUUM (ANALYZE)", Todo)
        fill(engine, endpoint.id, EACH, state="done", claimed_at=NOW - timedelta(days=1))
        if request.param == NOTHING_MOVED:
            vacuum(engine, "VACUUM (ANALYZE)", Todo)
        fill(engine, endpoint.id, EACH, state="claimed", owner="worker", lease_expires_at=lease)
        fill(engine, endpoint.id, EACH // 4, state="failed")
        fill(engine, endpoint.id, EACH)
        fill(engine, other.id, EACH)
        if request.param == "taken now":
            vacuum(engine, "VACUUM (ANALYZE)", Todo)
        elif request.param == "missing":
            vacuum(engine, "VACUUM", Todo)
        yield Crowd(engine, endpoint.id, endpoint.hook().id, other.id)
        engine.dispose()


def pages(engine: Engine, plans: str, act: Callable[[Session], Any]) -> int:
    """Do it in a session that prepares at once, see that it came to something, and count."""
    prepared = create_engine(engine.url, connect_args={"prepare_threshold": 0}, poolclass=NullPool)
    with Session(prepared) as session:
        session.execute(text(f"SET LOCAL plan_cache_mode = {plans}"))
        before = session.scalar(PAGES)
        assert act(session)
        return int(session.scalar(PAGES) - before)


PLANS: Final = pytest.mark.parametrize("plans", ["force_custom_plan", "force_generic_plan"])


@PLANS
def test_a_claim(crowd: Crowd, plans: str) -> None:
    assert pages(crowd.engine, plans, lambda s: queue.claim(s, crowd.endpoint_id, "worker", now=NOW)) < 100


@PLANS
@pytest.mark.parametrize("verb", [queue.heartbeat, queue.complete, queue.fail, queue.release])
def test_a_verb_of_who_holds_it(crowd: Crowd, plans: str, verb: Callable[..., Todo | None]) -> None:
    held = crowd.one("claimed")
    # Each entry that it writes is a descent.
    assert pages(crowd.engine, plans, lambda session: verb(session, held, "worker", now=NOW)) < 50


@PLANS
def test_whom_the_dispatcher_is_to_call(crowd: Crowd, plans: str) -> None:
    ready = crowd.one("pending")
    assert pages(crowd.engine, plans, lambda session: receivers(session, [ready])) < 20


@PLANS
def test_whether_the_dispatcher_may_still_call(crowd: Crowd, plans: str) -> None:
    ready = crowd.one("pending")
    assert (
        pages(
            crowd.engine,
            plans,
            lambda session: isinstance(receiver(session, crowd.hook_id, ready, "inbox"), Receiver),
        )
        < 20
    )


ACTS: Final[dict[str, Callable[[Session, Crowd, str], object]]] = {
    "claim": lambda session, crowd, _: queue.claim(session, crowd.endpoint_id, "worker", now=NOW),
    "heartbeat": lambda session, _, held: queue.heartbeat(session, held, "worker", now=NOW),
    "complete": lambda session, _, held: queue.complete(session, held, "worker", now=NOW),
    "reap": lambda session, *_: queue.reap_lapsed_leases(session, now=NOW),
    "retry": lambda session, *_: queue.requeue_due_retries(session, now=NOW),
    "re-ring": lambda session, *_: queue.rering_unclaimed(session, now=NOW),
    "revoke": lambda session, crowd, _: queue.revoke_endpoint(session, crowd.spare_id, now=NOW),
    "enqueue again": lambda session, crowd, _: queue.enqueue(
        session, crowd.spare_id, "inbox", "t", idempotency_key="k", now=NOW
    ),
    "whom to call": lambda session, _, held: receivers(session, [held]),
    "may it be called": lambda session, crowd, held: receiver(session, crowd.hook_id, held, "inbox"),
}


@pytest.mark.parametrize("name", ACTS)
def test_a_plan_that_was_made_for_an_empty_table_is_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By then the driver has prepared the statement, and the server has settled on a plan for it.

    A rollback would make the driver prepare anew, so everything here commits.
    """
    clock, act = 0.0, ACTS[name]
    monkeypatch.setattr(kept, "monotonic", lambda: clock)
    endpoint, spare, engine = world.endpoint(), world.endpoint(), world.engine
    crowd = Crowd(engine, endpoint.id, endpoint.hook().id, spare.id)
    with engine.begin() as connection:
        leave_to_us(connection)
    vacuum(engine, "VACUUM (ANALYZE)", Todo)
    with engine.connect() as connection, Session(connection) as session:
        for _ in range(15):
            act(session, crowd, "none")
            session.commit()
            with engine.begin() as other:
                other.execute(update(Endpoint).values(state="active", revoked_at=None))
        lease = NOW + timedelta(days=1)
        fill(engine, endpoint.id, EACH, state="done", claimed_at=NOW - timedelta(days=1))
        fill(engine, endpoint.id, EACH, state="claimed", owner="worker", lease_expires_at=lease)
        fill(engine, endpoint.id, EACH, state="failed", next_retry_at=lease)
        fill(engine, endpoint.id, EACH)
        held = crowd.one("claimed")
        clock += kept.PLAN_LIFETIME.total_seconds()

        before = session.scalar(PAGES)
        act(session, crowd, held)
        assert session.scalar(PAGES) - before < 100
