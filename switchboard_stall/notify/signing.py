"""Standard Webhooks: secrets, message ids and signatures."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

PREFIX: Final = "whsec_"
MINTED_BYTES: Final = 32
"""The length of a minted key, in bytes."""

KEY_BYTES: Final = range(24, 65)
"""The accepted lengths of a key, in bytes."""

_CROCKFORD: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


class SecretInvalid(ValueError):
    """A signing secret is not ``whsec_`` and the strict base64 of 24 to 64 bytes. Never shows the secret."""


class SigningKey:
    """The bytes that sign. Never shown by ``repr``, and never pickled.

    :param secret: ``whsec_`` followed by the strict, padded base64 of 24 to 64 bytes.
    :raises SecretInvalid: it is anything else.
    """

    __slots__ = ("_key",)

    def __init__(self, secret: str) -> None:
        """Make it; the class says of what."""
        self._key = _decoded(secret)

    def __repr__(self) -> str:
        """Show that it is a key, and nothing of it."""
        return "<SigningKey>"

    def __reduce__(self) -> str:
        """Refuse to be pickled."""
        raise TypeError("a signing key is not pickled")

    def signature(self, message_id: str, timestamp: int, body: bytes) -> str:
        """Return one signature: ``v1,`` and the padded base64 of HMAC-SHA256 over ``id.timestamp.body``.

        :param timestamp: whole seconds since the epoch.
        """
        signed = b"%s.%d.%s" % (message_id.encode("ascii"), timestamp, body)
        return "v1," + base64.b64encode(hmac.digest(self._key, signed, hashlib.sha256)).decode("ascii")


def mint_secret(token_bytes: Callable[[int], bytes] = secrets.token_bytes) -> str:
    """Return a new signing secret of 32 random bytes.

    :param token_bytes: gives so many bytes that nobody can guess.
    """
    return PREFIX + base64.b64encode(token_bytes(MINTED_BYTES)).decode("ascii")


def message_id(now: datetime, token_bytes: Callable[[int], bytes] = secrets.token_bytes) -> str:
    """Return ``msg_`` and a ULID: 48 bits of milliseconds, then 80 random bits.

    :param now: when the notification was queued for this hook, aware.
    :param token_bytes: gives so many random bytes.
    """
    value = int(now.timestamp() * 1000) << 80 | int.from_bytes(token_bytes(10))
    return "msg_" + "".join(_CROCKFORD[value >> shift & 31] for shift in range(125, -1, -5))


def signed_headers(
    keys: Iterable[SigningKey], message_id: str, timestamp: int, body: bytes
) -> dict[str, str]:
    """Return the three headers of Standard Webhooks.

    :param keys: the keys in force, the newest first; two during the day after a rotation.
    :param message_id: the same for all attempts of one notification to one hook.
    :param timestamp: whole seconds since the epoch; fresh for each attempt.
    """
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(key.signature(message_id, timestamp, body) for key in keys),
    }


def _decoded(secret: str) -> bytes:
    if secret.startswith(PREFIX):
        encoded = secret.removeprefix(PREFIX)
        try:
            key = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            key = b""
        # Python decodes stray trailing bits and padding; only the canonical form is strict.
        if len(key) in KEY_BYTES and base64.b64encode(key).decode("ascii") == encoded:
            return key
    raise SecretInvalid(
        f"a signing secret is {PREFIX} and the padded base64 of {KEY_BYTES[0]} to {KEY_BYTES[-1]} bytes"
    )
