"""Many clients at once against a running text server.

Uses only the standard library and one connection per client, so that the clients need little processor time.
"""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megajax.config.errors import UserError


def serving_load(
    *,
    url: str = "http://127.0.0.1:5000",
    clients: int = 64,
    seconds: float = 60.0,
    max_tokens: int = 32,
    hard: int = 0,
    guides: int = 0,
    pid: int = 0,
) -> dict[str, Any]:
    """Many clients at once against a running server: answers and tokens per second, latency, wrong answers.

    `--clients=16 --seconds=0` is a burst: each client sends one request. `--hard=16`: so many of the clients ask for
    guides that are expensive to compile, and only the others count. `--guides=1000 --pid=PID`: afterwards, the memory
    of the server's process before and after so many different guides.

    Raises UserError if no server answers at the address.
    """
    try:
        totals = load(url, clients=clients, seconds=seconds, max_tokens=max_tokens, hard=hard)
        print("\n".join(totals.lines()), flush=True)
        before = resident(pid)
        for number in range(guides):
            # Some are expensive.
            body = hard_guide(number) if number % 10 == 0 else {"properties": {f"name {number}": {"type": "integer"}}}
            load(url, clients=1, seconds=0, max_tokens=8, guide=body)
    except OSError as error:
        raise UserError(f"no server answers at {url} ({error}): start one with python -m megajax.serve") from None
    memory = {"resident_mib": before, "resident_mib_after_guides": resident(pid)} if guides else {}
    if guides:
        print(f"server: {before:,} MiB, after {guides:,} guides {memory['resident_mib_after_guides']:,} MiB")
    return totals.figures() | memory


def hard_guide(number: int) -> dict[str, Any]:
    """A JSON schema of a few bytes that takes seconds, or some MiB, to compile; different for each number."""
    return {"type": "integer", "multipleOf": 399_989 - 2 * number}


def resident(pid: int) -> int:
    """MiB of memory of a process; 0 for none."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) if pid else 0
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


@dataclass
class Load:
    """The answers that clients received."""

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    """Answers by status; 0: the connection failed."""
    latencies: list[float] = field(default_factory=list)
    """Seconds of each complete answer."""
    first_tokens: list[float] = field(default_factory=list)
    """Seconds until its first event."""
    tokens: int = 0
    """Of complete answers, from their usage."""
    errors: list[str] = field(default_factory=list)
    """Invalid answers with status 200."""

    def figures(self) -> dict[str, Any]:
        """The figures for a file."""
        latencies = {"latency": self.latencies, "first_token": self.first_tokens}
        return {
            "seconds": self.seconds,
            "requests_per_second": len(self.latencies) / self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "statuses": {str(status): count for status, count in self.statuses.items()},
            "errors": len(self.errors),
            **{
                f"{name}_ms_p{round(100 * share)}": 1e3 * quantile(values, share)
                for name, values in latencies.items()
                for share in (0.5, 0.99)
            },
        }

    def lines(self) -> list[str]:
        """The figures as text."""
        answers = len(self.latencies)
        return [
            f"{answers:,} answers in {self.seconds:.1f} s: {answers / self.seconds:.1f} a second, "
            f"{self.tokens / self.seconds:.1f} tokens a second",
            f"statuses {dict(self.statuses)}, {len(self.errors)} wrong answers",
            f"answer: median {1e3 * quantile(self.latencies, 0.5):.0f} ms, p99 {quantile(self.latencies, 0.99):.3f} s",
            f"first token: median {1e3 * quantile(self.first_tokens, 0.5):.0f} ms, "
            f"p99 {quantile(self.first_tokens, 0.99):.3f} s",
        ]


def quantile(values: list[float], share: float) -> float:
    """A quantile of the values; NaN if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def load(
    url: str,
    *,
    clients: int,
    seconds: float,
    prompt: str = "Once upon a time",
    max_tokens: int = 32,
    hard: int = 0,
    guide: dict[str, Any] | None = None,
) -> Load:
    """Each client requests streams, at least one, until the time is over, and waits for its last answer.

    Its prompt is `prompt` and its number. guide: a JSON schema of all answers; hard: so many clients have hard ones,
    each a different one in each request, and are not counted.
    """
    return asyncio.run(_load(url, clients, seconds, prompt, max_tokens, hard, guide))


async def _load(
    url: str, clients: int, seconds: float, prompt: str, max_tokens: int, hard: int, guide: dict[str, Any] | None
) -> Load:
    totals, uncounted, began, numbers = Load(), Load(), time.monotonic(), count()
    end = began + seconds

    def body(client: int) -> dict[str, Any]:
        schema = hard_guide(next(numbers)) if client < hard else guide
        return {"prompt": f"{prompt} {client}", "max_tokens": max_tokens} | ({"guided_json": schema} if schema else {})

    hard_ones = asyncio.gather(*(_client(url, end, partial(body, number), uncounted) for number in range(hard)))
    await asyncio.gather(*(_client(url, end, partial(body, number), totals) for number in range(hard, clients)))
    totals.seconds = time.monotonic() - began
    await hard_ones
    return totals


async def _client(url: str, end: float, body: Callable[[], dict[str, Any]], totals: Load) -> None:
    address = urlsplit(url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        while True:
            data = json.dumps(body() | {"stream": True, "stream_options": {"include_usage": True}}).encode()
            request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
            try:
                await _request(reader, writer, request, totals)
            except (OSError, asyncio.IncompleteReadError):
                totals.statuses[0] += 1
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
            if time.monotonic() >= end:
                break
    finally:
        writer.close()


async def _request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, totals: Load) -> None:
    began, first, events = time.monotonic(), None, list[bytes]()
    writer.write(request)
    await writer.drain()
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    status = int(head.split(" ", 2)[1])
    if "transfer-encoding: chunked" in head:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            events.append((await reader.readexactly(size + 2))[:-2])
            first = first or time.monotonic()
        await reader.readuntil(b"\r\n")
    else:
        length = next(line for line in head.split("\r\n") if line.startswith("content-length:"))
        events.append(await reader.readexactly(int(length.partition(":")[2])))
    totals.statuses[status] += 1
    if status != 200:
        await asyncio.sleep(0.1)
        return
    lines = [line[6:] for line in b"".join(events).split(b"\n\n") if line.startswith(b"data: ")]
    usage = json.loads(lines[-2]).get("usage") if len(lines) > 2 and lines[-1] == b"[DONE]" else None
    if usage is None:
        totals.errors.append(repr(lines[-1:])[:200])
        return
    totals.latencies.append(time.monotonic() - began)
    totals.first_tokens.append((first or time.monotonic()) - began)
    totals.tokens += usage["completion_tokens"]
