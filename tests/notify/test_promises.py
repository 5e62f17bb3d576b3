"""The table of promises in the docs names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "wake.md"


def test_each_promise_names_a_test_that_exists() -> None:
    rows = re.findall(r"^\| .+ \| (`.+) \|$", PAGE.read_text().partition("## Promise by promise")[2], re.M)
    assert len(rows) > 50
    for row in rows:
        file = ""
        for named, function in re.findall(r"`([\w.]*\.py)?(?:::(\w+))?`", row):
            file = named or file
            written = (HERE / file).read_text()
            assert re.search(rf"^def {function or 'test_'}", written, re.M), f"{file}::{function}"
