"""The flags of `python -m megajax.plan --config`, and what of the command line is read before the config."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.command_line import Flag
from megajax.config.builds import resolve
from megajax.config.errors import ConfigError, Problem
from megajax.config.patch import Mark, plain_name, setting
from megajax.config.tree import read_value

PNG = Flag("png", Path | None, help="of a schedule or a sweep: also draw it into this file (extra plot)")
FLAGS = (
    Flag("devices", str | None, help="GPUs to plan for, as GPU:N: a100-40gb, a100 (80 GB), h100, h200, b200 or gb200"),
    Flag("gpus-per-node", int | None, help="GPUs that NVLink connects; 8, of gb200 72, unless given"),
    Flag("audit", help="of a compiled plan: bytes through memory by class of kernel, and the kernels that move most"),
    Flag("formula", help="compile nothing: memory, traffic and speed by formulas"),
    Flag("search", help="find the fastest layout; settings given on the command line stay"),
    Flag("compile", int | None, help="of a search: layouts to compile; 3 with the extra aot, else 0"),
    Flag("out", Path | None, help="of a search: write the best into this config file, which loads --config"),
    Flag("resume", Path | None, help="of a search: cache file to go on from; beside --out unless given"),
    Flag("compare", str | None, help="another plan, in quotes: OTHER.py, GPU:N, --setting=value ..., or several"),
    Flag("sweep", str | None, help="curves over devices:64,128,...,16384, or over a setting: NAME:1,2,4"),
    Flag("device-file", Path | None, help="by formula: YAML that describes another device"),
    Flag("calibration", Path | None, help="constants measured by benchmarks/calibrate.py, in place of the known ones"),
    Flag("nvlink", float | None, help="GB/s from a GPU to others of its node, one direction"),
    Flag("network", float | None, help="GB/s from a GPU to other nodes, one direction"),
    Flag("json", Path | None, help="also write it into this file"),
    Flag("html", Path | None, help="also write it as a self-contained HTML page"),
    PNG,
)
MODES = ("search", "compare", "sweep")
NEEDS = {"compile": "search", "out": "search", "resume": "search", "png": "sweep"}
"""Flags that need another flag."""


def count_devices(flags: Mapping[str, Any]) -> tuple[int | None, list[Problem]]:
    """Number of devices that the flags ask for, and problems of the flags. Raises UserError for an unreadable file.

    None if the config's own layout need not match them: a search tries others, a sweep takes other numbers.
    """
    cluster, problems = resolve("megajax.planning.modes:read_target")(flags)
    modes = [name for name in MODES if flags[name]]
    if len(modes) > 1:
        problems.append(Problem(f"--{modes[1]}", f"goes with no --{modes[0]}", "ask for one of them at a time"))
    without = next((name for name in ("formula", *modes) if flags[name]), None)
    if flags["audit"] and without is not None:
        problems.append(Problem("--audit", f"goes with no --{without}", "it reads the program that is compiled"))
    for name, mode in NEEDS.items():
        if flags[name] is not None and not flags[mode]:
            problems.append(Problem(f"--{name}", f"goes with --{mode}, which is not given"))
    free = cluster is None or flags["search"] or flags["sweep"] is not None
    return None if free else cluster.devices, problems


def take_searched(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """With --search: the words without the settings that a search chooses, and those settings as fields of a Choice.

    They are fixed in the search and need not match the config's own layout. Raises ConfigError for wrong values.
    """
    if not any(plain_name(word) in ("__search", "__search=true") for word in argv):
        return list(argv), {}
    searched = resolve("megajax.planning.search.candidates:SEARCHED")
    annotation = resolve("megajax.planning.search.candidates:annotation")
    rest, fixed, problems, words = [], {}, [], list(argv)
    while words:
        word = words.pop(0)
        name, value = setting(word)
        if not word.startswith("--") or name not in searched:
            rest.append(word)
            continue
        if value is Mark.BARE and words and not words[0].startswith("--"):
            _, value = setting(f"--{name}={words.pop(0)}")
        read, wrong = read_value(value, annotation(name), name)
        problems += wrong
        fixed[searched[name]] = read
    if problems:
        raise ConfigError(problems, "command line")
    return rest, {name: value for name, value in fixed.items() if name != "data" or value is not None}


def source_of(argv: Sequence[str]) -> str:
    """The value of the last --config."""
    source = ""
    for place, word in enumerate(argv):
        if word.startswith("--config="):
            source = word.partition("=")[2]
        elif word == "--config":
            source = argv[place + 1]
    return source
