"""One attempt: one POST to one pinned address, within one deadline and two byte budgets, whoever answers."""

from __future__ import annotations

import contextlib
import errno
import http.client
import io
import socket
import ssl
import time
from typing import TYPE_CHECKING, Final, TypeVar, cast

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from _typeshed import WriteableBuffer

    from switchboard_stall.notify.health import FailureClass
    from switchboard_stall.notify.target import Address, Target

MAX_HANDSHAKE_BYTES: Final = 131_072
"""The most bytes read before TLS stands: OpenSSL itself takes certificates of 100 KiB."""

MAX_HEADER_BYTES: Final = 65_536
"""The most bytes read before a response's headers are complete, interim responses included."""

MAX_RESPONSE_BODY_BYTES: Final = 65_536
"""The most bytes read of a response's body. What is read is thrown away."""

MAX_DIALS: Final = 4
"""The most addresses of one host that one attempt connects to, in the resolver's order."""

_T = TypeVar("_T")

_RETRIED_STATUSES: Final = frozenset((408, 429))
_INTERIM: Final = range(102, 200)
_CHUNK: Final = 8_192


@frozen
class Outcome:
    """How one attempt ended.

    :param error: ``None`` if it was delivered.
    :param status: the HTTP status, if the receiver answered at all.
    :param retry: whether the same notification may be tried again.
    """

    error: FailureClass | None
    status: int | None = None
    retry: bool = False


def post(
    target: Target,
    addresses: Sequence[Address],
    headers: Mapping[str, str],
    body: bytes,
    *,
    timeout: float,
    tls: ssl.SSLContext,
    monotonic: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Send one POST and tell how it ended. Never raises for what the network or the receiver does.

    No name is resolved, no proxy asked, no redirect followed, no connection kept, no encoding undone.

    :param target: the checked URL. TLS is verified against its host.
    :param addresses: its checked addresses, the only ones that are dialled.
    :param headers: all headers but Host, Content-Length and Connection.
    :param body: the bytes to send.
    :param timeout: seconds for connecting, TLS, sending, headers and body together.
    :param tls: a context that verifies.
    :param monotonic: reads a clock in seconds that never goes back.

    Source: wake chain, "Delivery of a notification", attempt.
    """
    deadline = _Deadline(timeout, monotonic)
    try:
        with _dial(target, addresses, deadline, tls) as wire:
            return _exchange(wire, target, headers, body)
    except ssl.SSLCertVerificationError:  # It is an OSError too, and nothing a retry could mend.
        return Outcome("tls")
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        return Outcome("network", retry=True)
    except ssl.SSLError:
        return Outcome("tls")
    except TimeoutError:
        return Outcome("timeout", retry=True)
    except http.client.RemoteDisconnected:
        return Outcome("network", retry=True)
    except (_BudgetSpent, http.client.HTTPException, ValueError):
        return Outcome("network")  # An answer that is not HTTP, or never ends: the next would be the same.
    except OSError:
        return Outcome("network", retry=True)


def tls_context() -> ssl.SSLContext:
    """Return a context that trusts what this machine trusts. Making it takes some 20 ms: share it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    return narrowed(context)


def narrowed(context: ssl.SSLContext) -> ssl.SSLContext:
    """Return the same context, held to TLS 1.2 or newer and to names in the certificate's extension.

    :raises ValueError: it does not verify certificates or host names.
    """
    if context.verify_mode != ssl.CERT_REQUIRED or not context.check_hostname:
        raise ValueError("tls does not verify; it needs verify_mode=CERT_REQUIRED and check_hostname")
    if context.minimum_version < ssl.TLSVersion.TLSv1_2:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.hostname_checks_common_name = False
    return context


class _BudgetSpent(OSError):
    """The receiver sent more than an attempt reads."""


class _Deadline:
    def __init__(self, timeout: float, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._end = monotonic() + timeout

    def left(self) -> float:
        """Seconds left, more than none.

        :raises TimeoutError: none is left.
        """
        left = self._end - self._monotonic()
        if left <= 0:
            raise TimeoutError("the attempt's time is up")
        return left


def _dial(target: Target, addresses: Sequence[Address], deadline: _Deadline, tls: ssl.SSLContext) -> _Wire:
    sock = _connect(target, addresses[:MAX_DIALS], deadline)
    try:
        if target.scheme == "http":
            return _Wire(sock, deadline, MAX_HEADER_BYTES)
        return _TlsWire(sock, deadline, tls, target.host)
    except BaseException:
        sock.close()
        raise


def _connect(target: Target, addresses: Sequence[Address], deadline: _Deadline) -> socket.socket:
    failure: OSError = OSError(errno.EADDRNOTAVAIL, "no address to dial")
    for number, address in enumerate(addresses):
        left = deadline.left()
        sock = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
        try:
            # The others get their share of the time when this one is a black hole.
            sock.settimeout(left / (len(addresses) - number))
            sock.connect((str(address), target.port))
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure


class _Wire(io.RawIOBase):
    """A connected socket with the deadline and a byte budget armed on each read and write.

    What a per-read timeout would let drip for ever ends here.
    """

    def __init__(self, sock: socket.socket, deadline: _Deadline, budget: int) -> None:
        self._sock = sock
        self._deadline = deadline
        self._budget = budget
        self._reader = _Reader(self, _CHUNK)

    def allow(self, budget: int) -> None:
        """Set how many more bytes may be read."""
        self._budget = budget

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self._receive(len(view))
        view[: len(data)] = data
        return len(data)

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._sock.settimeout(self._deadline.left())
            view = view[self._sock.send(view) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        """Give http.client the one reader, so that what it has read ahead is not lost between responses."""
        return self._reader

    def close(self) -> None:
        self._sock.close()
        super().close()

    def _receive(self, most: int) -> bytes:
        if self._budget <= 0:
            raise _BudgetSpent("the receiver sent more than an attempt reads")
        self._sock.settimeout(self._deadline.left())
        data = self._sock.recv(min(most, self._budget))
        self._budget -= len(data)
        return data


class _TlsWire(_Wire):
    """The same over TLS, where the budget counts what came over the wire.

    OpenSSL reads from memory, not from the socket: a peer that floods it with records that carry no data
    (session tickets, key updates) would otherwise hold it past any timeout.
    """

    def __init__(self, sock: socket.socket, deadline: _Deadline, tls: ssl.SSLContext, host: str) -> None:
        super().__init__(sock, deadline, MAX_HANDSHAKE_BYTES)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._run(self._tls.do_handshake)
        self.allow(MAX_HEADER_BYTES)

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        try:
            return self._run(lambda: cast("int", self._tls.read(len(view), view)))
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return 0

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._run(lambda: self._tls.write(view)) :]  # noqa: B023 (called at once)

    def _run(self, step: Callable[[], _T]) -> _T:
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                self._flush()
                data = self._receive(_CHUNK)
                if data:
                    self._incoming.write(data)
                elif self._incoming.eof:
                    raise ssl.SSLEOFError("the connection was closed within TLS") from None
                else:
                    self._incoming.write_eof()
            else:
                self._flush()
                return result

    def _flush(self) -> None:
        super().sendall(self._outgoing.read())


class _Reader(io.BufferedReader):
    """A reader that a response cannot close: the next response on the same connection needs it."""

    def close(self) -> None:
        pass

    def flush(self) -> None:
        """A response that is collected flushes what it reads from, closed or not."""


def _exchange(wire: _Wire, target: Target, headers: Mapping[str, str], body: bytes) -> Outcome:
    wire.sendall(_request(target, headers, body))
    while True:
        response = http.client.HTTPResponse(wire, method="POST")  # type: ignore[arg-type]
        response.begin()
        if response.status not in _INTERIM:
            break
    outcome = _judged(response.status)
    # The status has decided; the rest is read so that an honest receiver can finish its answer.
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        _drain(wire, response)
    return outcome


def _request(target: Target, headers: Mapping[str, str], body: bytes) -> bytes:
    fields = {
        "host": target.authority,
        "content-length": str(len(body)),
        "accept-encoding": "identity",
        "connection": "close",
        **headers,
    }
    lines = [f"POST {target.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body


def _drain(wire: _Wire, response: http.client.HTTPResponse) -> None:
    left = MAX_RESPONSE_BODY_BYTES
    wire.allow(left)
    while left and (data := response.read(min(left, _CHUNK))):
        left -= len(data)


def _judged(status: int) -> Outcome:
    if 200 <= status < 300:
        return Outcome(None, status)
    if 300 <= status < 400:
        return Outcome("redirect", status)
    if status >= 500:
        return Outcome("server_error", status, retry=status < 600)
    return Outcome("client_error", status, retry=status in _RETRIED_STATUSES)
