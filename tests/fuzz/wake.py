"""The coverage-guided fuzzer; README.md beside it says how to run it."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["switchboard_stall.notify", "http.client", "ipaddress"]):
    import http.client  # noqa: F401
    import ipaddress  # noqa: F401

    from fuzz import checks

    import switchboard_stall.notify.attempt
    import switchboard_stall.notify.body
    import switchboard_stall.notify.target  # noqa: F401


def url(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    answers = [provider.ConsumeUnicode(40) for _ in range(provider.ConsumeIntInRange(0, 3))]
    prefix = provider.PickValueInList(["", "https://", "http://", "https://["])
    checks.check_url(prefix + provider.ConsumeUnicode(sys.maxsize), answers)


def response(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    prefix = provider.PickValueInList(
        [b"", b"HTTP/1.1 ", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"]
    )
    checks.check_response(prefix + provider.ConsumeBytes(sys.maxsize) * provider.ConsumeIntInRange(1, 50))


def body(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    texts = [provider.ConsumeUnicode(40) * provider.PickValueInList([1, 3, 17, 300]) for _ in range(5)]
    checks.check_body(texts, provider.ConsumeIntInRange(0, 2**31 - 1))


TARGETS = {"url": url, "response": response, "body": body}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: {sys.argv[0]} {' | '.join(TARGETS)} [options of libFuzzer]")
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
