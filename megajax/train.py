"""Train a model: `python -m megajax.train --config=FILE [--dotted.setting=value ...]`."""

from megajax.config.builds import resolve
from megajax.config.command_line import Flag, front_door, parse

DESCRIPTION = "Train a model; resumes by itself from its run folder."
FLAGS = (Flag("skip-train", help="only evaluate the newest checkpoint on the validation and test splits"),)


def main(argv: list[str]) -> int:
    """Read the command line, then (and only then) import jax and run the job."""
    command = parse(argv, verb="train", flags=FLAGS, description=DESCRIPTION)
    train = resolve("megajax.training.job:train")
    sampler = resolve("megajax.inference.sample:text_sample")
    return train(command.config, skip_train=command.flags["skip_train"], sources=command.sources, sampler=sampler)


if __name__ == "__main__":
    front_door(main)
