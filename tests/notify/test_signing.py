from __future__ import annotations

import base64
import pickle
import re
import traceback
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError
from support.outside_judges import npm_judge

from switchboard_stall.notify.signing import (
    SecretInvalid,
    SigningKey,
    message_id,
    mint_secret,
    signed_headers,
)

if TYPE_CHECKING:
    from collections.abc import Callable

BODY = '{"summary":"\\u00abé"}'.encode()


def now() -> int:
    return int(datetime.now(UTC).timestamp())


def test_the_signature_is_hmac_over_id_timestamp_and_body() -> None:
    # The example of the Standard Webhooks specification.
    key = SigningKey("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signed = key.signature("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_minted_secret_is_32_random_bytes() -> None:
    secret = mint_secret()
    assert re.fullmatch(r"whsec_[A-Za-z0-9+/]{43}=", secret)
    assert secret != mint_secret()
    assert mint_secret(lambda length: b"\0" * length) == "whsec_" + base64.b64encode(bytes(32)).decode()


@pytest.mark.parametrize("length", [24, 32, 64])
def test_keys_of_24_to_64_bytes_are_accepted(length: int) -> None:
    SigningKey("whsec_" + base64.b64encode(bytes(length)).decode())


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "whsec_",
        "whsec_" + base64.b64encode(bytes(23)).decode(),
        "whsec_" + base64.b64encode(bytes(65)).decode(),
        base64.b64encode(bytes(32)).decode(),
        "WHSEC_" + base64.b64encode(bytes(32)).decode(),
        "whsec_" + base64.b64encode(bytes(32)).decode().rstrip("="),
        "whsec_" + base64.b64encode(bytes(32)).decode() + "\n",
        "whsec_ " + base64.b64encode(bytes(32)).decode(),
        "whsec_" + base64.b64encode(bytes(32)).decode()[:-2] + "B=",
        "whsec_" + base64.urlsafe_b64encode(b"\xff" * 32).decode(),
        "whsec_" + "é" * 43 + "=",
    ],
)
def test_anything_but_strict_base64_is_no_secret_and_is_not_shown(secret: str) -> None:
    with pytest.raises(SecretInvalid) as caught:
        SigningKey(secret)
    shown = "".join(traceback.format_exception(caught.value))
    assert len(secret) < 10 or secret not in shown


def test_a_key_is_neither_shown_nor_pickled() -> None:
    key = SigningKey(mint_secret())
    assert repr(key) == str(key) == "<SigningKey>"
    with pytest.raises(TypeError):
        pickle.dumps(key)


def test_a_message_id_is_a_ulid_of_its_time() -> None:
    first = message_id(datetime(2026, 12, 1, tzinfo=UTC))
    later = message_id(datetime(2026, 12, 2, tzinfo=UTC))
    assert re.fullmatch(r"msg_[0-7][0-9A-HJKMNP-TV-Z]{25}", first)
    assert first < later
    # The example of the ULID specification: 1469918176385 is 01ARYZ6S41.
    at = datetime.fromtimestamp(1469918176.385, UTC)
    assert message_id(at, lambda length: b"\0" * length) == "msg_01ARYZ6S41" + "0" * 16


@given(st.binary(min_size=24, max_size=64), st.text(st.characters(codec="utf-8")))
def test_the_python_judge_accepts_every_key_and_body(key: bytes, text: str) -> None:
    secret = "whsec_" + base64.b64encode(key).decode()
    body = text.encode()
    headers = signed_headers([SigningKey(secret)], "msg_1", now(), body)
    Webhook(secret).verify(body, headers, json_parse=False)


def test_during_a_rotation_both_secrets_verify_and_a_third_does_not() -> None:
    new, old, other = mint_secret(), mint_secret(), mint_secret()
    headers = signed_headers([SigningKey(new), SigningKey(old)], "msg_1", now(), BODY)
    assert headers["webhook-signature"].split(" ")[0] == SigningKey(new).signature(
        "msg_1", int(headers["webhook-timestamp"]), BODY
    )
    Webhook(new).verify(BODY, headers)
    Webhook(old).verify(BODY, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(other).verify(BODY, headers)


@pytest.fixture(scope="module")
def judged_by_npm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bytes, dict[str, str]], bool]:
    return npm_judge(tmp_path_factory.getbasetemp())


def test_the_npm_judge_accepts_one_signature_and_two_and_no_forged_one(
    judged_by_npm: Callable[[str, bytes, dict[str, str]], bool],
) -> None:
    new, old, other = mint_secret(), mint_secret(), mint_secret()
    one = signed_headers([SigningKey(new)], "msg_1", now(), BODY)
    two = signed_headers([SigningKey(new), SigningKey(old)], "msg_1", now(), BODY)
    assert judged_by_npm(new, BODY, one)
    assert judged_by_npm(new, BODY, two)
    assert judged_by_npm(old, BODY, two)
    assert not judged_by_npm(other, BODY, two)
    assert not judged_by_npm(new, BODY + b" ", one)
