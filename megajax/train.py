"""Train a model: `python -m megajax.train --config=FILE [--dotted.setting=value ...]`."""

import os
import signal
import sys
from functools import partial

from megajax.command_line.device_flags import count_processes
from megajax.command_line.parser import PROCESS_FLAGS, Flag, front_door, parse
from megajax.config.class_references import resolve
from megajax.config.config_files import advised
from megajax.config.errors import ConfigError
from megajax.faults.beats import ELASTIC, failures_reported
from megajax.faults.unfailing_output import drop_lines, keep_writing
from megajax.launcher.one_process_each import gpus_here, processes_to_start
from megajax.planning.replan import elastic_hint
from megajax.processes.identity import find_identity
from megajax.processes.xla_options import set_process
from megajax.training.run_config import COMMON

DESCRIPTION = """Train a model, resuming from its run folder if it has checkpoints. On a machine with several GPUs
it starts one process for each, with --num-processes=1 one for all. Processes on several machines are started with the
same command each: by srun, mpirun, a Kubernetes job, `python -m megajax.launch`, or by hand with the flags below.

Names of other trainers, such as --lr and --tp, end with a message that has the name here.

  python -m megajax.train --config=quickstart.py                    trains the config of the file
  python -m megajax.train --config=quickstart.py --steps=100 --run_dir=runs/short    with other settings"""
FLAGS = (
    Flag("skip-train", help="only evaluate the newest checkpoint on the validation and test splits"),
    Flag("verify-data", help="read all bytes of the data files first, and compare them with those of earlier attempts"),
    *PROCESS_FLAGS,
)


@failures_reported()
def main(argv: list[str]) -> int:
    """Parse the command line, then import jax, connect the processes, and run the job."""
    settings = [*argv, "--parallel.elastic=true"] if os.environ.get(ELASTIC, "") not in ("", "0") else argv
    command = parse(settings, verb="train", flags=FLAGS, description=DESCRIPTION, common=COMMON, hint=elastic_hint)
    if (processes := processes_to_start()) is not None:
        print(f"megajax: a process for each of {processes} GPUs; --num-processes=1 drives all in one", file=sys.stderr)
        launch = [sys.executable, "-m", "megajax", "launch", f"--processes={processes}", "--"]
        os.execv(sys.executable, [*launch, "python", "-m", "megajax.train", *argv])
    set_process(command.config.xla)
    if (count_processes() or 1) > 1 and (command.devices or os.environ.get("JAX_PLATFORMS") or "").startswith("cpu"):
        drop_lines(b"[Gloo] ")  # it reports each group of processes that it connects
    connect, finish = (resolve(f"megajax.processes.start:{name}") for name in ("start", "finish"))
    flags = {name: command.flags[name] for name in ("skip_train", "verify_data")}
    patience, identity = command.flags["init_timeout"], partial(find_identity, command.config, flags)
    train = resolve("megajax.job.job:train")
    sampler = resolve("megajax.tasks.end_of_run_samples:sample")
    reporter = resolve("megajax.reporting.write_report:close_run")
    set_limit = resolve("megajax.planning.host_pool:set_limit")
    set_limit(command.config, gpus=gpus_here(), processes=count_processes() or 1)
    try:
        code = train(
            command.config,
            **flags,
            sources=command.sources,
            sampler=sampler,
            reporter=reporter,
            connect=partial(connect, patience=patience, identity=identity),
            patience=patience,
            started=resolve("megajax.metrics.event_log:process_start")(),
        )
    except ConfigError as error:
        raise advised(error, command.source, "train") from None
    finish()
    return code


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until the run handles signals, SIGINT ends the program like SIGTERM: a KeyboardInterrupt during imports may be
        # lost in libraries, and the run would continue.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    keep_writing()
    front_door(main)
