"""Each promise is kept by a ``Session`` and by an ``AsyncSession``."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Protocol

import pytest
from attrs import frozen
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from support.actors import PATIENCE
from support.builders import NOW

from switchboard_stall import Nudge, nudge_stalled_queues

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine
    from support.databases import DatabaseServer

AT_ONCE: Final = 5


class Sweep(Protocol):
    """Sweep in a session of its own, and commit unless told otherwise."""

    def __call__(self, now: datetime | None = NOW, *, commit: bool = True) -> list[Nudge]: ...

    def at_once(self, times: int) -> list[list[Nudge]]:
        """Sweep that many times, several at a time, each in a session of its own."""


@pytest.fixture(params=["Session", "AsyncSession"])
def sweep(request: pytest.FixtureRequest, server: DatabaseServer, engine: Engine) -> Iterator[Sweep]:
    if request.param == "Session":
        yield Synchronous(engine)
        return
    assert engine.url.database is not None
    asynchronous = server.async_engine(engine.url.database)
    yield Asynchronous(asynchronous)
    asyncio.run(asynchronous.dispose())


@frozen
class Synchronous:
    """Several at a time are threads."""

    engine: Engine

    def __call__(self, now: datetime | None = NOW, *, commit: bool = True) -> list[Nudge]:
        with Session(self.engine) as session:
            nudges = nudge_stalled_queues(session, now=now)
            if commit:
                session.commit()
        return nudges

    def at_once(self, times: int) -> list[list[Nudge]]:
        with ThreadPoolExecutor(max_workers=AT_ONCE) as threads:
            return [future.result(PATIENCE) for future in [threads.submit(self) for _ in range(times)]]


@frozen
class Asynchronous:
    """Several at a time are tasks of one event loop, to which an asynchronous engine belongs."""

    engine: AsyncEngine

    def __call__(self, now: datetime | None = NOW, *, commit: bool = True) -> list[Nudge]:
        return asyncio.run(self._sweep(now, commit))

    def at_once(self, times: int) -> list[list[Nudge]]:
        async def all_of_them() -> list[list[Nudge]]:
            places = asyncio.Semaphore(AT_ONCE)

            async def one() -> list[Nudge]:
                async with places:
                    return await self._sweep(NOW, commit=True)

            return await asyncio.wait_for(asyncio.gather(*(one() for _ in range(times))), PATIENCE)

        return asyncio.run(all_of_them())

    async def _sweep(self, now: datetime | None, commit: bool) -> list[Nudge]:
        async with AsyncSession(self.engine) as session:
            nudges = await session.run_sync(lambda inner: nudge_stalled_queues(inner, now=now))
            if commit:
                await session.commit()
        return nudges
