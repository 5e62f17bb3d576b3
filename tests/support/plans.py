"""What a statement did, read from ``EXPLAIN (ANALYZE, BUFFERS, WAL, FORMAT JSON)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import psycopg
from attrs import frozen
from sqlalchemy.dialects.postgresql import psycopg as psycopg_dialect
from sqlalchemy.sql.compiler import SQLCompiler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import ClauseElement, Connection

PlanMode = Literal["auto", "force_generic_plan"]
"""A value of ``plan_cache_mode``."""

_OPTIONS = "ANALYZE, BUFFERS, WAL, TIMING OFF, FORMAT JSON"


@frozen
class Node:
    """One node of a plan."""

    told: dict[str, Any]
    parent: Node | None = None

    @property
    def kind(self) -> str:
        return str(self.told["Node Type"])

    @property
    def table(self) -> str:
        """The table it scans; a bitmap's index scan names only its index."""
        return str(self.told.get("Relation Name", ""))

    @property
    def index(self) -> str:
        return str(self.told.get("Index Name", ""))

    @property
    def condition(self) -> str:
        """What the index was asked for."""
        return str(self.told.get("Index Cond", ""))

    @property
    def loops(self) -> int:
        return int(self.told["Actual Loops"])

    @property
    def rows(self) -> float:
        """Rows it looked at in all its loops, kept or thrown away."""
        each = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
        return float(sum(self.told.get(name, 0) for name in each)) * self.loops

    def walk(self) -> Iterator[Node]:
        """This node and all below it, also those that never ran."""
        yield self
        for child in self.told.get("Plans", ()):
            yield from Node(child, self).walk()


@frozen
class Plan:
    """A whole plan, with what running it took."""

    root: Node

    @property
    def buffers(self) -> int:
        """Pages looked at, cached or not."""
        return int(self.root.told["Shared Hit Blocks"]) + int(self.root.told["Shared Read Blocks"])

    @property
    def wal_records(self) -> int:
        return int(self.root.told.get("WAL Records", 0))

    def sequential_scans(self, table: str) -> list[Node]:
        """Scans of the table, or of a partition of it, that no index serves; planned is enough."""
        return [node for node in self.root.walk() if node.kind == "Seq Scan" and node.table.startswith(table)]

    def rows(self, table: str) -> float:
        """Rows of the table, or entries of its indexes, that were looked at."""
        return sum(node.rows for node in self.root.walk() if _reads(node, table))

    def probes(self, *columns: str) -> list[Node]:
        """Scans of an index that were asked for exactly one value of each of the columns."""
        return [
            node
            for node in self.root.walk()
            if node.index and all(f"({column} = " in node.condition for column in columns)
        ]


def _reads(node: Node, table: str) -> bool:
    # A bitmap's index scan names only its index; those carry their table's name.
    return node.table.startswith(table) or (node.kind == "Bitmap Index Scan" and f"_{table}_" in node.index)


def explain(
    connection: Connection,
    statement: ClauseElement,
    *,
    mode: PlanMode = "auto",
    runs: int = 1,
    **parameters: Any,
) -> Plan:
    """Prepare the statement on the server, run it, and return the plan of its last run.

    The caller's transaction holds what the statement wrote. Under ``force_generic_plan`` the server plans
    without looking at the parameters, as a driver's prepared statement comes to do after some runs.

    :param runs: how often it is executed; ``auto`` considers a generic plan from the sixth on.
    """
    dialect = psycopg_dialect.dialect(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]
    compiled = statement.compile(dialect=dialect)
    assert isinstance(compiled, SQLCompiler)
    names = compiled.positiontup or []
    types = [connection.dialect.type_compiler_instance.process(compiled.binds[name].type) for name in names]
    values = tuple({**compiled.params, **parameters}[name] for name in names)
    signature, slots = (f"({', '.join(types)})", f"({', '.join(['%s'] * len(names))})") if names else ("", "")
    connection.exec_driver_sql("DEALLOCATE ALL")
    connection.exec_driver_sql(f"SET LOCAL plan_cache_mode = {mode}")
    connection.exec_driver_sql(f"PREPARE explained{signature} AS {compiled}")
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    # EXECUTE takes no parameters of the protocol, so this cursor writes them into the SQL.
    with psycopg.ClientCursor(driver) as cursor:
        for _ in range(runs):
            cursor.execute(f"EXPLAIN ({_OPTIONS}) EXECUTE explained{slots}", values)
            told = cursor.fetchall()
    return Plan(Node(told[0][0][0]["Plan"]))
