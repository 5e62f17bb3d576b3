"""The dispatcher's counters as OpenTelemetry metrics: the extra ``otel``.

Nothing is counted twice: the instruments read what the dispatcher counts anyway, when a reader collects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from switchboard_stall.notify.dispatcher import Dispatcher


def observe(dispatcher: Dispatcher, meter: metrics.Meter | None = None) -> None:
    """Publish what a dispatcher has done and what it holds.

    Three instruments, read when the SDK collects; attributes say which:

    - ``switchboard.wake.notifications``, a counter of notifications that came to an end: ``outcome`` is
      ``delivered``, ``failed``, ``dropped`` or ``skipped``, and ``reason`` says why for the last three.
    - ``switchboard.wake.attempts``, a counter of attempts that came to an end.
    - ``switchboard.wake.held``, a gauge of notifications held: ``stage`` is ``ready``, ``deliveries`` or
      ``running``.

    :param dispatcher: whose. The instruments keep it alive as long as the meter's provider lives.
    :param meter: makes the instruments; ``None`` for one of the global provider.
    """
    meter = meter if meter is not None else metrics.get_meter("switchboard_stall")

    def notifications(_: CallbackOptions) -> Iterable[Observation]:
        stats = dispatcher.stats
        yield Observation(stats.delivered, {"outcome": "delivered"})
        for outcome in ("failed", "dropped", "skipped"):
            for reason, number in getattr(stats, outcome).items():
                yield Observation(number, {"outcome": outcome, "reason": reason})

    def attempts(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(dispatcher.stats.attempts)

    def held(_: CallbackOptions) -> Iterable[Observation]:
        stats = dispatcher.stats
        for stage in ("ready", "deliveries", "running"):
            yield Observation(getattr(stats, stage), {"stage": stage})

    meter.create_observable_counter(
        "switchboard.wake.notifications", [notifications], "{notification}", "Notifications that ended"
    )
    meter.create_observable_counter(
        "switchboard.wake.attempts", [attempts], "{attempt}", "Attempts that ended"
    )
    meter.create_observable_gauge(
        "switchboard.wake.held", [held], "{notification}", "Notifications held in memory"
    )
