"""One attempt against receivers that misbehave at every stage. Each listens on this machine only."""

from __future__ import annotations

import gzip
import socket
import ssl
import time
from contextlib import contextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import pytest
from support.receiver import LOOPBACK, Authority, Receiver, Request, Wire, no_content, status

from switchboard_stall.notify.attempt import (
    MAX_HEADER_BYTES,
    MAX_RESPONSE_BODY_BYTES,
    Outcome,
    narrowed,
    post,
    tls_context,
)
from switchboard_stall.notify.target import Target, parse_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOST = "hooks.example"
SHORT = 0.3
"""Seconds for a whole attempt, where it is the deadline that ends it."""

# Loopback buffers hold some megabytes that nobody reads; what is poured is far more.
POURED = 50_000_000


@contextmanager
def receiving(
    authority: Authority, behave: Callable[[Request, Wire], None] = no_content, *names: str, **given: Any
) -> Iterator[Receiver]:
    with Receiver(authority.server_context(*(names or (HOST, LOOPBACK))), behave, **given) as receiver:
        yield receiver


def attempt(
    receiver: Receiver,
    authority: Authority,
    *,
    url: str | None = None,
    addresses: tuple[str, ...] = (LOOPBACK,),
    timeout: float = 10.0,
    tls: ssl.SSLContext | None = None,
) -> Outcome:
    return post(
        parse_target(url or receiver.url(HOST, "/hook?a=b"), allow_http=True),
        [ip_address(address) for address in addresses],
        {"content-type": "application/json"},
        b"{}",
        timeout=timeout,
        tls=narrowed(tls or authority.client_context()),
    )


# What is sent, and what the answer means.


def test_the_request_is_one_plain_post_on_a_connection_of_its_own(authority: Authority) -> None:
    with receiving(authority) as receiver:
        assert attempt(receiver, authority) == Outcome(None, 204)
        assert attempt(receiver, authority) == Outcome(None, 204)
    request = receiver.requests[0]
    assert request.line == "POST /hook?a=b HTTP/1.1"
    assert request.body == b"{}"
    assert request.headers == {
        "host": f"{HOST}:{receiver.port}",
        "content-length": "2",
        "accept-encoding": "identity",
        "connection": "close",
        "content-type": "application/json",
    }
    assert receiver.connections == 2


@pytest.mark.parametrize("code", [200, 201, 202, 204, 226, 299])
def test_2xx_is_delivered(authority: Authority, code: int) -> None:
    with receiving(authority, status(code)) as receiver:
        assert attempt(receiver, authority) == Outcome(None, code)


@pytest.mark.parametrize("code", [408, 429])
def test_408_and_429_are_retried(authority: Authority, code: int) -> None:
    with receiving(authority, status(code)) as receiver:
        assert attempt(receiver, authority) == Outcome("client_error", code, retry=True)


@pytest.mark.parametrize("code", [500, 502, 503, 504, 507, 599])
def test_5xx_is_retried(authority: Authority, code: int) -> None:
    with receiving(authority, status(code)) as receiver:
        assert attempt(receiver, authority) == Outcome("server_error", code, retry=True)


@pytest.mark.parametrize("code", [400, 401, 403, 404, 405, 409, 410, 413, 422, 425, 451, 499, 101, 600, 999])
def test_every_other_status_ends_it(authority: Authority, code: int) -> None:
    with receiving(authority, status(code)) as receiver:
        outcome = attempt(receiver, authority)
    assert (outcome.status, outcome.retry) == (code, False)
    assert outcome.error in ("client_error", "server_error")


@pytest.mark.parametrize("code", [300, 301, 302, 303, 304, 307, 308])
def test_a_redirect_is_one_request_and_the_end(authority: Authority, code: int) -> None:
    with receiving(authority) as other, receiving(authority) as receiver:
        receiver.behave = status(code, f"location: {other.url()}\r\nrefresh: 0; url={other.url()}\r\n")
        assert attempt(receiver, authority) == Outcome("redirect", code)
    assert (receiver.connections, other.connections) == (1, 0)


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "HTTP_PROXY"])
def test_no_proxy_of_the_environment_is_dialled(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    with Receiver() as proxy, receiving(authority) as receiver:
        monkeypatch.setenv(variable, proxy.url(path=""))
        assert attempt(receiver, authority).error is None
    assert (proxy.connections, receiver.connections) == (0, 1)


def test_no_name_is_resolved(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*asked: object, **options: object) -> None:
        raise AssertionError(f"resolved {asked}")

    with receiving(authority) as receiver:
        for function in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "create_connection"):
            monkeypatch.setattr(socket, function, refuse)
        assert attempt(receiver, authority).error is None


def test_interim_responses_are_passed_over(authority: Authority) -> None:
    def hint_and_answer(request: Request, wire: Wire) -> None:
        wire.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n")
        wire.send(b"HTTP/1.1 102 Processing\r\n\r\n")
        wire.answer(200, body=b"done")

    with receiving(authority, hint_and_answer) as receiver:
        assert attempt(receiver, authority) == Outcome(None, 200)


def test_plain_http_works_where_the_target_says_so(authority: Authority) -> None:
    with Receiver() as receiver:
        assert attempt(receiver, authority) == Outcome(None, 204)
        assert receiver.requests[0].headers["host"] == f"{HOST}:{receiver.port}"


# TLS.


@pytest.mark.parametrize(
    "names",
    [
        ("other.example",),
        (LOOPBACK,),
        ("127.0.0.2",),
        ("*.hooks.example",),
        ("example",),
        ("*.example.hooks",),
    ],
    ids=str,
)
def test_a_certificate_for_another_name_or_the_bare_address_gets_no_byte_of_the_request(
    authority: Authority, names: tuple[str, ...]
) -> None:
    with receiving(authority, no_content, *names) as receiver:
        assert attempt(receiver, authority) == Outcome("tls")
    assert (receiver.connections, receiver.requests, receiver.bytes_after_handshake) == (1, [], 0)


def test_a_common_name_is_no_name(authority: Authority) -> None:
    with Receiver(authority.server_context(LOOPBACK, common_name=HOST)) as receiver:
        assert attempt(receiver, authority) == Outcome("tls")
    assert receiver.bytes_after_handshake == 0


def test_a_certificate_is_verified_against_a_literal_address_too(authority: Authority) -> None:
    with receiving(authority, no_content, HOST) as receiver:
        assert attempt(receiver, authority, url=receiver.url(LOOPBACK)) == Outcome("tls")
    with receiving(authority, no_content, LOOPBACK) as receiver:
        assert attempt(receiver, authority, url=receiver.url(LOOPBACK)) == Outcome(None, 204)


@pytest.mark.parametrize("wrong", ["expired", "another authority"])
def test_a_certificate_nobody_vouches_for_gets_no_byte_of_the_request(
    authority: Authority, wrong: str
) -> None:
    context = (
        authority.server_context(HOST, days=-1) if wrong == "expired" else Authority().server_context(HOST)
    )
    with Receiver(context) as receiver:
        assert attempt(receiver, authority) == Outcome("tls")
    assert receiver.bytes_after_handshake == 0


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
def test_tls_before_1_2_is_not_spoken(authority: Authority) -> None:
    old = authority.server_context(HOST)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    lax = authority.client_context()
    lax.set_ciphers("ALL:@SECLEVEL=0")
    lax.minimum_version = ssl.TLSVersion.TLSv1_1
    with Receiver(old) as receiver:
        assert attempt(receiver, authority, tls=lax).error in ("tls", "network")
    assert receiver.requests == []


def test_a_context_that_does_not_verify_is_refused(authority: Authority) -> None:
    context = authority.client_context()
    context.check_hostname = False
    with pytest.raises(ValueError, match="does not verify"):
        narrowed(context)
    context.verify_mode = ssl.CERT_NONE
    with pytest.raises(ValueError, match="does not verify"):
        narrowed(context)


def test_this_machines_trust_does_not_extend_to_the_tests_authority(authority: Authority) -> None:
    with receiving(authority) as receiver:
        assert attempt(receiver, authority, tls=tls_context()) == Outcome("tls")


# Time: one deadline over every stage.


def drip_forever(data: bytes) -> Callable[[Request, Wire], None]:
    return lambda request, wire: wire.drip(data * 10_000, every=SHORT / 10)


def tls_drip(wire: Wire) -> None:
    """The first bytes of a plausible handshake record, one at a time."""
    wire.drip(b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc\x03\x03" + b"\0" * 16_384, every=SHORT / 10)


SLOW: dict[str, dict[str, Any]] = {
    "stalls in TLS": {"before_tls": Wire.stall},
    "drips in TLS": {"before_tls": tls_drip},
    "stalls before the status": {"behave": lambda request, wire: wire.stall()},
    "drips the status": {"behave": drip_forever(b"HTTP/1.1 2")},
    "drips headers": {"behave": drip_forever(b"HTTP/1.1 200 OK\r\nx: y\r\nx: y\r\nx: y\r\n")},
    "drips 100 Continue": {"behave": drip_forever(b"HTTP/1.1 100 Continue\r\n\r\n")},
}


def then(head: bytes, rest: bytes = b"") -> Callable[[Request, Wire], None]:
    """Send ``head`` at once and then drip ``rest``, or nothing."""

    def behave(request: Request, wire: Wire) -> None:
        wire.send(b"HTTP/1.1 200 OK\r\n" + head)
        wire.drip(rest * 9_000, every=SHORT / 10)
        wire.stall()

    return behave


CHUNKED = b"transfer-encoding: chunked\r\n\r\n"

LATE = {
    "stalls in the body": then(b"content-length: 9\r\n\r\n1"),
    "drips the body": then(b"content-length: 90000\r\n\r\n", b"x"),
    "drips chunks": then(CHUNKED, b"1\r\nx\r\n"),
    "drips trailers": then(CHUNKED + b"0\r\n", b"x: y\r\n"),
    "never closes": then(b"\r\n"),
}


def timed(call: Callable[[], Outcome]) -> tuple[Outcome, float]:
    began = time.monotonic()
    outcome = call()
    return outcome, time.monotonic() - began


@pytest.mark.parametrize("how", SLOW)
def test_a_receiver_that_is_slow_before_its_status_is_given_up_in_time(
    authority: Authority, how: str
) -> None:
    with Receiver(authority.server_context(HOST), **SLOW[how]) as receiver:
        outcome, seconds = timed(lambda: attempt(receiver, authority, timeout=SHORT))
    assert outcome == Outcome("timeout", retry=True)
    assert SHORT <= seconds < SHORT + 0.5


@pytest.mark.parametrize("how", LATE)
def test_a_receiver_that_is_slow_after_its_status_has_been_told_and_holds_nobody(
    authority: Authority, how: str
) -> None:
    with receiving(authority, LATE[how]) as receiver:
        outcome, seconds = timed(lambda: attempt(receiver, authority, timeout=SHORT))
    assert outcome == Outcome(None, 200)
    assert seconds < SHORT + 0.5


def test_a_receiver_that_does_not_take_the_connection_is_given_up_in_time(authority: Authority) -> None:
    with socket.create_server((LOOPBACK, 0), backlog=0) as full:
        port = full.getsockname()[1]
        waiting = []
        try:
            for _ in range(8):  # Fill the queue of connections nobody accepts.
                sock = socket.socket()
                sock.setblocking(False)
                sock.connect_ex((LOOPBACK, port))
                waiting.append(sock)
            target = Target("https", HOST, port, "/")
            outcome, seconds = timed(
                lambda: post(
                    target, [ip_address(LOOPBACK)], {}, b"", timeout=SHORT, tls=authority.client_context()
                )
            )
        finally:
            for sock in waiting:
                sock.close()
    assert outcome == Outcome("timeout", retry=True)
    assert seconds < SHORT + 0.5


def test_a_drip_of_a_byte_a_second_ends_after_5_seconds_in_all(authority: Authority) -> None:
    def drip(request: Request, wire: Wire) -> None:
        wire.drip(b"HTTP/1.1 200 OK\r\nx: y\r\n", every=1.0)

    with receiving(authority, drip) as receiver:
        outcome, seconds = timed(lambda: attempt(receiver, authority, timeout=5.0))
    assert outcome == Outcome("timeout", retry=True)
    assert 4.9 < seconds < 5.1


def test_time_that_was_spent_before_is_not_given_again(authority: Authority) -> None:
    with receiving(authority) as receiver:
        assert attempt(receiver, authority, timeout=-0.001) == Outcome("timeout", retry=True)
    assert receiver.connections == 0


# Bytes: two budgets, whatever is sent.

FLOODS: dict[str, bytes] = {
    "one endless status line": b"HTTP/1.1 200 " + b"O" * 60_000,
    "one endless header": b"x" * 60_000,
    "many headers": b"x: " + b"y" * 1_000 + b"\r\n",
    "short headers": b"x:\r\n",
    "100 Continue": b"HTTP/1.1 100 Continue\r\n\r\n",
    "103 Early Hints": b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n",
    "100 Continue with headers": b"HTTP/1.1 100 Continue\r\nx: " + b"y" * 1_000 + b"\r\n\r\n",
    "binary": bytes(range(256)) * 100,
}


@pytest.mark.parametrize("how", FLOODS)
def test_no_more_than_65536_bytes_of_headers_are_read(
    authority: Authority, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flood(request: Request, wire: Wire) -> None:
        if "header" in how and "Continue" not in how:
            wire.send(b"HTTP/1.1 200 OK\r\n")
        wire.pour(FLOODS[how], POURED)

    read = counted_reads(monkeypatch)
    with Receiver(None, flood) as receiver:
        outcome, seconds = timed(lambda: attempt(receiver, authority))
    assert outcome == Outcome("network")
    assert 0 < read() <= MAX_HEADER_BYTES
    assert seconds < 5


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


BODIES: dict[str, tuple[bytes, bytes]] = {
    "50 MB with their length": (b"content-length: 50000000\r\n\r\n", b"x" * 65_536),
    "until the connection closes": (b"\r\n", b"x" * 65_536),
    "an endless length": (b"content-length: 99999999999999999999\r\n\r\n", b"x" * 65_536),
    "chunks": (b"transfer-encoding: chunked\r\n\r\n", chunked(b"x" * 65_536)),
    "chunks of a byte": (b"transfer-encoding: chunked\r\n\r\n", chunked(b"x") * 1_000),
    "endless chunk extensions": (b"transfer-encoding: chunked\r\n\r\n1;", b"x" * 65_536),
    "a chunk without an end": (b"transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n", b"x" * 65_536),
    "a negative chunk": (b"transfer-encoding: chunked\r\n\r\n-1\r\n", b"x" * 65_536),
    "endless trailers": (b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n" * 1_000),
    "a gzip bomb": (
        b"content-encoding: gzip\r\ncontent-length: 50000000\r\n\r\n",
        gzip.compress(b"\0" * 50_000_000),
    ),
}


@pytest.mark.parametrize("how", BODIES)
def test_no_more_than_65536_bytes_of_body_are_read_and_the_status_counts(
    authority: Authority, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, body = BODIES[how]

    def flood(request: Request, wire: Wire) -> None:
        wire.send(b"HTTP/1.1 200 OK\r\n" + head)
        wire.pour(body, POURED)

    read = counted_reads(monkeypatch)
    with Receiver(None, flood) as receiver:
        outcome, seconds = timed(lambda: attempt(receiver, authority))
    assert outcome == Outcome(None, 200)
    assert 0 < read() <= MAX_HEADER_BYTES + MAX_RESPONSE_BODY_BYTES
    # Some of the body may come along with the headers; the two budgets do not add up for it.
    assert read() <= MAX_RESPONSE_BODY_BYTES + 8_192 + 200
    assert seconds < 5


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts what an attempt takes off its sockets."""
    counts: list[int] = []
    real = socket.socket.recv

    def recv(self: socket.socket, size: int, flags: int = 0) -> bytes:
        data = real(self, size, flags)
        if self.getpeername()[1] in ports and self.getsockname()[1] not in ports:
            counts.append(len(data))
        return data

    ports: set[int] = set()
    entered = Receiver.__enter__

    def enter(self: Receiver) -> Receiver:
        receiver = entered(self)
        ports.add(receiver.port)
        return receiver

    monkeypatch.setattr(Receiver, "__enter__", enter)
    monkeypatch.setattr(socket.socket, "recv", recv)
    return lambda: sum(counts)


def test_a_flood_of_tls_records_without_data_ends_too(authority: Authority) -> None:
    context = authority.server_context(HOST)
    context.num_tickets = 1_000_000
    with Receiver(context, lambda request, wire: wire.stall()) as receiver:
        outcome, seconds = timed(lambda: attempt(receiver, authority, timeout=5.0))
    assert outcome == Outcome("network")
    assert seconds < 5.1


# Answers that are none.

NOT_HTTP = {
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "HTTP/0.9": b"<html>hello</html>",
    "HTTP/2": b"\0\0\x12\4\0\0\0\0\0",
    "no status": b"HTTP/1.1\r\n\r\n",
    "a status of letters": b"HTTP/1.1 abc OK\r\n\r\n",
    "a status below 100": b"HTTP/1.1 42 OK\r\n\r\n",
    "a status of four digits": b"HTTP/1.1 2000 OK\r\n\r\n",
    "an unknown version": b"HTTP/9.9 200 OK\r\n\r\n",
    "NUL": b"\0" * 100,
}


@pytest.mark.parametrize("how", NOT_HTTP)
def test_an_answer_that_is_not_http_ends_it(authority: Authority, how: str) -> None:
    with receiving(authority, lambda request, wire: wire.send(NOT_HTTP[how] + b"\r\n\r\n")) as receiver:
        assert attempt(receiver, authority) == Outcome("network")


def test_a_connection_closed_without_an_answer_is_retried(authority: Authority) -> None:
    with receiving(authority, lambda request, wire: None) as receiver:
        assert attempt(receiver, authority) == Outcome("network", retry=True)


def test_a_connection_closed_within_tls_is_retried(authority: Authority) -> None:
    def close(wire: Wire) -> None:
        wire.sock.recv(1)
        wire.sock.shutdown(socket.SHUT_RDWR)

    with Receiver(authority.server_context(HOST), before_tls=close) as receiver:
        assert attempt(receiver, authority) == Outcome("network", retry=True)


def test_plain_text_where_tls_was_expected_ends_it(authority: Authority) -> None:
    with Receiver(None, before_tls=lambda wire: wire.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as receiver:
        url = receiver.url(HOST).replace("http:", "https:")
        assert attempt(receiver, authority, url=url) == Outcome("tls")


# Addresses: those that were checked, and no other.


def test_a_refused_connection_is_retried_and_the_next_address_is_tried_first(authority: Authority) -> None:
    with receiving(authority) as receiver:
        assert attempt(receiver, authority, addresses=("127.0.0.9", LOOPBACK)) == Outcome(None, 204)
        nobody = receiver.url(HOST)
    assert attempt(receiver, authority, url=nobody) == Outcome("network", retry=True)


def test_no_more_than_four_addresses_are_dialled(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled: list[str] = []

    def refuse(self: socket.socket, address: tuple[str, int]) -> None:
        dialled.append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", refuse)
    outcome = post(
        Target("https", HOST, 443, "/"),
        [ip_address(f"127.0.0.{last}") for last in range(1, 100)],
        {},
        b"",
        timeout=1,
        tls=authority.client_context(),
    )
    assert outcome == Outcome("network", retry=True)
    assert dialled == ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"]
