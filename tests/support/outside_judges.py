"""Verifiers of Standard Webhooks that others wrote."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

NODE = Path(__file__).parents[1] / "notify" / "node"


def npm_judge(folder: Path) -> Callable[[str, bytes, dict[str, str]], bool]:
    """A function that asks the npm package ``standardwebhooks``: secret, body, headers.

    Where there is no Node.js, the test is an expected failure that says so in the summary, not a pass.

    :param folder: where the package may be installed.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.xfail("Node.js is not installed, so the npm judge of signatures was NOT asked")
    program = folder / "npm-judge"
    if not (program / "node_modules").exists():
        shutil.copytree(NODE, program, dirs_exist_ok=True)
        installed = subprocess.run(
            [npm, "ci", "--no-audit", "--no-fund"], cwd=program, capture_output=True, text=True, timeout=120
        )
        if installed.returncode:
            pytest.xfail(f"npm could not install the judge, so it was NOT asked: {installed.stderr[-300:]}")

    def judge(secret: str, body: bytes, headers: dict[str, str]) -> bool:
        asked = {"secret": secret, "body": base64.b64encode(body).decode(), "headers": headers}
        ran = subprocess.run(
            [node, "verify.js"],
            cwd=program,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return ran.stdout.strip() == "accepted"

    return judge
