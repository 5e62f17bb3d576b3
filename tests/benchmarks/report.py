"""What is done with results: tables on the terminal, JSON, plots and ``cost.md`` in docs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import asdict
from benchmarks import plots

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.bench import Result

TEMPLATE: Final = Path(__file__).with_name("cost.md.in")
FOLDER: Final = "benchmarks"
_SLOT: Final = re.compile(r"\{\{([^}|]+)(?:\|([^}]*))?\}\}")


def as_text(name: str, result: Result) -> str:
    """Lay the tables out for a terminal."""
    lines = [f"== {name}"]
    lines += [f"{key}: {value}" for key, value in result.figures.items() if not isinstance(value, dict)]
    for table in result.tables.values():
        cells = [list(map(_shown, row)) for row in [list(table.columns), *table.rows]]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", f"-- {table.title}"]
        lines += ["  ".join(map(str.rjust, row, widths)) for row in cells]
    return "\n".join([*lines, ""])


def write_json(docs: Path, name: str, result: Result) -> None:
    """Keep one part's result."""
    folder = docs / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n")


def write_docs(docs: Path) -> None:
    """Draw the plots and fill the page from the JSON that is there."""
    results = read(docs)
    for name, drawn in plots.draw(results).items():
        (docs / FOLDER / f"{name}.svg").write_text(drawn)
    (docs / "cost.md").write_text(page(results))


def read(docs: Path) -> dict[str, Any]:
    """Return each part's result by the part's name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((docs / FOLDER).glob("*.json"))}


def page(results: Mapping[str, Any], template: str | None = None) -> str:
    """Fill the slots of the page: ``{{part/path/to/figure}}``, with a format behind a bar, or ``|table``,
    or ``|<=8`` for whether a goal is met.

    A path's step is a key or an index; ``[column=value]`` finds the row in which a column has a value, and
    a column's name then finds the cell.
    """

    def fill(match: re.Match[str]) -> str:
        value = look_up(results, match[1].strip())
        if match[2] == "table":
            return markdown(value)
        if match[2] and match[2].startswith("<="):
            return "met" if value <= float(match[2][2:]) else "**not met**"
        return format(value, match[2]) if match[2] else _shown(value)

    return _SLOT.sub(fill, TEMPLATE.read_text() if template is None else template)


def look_up(results: Mapping[str, Any], path: str) -> Any:
    """Follow a path: ``part/tables/states/[state=paced,pending=100000]/sweep ms``."""
    value: Any = results
    table: Mapping[str, Any] = {}
    for step in path.split("/"):
        if step.startswith("["):
            table = value
            wanted = dict(pair.split("=", 1) for pair in step[1:-1].split(","))
            (value,) = (
                row
                for row in value["rows"]
                if all(str(row[value["columns"].index(key)]) == want for key, want in wanted.items())
            )
        elif isinstance(value, list):
            value = value[table["columns"].index(step) if table else int(step)]
        else:
            value = value[step]
    return value


def markdown(table: Mapping[str, Any]) -> str:
    """Lay a table out as Markdown."""
    rows = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
    return "\n".join("| " + " | ".join(map(_shown, row)) + " |" for row in rows)


def _shown(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}"
