from __future__ import annotations

import base64
import builtins
import pickle
import subprocess
import sys
import traceback
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchboard_stall.notify.secrets import (
    KEY_VARIABLE,
    NotifyExtraMissing,
    SealedSecretError,
    SecretBox,
    SecretKeyError,
    secret_box,
)

KEY = bytes(range(1, 33))
VECTOR = "enc:v1:AAECAwQFBgcICQoLBlhy8quCBW5uT9AkAf6U7E/yNNTKAgO2q0fxkQDepCG9ng"


def test_the_vector_holds_both_ways() -> None:
    box = SecretBox(KEY.hex(), token_bytes=lambda length: bytes(range(length)))
    assert box.seal("whsec_deadbeefcafe") == VECTOR
    assert box.open(VECTOR) == "whsec_deadbeefcafe"


@pytest.mark.parametrize(
    "text",
    [
        KEY.hex(),
        KEY.hex().upper(),
        base64.b64encode(KEY).decode(),
        base64.b64encode(KEY).decode().rstrip("="),
        f"  {KEY.hex()}\n",
    ],
)
def test_the_key_is_base64_or_hex_of_32_bytes(text: str) -> None:
    assert SecretBox(text).open(VECTOR) == "whsec_deadbeefcafe"


@pytest.mark.parametrize(
    "text",
    [
        "",
        KEY.hex()[:-2],
        KEY.hex() + "00",
        base64.b64encode(KEY[:-1]).decode(),
        base64.b64encode(KEY + b"x").decode(),
        "correct horse battery staple!!!!",
        base64.urlsafe_b64encode(b"\xff" * 32).decode(),
    ],
)
def test_anything_else_is_no_key_and_is_not_shown(text: str) -> None:
    with pytest.raises(SecretKeyError) as caught:
        SecretBox(text)
    shown = "".join(traceback.format_exception(caught.value))
    assert not text or text not in shown


def test_without_a_key_there_is_no_box_and_the_error_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(SecretKeyError, match=KEY_VARIABLE):
        SecretBox.from_environment({})
    with pytest.raises(SecretKeyError, match=KEY_VARIABLE):
        SecretBox.from_environment({KEY_VARIABLE: "  "})
    with pytest.raises(SecretKeyError, match=KEY_VARIABLE):
        secret_box(None)


def test_the_environment_gives_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY.hex())
    assert secret_box(None).open(VECTOR) == "whsec_deadbeefcafe"


@pytest.mark.parametrize(
    "stored",
    [
        "whsec_deadbeefcafe",
        VECTOR.removeprefix("enc:v1:"),
        VECTOR.replace("enc:v1:", "enc:v2:"),
        VECTOR.replace("enc:v1:", "ENC:V1:"),
        VECTOR + "=",
        VECTOR[:-1],
        VECTOR[:-8],
        VECTOR[:-1] + "h",
        "enc:v1:",
        "enc:v1:AAECAwQFBgcICQoL",
        "enc:v1:ü",
    ],
)
def test_a_stored_value_that_is_not_sealed_or_was_changed_is_refused(stored: str) -> None:
    with pytest.raises(SealedSecretError) as caught:
        SecretBox(KEY.hex()).open(stored)
    assert "deadbeef" not in "".join(traceback.format_exception(caught.value))


def test_another_key_does_not_open_it() -> None:
    with pytest.raises(SealedSecretError, match=KEY_VARIABLE):
        SecretBox(bytes(32).hex()).open(VECTOR)


@given(st.text())
def test_what_is_sealed_opens_again_and_is_never_sealed_alike(secret: str) -> None:
    box = SecretBox(KEY.hex())
    try:
        secret.encode()
    except UnicodeEncodeError:
        return
    sealed = box.seal(secret)
    assert box.open(sealed) == secret
    assert box.seal(secret) != sealed
    assert "=" not in sealed


def test_a_box_is_neither_shown_nor_pickled() -> None:
    box = SecretBox(KEY.hex())
    assert repr(box) == str(box) == "<SecretBox>"
    with pytest.raises(TypeError):
        pickle.dumps(box)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_cryptography(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_cryptography)
    with pytest.raises(NotifyExtraMissing, match=r"pip install 'switchboard-stall\[notify\]'"):
        SecretBox(KEY.hex())


def test_importing_the_wake_imports_neither_cryptography_nor_an_http_library() -> None:
    program = (
        "import sys, switchboard_stall.notify;"
        "print([name for name in ('cryptography', 'httpx', 'requests', 'aiohttp') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
