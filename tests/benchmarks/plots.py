"""Plots as SVG, written by hand: lines on linear or logarithmic axes."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 40, 72
COLOURS: Final = ("#1f6feb", "#d9480f", "#2b8a3e", "#862e9c", "#495057")
_FONT: Final = "font-family='system-ui, sans-serif' font-size='12' fill='#212529'"


@frozen
class Axis:
    """What stands along one side."""

    title: str
    log: bool = False

    def place(self, value: float, low: float, high: float) -> float:
        """Where a value stands, from 0 to 1."""
        if self.log:
            value, low, high = (math.log10(max(each, 1e-9)) for each in (value, low, high))
        return (value - low) / (high - low) if high > low else 0.5

    def span(self, values: Sequence[float]) -> tuple[float, float]:
        """The ends of the axis: the next powers of ten, or from zero."""
        if self.log:
            low, high = (max(each, 1e-9) for each in (min(values), max(values)))
            return 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high) + 1e-9)
        return 0.0, max(values) * 1.1 or 1.0

    def ticks(self, low: float, high: float) -> list[float]:
        """Where marks stand."""
        if self.log:
            return [10.0**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]
        step = 10 ** math.floor(math.log10(high / 2))
        step *= next(times for times in (1, 2, 5, 10) if high / (step * times) <= 6)
        return [step * number for number in range(int(high / step) + 1)]


def lines(title: str, across: Axis, up: Axis, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draw each series as a line with a dot at every measurement."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    (left, right), (low, high) = across.span(xs), up.span(ys)

    def x_of(value: float) -> float:
        return LEFT + across.place(value, left, right) * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - up.place(value, low, high) * (HEIGHT - TOP - BOTTOM)

    drawn = [_text(WIDTH / 2, 20, title, "middle", bold=True)]
    for tick in up.ticks(low, high):
        y = y_of(tick)
        drawn.append(f"<line x1='{LEFT}' y1='{y:.1f}' x2='{WIDTH - RIGHT}' y2='{y:.1f}' stroke='#dee2e6'/>")
        drawn.append(_text(LEFT - 8, y + 4, _short(tick), "end"))
    for tick in across.ticks(left, right):
        drawn.append(_text(x_of(tick), HEIGHT - BOTTOM + 18, _short(tick), "middle"))
    drawn.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 36, across.title, "middle"))
    drawn.append(
        f"<text transform='translate(16 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)'"
        f" text-anchor='middle' {_FONT}>{escape(up.title)}</text>"
    )
    place = LEFT
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        drawn.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>")
        drawn += [f"<circle cx='{x_of(x):.1f}' cy='{y_of(y):.1f}' r='3' fill='{colour}'/>" for x, y in points]
        drawn.append(f"<rect x='{place}' y='{HEIGHT - 22}' width='12' height='12' fill='{colour}'/>")
        drawn.append(_text(place + 17, HEIGHT - 11, name, "start"))
        place += 30 + 7 * len(name)
    return _svg(WIDTH, HEIGHT, title, drawn)


def draw(results: Mapping[str, Any]) -> dict[str, str]:
    """Draw every plot whose figures are there, by file name."""
    drawn = {}
    if "per-pair" in results:
        tables = results["per-pair"]["tables"]
        states = ("stalled, old claims", "paced", "requeued", "fresh")
        drawn["backlog"] = lines(
            "Time of a sweep against the backlog",
            Axis("pending todos", log=True),
            Axis("ms a sweep"),
            {state: _points(tables["states"], "pending", "sweep ms", state=state) for state in states},
        )
        drawn["buffers"] = lines(
            "Buffers a pair against the backlog",
            Axis("pending todos", log=True),
            Axis("buffers a pair"),
            {
                **{
                    state: _points(tables["states"], "pending", "sweep: buffers a pair", state=state)
                    for state in states
                },
                "the walk": _points(tables["states"], "pending", "walk: buffers a pair", state="paced"),
            },
        )
        drawn["pairs"] = lines(
            "Time of a sweep against the number of pairs",
            Axis("pairs", log=True),
            Axis("ms", log=True),
            {
                "the sweep": _points(tables["pairs"], "pairs", "sweep ms"),
                "the walk": _points(tables["pairs"], "pairs", "walk ms"),
            },
        )
    if "contention" in results:
        tables = results["contention"]["tables"]
        drawn["instances"] = lines(
            "Against the number of instances",
            Axis("instances"),
            Axis("a second"),
            {
                "wakes, all due at once": _points(tables["wakes"], "instances", "wakes/s"),
            },
        )
    return drawn


def _points(table: Mapping[str, Any], across: str, up: str, **only: str) -> list[tuple[float, float]]:
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    return [(row[across], row[up]) for row in rows if all(row[name] == value for name, value in only.items())]


def _svg(width: int, height: int, title: str, drawn: Sequence[str]) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img'>"
    ground = f"<rect width='{width}' height='{height}' fill='white'/>"
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *drawn, "</svg>", ""])


def _text(x: float, y: float, said: str, anchor: str, *, bold: bool = False) -> str:
    weight = " font-weight='bold'" if bold else ""
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' {_FONT}{weight}>{escape(said)}</text>"


def _short(value: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"
