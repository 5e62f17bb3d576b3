"""``demo``: the whole story of a queue that stalls, on a real PostgreSQL, told in seconds.

Real are the server, the rows, the sweeps, the HTTPS requests and the judge of their signatures. Invented is
only the time: every verb and every sweep is handed the story's instant.
"""

from __future__ import annotations

import base64
import logging
import secrets
import ssl
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from attrs import define, field
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from switchboard_stall import migrations
from switchboard_stall.cli.database import embedded, make_engine
from switchboard_stall.cli.output import duration, quoted, say
from switchboard_stall.cli.receiver import Receiver, make_certificates, receiver
from switchboard_stall.cli.wake import waking
from switchboard_stall.models import Endpoint, NotifyHook, QueueStall
from switchboard_stall.notify import Dispatcher, TargetPolicy, create_hook
from switchboard_stall.queue import claim, complete, enqueue
from switchboard_stall.schedule import STALL_POLICY
from switchboard_stall.sweep import Nudge, nudge_stalled_queues

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable, Iterator

    from sqlalchemy import URL, Engine

QUEUE: Final = "inbox"
LOOPBACK: Final = "127.0.0.0/8"
TICK: Final = timedelta(seconds=30)
PATIENCE: Final = 10.0
"""Seconds to wait for a wake that is owed."""

QUIET: Final = 0.3
"""Seconds to listen for a wake that must not come."""


class _LastLevel(logging.Handler):
    """Remembers how loud the sweep's last line was."""

    def __init__(self) -> None:
        super().__init__()
        self.level_seen = logging.NOTSET

    def emit(self, record: logging.LogRecord) -> None:
        self.level_seen = record.levelno


@define
class Story:
    """The stage of the demo: who takes part, what time it is in the story, and what has held so far."""

    engine: Engine
    receiver: Receiver
    endpoint_id: uuid.UUID
    log: _LastLevel
    start: datetime
    now: datetime = field(init=False)
    held: int = field(default=0, init=False)
    broken: list[str] = field(factory=list, init=False)

    @now.default
    def _begins_at_the_start(self) -> datetime:
        return self.start

    def tell(self, words: str) -> None:
        """Print what happens, at the time of the story."""
        say(f"{_clock(self.now - self.start):>10}  {words}")

    def check(self, words: str, holds: bool) -> None:
        """Print whether something that must hold does."""
        say(f"{'':>10}  {'✓' if holds else '✗'} {words}")
        if holds:
            self.held += 1
        else:
            self.broken.append(words)

    def send(self, *titles: str) -> None:
        """Enqueue todos, as a sender whose deliveries are verified."""
        for title in titles:
            with Session(self.engine) as session:
                enqueue(
                    session,
                    self.endpoint_id,
                    QUEUE,
                    title,
                    source="billing",
                    kind="invoice.paid",
                    idempotency_key=title,
                    vouched=True,
                    now=self.now,
                )
                session.commit()
            self.now += timedelta(seconds=1)

    def consume(self) -> int:
        """Be a one-shot consumer: claim one todo, finish it, exit. Returns how many it found."""
        with Session(self.engine) as session:
            todos = claim(session, self.endpoint_id, "one-shot", now=self.now)
            session.commit()
            for todo in todos:
                complete(session, todo.id, "one-shot", {"booked": True}, now=self.now)
            session.commit()
        return len(todos)

    def sweep(self) -> list[Nudge]:
        """Sweep once, as one instance does on a tick."""
        with Session(self.engine) as session:
            nudges = nudge_stalled_queues(session, now=self.now)
            session.commit()
        return nudges

    def until_nudged(self, *, at_most: timedelta, every: timedelta = TICK) -> tuple[Nudge | None, timedelta]:
        """Let ticks pass until one nudges; return the nudge and how long it took."""
        began = self.now
        while self.now - began < at_most:
            self.now += every
            nudges = self.sweep()
            if nudges:
                return nudges[0], self.now - began
        return None, self.now - began

    def expect_wake(self, nudge: Nudge) -> None:
        """Check that the receiver gets the nudge, believes it, and gets nothing else."""
        wakes = self.receiver.wakes(1, patience=PATIENCE)
        right = [
            wake
            for wake in wakes
            if wake.verified
            and wake.body["type"] == "todo.ready"
            and wake.body["todo_id"] == nudge.todo.id
            and wake.body["queue"] == nudge.queue
        ]
        title = quoted(nudge.todo.title)
        self.check(f"one wake came for {title}, its signature verified", len(right) == 1)

    def ledger_rows(self) -> int:
        """How many pairs the ledger holds."""
        with Session(self.engine) as session:
            return session.scalar(select(func.count()).select_from(QueueStall)) or 0

    def health(self) -> tuple[int | None, int]:
        """The last HTTP status of the hook, and its failures in a row."""
        with Session(self.engine) as session:
            row = session.execute(select(NotifyHook.last_status, NotifyHook.consecutive_failures)).one()
        return row.last_status, row.consecutive_failures


def creation(story: Story) -> None:
    """A sender's todos ring by themselves, once each."""
    titles = ("Invoice 1041", "Invoice 1042", "Invoice 1043")
    story.tell(f"A sender enqueues {len(titles)} todos into {quoted(QUEUE)}.")
    story.send(*titles)
    wakes = story.receiver.wakes(len(titles), patience=PATIENCE)
    created = all(wake.verified and wake.body["reason"] == "created" for wake in wakes)
    named = {wake.body["summary"] for wake in wakes} == set(titles)
    story.check("a creation wake came for each, its signature verified", created and named)


def one_shot(story: Story) -> None:
    """A consumer without a session claims one and exits: the hole that this package closes."""
    story.now += TICK
    story.tell("A one-shot consumer wakes, claims one todo, finishes it, and exits.")
    story.check("it claimed one; two are left, and no edge will ring for them again", story.consume() == 1)


def first_nudge(story: Story) -> None:
    """The first nudge, one wait after the claim."""
    nudge, after = story.until_nudged(at_most=timedelta(hours=1))
    story.tell(f"Ticks pass, one every {duration(TICK)}. No new webhook arrives.")
    _check_nudge(story, nudge, 1, after)


def backoff(story: Story) -> None:
    """The second nudge waits longer."""
    nudge, after = story.until_nudged(at_most=timedelta(hours=2))
    story.tell("Nobody claims. The sweep backs off.")
    _check_nudge(story, nudge, 2, after)


def two_instances(story: Story) -> None:
    """Two instances sweep at one moment: one wake."""
    story.now += STALL_POLICY.wait(3) - TICK
    early = story.sweep()
    story.now += TICK
    gate = threading.Barrier(2)

    def instance() -> list[Nudge]:
        with Session(story.engine) as session:
            session.connection(execution_options={"isolation_level": "READ COMMITTED"})
            gate.wait(PATIENCE)
            nudges = nudge_stalled_queues(session, now=story.now)
            session.commit()
            return nudges

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(instance) for _ in range(2)]
        nudges = [nudge for run in runs for nudge in run.result()]
    story.tell("Two instances sweep at the same moment.")
    story.check("one of them nudges, the other finds it charged", len(nudges) == 1 and not early)
    if nudges:
        _check_nudge(story, nudges[0], 3, STALL_POLICY.wait(3))
    story.check("no second wake came", story.receiver.quiet(QUIET))


def progress(story: Story) -> None:
    """A claim proves the consumer alive, and the budget is whole again."""
    story.now += timedelta(minutes=10)
    story.tell("The consumer comes back, claims one todo, finishes it, and exits.")
    story.check("it claimed one; one is left", story.consume() == 1)
    nudge, after = story.until_nudged(at_most=timedelta(hours=12))
    story.tell("It stalls again. A claim was progress, so the budget is fresh.")
    _check_nudge(story, nudge, 1, after)


def cap(story: Story) -> None:
    """Five nudges, then silence."""
    story.tell("This time nobody comes.")
    for number in range(2, STALL_POLICY.cap + 1):
        nudge, after = story.until_nudged(at_most=timedelta(days=1), every=STALL_POLICY.wait(number) / 20)
        story.tell(f"Nudge {number}.")
        _check_nudge(story, nudge, number, after)
    story.check("the sweep logged the last one as a warning", story.log.level_seen == logging.WARNING)
    nudge, _ = story.until_nudged(at_most=timedelta(days=7), every=timedelta(hours=6))
    story.tell("A week passes.")
    story.check(f"silence: {STALL_POLICY.cap} nudges are the most a stall gets", nudge is None)
    story.check("no wake came", story.receiver.quiet(QUIET))


def drain(story: Story) -> None:
    """A drained queue is forgotten, and its next stall is a first one."""
    story.tell("Somebody mends the consumer. It takes the last todo.")
    story.check("it claimed one; the queue is empty", story.consume() == 1)
    story.now += TICK
    before, nudges = story.ledger_rows(), story.sweep()
    story.tell("The next sweep.")
    story.check(
        "it forgets the queue's nudges, and wakes nobody",
        (before, nudges, story.ledger_rows()) == (1, [], 0) and story.receiver.quiet(QUIET),
    )
    story.now += timedelta(days=1)
    title = "Invoice 1044"
    story.tell("A new todo comes, and nobody claims it.")
    story.send(title)
    wakes = story.receiver.wakes(1, patience=PATIENCE)
    story.check(
        "a creation wake came, its signature verified",
        [(wake.verified, wake.body["summary"]) for wake in wakes] == [(True, title)],
    )
    nudge, after = story.until_nudged(at_most=timedelta(hours=12))
    story.tell("It stalls, on a fresh budget.")
    _check_nudge(story, nudge, 1, after)
    story.check("no other wake came", story.receiver.quiet(QUIET))
    story.check("the hook is healthy: last answer 204, no failure", story.health() == (204, 0))


SCENES: Final[tuple[Callable[[Story], None], ...]] = (
    creation,
    one_shot,
    first_nudge,
    backoff,
    two_instances,
    progress,
    cap,
    drain,
)
"""The story, in order."""


def _check_nudge(story: Story, nudge: Nudge | None, number: int, after: timedelta) -> None:
    wait = STALL_POLICY.wait(number)
    holds = nudge is not None and nudge.number == number and after == wait
    seen = "none came" if nudge is None else f"nudge {nudge.number} after {duration(after)}"
    words = f"nudge {number} of {STALL_POLICY.cap} after {duration(wait)}"
    story.check(words if holds else f"{words} (seen: {seen})", holds)
    if nudge is not None:
        story.expect_wake(nudge)


def _clock(elapsed: timedelta) -> str:
    seconds = int(elapsed.total_seconds())
    days, rest = divmod(seconds, 86_400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}d {clock}" if days else clock


@contextmanager
def staged(url: URL) -> Iterator[Story]:
    """Give the stage on an empty database: migrated, with an endpoint, its hook, and a receiver behind it.

    :param url: of the database.
    """
    with ExitStack() as stack:
        engine = make_engine(url)
        stack.callback(engine.dispose)
        with engine.connect() as connection:
            migrations.upgrade(connection)
            version = connection.scalar(text("SHOW server_version"))
        say(f"{'':>10}  PostgreSQL {version}, at revision {migrations.current(engine)}")

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="switchboard-stall-")))
        certificates = make_certificates()
        receiving = stack.enter_context(receiver(folder, certificates))
        key = base64.b64encode(secrets.token_bytes(32)).decode()
        with Session(engine) as session:
            endpoint = Endpoint(slug="night-shift", scope_queues=[QUEUE])
            session.add(endpoint)
            session.commit()
            endpoint_id = endpoint.id
            # The policy is what keeps a hook from naming this machine; a demo lives on this machine.
            policy = TargetPolicy(allow_cidrs=[LOOPBACK])
            minted = create_hook(session, endpoint_id, receiving.url, key=key, policy=policy)
            session.commit()
        receiving.trust(minted.secret)
        say(f"{'':>10}  endpoint night-shift, its hook at {receiving.url}, its secret sealed")

        tls = ssl.create_default_context(cadata=certificates.authority)
        stack.enter_context(waking(Dispatcher(engine, key=key, tls=tls, allow_cidrs=[LOOPBACK])))

        log = _LastLevel()
        sweep_log = logging.getLogger("switchboard_stall.sweep")
        sweep_log.addHandler(log)
        stack.callback(sweep_log.removeHandler, log)
        level = sweep_log.level
        sweep_log.setLevel(logging.INFO)
        stack.callback(sweep_log.setLevel, level)
        yield Story(engine, receiving, endpoint_id, log, datetime.now(UTC).replace(microsecond=0))


@click.command("demo")
def demo() -> None:
    """Tell the story of a queue that stalls: real PostgreSQL, real HTTPS, real signatures, invented time.

    Needs the extras cli and embedded and nothing else. What it makes is thrown away.
    """
    began = time.monotonic()
    say("The story of a queue that stalls. Times are the story's; the rest is real.\n")
    with embedded(None, durable=False) as url, staged(url) as story:
        say()
        for scene in SCENES:
            scene(story)
        held, broken = story.held, story.broken
    say()
    if broken:
        raise click.ClickException(f"{len(broken)} of {held + len(broken)} did not hold: {'; '.join(broken)}")
    say(f"All {held} held, in {time.monotonic() - began:.1f} s.")
