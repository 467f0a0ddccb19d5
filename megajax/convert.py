"""Convert weights from and to other libraries' formats: `python -m megajax.convert --from=hf:DIR --to=RUN`."""

import signal
import sys
from dataclasses import replace
from pathlib import Path

from megajax.command_line.device_flags import use_devices
from megajax.command_line.parser import Flag, front_door, parse
from megajax.config.bounds import Count
from megajax.config.class_references import resolve
from megajax.config.errors import ConfigError
from megajax.config.paths_and_store_urls import PathText, StoredText
from megajax.interop.conversion_flags import Progress, flag_problems, reading_of
from megajax.interop.weights.origin import IGNORE_FLAG, TRUST_FLAG

DESCRIPTION = """Convert weights between formats. They are streamed: memory need not hold them.

  python -m megajax.convert --from=hf:DIR --to=runs/llama           a Hugging Face folder to a run
  python -m megajax.convert --from=runs/llama --to=hf:DIR           and back, from its newest checkpoint
  python -m megajax.convert --from=runs/llama/checkpoints/00000100 --to=hf:DIR --dtype=bfloat16
  python -m megajax.convert --from=runs/lora --to=peft:DIR          only the adapters; --merge adds them to the weights
  python -m megajax.convert --from=peft:DIR --base=hf:DIR --to=runs/lora
  python -m megajax.convert --from=megatron:DIR --to=runs/gpt       a Megatron-LM checkpoint to a run, or the reverse
  python -m megajax.convert --average=runs/llama/100,runs/llama/200 --to=runs/mean
  python -m megajax.convert --from=runs/llama --to=runs/int8 --quantize=int8 --compare=FILE

A folder is written under a temporary name and renamed when it is complete. Nothing is downloaded."""
FLAGS = (
    Flag("from", StoredText | None, help="hf:DIR, megatron:DIR, peft:DIR, a run's folder or one of its steps"),
    Flag("to", PathText | None, help="must be given: a new folder: a run's, hf:DIR, megatron:DIR or peft:DIR"),
    Flag("dtype", str | None, help="float32, bfloat16 or float16; default: float32 for runs, otherwise unchanged"),
    Flag("verify", help="read the result back and compare all of it"),
    Flag(
        "base",
        PathText | None,
        help="model of peft:DIR: hf:DIR, a run, or a name with --to=peft:; default: the known one",
    ),
    Flag("merge", help="add low-rank adapters to the weights"),
    IGNORE_FLAG,
    TRUST_FLAG,
    Flag("average", tuple[StoredText, ...], (), help="average the weights of these steps of runs, instead of --from"),
    Flag("average-last", int | None, help="average this number of the newest steps of --from"),
    Flag("family", str | None, help="model family to write: llama, …; local for megatron:; default: a lossless one"),
    Flag("shard-size", float, 5.0, help="maximum GB of a safetensors file"),
    Flag("vocabulary", Count | None, help="number of tokens, if a Megatron-LM checkpoint has only the padded number"),
    Flag("quantize", str | None, help="store weight matrices in int8, fp8, fp8_blocks, mxfp8, int4, nf4 or nvfp4"),
    Flag("group", int | None, help="inputs per scale; default: 128 in int4, 64 in nf4"),
    Flag("double", bool, False, help="store the scales of int4 or nf4 in 8 bits"),
    Flag("exclude", tuple[str, ...], (), help="patterns of matrices that are not quantized, such as *.mixer.output"),
    Flag("activations", str | None, help="fp8: round the inputs of matrices too, with --quantize=fp8"),
    Flag("calibration", Path | None, help="a text file to choose factors and scales with"),
    Flag("compare", Path | None, help="a text file to compare the logits on, before and after"),
)


def main(argv: list[str]) -> int:
    """Exit codes: 0 done, 2 user error, 130 and 143 interrupted, 1 crash. All except 0 leave no output.

    Raises:
        UserError: for anything the user has to change.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    flags = parse(argv, verb="convert", flags=FLAGS, with_config=False, description=DESCRIPTION).flags
    if problems := flag_problems(flags):
        raise ConfigError(problems, "command line")
    use_devices("cpu:1")
    # By name: jax is imported only now, and the front door can report a missing package.
    open_source, options, write, verify = (
        resolve(f"megajax.interop.conversion:{name}") for name in ("open_source", "options", "write", "verify")
    )
    source = flags["from"], flags["average"], flags["average_last"]
    reading = reading_of(flags)
    stored = open_source(*source, reading, merge=flags["merge"])
    settings = options(flags["dtype"], flags["family"] or "", flags["shard_size"], flags["base"] or "")
    before, calibration, text = stored, None, None
    if flags["quantize"]:
        if flags["compare"] is not None:  # before anything is written
            text = (
                flags["compare"],
                resolve("megajax.interop.quantization.quantized_copy:read_rows")(stored, flags["compare"]),
            )
        stored, calibration = resolve("megajax.interop.quantization.quantized_copy:quantize")(stored, flags)
    with Progress(sys.stderr, stored.elements(), "converting") as progress:
        lines = write(stored, flags["to"], settings, progress)
    print(*lines, progress.total(), sep="\n")
    if flags["verify"]:
        with Progress(sys.stderr, stored.elements(), "verifying") as progress:
            line = verify(stored, flags["to"], settings, progress)
        print(line, progress.total(), sep="\n")
    if flags["quantize"]:
        report = resolve("megajax.interop.quantization.quantized_copy:report")
        quantized = open_source(flags["to"], reading=replace(reading, base=None))
        print(*report(before, quantized, Path(flags["to"]), calibration, text), sep="\n")
    return 0


if __name__ == "__main__":
    front_door(main)
