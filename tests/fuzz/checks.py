"""What no input may break: shared by the coverage-guided fuzzer and by the suite."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from ipaddress import IPv4Address, ip_address, ip_network
from typing import get_args

from switchboard_stall.models import Todo
from switchboard_stall.notify import attempt
from switchboard_stall.notify.body import MAX_BODY_BYTES, BodyTooLarge, Notification
from switchboard_stall.notify.health import FailureClass
from switchboard_stall.notify.target import HostUnresolved, Target, TargetPolicy, TargetRefused

_POLICIES = (
    TargetPolicy(),
    TargetPolicy(allow_http=True, allow_cidrs=["0.0.0.0/0", "::/0"], listening=[("93.184.216.34", 443)]),
)
_NEVER = [
    ip_network(cidr)
    for cidr in (
        "0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3", "::/8", "64:ff9b::/32", "2002::/16",
        "2001::/32", "fe80::/10", "ff00::/8",
    )
]  # fmt: skip
_CERTIFICATELESS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def check_url(url: str, answers: list[str]) -> None:
    """A URL is refused or becomes one plain target, and no answer leads where nothing may go."""
    for policy in _POLICIES:
        with suppress(TargetRefused, HostUnresolved):
            target = policy.target(url)
            assert 1 <= target.port <= 65535
            assert target.scheme in ("https", "http")
            assert not set(target.host) & set("/?#@\\%[] \t\r\n\0")
            request = f"POST {target.path} HTTP/1.1\r\nhost: {target.authority}\r\n\r\n"
            assert request.isascii()
            assert len(request.split("\r\n")) == 4
            assert len(request.split(" ")) == 4
            if target.literal is None:
                with suppress(OSError):
                    # What a C library would dial without asking a name server.
                    assert IPv4Address(socket.inet_aton(target.host)) is None, target.host
            else:
                answers = [target.host]
            for address in policy.check(target, answers):
                assert not any(address in network for network in _NEVER), (url, address)


class Wire:
    """One end of a pair of sockets, so that a whole answer comes without a network."""

    def __init__(self, answer: bytes) -> None:
        self.near, self.far = socket.socketpair()
        self.read = 0
        self._sender = threading.Thread(target=self._send, args=(answer,), daemon=True)
        self._sender.start()

    def _send(self, answer: bytes) -> None:
        with suppress(OSError):
            self.far.sendall(answer)
            self.far.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.near.close()
        self.far.close()
        self._sender.join()


class _Counting(socket.socket):
    read = 0

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = super().recv(size, flags)
        self.read += len(data)
        return data


def check_response(answer: bytes) -> None:
    """Any answer is an outcome of a known class, after at most two budgets of bytes."""
    wire = Wire(answer)
    near = _Counting(fileno=wire.near.detach())
    real = attempt._connect
    attempt._connect = lambda *args: near
    try:
        outcome = attempt.post(
            Target("http", "good.example", 80, "/"),
            [ip_address("93.184.216.34")],
            {},
            b"{}",
            timeout=5,
            tls=_CERTIFICATELESS,
        )
    finally:
        attempt._connect = real
        near.close()
        wire.close()
    assert outcome.error is None or outcome.error in get_args(FailureClass)
    assert outcome.error != "timeout", "an answer that ends cannot time out"
    assert (outcome.error is None) == (outcome.status is not None and 200 <= outcome.status < 300)
    assert not (outcome.retry and outcome.error is None)
    assert near.read <= attempt.MAX_HEADER_BYTES + attempt.MAX_RESPONSE_BODY_BYTES


def check_body(texts: list[str], attempts: int) -> None:
    """Whatever a sender wrote leaves as one bounded line of JSON that a strict receiver reads."""
    title, kind, source, queue, slug = (texts + [""] * 5)[:5]
    todo = Todo(
        id="td_1",
        endpoint_id=uuid.UUID(int=1),
        queue=queue,
        title=title,
        kind=kind,
        source=source,
        attempt=attempts,
    )
    try:
        body = Notification.of(todo, "created", datetime.now(UTC)).body(slug)
    except BodyTooLarge:
        assert len(queue) > 100 or len(slug) > 100
        return
    assert len(body) <= MAX_BODY_BYTES
    assert all(0x20 <= byte < 0x7F for byte in body)
    read = json.loads(body)
    for name in ("summary", "kind", "source"):
        text = read.get(name, "")
        text.encode("utf-8")
        assert len(text) <= 200
        assert "</channel>" not in text.lower()
        assert not {"\r", "\n"} & set(text)
