"""``python tests/benchmarks``: the one command."""

from __future__ import annotations

import sys
from pathlib import Path


def run() -> int:
    """Find the package and its support beside this folder, and do what the command line says."""
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
    from benchmarks.command import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
