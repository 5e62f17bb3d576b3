"""The stage: each test gets actors, sessions that act at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.actors import stage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine
    from support.actors import Stage


@pytest.fixture
def actor(engine: Engine) -> Iterator[Stage]:
    with stage(engine) as make:
        yield make
