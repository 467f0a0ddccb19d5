"""Loads a text server with many clients at once: `python benchmarks/serving_load.py --url=http://127.0.0.1:5000`.

Uses only the standard library and one connection per client, so that the clients need little processor time.
"""

import argparse
import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Load:
    """What clients saw."""

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    """Answers by status; 0: the connection broke."""
    latencies: list[float] = field(default_factory=list)
    """Seconds of each complete answer."""
    first_tokens: list[float] = field(default_factory=list)
    """Seconds until its first event."""
    tokens: int = 0
    """Of complete answers, by their usage."""
    errors: list[str] = field(default_factory=list)
    """Answers with status 200 that are not what they should be."""

    def lines(self) -> list[str]:
        """Figures in words."""
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
    """Of the values; NaN without any."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def load(url: str, *, clients: int, seconds: float, prompt: str = "Once upon a time", max_tokens: int = 32) -> Load:
    """Each client asks for one stream after the other until the time is over, and waits for its last answer.

    Every client has a prompt of its own: `prompt`, then its number.
    """
    return asyncio.run(_load(url, clients, seconds, prompt, max_tokens))


async def _load(url: str, clients: int, seconds: float, prompt: str, max_tokens: int) -> Load:
    totals, began = Load(), time.monotonic()
    end = began + seconds
    await asyncio.gather(*(_client(url, end, f"{prompt} {number}", max_tokens, totals) for number in range(clients)))
    totals.seconds = time.monotonic() - began
    return totals


async def _client(url: str, end: float, prompt: str, max_tokens: int, totals: Load) -> None:
    address = urlsplit(url)
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        while time.monotonic() < end:
            try:
                await _request(reader, writer, request, totals)
            except (OSError, asyncio.IncompleteReadError):
                totals.statuses[0] += 1
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
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


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:5000")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()
    totals = load(arguments.url, clients=arguments.clients, seconds=arguments.seconds, max_tokens=arguments.max_tokens)
    print("\n".join(totals.lines()))


if __name__ == "__main__":
    main()
