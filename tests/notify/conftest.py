"""What the tests of the wake share: one authority, one key, a stage to deliver on, and an ear on the log."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from attrs import define, field
from sqlalchemy import select, update
from sqlalchemy.orm import Session
from support.receiver import LOOPBACK, Authority, Receiver

from switchboard_stall import Endpoint, NotifyHook
from switchboard_stall.notify import Dispatcher, MintedSecret, SecretBox, TargetPolicy, create_hook

if TYPE_CHECKING:
    import uuid
    from collections.abc import Iterator

    from sqlalchemy import Engine
    from support.builders import EndpointBuilder, World

KEY = bytes(range(1, 33)).hex()
HOST = "hooks.example"
MARKER = "query-that-nobody-may-log"

# A secret, a signature with its 43 digits, and the query that every hook's URL carries.
_LEAKS = re.compile(rf"whsec_|v1,[A-Za-z0-9+/]{{43}}=|{MARKER}|{KEY}")


@pytest.fixture(autouse=True)
def nothing_secret_is_logged() -> Iterator[None]:
    """Every test of the wake fails if a secret, a signature or a URL's query shows in what it logged."""
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
    package = logging.getLogger("switchboard_stall")
    level = package.level
    logging.getLogger().addHandler(handler)
    package.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        package.setLevel(level)
    leak = _LEAKS.search(heard.getvalue())
    assert leak is None, f"the log shows {leak[0]!r}:\n{heard.getvalue()}"


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def receiver(authority: Authority) -> Iterator[Receiver]:
    """Honest, unless the test says otherwise before the first request."""
    with Receiver(authority.server_context(LOOPBACK, HOST)) as receiver:
        yield receiver


@define(eq=False)
class Stage:
    """A database with one active endpoint, and what it takes to deliver from it."""

    engine: Engine
    authority: Authority
    world: World
    endpoint: EndpointBuilder = field(init=False)
    box: SecretBox = field(factory=lambda: SecretBox(KEY))
    policy: TargetPolicy = field(factory=lambda: TargetPolicy(allow_cidrs=["127.0.0.0/8"]))
    names: dict[str, list[str]] = field(factory=lambda: {HOST: [LOOPBACK]})
    asked: list[str] = field(factory=list)

    @endpoint.default
    def _endpoint(self) -> EndpointBuilder:
        return self.world.endpoint(scope=["inbox"])

    def resolver(self, host: str) -> list[str]:
        self.asked.append(host)
        try:
            return self.names[host]
        except KeyError:
            raise OSError("no such name") from None

    def hook(self, url: str, *, endpoint: EndpointBuilder | None = None, **given: Any) -> MintedSecret:
        """A hook as its owner makes it; each URL carries a query that must not be logged."""
        with Session(self.engine) as session:
            minted = create_hook(
                session,
                (endpoint or self.endpoint).id,
                f"{url}?token={MARKER}",
                key=self.box,
                policy=self.policy,
                resolver=self.resolver,
                **given,
            )
            session.commit()
            return minted

    def todo(self, *, endpoint: EndpointBuilder | None = None, **columns: Any) -> Any:
        """A pending todo of the inbox, as a ready hook is given it."""
        return (endpoint or self.endpoint).queue("inbox").pending(age="1m", **columns)

    @contextlib.contextmanager
    def dispatcher(self, **given: Any) -> Iterator[Dispatcher]:
        """A dispatcher with short waits that trusts the tests' authority and resolves their names only."""
        settings: dict[str, Any] = {
            "key": self.box,
            "allow_cidrs": self.policy.allow_cidrs,
            "tls": self.authority.client_context(),
            "resolver": self.resolver,
            "retry_waits": (timedelta(milliseconds=20), timedelta(milliseconds=40)),
            "attempt_timeout": timedelta(seconds=5),
        }
        with Dispatcher(self.engine, **settings | given) as dispatcher:
            yield dispatcher

    def row(self, hook_id: uuid.UUID) -> NotifyHook:
        """The hook as it is stored."""
        with Session(self.engine, expire_on_commit=False) as session:
            row = session.scalars(select(NotifyHook).where(NotifyHook.id == hook_id)).one()
            session.expunge(row)
            return row

    def set_hook(self, hook_id: uuid.UUID, **columns: Any) -> None:
        with Session(self.engine) as session:
            session.execute(update(NotifyHook).where(NotifyHook.id == hook_id).values(**columns))
            session.commit()

    def set_endpoint(self, **columns: Any) -> None:
        with Session(self.engine) as session:
            session.execute(update(Endpoint).where(Endpoint.id == self.endpoint.id).values(**columns))
            session.commit()


@pytest.fixture
def stage(engine: Engine, authority: Authority, world: World) -> Stage:
    return Stage(engine, authority, world)
