"""SQL laid out for reading: a line for each clause, an indent for each subquery, no token changed."""

from __future__ import annotations

import re
from typing import Final, TypeAlias

from attrs import field, frozen

WIDTH: Final = 110
"""The widest line, where the SQL can be broken at all."""

_TOKEN: Final = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|[(),]|[^\s(),'"]+""")
_STEP: Final = "    "
_QUERY_WORDS: Final = frozenset({"SELECT", "WITH", "INSERT", "DELETE"})
_CLAUSES: Final = tuple(
    clause.split()
    for clause in (
        *("WITH", "SELECT", "FROM", "WHERE", "ORDER BY", "LIMIT", "UNION ALL", "FOR UPDATE", "RETURNING"),
        *("LEFT OUTER JOIN", "FULL OUTER JOIN", "JOIN"),
        *("INSERT INTO", "VALUES", "ON CONFLICT", "DO UPDATE SET", "DELETE FROM", "USING"),
    )
)
_LOGIC: Final = frozenset({"AND", "OR"})
_COMMA: Final = frozenset({","})
_CASES: Final = frozenset({"WHEN", "ELSE", "END"})


@frozen
class _Group:
    """What stands between two parentheses; ``tight`` where nothing is between them and the word before."""

    tight: bool
    items: list[_Item] = field(factory=list)

    @property
    def is_query(self) -> bool:
        first = self.items[0] if self.items else ""
        return first in _QUERY_WORDS if isinstance(first, str) else first.is_query

    @property
    def holds_query(self) -> bool:
        return self.is_query or _hold_query(self.items)


_Item: TypeAlias = "str | _Group"


def laid_out(text: str) -> str:
    """Return SQL with its lines broken for reading.

    :param text: one statement, in balanced parentheses.
    """
    return "\n".join(_query(_parsed(text), ""))


def _parsed(text: str) -> list[_Item]:
    groups = [_Group(tight=False)]
    end = -1
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == "(":
            group = _Group(tight=match.start() == end)
            groups[-1].items.append(group)
            groups.append(group)
        elif token == ")":
            groups.pop()
        else:
            groups[-1].items.append(token)
        end = match.end()
    return groups[0].items


def _query(items: list[_Item], indent: str) -> list[str]:
    starts = [0]
    place = 0
    while place < len(items):
        clause = next((words for words in _CLAUSES if items[place : place + len(words)] == words), None)
        if clause and place:
            starts.append(place)
        place += len(clause or "-")
    lines: list[str] = []
    for start, end in zip(starts, [*starts[1:], len(items)], strict=True):
        clause_items = items[start:end]
        if clause_items[0] == "WITH":
            for part in _parts(clause_items, after=_COMMA):
                lines += _line(part, indent)
        else:
            lines += _line(clause_items, indent)
    return lines


def _line(items: list[_Item], indent: str, hang: str = _STEP) -> list[str]:
    """Lay out items in one line if they fit; else break at their commas, else at AND and OR, and so on."""
    if not _hold_query(items) and len(indent) + len(_flat(items)) <= WIDTH:
        return [indent + _flat(items)]
    listed = _parts(items, after=_COMMA)
    if len(listed) > 1:
        return _filled(listed, indent)
    joined = _parts(items, before=_LOGIC)
    if len(joined) > 1:
        return [
            *_line(joined[0], indent),
            *(line for part in joined[1:] for line in _line(part, indent + hang)),
        ]
    cases = _parts(items, before=_CASES)
    if len(cases) > 1:
        return [
            *_line(cases[0], indent),
            *(
                line
                for part in cases[1:]
                for line in _line(part, indent if part[0] == "END" else indent + _STEP)
            ),
        ]
    return _opened(items, indent)


def _filled(parts: list[list[_Item]], indent: str) -> list[str]:
    """Put as many parts into a line as fit."""
    lines: list[str] = []
    place = 0
    while place < len(parts):
        inner = indent + _STEP if lines else indent
        line = parts[place]
        place += 1
        while place < len(parts):
            longer = line + parts[place]
            if _hold_query(longer) or len(inner) + len(_flat(longer)) > WIDTH:
                break
            line = longer
            place += 1
        lines += _line(line, inner)
    return lines


def _opened(items: list[_Item], indent: str) -> list[str]:
    """Open the parentheses that hold a query, or else the widest ones, over lines of their own."""
    groups = [item for item in items if isinstance(item, _Group) and item.items]
    if not groups:
        return [indent + _flat(items)]
    widest = max(groups, key=lambda group: len(_flat(group.items)))
    chosen = next((group for group in groups if group.holds_query), widest)
    place = next(place for place, item in enumerate(items) if item is chosen)
    head = _flat([*items[:place], _Group(chosen.tight)]).removesuffix(")")
    inner = indent + _STEP
    body = _query(chosen.items, inner) if chosen.is_query else _line(chosen.items, inner, hang="")
    return [indent + head, *body, *_line([")", *items[place + 1 :]], indent)]


def _parts(
    items: list[_Item], *, before: frozenset[str] = frozenset(), after: frozenset[str] = frozenset()
) -> list[list[_Item]]:
    """Cut items before or after certain words; a CASE within a CASE stays whole."""
    parts: list[list[_Item]] = [[]]
    depth = 0
    for item in items:
        word = item if isinstance(item, str) else ""
        outermost = depth <= 1 if before is _CASES else depth == 0
        if word in before and outermost and parts[-1]:
            parts.append([])
        parts[-1].append(item)
        if word in after and outermost:
            parts.append([])
        depth += {"CASE": 1, "END": -1}.get(word, 0)
    return [part for part in parts if part]


def _hold_query(items: list[_Item]) -> bool:
    return any(isinstance(item, _Group) and item.holds_query for item in items)


def _flat(items: list[_Item]) -> str:
    line = ""
    for item in items:
        word = item if isinstance(item, str) else f"({_flat(item.items)})"
        joined = not line or item == "," or (isinstance(item, _Group) and item.tight)
        line += word if joined else f" {word}"
    return line
