"""``sql``: the statement as PostgreSQL gets it, laid out for reading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click
from sqlalchemy import CTE, select
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from switchboard_stall import statement
from switchboard_stall.cli.layout import laid_out
from switchboard_stall.cli.output import say
from switchboard_stall.statement import drain_statement, due_statement, nudge_statement

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Select


def _alone(stage: CTE) -> Select[*tuple[Any, ...]]:
    return select(*stage.c).select_from(stage)


STAGES: Final[dict[str, Callable[[], Select[*tuple[Any, ...]]]]] = {
    "pending": lambda: _alone(statement.pending()),
    "pairs": lambda: _alone(statement.pairs(statement.pending())),
    "drained": drain_statement,
    "due": due_statement,
    "charged": lambda: _alone(statement.charged(statement.due(statement.pairs(statement.pending())))),
    "named": nudge_statement,
}
"""The statement up to each of its stages, in their order. The last is the whole."""


@click.command("sql")
@click.option(
    "--stage",
    type=click.Choice(list(STAGES)),
    default="named",
    help="Only as far as this stage; `due` is the dry run. The whole statement unless told.",
)
def sql(stage: str) -> None:
    """Show the SQL of the sweep. It can be pasted into psql: beware that the whole one charges the ledger."""
    say(f"{laid_out(compiled(STAGES[stage]()))};")


def compiled(query: Select[*tuple[Any, ...]]) -> str:
    """Return the SQL of a statement, with its constants written into it."""
    # Named, so that a percent sign is itself; nothing is bound.
    dialect = PGDialect_psycopg(paramstyle="named")  # type: ignore[no-untyped-call]
    return str(query.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
