"""A receiver of wakes for the demo: HTTPS, in a process of its own, that believes no signature unseen.

:func:`serve` prints the port it listens on, reads the hook's secret from its standard input, and then
prints one JSON line for each request: what came, and whether the package ``standardwebhooks`` verified it.
It ends when its standard input does. It knows nothing of the sender: only the wire.
"""

from __future__ import annotations

import json
import queue
import ssl
import subprocess
import sys
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import IO

ADDRESS: Final = "127.0.0.1"


@frozen
class Wake:
    """One request, as the receiver saw it.

    :param verified: whether the stock verifier accepted its signature.
    :param body: the notification, parsed.
    :param headers: by lower-case name.
    """

    verified: bool
    body: dict[str, Any]
    headers: dict[str, str]


@frozen
class Certificates:
    """A certificate for 127.0.0.1 and the authority that signed it, in PEM."""

    authority: str
    server: str


@define
class Receiver:
    """The receiver's process, seen from the outside."""

    url: str
    _stdin: IO[str]
    _wakes: queue.SimpleQueue[Wake] = field(factory=queue.SimpleQueue)

    def trust(self, secret: str) -> None:
        """Hand over the hook's secret, as whoever registers a hook does once."""
        self._stdin.write(secret + "\n")
        self._stdin.flush()

    def wakes(self, count: int, *, patience: float) -> list[Wake]:
        """Wait for so many wakes.

        :param count: how many should come.
        :param patience: seconds to wait for each.
        :returns: those that came, perhaps fewer.
        """
        came: list[Wake] = []
        while len(came) < count:
            try:
                came.append(self._wakes.get(timeout=patience))
            except queue.Empty:
                break
        return came

    def quiet(self, moment: float) -> bool:
        """Return whether no wake arrives for so many seconds."""
        return not self.wakes(1, patience=moment)


@contextmanager
def receiver(folder: Path, certificates: Certificates) -> Iterator[Receiver]:
    """Run a receiver for the length of the context.

    :param folder: where its certificate and key may lie.
    :param certificates: what it shows to whoever connects.
    :raises RuntimeError: it did not start.
    """
    pem = folder / "receiver.pem"
    pem.touch(mode=0o600)
    pem.write_text(certificates.server)
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; from {__name__} import serve; serve(sys.argv[1])", str(pem)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # A terminal's Ctrl-C is for the demo, which ends this process by closing its input.
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        first = process.stdout.readline()
        if not first:
            raise RuntimeError("the receiver did not start")
        running = Receiver(f"https://{ADDRESS}:{json.loads(first)['port']}/wake", process.stdin)
        reader = threading.Thread(target=_collect, args=(process.stdout, running._wakes), daemon=True)
        reader.start()
        try:
            yield running
        finally:
            process.stdin.close()
            process.terminate()
            process.wait()
            # The reader must be at the end of the pipe before it is closed under it.
            reader.join()


def make_certificates() -> Certificates:
    """Return a fresh authority and its certificate for 127.0.0.1, good for a day."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
        )

    def pem(certificate: x509.Certificate) -> str:
        return certificate.public_bytes(serialization.Encoding.PEM).decode()

    # Verifiers of today refuse an authority that does not say what its key may be used for.
    def usage(*, signs: bool) -> x509.KeyUsage:
        return x509.KeyUsage(
            digital_signature=not signs,
            key_cert_sign=signs,
            crl_sign=signs,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )

    issuer = name("switchboard-stall demo authority")
    authority_key, server_key = (
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP256R1()),
    )
    authority_id = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    authority = (
        builder(issuer, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage(signs=True), critical=True)
        .add_extension(authority_id, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    server = (
        builder(name("switchboard-stall demo receiver"), server_key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address(ADDRESS))]), critical=False)
        .add_extension(usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority_id), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )
    key = server_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    return Certificates(pem(authority), key + pem(server))


def _collect(lines: IO[str], wakes: queue.SimpleQueue[Wake]) -> None:
    for line in lines:
        wakes.put(Wake(**json.loads(line)))


class _Handler(BaseHTTPRequestHandler):
    secret = ""

    def do_POST(self) -> None:
        """Verify, answer, and tell."""
        from standardwebhooks import Webhook, WebhookVerificationError

        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            Webhook(self.secret).verify(body, headers)
            verified = True
        except WebhookVerificationError:
            verified = False
        # Told before it is answered: who has the answer may rely on it.
        print(json.dumps({"verified": verified, "body": json.loads(body), "headers": headers}), flush=True)
        self.send_response(204 if verified else 401)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (named by the base class)
        """Stay silent: what came is told as JSON."""


def serve(certificate: str) -> None:
    """Serve until standard input ends.

    :param certificate: path of a PEM file with the key and the certificate.
    """
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    with HTTPServer((ADDRESS, 0), _Handler) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        print(json.dumps({"port": server.server_port}), flush=True)
        _Handler.secret = sys.stdin.readline().strip()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdin.read()
