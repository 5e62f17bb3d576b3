"""Every example in the README and the docs is run, so that none of them can rot.

How a fenced block is run hangs on its language: ``python`` blocks of one page run one after another in one
namespace; in ``console`` blocks each ``$ switchboard-stall`` line runs and its output is compared, where
``...`` stands for anything; ``sql`` is executed and rolled back; ``toml``, ``json`` and ``sh`` are parsed.
``text`` is for reading. A comment ``<!-- not run: why -->`` before a block leaves it out.
"""

from __future__ import annotations

import asyncio
import base64
import doctest
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree

import pytest
from attrs import frozen
from click.testing import CliRunner
from sqlalchemy import Engine, text
from support.builders import World

from switchboard_stall.cli import main
from switchboard_stall.cli.output import duration
from switchboard_stall.ready import set_todo_ready_hook
from switchboard_stall.schedule import STALL_POLICY

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES: Final = {"python", "console", "sql", "toml", "json", "sh", "text", "mermaid"}

_BLOCK: Final = re.compile(
    r"(?P<skip><!-- not run: .+? -->\n+)?^```(?P<language>\S*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE
)
_LINK: Final = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_KEY: Final = base64.b64encode(bytes(range(32))).decode()


@frozen
class Block:
    language: str
    body: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page that are run."""
    written = page.read_text()
    return [
        Block(match["language"], match["body"], written.count("\n", 0, match.start("body")))
        for match in _BLOCK.finditer(written)
        if not match["skip"]
    ]


def quick_start() -> list[Block]:
    """The two blocks that a fresh machine is given."""
    section = (ROOT / "README.md").read_text().partition("## Quick start\n")[2].partition("\n## ")[0]
    return [
        Block(match["language"], match["body"], 0)
        for match in _BLOCK.finditer(section)
        if match["language"] == "sh"
    ]


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def environment(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DATABASE_URL", engine.url.render_as_string(hide_password=False))
    monkeypatch.setenv("SWITCHBOARD_SECRET_ENCRYPTION_KEY", _KEY)
    before = set_todo_ready_hook(None)
    yield
    set_todo_ready_hook(before)


def test_each_block_says_what_it_is(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{page.name}:{block.line}: {block.language!r}"


@pytest.mark.usefixtures("environment")
def test_python_examples_run(page: Path) -> None:
    namespace: dict[str, Any] = {}
    try:
        for block in blocks(page):
            if block.language == "python":
                # Padded, so that a traceback names the line of the page.
                code = compile("\n" * block.line + block.body, str(page), "exec")
                exec(code, namespace)
        if "lifespan" in namespace:
            asyncio.run(_lived_through(namespace["lifespan"]))
    finally:
        for value in namespace.values():
            if isinstance(value, Engine):
                value.dispose()


async def _lived_through(lifespan: Any) -> None:
    async with lifespan(None):
        pass


@pytest.mark.usefixtures("environment")
def test_commands_print_what_is_shown(page: Path, engine: Engine) -> None:
    World(engine).endpoint(slug="orders", scope=["inbox"])
    checker = doctest.OutputChecker()
    for block in blocks(page):
        if block.language != "console":
            continue
        for run in re.split(r"^\$ ", block.body, flags=re.MULTILINE)[1:]:
            line, _, shown = run.partition("\n")
            program, *arguments = shlex.split(line)
            assert program == "switchboard-stall", f"{page.name}:{block.line}: {line}"
            result = CliRunner().invoke(main, arguments)
            assert (result.exit_code, result.stderr) == (0, "")
            assert checker.check_output(shown, result.stdout, doctest.ELLIPSIS), (
                f"{page.name}:{block.line}: {line} prints\n{result.stdout}\nand not\n{shown}"
            )


def test_sql_examples_run(page: Path, engine: Engine) -> None:
    for block in blocks(page):
        if block.language == "sql":
            with engine.connect() as connection:
                for statement in filter(str.strip, block.body.split(";\n")):
                    connection.execute(text(statement.replace(":", r"\:")))


def test_configuration_examples_parse(page: Path) -> None:
    for block in blocks(page):
        if block.language == "toml":
            tomllib.loads(block.body)
        elif block.language == "json":
            json.loads(block.body)
        elif block.language == "sh":
            subprocess.run(["sh", "-n"], input=block.body, text=True, check=True)


def test_the_quick_start_is_two_blocks_that_stand_alone() -> None:
    demo, tests = quick_start()
    for block in (demo, tests):
        assert "python3 -m venv --without-pip .venv" in block.body
        # One chain: whoever pastes it gets the exit code of the first step that failed.
        assert all(line.endswith("&&") for line in block.body.splitlines()[:-1])
    assert demo.body.splitlines()[-1] == ".venv/bin/switchboard-stall demo"
    assert ".venv/bin/python -m pytest" in tests.body.splitlines()[-1]


def test_links_lead_somewhere(page: Path) -> None:
    for match in _LINK.finditer(page.read_text()):
        target, _, anchor = match["target"].partition("#")
        if "://" in target:
            continue
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", each).lower().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_render_anywhere(picture: Path) -> None:
    tree = ElementTree.parse(picture)
    tags = {element.tag.rpartition("}")[2] for element in tree.iter()}
    # A code host strips what could run or load.
    assert not tags & {"script", "foreignObject", "image", "use"}
    assert "viewBox" in tree.getroot().attrib


def test_the_picture_shows_the_schedule_in_force() -> None:
    shown = (ROOT / "docs" / "schedule.svg").read_text()
    total = type(STALL_POLICY.waits[0])()
    for number, wait in enumerate(STALL_POLICY.waits, 1):
        total += wait
        assert f">nudge {number}<" in shown
        assert f">{duration(wait)}<" in shown
        assert f">{duration(total)}<" in shown
