"""The chunked cross-entropy, with a vocabulary sharded over all devices, against whole logits: time, memory, equality.

Run:  python benchmarks/loss.py [--seconds=0.3] [--devices=cpu:4] [--peak-tflops=N]

Both compute the loss and the gradients of hidden states and table. The shipped loss computes the float32 logits of one
chunk of tokens at a time, and their gradient in the same pass. The plain one computes all logits and uses autodiff.
Operations are 6 x tokens x hidden x vocabulary, divided by the number of devices. benchmarks/kernels.py has the same
cases and writes JSON.
"""

from megajax.command_line.parser import Flag, front_door, parse
from megajax.config.builds import resolve

FLAGS = (Flag("seconds", float, 0.3), Flag("peak-tflops", float | None))


def main(argv: list[str]) -> int:
    """Measure and print. Returns 1 where a loss or gradient is wrong.

    Raises:
        UserError: a GPU without a known peak.
    """
    if {"-h", "--help"} & set(argv):
        print(__doc__.strip())
        return 0
    flags = parse(argv, verb="loss", flags=FLAGS, with_config=False).flags
    records = resolve("loss_cases:measure_here")(**flags, show=lambda text: print(text, flush=True))
    return 0 if all(record["right"] for record in records) else 1


if __name__ == "__main__":
    front_door(main)
