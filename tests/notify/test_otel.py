"""The metrics say what the dispatcher counts."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint

from switchboard_stall import Todo
from switchboard_stall.models import QUARANTINE
from switchboard_stall.notify import Dispatcher
from switchboard_stall.notify.otel import observe

if TYPE_CHECKING:
    from sqlalchemy import Engine


def collected(reader: InMemoryMetricReader) -> dict[tuple[str, ...], int | float]:
    data = reader.get_metrics_data()
    assert data is not None
    return {
        (metric.name, *map(str, (point.attributes or {}).values())): point.value
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
        if isinstance(point, NumberDataPoint)
    }


def test_the_instruments_read_what_the_dispatcher_counts(engine: Engine) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    dispatcher = Dispatcher(engine, key=secrets.token_hex(32))
    observe(dispatcher, provider.get_meter("test"))
    assert collected(reader)["switchboard.wake.notifications", "delivered"] == 0

    todo = Todo(id="td_1", queue=QUARANTINE, title="t", attempt=0)
    for _ in range(3):
        dispatcher.enqueue(todo, "created")
    dispatcher.close()
    dispatcher.enqueue(Todo(id="td_2", queue="inbox", title="t", attempt=0), "created")

    seen = collected(reader)
    assert seen["switchboard.wake.notifications", "skipped", "quarantine"] == 3
    assert seen["switchboard.wake.notifications", "dropped", "closed"] == 1
    assert seen["switchboard.wake.attempts",] == 0
    assert seen["switchboard.wake.held", "ready"] == 0
    provider.shutdown()
