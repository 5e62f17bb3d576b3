"""The receivers of the delivery part, a process of their own: one that answers at once, one that never does.

Says on standard output, as JSON: its authority's certificate and both ports; then, for each request, the
monotonic second in which its first byte was read, and the todo that it names. Ends with standard input.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time

from support.receiver import LOOPBACK, Authority


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        first = await reader.readexactly(1)
        at = time.monotonic()
        head = first + await reader.readuntil(b"\r\n\r\n")
        (length,) = (
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        )
        body = json.loads(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        await writer.drain()
        print(json.dumps([at, body["todo_id"]]), flush=True)
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def swallow(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read(-1)


async def main() -> None:
    authority = Authority()
    fast = await asyncio.start_server(
        answer, LOOPBACK, 0, ssl=authority.server_context(LOOPBACK), backlog=1024
    )
    hole = await asyncio.start_server(swallow, LOOPBACK, 0, backlog=1024)
    (certificate,) = authority.client_context().get_ca_certs(binary_form=True)
    ports = [server.sockets[0].getsockname()[1] for server in (fast, hole)]
    print(json.dumps([ssl.DER_cert_to_PEM_cert(certificate), *ports]), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
