from __future__ import annotations

import json
import tracemalloc
import uuid
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchboard_stall import Todo
from switchboard_stall.notify.body import MAX_BODY_BYTES, BodyTooLarge, Notification, neutralised

MADE = datetime(2026, 12, 1, 12, 0, 0, 999_999, tzinfo=UTC)
FIELDS = [
    "type",
    "reason",
    "todo_id",
    "queue",
    "kind",
    "source",
    "summary",
    "endpoint",
    "attempt",
    "created_at",
]

# Any str Python can hold, lone surrogates and NUL included.
texts = st.text(st.characters(codec=None), max_size=600)


def notification(**columns: Any) -> Notification:
    todo = Todo(
        **{"id": "td_1", "endpoint_id": uuid.UUID(int=1), "queue": "inbox", "title": "work", "attempt": 0}
        | columns
    )
    return Notification.of(todo, "created", MADE)


def body(**columns: Any) -> dict[str, Any]:
    sent = notification(**columns).body("builds")
    assert len(sent) <= MAX_BODY_BYTES
    read: dict[str, Any] = json.loads(sent)
    return read


def test_the_body_is_the_contract_to_the_byte() -> None:
    todo = notification(kind="build", source="forge", title="a title", attempt=2, payload={"card": "4111"})
    assert todo.body("builds") == (
        b'{"type":"todo.ready","reason":"created","todo_id":"td_1","queue":"inbox","kind":"build",'
        b'"source":"forge","summary":"a title","endpoint":"builds","attempt":2,'
        b'"created_at":"2026-12-01T12:00:00Z"}'
    )


@pytest.mark.parametrize("nothing", [None, ""])
def test_kind_and_source_are_omitted_when_empty_and_summary_is_not(nothing: str | None) -> None:
    assert list(body(kind=nothing, source=nothing, title="")) == [
        name for name in FIELDS if name not in ("kind", "source")
    ]


def test_created_at_is_when_the_notification_was_made_in_utc_whatever_its_zone() -> None:
    made = datetime(2026, 12, 1, 1, 30, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    sent = json.loads(notification()._replace(made_at=made).body("builds"))
    assert sent["created_at"] == "2026-11-30T20:00:00Z"


@pytest.mark.parametrize(
    ("sent", "leaves"),
    [
        ("</channel>", "«/channel»"),
        ("</ChAnNeL>", "«/channel»"),
        ("a\r\nb\nc", "a  b c"),
        ("</chan\nnel>", "</chan nel>"),
        ("</channel></channel>", "«/channel»«/channel»"),
    ],
)
def test_sender_text_cannot_end_a_channel_or_a_line(sent: str, leaves: str) -> None:
    assert [body(title=sent, kind=sent, source=sent)[name] for name in ("summary", "kind", "source")] == [
        leaves
    ] * 3


def test_summary_keeps_200_code_points_and_kind_and_source_128() -> None:
    sent = body(title="é" * 201, kind="ü" * 129, source="ß" * 129)
    assert (sent["summary"], sent["kind"], sent["source"]) == ("é" * 200, "ü" * 128, "ß" * 128)


def test_text_that_would_not_fit_is_cut_from_the_summary_first_and_between_code_points() -> None:
    sent = body(title="\U0001f600" * 200, kind="\U0001f601" * 128, source="\U0001f602" * 128)
    assert sent["kind"] == "\U0001f601" * 128
    assert sent["source"] == "\U0001f602" * 128
    assert 0 < len(sent["summary"]) < 200
    assert set(sent["summary"]) == {"\U0001f600"}


def test_after_the_summary_the_source_is_cut_and_then_the_kind() -> None:
    sent = body(queue="\1" * 512, title="t" * 200, kind="k" * 128, source="\2" * 128)
    assert sent["queue"] == "\1" * 512
    assert sent["summary"] == ""
    assert set(sent["source"]) == {"\2"}
    assert sent["kind"] == "k" * 128


def test_what_names_the_todo_is_never_cut() -> None:
    with pytest.raises(BodyTooLarge):
        notification(queue="\1" * 512).body("e" * 2000)
    with pytest.raises(BodyTooLarge):
        notification(queue="q" * 513)
    with pytest.raises(BodyTooLarge):
        notification(id="t" * 257)


@pytest.mark.parametrize(
    "title",
    [
        "line\nline\rline\u2028line\u2029line\x85line\x0bline\x0cline",
        "\u202eevil\u2066\u2069\u200f",
        "\ud800 alone, \udfff alone, \udc00\ud800 swapped",
        "nul \0 nul",
        '"quoted" \\ and </CHANNEL>',
        "x" * 10_000_000,
        "\ud800" * 10_000_000,
    ],
    ids=["lines", "bidi", "surrogates", "nul", "quotes", "10 MB", "10 MB of surrogates"],
)
def test_a_hostile_title_leaves_as_one_bounded_line_of_ascii_json(title: str) -> None:
    sent = notification(title=title).body("builds")
    assert len(sent) <= MAX_BODY_BYTES
    assert all(0x20 <= byte < 0x7F for byte in sent)
    json.loads(sent)["summary"].encode("utf-8")  # Strict receivers can decode it.


def test_a_title_of_10_mb_is_never_copied_whole() -> None:
    todo = Todo(id="td_1", endpoint_id=uuid.UUID(int=1), queue="inbox", title="x" * 10_000_000, attempt=0)
    tracemalloc.start()
    try:
        Notification.of(todo, "created", MADE)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100_000


@given(title=texts, kind=texts, source=texts, queue=st.text(st.characters(codec=None), max_size=300))
def test_any_text_leaves_as_one_bounded_line_that_a_strict_receiver_reads(
    title: str, kind: str, source: str, queue: str
) -> None:
    made = notification(title=title, kind=kind, source=source, queue=queue)
    sent = made.body("builds")
    assert len(sent) <= MAX_BODY_BYTES
    assert sent == made.body("builds")
    assert sent.isascii()
    assert b"\n" not in sent
    read = json.loads(sent)
    assert list(read) == [name for name in FIELDS if name in read]
    for name in ("summary", "kind", "source"):
        text = read.get(name, "")
        text.encode("utf-8")
        assert "</channel>" not in text.lower()
        assert not {"\r", "\n"} & set(text)


@given(texts)
def test_neutralised_text_is_never_longer_and_stays_as_it_is_when_neutralised_again(text: str) -> None:
    once = neutralised(text)
    assert len(once) == len(text)
    assert neutralised(once) == once
