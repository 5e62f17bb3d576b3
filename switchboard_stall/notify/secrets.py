"""Secrets at rest: AES-256-GCM under one key that the environment holds."""

from __future__ import annotations

import base64
import binascii
import os
import re
import secrets
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

KEY_VARIABLE: Final = "SWITCHBOARD_SECRET_ENCRYPTION_KEY"
"""The environment variable that holds the key."""

PREFIX: Final = "enc:v1:"
_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16


class SecretKeyError(ValueError):
    """There is no key for secrets at rest, or it is not the base64 or hex of 32 bytes. Never shows it."""


class SealedSecretError(ValueError):
    """A stored secret is not sealed, is damaged, or was sealed under another key. Never shows it."""


class NotifyExtraMissing(ImportError):
    """The package that seals secrets is not installed."""


class SecretBox:
    """Seals the secrets that are stored, and opens them again. Never shown by ``repr``, never pickled.

    :param key: base64 or hex of exactly 32 bytes; white space around it is ignored.
    :param token_bytes: gives so many random bytes, for the nonces.
    :raises SecretKeyError: it is anything else.
    :raises NotifyExtraMissing: the extra ``notify`` is not installed.

    Source: wake chain, "Secrets at rest".
    """

    __slots__ = ("_cipher", "_token_bytes")

    def __init__(self, key: str, *, token_bytes: Callable[[int], bytes] = secrets.token_bytes) -> None:
        """Make it; the class says of what."""
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise NotifyExtraMissing(
                "secrets at rest need the package cryptography: pip install 'switchboard-stall[notify]'"
            ) from None
        self._cipher = AESGCM(_key_bytes(key))
        self._token_bytes = token_bytes

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> SecretBox:
        """Return a box under the key in ``SWITCHBOARD_SECRET_ENCRYPTION_KEY``.

        :param environment: where to look for it.
        :raises SecretKeyError: it is not set, or is no key.
        """
        key = environment.get(KEY_VARIABLE, "")
        if not key.strip():
            raise SecretKeyError(
                f"{KEY_VARIABLE} is not set; notify hooks need it: base64 or hex of 32 random bytes"
            )
        return cls(key)

    def __repr__(self) -> str:
        """Show that it is a box, and nothing of its key."""
        return "<SecretBox>"

    def __reduce__(self) -> str:
        """Refuse to be pickled."""
        raise TypeError("a secret box is not pickled")

    def seal(self, secret: str) -> str:
        """Return the form to store: ``enc:v1:`` and unpadded base64 of nonce, ciphertext and tag."""
        nonce = self._token_bytes(_NONCE_BYTES)
        sealed = nonce + self._cipher.encrypt(nonce, secret.encode(), None)
        return PREFIX + base64.b64encode(sealed).decode("ascii").rstrip("=")

    def open(self, stored: str) -> str:
        """Return the secret that was sealed.

        :raises SealedSecretError: ``stored`` has no prefix, is damaged, or is sealed under another key.
        """
        from cryptography.exceptions import InvalidTag

        encoded = stored.removeprefix(PREFIX)
        if encoded == stored:
            raise SealedSecretError(f"a stored secret does not begin with {PREFIX}; it is not used")
        sealed = _unpadded_base64(encoded)
        if sealed is None or len(sealed) < _NONCE_BYTES + _TAG_BYTES:
            raise SealedSecretError("a stored secret is damaged")
        try:
            return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None).decode()
        except (InvalidTag, UnicodeDecodeError):
            raise SealedSecretError(
                f"a stored secret does not open: it is damaged, or {KEY_VARIABLE} is another key now"
            ) from None


def secret_box(key: SecretBox | str | None) -> SecretBox:
    """Return the box that is meant: given, under the given key, or under the environment's.

    :raises SecretKeyError: there is no key, or it is not one.
    """
    if isinstance(key, SecretBox):
        return key
    return SecretBox.from_environment() if key is None else SecretBox(key)


def _key_bytes(text: str) -> bytes:
    text = text.strip()
    key = bytes.fromhex(text) if re.fullmatch("[0-9a-fA-F]{64}", text) else _unpadded_base64(text.rstrip("="))
    if key is None or len(key) != _KEY_BYTES:
        raise SecretKeyError(f"the key for secrets is not the base64 or hex of exactly {_KEY_BYTES} bytes")
    return key


def _unpadded_base64(text: str) -> bytes | None:
    try:
        decoded = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None
    return decoded if base64.b64encode(decoded).decode("ascii").rstrip("=") == text else None
