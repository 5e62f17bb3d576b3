"""``demo``: the story holds from beginning to end, and says so when it does not."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from click.testing import CliRunner

from switchboard_stall.cli import main

if TYPE_CHECKING:
    import pytest

    from switchboard_stall.cli.demo import Story


def test_every_step_of_the_story_holds() -> None:
    result = CliRunner().invoke(main, ["demo"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "✗" not in result.stdout
    assert result.stdout.count("its signature verified") >= 11
    assert result.stdout.splitlines()[-1].startswith("All ")


def test_a_step_that_does_not_hold_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(story: Story) -> None:
        story.check("the sun rises", True)
        story.check("the moon is cheese", False)

    # The attribute of the package is the command, not the module.
    monkeypatch.setattr(importlib.import_module("switchboard_stall.cli.demo"), "SCENES", (broken,))
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 1
    assert "✗ the moon is cheese" in result.stdout
    assert result.stderr == "Error: 1 of 2 did not hold: the moon is cheese\n"
