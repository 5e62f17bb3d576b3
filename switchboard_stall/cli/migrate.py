"""``db``: the schema's revisions."""

from __future__ import annotations

import click

from switchboard_stall import migrations
from switchboard_stall.cli.database import connected, database_option
from switchboard_stall.cli.output import echo_json


@click.group("db")
@database_option
def db() -> None:
    """Make and change the tables."""


@db.command("upgrade")
@click.argument("revision", default="head")
@click.option("--schema", help="The PostgreSQL schema of the tables; else the first of the search path.")
@database_option
def upgrade(revision: str, schema: str | None) -> None:
    """Bring the tables to REVISION, the newest unless told. Again is a no-op; two at once take turns.

    Connect directly, not through a transaction pooler.
    """
    with connected(make=True) as engine, engine.connect() as connection:
        migrations.upgrade(connection, revision, schema=schema)
        click.echo(f"at revision {migrations.current(connection, schema=schema)}")


@db.command("current")
@click.option("--schema", help="The PostgreSQL schema of the tables; else the first of the search path.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@database_option
def current(schema: str | None, as_json: bool) -> None:
    """Show which revision the database is at."""
    with connected() as engine:
        revision = migrations.current(engine, schema=schema)
    newest = migrations.head()
    if as_json:
        echo_json({"revision": revision, "head": newest, "is_current": revision == newest})
    elif revision is None:
        click.echo("none: switchboard-stall db upgrade makes the tables, db stamp adopts existing ones")
    elif revision == newest:
        click.echo(f"{revision}, the newest")
    else:
        click.echo(f"{revision}; the newest here is {newest}: switchboard-stall db upgrade")


@db.command("stamp")
@click.argument("revision", default=migrations.BASE_REVISION)
@click.option("--schema", help="The PostgreSQL schema of the tables; else the first of the search path.")
@database_option
def stamp(revision: str, schema: str | None) -> None:
    """Adopt tables that are there already: check that they are REVISION, and note it. Changes nothing else.

    The default is the wake chain's own tables with the column todos.vouched; upgrade goes on from there.
    """
    with connected() as engine, engine.connect() as connection:
        migrations.stamp(connection, revision, schema=schema)
        now_at = migrations.current(connection, schema=schema)
        click.echo(f"at revision {now_at}" if now_at else "at no revision: the tables are left alone")
