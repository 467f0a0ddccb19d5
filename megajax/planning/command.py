"""What `python -m megajax.plan --config` does: its flags, and the plan they ask for, compiled or by formula."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.command_line import Flag
from megajax.config.builds import resolve
from megajax.config.errors import ConfigError, Problem, UserError
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
    Flag("resume", Path | None, help="of a search: file that remembers what was found; beside --out unless given"),
    Flag("compare", str | None, help="beside what else, in quotes: OTHER.py, GPU:N, --setting=value ..., or several"),
    Flag("sweep", str | None, help="curves over devices:64,128,...,16384, or over a setting: NAME:1,2,4"),
    Flag("device-file", Path | None, help="by formula: YAML that describes another device"),
    Flag("calibration", Path | None, help="what benchmarks/calibrate.py measured, in place of what is known"),
    Flag("nvlink", float | None, help="GB/s from a GPU to others of its node, one direction"),
    Flag("network", float | None, help="GB/s from a GPU to other nodes, one direction"),
    Flag("json", Path | None, help="also write it into this file"),
    Flag("html", Path | None, help="also draw it as a page that needs nothing beside itself"),
    PNG,
)
MODES = ("search", "compare", "sweep")
BELONG = {"compile": "search", "out": "search", "resume": "search", "png": "sweep"}
"""Flags that say nothing without another."""


def count_devices(flags: Mapping[str, Any]) -> tuple[int | None, list[Problem]]:
    """Devices that the flags ask for, and what is wrong with them. Raises UserError for an unreadable file.

    None where the layout of the config need not fit them: a search finds others, a sweep takes other numbers.
    """
    cluster, problems = resolve("megajax.planning.cost.formula:read_target")(flags)
    asked = [name for name in MODES if flags[name]]
    if len(asked) > 1:
        problems.append(Problem(f"--{asked[1]}", f"goes with no --{asked[0]}", "ask for one of them at a time"))
    without = next((name for name in ("formula", *asked) if flags[name]), None)
    if flags["audit"] and without is not None:
        problems.append(Problem("--audit", f"goes with no --{without}", "it reads the program that is compiled"))
    for name, mode in BELONG.items():
        if flags[name] is not None and not flags[mode]:
            problems.append(Problem(f"--{name}", f"goes with --{mode}, which is not given"))
    free = cluster is None or flags["search"] or flags["sweep"] is not None
    return None if free else cluster.devices, problems


def take_searched(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """With --search, the words without settings that a search chooses, and those as fields of a Choice: they are fixed.

    They need not fit the config's own layout. Raises ConfigError for values of the wrong kind.
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
    """What --config says; the last counts."""
    found = ""
    for place, word in enumerate(argv):
        if word.startswith("--config="):
            found = word.partition("=")[2]
        elif word == "--config":
            found = argv[place + 1]
    return found


def plan(config: Any, flags: Mapping[str, Any], source: str, fixed: Mapping[str, Any]) -> None:
    """Print a config's plan and write what is asked for. Raises UserError for what the user has to change.

    source: what --config says; fixed: of `take_searched`.
    """
    cluster, _ = resolve("megajax.planning.cost.formula:read_target")(flags)
    device = resolve("megajax.planning.cost.formula:device_of")(cluster, flags)
    asked = {"cfg": config, "source": source, "cluster": cluster, "device": device, "flags": flags}
    name = Path(source).name
    if flags["search"]:
        search = resolve("megajax.planning.search.search_command:Asked")(fixed=fixed, **asked)
        found, commands = resolve("megajax.planning.search.search_command:run")(search)
        made = "of_search", (found, commands, name)
    elif flags["compare"] is not None:
        made = "of_comparison", resolve("megajax.planning.search.compare:run")(**asked)
    elif flags["sweep"] is not None:
        made = "of_sweep", (resolve("megajax.planning.search.sweep:run")(**asked), name)
    elif flags["formula"]:
        made = "of_plan", (resolve("megajax.planning.cost.formula:run")(config, cluster, device, flags), name)
    else:
        made = "of_compiled", (_compiled(config, cluster, device, flags), device, name)
    if flags["html"] is not None:
        module = "compiled_page" if made[0] == "of_compiled" else "page"
        page = resolve(f"megajax.planning.{module}:{made[0]}")(*made[1])
        resolve("megajax.planning.page:write")(page, flags["html"])
        print(f"\npage: {flags['html']}")


def _compiled(config: Any, cluster: Any, device: Any, flags: Mapping[str, Any]) -> Any:
    if cluster.name not in resolve("megajax.planning.program.devices:GPUS"):
        raise UserError(f"{cluster.name} is described in --device-file, which the compiler can't use: give --formula")
    resolve("megajax.planning.program.deviceless:prepare")()
    compile_train_step = resolve("megajax.planning.program.train_step:compile_train_step")
    try:
        compiled = compile_train_step(config, cluster)
    except resolve("jax.errors:JaxRuntimeError") as error:
        raise UserError(
            f"XLA of jax {resolve('jax:__version__')} did not compile this for {cluster.name}: "
            f"{str(error).strip().splitlines()[0][:200]}\n"
            "Try a newer jax; --formula needs no compiler"
        ) from error
    found = resolve("megajax.planning.program.audit:audit")(compiled.text, compiled.counts) if flags["audit"] else None
    resolve("megajax.planning.report:show")(compiled, device=device, found=found)
    if not compiled.fits:
        resolve("megajax.planning.search.too_large:show")(compiled, device)
    if flags["json"] is not None:
        resolve("megajax.planning.report:write_json")(compiled, flags["json"], device, found)
    return compiled
