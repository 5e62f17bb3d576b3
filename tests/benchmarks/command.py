"""The command: run the parts, print their tables, and with ``--write`` put figures and plots into docs."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve
from benchmarks import beside, contention, delivery, per_pair, report, upkeep, verbs
from benchmarks.bench import DEFAULT, LARGE, QUICK, Bench, Result, bench

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PARTS: Final[dict[str, Callable[[Bench], Result]]] = {
    "per-pair": per_pair.run,
    "floods": per_pair.floods,
    "partitions": per_pair.partitions,
    "verbs": verbs.run,
    "bloat": upkeep.bloat,
    "dead-rows": upkeep.dead_rows,
    "reaper": upkeep.reaper,
    "contention": contention.run,
    "beside": beside.run,
    "delivery": delivery.run,
}
DOCS: Final = Path(__file__).resolve().parents[2] / "docs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python tests/benchmarks", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be given again")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="tiny: shows that the harness works")
    size.add_argument("--large", action="store_true", help="10,000,000 pending, 100,000 pairs: half an hour")
    parser.add_argument(
        "--set", metavar="NAME=NUMBER", action="append", default=[], help="change one number of the scale"
    )
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks and docs/cost.md")
    parser.add_argument("--redraw", action="store_true", help="measure nothing; write docs from the JSON")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder that --write writes to")
    parser.add_argument("--database-url", help="a server to use; its role must be a superuser")
    parser.add_argument("--bin-dir", type=Path, help="folder with another version's initdb and postgres")
    options = parser.parse_args(arguments)
    scale = QUICK if options.quick else LARGE if options.large else DEFAULT
    changes: dict[str, Any] = {
        name: int(number) for name, number in (each.split("=") for each in options.set)
    }
    scale = evolve(scale, **changes)
    if not options.redraw:
        with bench(scale, named=options.database_url, bin_dir=options.bin_dir) as run:
            for name in options.only or PARTS:
                began = time.monotonic()
                result = PARTS[name](run)
                result.figures["seconds"] = round(time.monotonic() - began)
                print(report.as_text(name, result), flush=True)
                if options.write:
                    report.write_json(options.docs, name, result)
    if options.write or options.redraw:
        missing = set(PARTS) - set(report.read(options.docs))
        if missing:
            print(f"cost.md stays as it is: it also needs {', '.join(sorted(missing))}")
        else:
            report.write_docs(options.docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
