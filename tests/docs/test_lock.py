"""The lock file means the same wherever packages come from."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCKED = (ROOT / "requirements.lock").read_text().splitlines()


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_it_holds_names_and_versions_and_no_index_and_no_path() -> None:
    for line in LOCKED:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.+!]*", line), line


def test_it_pins_whatever_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    asked = [
        *project["project"]["dependencies"],
        *(each for extra in ("notify", "cli", "embedded") for each in extras[extra]),
        *project["dependency-groups"]["dev"],
    ]
    names = {normalised(re.match(r"[A-Za-z0-9._-]+", each)[0]) for each in asked}  # type: ignore[index]
    assert names - {project["project"]["name"]} <= {normalised(line.partition("==")[0]) for line in LOCKED}
