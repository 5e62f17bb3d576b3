"""The checks of the coverage-guided fuzzer, on what Hypothesis draws."""

from __future__ import annotations

from fuzz.checks import check_body, check_response, check_url
from hypothesis import example, given
from hypothesis import strategies as st

any_text = st.text(st.characters(codec=None), max_size=700)

pieces = st.sampled_from(
    [
        *[
            "https://",
            "http://",
            ":",
            "//",
            "/",
            "?",
            "#",
            "@",
            "[",
            "]",
            "%",
            "\\",
            ".",
            "..",
            "。",
            "．127",
        ],
        *[
            "127.0.0.1",
            "0x7f",
            "0177",
            "2130706433",
            "::1",
            "::ffff:",
            "fe80::1",
            "%lo",
            "%25lo",
            "localhost",
        ],
        *["good.example", "xn--", "443", ":443", ":0", ":65536", "﹕", "1", "①"],
        *" \t\n\0\u00ad\u2028",
    ]
)
addresses = st.one_of(
    st.ip_addresses().map(str),
    st.sampled_from(["127.0.0.1", "::ffff:10.0.0.1", "93.184.216.34", "fe80::1%eth0", "", "localhost"]),
    any_text,
)


@given(st.lists(pieces, max_size=12).map("".join), st.lists(addresses, max_size=3))
def test_no_url_and_no_answer_leads_to_an_address_that_is_never_called(url: str, answers: list[str]) -> None:
    check_url(url, answers)
    check_url("https://" + url, answers)


lines = st.sampled_from(
    [
        *[b"HTTP/1.1 200 OK", b"HTTP/1.1 100 Continue", b"HTTP/1.1 103 Early Hints", b"HTTP/1.1 204"],
        *[b"HTTP/1.0 302 x", b"HTTP/1.1 099 x", b"HTTP/1.1 -200 OK", b"HTTP/1.1 \xb2\xb20 OK", b"HTTP/2 200"],
        *[b"content-length: 5", b"content-length: -5", b"content-length: " + b"9" * 20, b"content-length: x"],
        *[b"transfer-encoding: chunked", b"transfer-encoding: gzip, chunked", b"content-encoding: gzip"],
        *[b"connection: keep-alive", b": x", b"x", b" x", b"x:" + b"y" * 65_536, b"", b"", b"\0", b"hello"],
        *[b"5", b"-1", b"0", b"f" * 18, b"0x5", b"+5", b"5;x"],
    ]
)


@given(st.lists(lines, max_size=30), st.sampled_from([b"\r\n", b"\n", b"\r"]), st.integers(1, 20))
def test_no_answer_breaks_an_attempt(answer: list[bytes], end: bytes, times: int) -> None:
    check_response(end.join(answer) * times)


@given(st.binary(max_size=2_000))
def test_no_bytes_break_an_attempt(answer: bytes) -> None:
    check_response(answer)
    check_response(b"HTTP/1.1 200 OK\r\n" + answer)


@given(st.lists(any_text, min_size=5, max_size=5), st.integers(0, 2**31 - 1))
@example(["\U0001f600" * 700, "</CHANNEL>" * 70, "\ud800" * 700, "\1" * 512, "slug"], 5)
def test_no_text_breaks_the_body(texts: list[str], attempts: int) -> None:
    check_body(texts, attempts)
