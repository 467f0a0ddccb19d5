"""Processes that are killed in saves to an object store: no committed step is lost, and no wrong one is restored."""

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from object_stores import ENDPOINT, SERVERS, FaultyProxy, environment, free_port

pytest.importorskip("moto")
pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("store_processes.py")


class Attempt:
    """Two processes that save; their lines are collected."""

    def __init__(self, folder: Path, url: str, variables: dict[str, str]):
        port = str(free_port())
        self.processes = [
            subprocess.Popen(
                [sys.executable, SCRIPT, str(index), port, folder, url],
                env=environment(variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for index in range(2)
        ]  # fmt: skip
        self.lines: list[str] = []
        self.errors: list[str] = []
        for process in self.processes:
            threading.Thread(target=self._collect, args=(process.stdout, self.lines), daemon=True).start()
            threading.Thread(target=self._collect, args=(process.stderr, self.errors), daemon=True).start()

    @staticmethod
    def _collect(stream, lines: list[str]) -> None:
        lines.extend(line.strip() for line in iter(stream.readline, ""))

    def number(self, word: str) -> int:
        """The last number after a word; -1 if it did not appear."""
        return max((int(line.split()[1]) for line in list(self.lines) if line.startswith(f"{word} ")), default=-1)

    def wait_for(self, word: str, least: int, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while self.number(word) < least:
            assert time.monotonic() < deadline and self.processes[0].poll() is None, self.errors[-20:]
            time.sleep(0.01)

    def kill(self, victims: list[int], then: float) -> None:
        """Kills some processes, and the others later, as a launcher does."""
        for index in victims:
            self.processes[index].send_signal(signal.SIGKILL)
        time.sleep(then)
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("store", SERVERS)
def test_kills_in_saves_lose_nothing(store: str, tmp_path: Path) -> None:
    """Every second attempt has a store that fails too."""
    draw, committed, hits = random.Random(7), 0, 0
    with SERVERS[store]() as variables:
        endpoint = ENDPOINT[store]
        proxy = FaultyProxy(variables[endpoint])
        variables |= {endpoint: proxy.url, "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "1"}
        try:
            for victims, faulty in (([0], False), ([1], True), ([0, 1], True)):
                attempt = Attempt(tmp_path / "checkpoints", f"{store}://bucket/run", variables)
                attempt.wait_for("start", 0)
                start = attempt.number("start")
                assert start >= committed, "a committed step was lost"
                if faulty:
                    proxy.inject(draw.choice(["503", "500", "cut", "slow"]), draw.randrange(1, 4))
                attempt.wait_for("begin", start + draw.randrange(1, 3))
                time.sleep(draw.uniform(0.0, 0.25))
                in_a_save = attempt.number("begin") > attempt.number("committed")
                attempt.kill(victims, draw.uniform(0.0, 0.3))
                committed, hits = max(committed, attempt.number("committed")), hits + in_a_save
                assert not any("damaged" in line or "AssertionError" in line for line in attempt.errors)
            last = Attempt(tmp_path / "checkpoints", f"{store}://bucket/run", variables)
            last.wait_for("start", committed)
            last.kill([0, 1], 0)
        finally:
            proxy.close()
    assert hits >= 1
