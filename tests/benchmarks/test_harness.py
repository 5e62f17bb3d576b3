"""The benchmarks still run, and the page in docs says what was measured."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from benchmarks import report
from benchmarks.bench import QUICK, Bench, alternately, quantile
from benchmarks.command import DOCS, PARTS
from benchmarks.plots import Axis, draw
from support.databases import DatabaseServer, migrated_template
from support.variants import VARIANTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TINY = evolve(
    QUICK, backlogs=(40, 80), pair_counts=(4,), pairs=8, verbs=2, instances=(2,), receivers=2, wakes=2
)


@pytest.fixture
def small(server: DatabaseServer) -> Iterator[Bench]:
    """A run on the tests' server; whatever variant they are in, it measures the plain schema."""
    plain = DatabaseServer(server.url, variant=VARIANTS[""])
    with migrated_template(plain) as template:
        yield Bench(TINY, plain, template, say=lambda _: None)
    plain.disconnect()


@pytest.mark.parametrize("part", PARTS)
def test_each_part_runs_and_its_result_can_be_shown_and_kept(part: str, small: Bench, tmp_path: Path) -> None:
    result = PARTS[part](small)

    report.write_json(tmp_path, part, result)
    kept = report.read(tmp_path)[part]
    assert all(table["rows"] for table in kept["tables"].values() if "core" not in table["title"])
    assert all(table.title in report.as_text(part, result) for table in result.tables.values())


def test_acts_are_timed_in_turn() -> None:
    order: list[str] = []

    first, second = alternately(2, lambda: order.append("a"), lambda: order.append("b"))

    assert order == ["a", "b"] * 3
    assert len(first) == len(second) == 2


def test_a_quantile_is_a_value_that_was_measured() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 3.0
    assert quantile([1.0], 0.99) == 1.0


def test_a_slot_of_the_page_is_filled_from_a_cell_or_a_whole_table() -> None:
    results = {"part": {"tables": {"t": {"columns": ["state", "ms"], "rows": [["paced", 1234.5]]}}}}

    assert report.page(results, "{{part/tables/t/[state=paced]/ms}}") == "1,234.5"
    assert report.page(results, "{{part/tables/t/[state=paced]/ms|.0f}} ms") == "1234 ms"
    assert report.page(results, "{{part/tables/t|table}}").splitlines()[-1] == "| paced | 1,234.5 |"


def test_a_slot_without_a_figure_is_an_error() -> None:
    with pytest.raises(KeyError):
        report.page({}, "{{part/figures/none}}")


def test_the_page_in_docs_is_what_its_json_says() -> None:
    """Nobody writes a figure by hand."""
    results = report.read(DOCS)

    assert report.page(results) == (DOCS / "cost.md").read_text()
    for name, drawn in draw(results).items():
        assert (DOCS / report.FOLDER / f"{name}.svg").read_text() == drawn


def test_a_logarithmic_axis_ends_at_powers_of_ten() -> None:
    axis = Axis("pending", log=True)

    low, high = axis.span([300, 40_000])

    assert (low, high) == (100, 100_000)
    assert axis.ticks(low, high) == [100, 1_000, 10_000, 100_000]
    assert math.isclose(axis.place(1_000, low, high), 1 / 3)
