"""A real HTTPS receiver on this machine, honest or hostile, with certificates of its own authority."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import json
import socket
import ssl
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

from attrs import define, field, frozen
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

LOOPBACK = "127.0.0.1"

# Python 3.13 verifies to the letter of RFC 5280.
_CERTIFICATES_ONLY = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


class Authority:
    """A certificate authority that only these tests trust."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        self._key_id = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self._certificate = (
            _builder(self._name, self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_CERTIFICATES_ONLY, critical=True)
            .add_extension(self._key_id, critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def client_context(self) -> ssl.SSLContext:
        """A context that trusts this authority and no other."""
        return ssl.create_default_context(cadata=self._certificate.public_bytes(Encoding.PEM).decode())

    def server_context(self, *names: str, common_name: str = "a receiver", days: int = 1) -> ssl.SSLContext:
        """A context that presents a certificate for these names and addresses; negative days: it expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        certificate = (
            _builder(subject, self._name, key, days)
            .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._key_id), False
            )
            .sign(self._key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with TemporaryDirectory() as folder:
            pem = Path(folder) / "receiver.pem"
            pem.write_bytes(
                key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
                + certificate.public_bytes(Encoding.PEM)
            )
            context.load_cert_chain(pem)
        return context


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = 1
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=2))
        .not_valid_after(now + dt.timedelta(days=days))
    )


@frozen
class Request:
    """One request as it came in: header names in lower case."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@define(eq=False)
class Wire:
    """One connection to the receiver, for a behaviour that misbehaves."""

    sock: socket.socket
    closing: threading.Event
    sent: int = 0

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)
        self.sent += len(data)

    def answer(self, status: int = 204, *, headers: str = "", body: bytes = b"") -> None:
        length = "" if status == 204 else f"content-length: {len(body)}\r\n"
        self.send(f"HTTP/1.1 {status} Some Reason\r\n{headers}{length}\r\n".encode("latin-1") + body)

    def stall(self, seconds: float = 30.0) -> None:
        """Do nothing until the receiver closes."""
        self.closing.wait(seconds)

    def drip(self, data: bytes, every: float) -> None:
        """Send one byte at a time."""
        for byte in data:
            if self.closing.wait(every):
                return
            self.send(bytes([byte]))

    def pour(self, data: bytes, limit: int) -> None:
        """Send ``data`` again and again, until the other side has had enough or ``limit`` bytes are sent."""
        with contextlib.suppress(OSError):
            while self.sent < limit and not self.closing.is_set():
                self.send(data)


def no_content(request: Request, wire: Wire) -> None:
    """What an honest receiver does."""
    wire.answer(204)


def status(code: int, headers: str = "") -> Callable[[Request, Wire], None]:
    """Answer each request with this status."""
    return lambda request, wire: wire.answer(code, headers=headers)


@define(eq=False)
class Receiver:
    """Listens on a port of its own, from ``with`` on; keeps what came in.

    :param tls: the context of the server; ``None`` for plain HTTP.
    :param behave: what to do with a request. :param before_tls: called with each new connection first.
    """

    tls: ssl.SSLContext | None = None
    behave: Callable[[Request, Wire], None] = no_content
    before_tls: Callable[[Wire], None] = lambda wire: None
    requests: list[Request] = field(factory=list, init=False)
    connections: int = field(default=0, init=False)
    bytes_after_handshake: int = field(default=0, init=False)
    port: int = field(default=0, init=False)
    wires: list[Wire] = field(factory=list, init=False)
    _changed: threading.Condition = field(factory=threading.Condition, init=False)
    _closing: threading.Event = field(factory=threading.Event, init=False)
    _listener: socket.socket = field(init=False)
    _threads: list[threading.Thread] = field(factory=list, init=False)

    def url(self, host: str = LOOPBACK, path: str = "/hook") -> str:
        return f"{'http' if self.tls is None else 'https'}://{host}:{self.port}{path}"

    def wait_for(self, number: int, timeout: float = 10.0) -> list[Request]:
        """The requests, once there are so many."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: len(self.requests) >= number, timeout)
        assert arrived, f"{len(self.requests)} of {number} requests arrived in {timeout} s"
        return list(self.requests)

    def __enter__(self) -> Self:
        self._listener = socket.create_server((LOOPBACK, 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        self._spawn(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for wire in list(self.wires):
            with contextlib.suppress(OSError):
                wire.sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(10)

    def _spawn(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="test-receiver", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            sock.settimeout(30)
            self._spawn(lambda sock=sock: self._serve(sock))  # type: ignore[misc]

    def _serve(self, sock: socket.socket) -> None:
        wire = Wire(sock, self._closing)
        self.wires.append(wire)
        try:
            self.before_tls(wire)
            if self.tls is not None:
                wire.sock = self.tls.wrap_socket(sock, server_side=True)
            request = self._read(wire.sock)
            if request is not None:
                with self._changed:
                    self.requests.append(request)
                    self._changed.notify_all()
                self.behave(request, wire)
        except OSError:
            pass  # The other side had enough, or did not trust us.
        finally:
            wire.sock.close()

    def _read(self, sock: socket.socket) -> Request | None:
        data = b""
        while b"\r\n\r\n" not in data:
            more = sock.recv(65536)
            self.bytes_after_handshake += len(more)
            if not more:
                return None
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        line, *rest = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in rest)}
        while len(body) < int(headers.get("content-length", "0")):
            body += sock.recv(65536)
        return Request(line, headers, body)
