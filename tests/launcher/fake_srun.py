"""Like srun --kill-on-bad-exit: starts tasks, kills all after the first failure, and returns the highest code.

SIGTERM kills the tasks, SIGUSR1 and SIGUSR2 are passed on to them: so does srun of Slurm 22.05.

fake_srun.py TASKS COMMAND...
"""

import os
import signal
import subprocess
import sys
import time

count, command = int(sys.argv[1]), sys.argv[2:]
assert "MEGAJAX_PROCESS_ID" not in os.environ and "MEGAJAX_NUM_PROCESSES" not in os.environ
slurm = {"SLURM_NTASKS": str(count)}
tasks = [
    subprocess.Popen(command, env=os.environ | slurm | {"SLURM_PROCID": str(index)}, process_group=0)
    for index in range(count)
]
killed = False


def forward(number: int, frame: object) -> None:
    for task in tasks:
        if task.poll() is None:
            task.send_signal(number)


def interrupted(number: int, frame: object) -> None:
    """The second SIGINT kills all."""
    signal.signal(signal.SIGINT, lambda *_: forward(signal.SIGKILL, None))


for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, forward)
signal.signal(signal.SIGTERM, lambda *_: forward(signal.SIGKILL, None))
signal.signal(signal.SIGINT, interrupted)
while any(task.poll() is None for task in tasks):
    if not killed and any(task.poll() for task in tasks):
        killed = True
        time.sleep(0.3)  # As long as the others need to notice.
        forward(signal.SIGKILL, None)
    time.sleep(0.02)
sys.exit(max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks))
