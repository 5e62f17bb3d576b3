"""The command ``switchboard-stall``: the demo, the real thing, and what an operator asks at night.

Exit codes: 0 it is done, 1 it failed, 2 wrong use.
"""

from __future__ import annotations

from typing import Any

try:
    import click
except ImportError as error:  # pragma: no cover
    raise SystemExit(
        "switchboard-stall: its command needs the extra cli: pip install 'switchboard-stall[cli,embedded]'"
    ) from error

from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError

from switchboard_stall.cli.database import Settings, database_option, explained, redacted
from switchboard_stall.cli.demo import demo
from switchboard_stall.cli.migrate import db
from switchboard_stall.cli.run import run
from switchboard_stall.cli.schedule import schedule
from switchboard_stall.cli.sql import sql
from switchboard_stall.cli.status import status
from switchboard_stall.cli.sweep import sweep
from switchboard_stall.cli.why import why
from switchboard_stall.sweep import IsolationError

__all__ = ["main"]


class _Command(click.Group):
    """Says what is expected to go wrong in a line, without a traceback and without a password."""

    def invoke(self, ctx: click.Context) -> Any:
        settings = ctx.ensure_object(Settings)
        try:
            return super().invoke(ctx)
        except DBAPIError as error:
            raise click.ClickException(explained(error, settings.resolved)) from error
        except (CommandError, IsolationError) as error:
            raise click.ClickException(redacted(str(error), settings.resolved)) from error


@click.group(cls=_Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="switchboard-stall")
@database_option
def main() -> None:
    """Wake the consumer of a queue that holds claimable work nobody claims."""


for _command in (demo, run, sweep, status, why, schedule, sql, db):
    main.add_command(_command)
