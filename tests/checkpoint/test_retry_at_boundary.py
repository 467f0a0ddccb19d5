"""Processes, here threads, agree on a step without waiting for each other."""

import random
import threading
import time

import pytest

from megajax.checkpoint.agree_on_boundary import DelayedAgreement, StepBoundary
from megajax.processes.peers import Peers

PATIENCE = 60.0


class Gang:
    """Threads whose steps depend on each other like those of processes: step n needs step n - 1 of all threads."""

    def __init__(self, count: int):
        self.sent = [0] * count
        self.changed = threading.Condition()

    def step(self, index: int, step: int) -> None:
        """Send a step, then wait for the numbers of the one before."""
        with self.changed:
            self.sent[index] = step
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: min(self.sent) >= step - 1, PATIENCE), "the steps hang"


class ThreadPeers:
    """What one thread of a gang sees."""

    def __init__(self, barrier: threading.Barrier, values: dict, index: int):
        self.barrier, self.values, self.index = barrier, values, index

    def agree(self) -> None:
        self.barrier.wait(PATIENCE)

    def gather(self, value: int) -> list[int]:
        self.values[self.index] = value
        self.barrier.wait(PATIENCE)
        return list(self.values.values())


@pytest.mark.parametrize("seed", range(4))
def test_all_processes_agree_on_one_step_without_waiting_for_each_other(seed):
    draw, count, steps = random.Random(seed), 3, 60
    gang, barrier, values = Gang(count), threading.Barrier(count), {}
    noticed = [draw.randrange(5, 20) for _ in range(count)]
    delays = [draw.choice((0.0, 0.001, 0.004)) for _ in range(count)]
    agreed = [[] for _ in range(count)]

    def process(index: int) -> None:
        boundary = StepBoundary(ThreadPeers(barrier, values, index), 0)
        for step in range(1, steps + 1):
            time.sleep(delays[index])
            gang.step(index, step)
            if boundary.reached(step):
                agreed[index].append(step)
            if step == noticed[index]:
                DelayedAgreement(boundary, delays[index])

    threads = [threading.Thread(target=process, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert agreed[0] == agreed[1] == agreed[2] and len(agreed[0]) <= 1
    assert not agreed[0] or agreed[0][0] > max(noticed)


def test_a_single_process_agrees_on_the_next_step():
    boundary = StepBoundary(Peers(), 7)
    agreement = DelayedAgreement(boundary, 1000.0)
    assert not boundary.reached(8)
    agreement.wait(skip_delay=True)
    assert boundary.reached(9) and not boundary.reached(10)
    boundary.agree()
    boundary.cancel()
    assert not boundary.reached(11)


def test_a_failed_agreement_does_not_block_steps():
    class Broken:
        def agree(self) -> None: ...

        def gather(self, value: int) -> list[int]:
            raise RuntimeError("the coordination service is gone")

    boundary = StepBoundary(Broken(), 0)
    agreement = DelayedAgreement(boundary, 0.0)
    with pytest.raises(RuntimeError, match="is gone"):
        agreement.wait(skip_delay=False)
    assert not boundary.reached(1)
