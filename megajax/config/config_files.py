"""Find, run and read config files; `load` does it all for notebooks and tests."""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megajax.config.class_references import resolve
from megajax.config.compose import TRUST, assemble
from megajax.config.errors import ConfigError, Problem, TooFewDevices, UserError
from megajax.config.hints import download_hint, either, nearest_names
from megajax.config.python_file import display_path, run
from megajax.config.settings_tree import Over, patch_of, setting

ROOT = "megajax.training.run_config:RunConfig"
PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = folder if (folder := PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"
"""The configs shipped with MegaJAX: inside an installed package, or next to the package in a checkout."""
SUFFIXES = (".py", ".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Source:
    """The contents of a config file: a config built by Python (None: the defaults), settings over it, and sources."""

    name: str
    base: Any
    settings: object = None  # None: Python built the whole config
    layers: tuple[tuple[str, Any], ...] = ()  # (file, its settings), lowest first; the base's file has no settings

    def over(self, upper: object) -> object:
        """The file's settings with others over them."""
        return upper if self.settings is None else Over(self.settings, upper)


def load(source: str | Path, *settings: str, devices: int | None = None, root: str | type = ROOT) -> Any:
    """The config of a file with "dotted.name=value" settings over it, checked.

    `source` is a path or a name in configs/, followed by ":function" for another function than `config`. With
    `devices`, their total number, the layout is checked too. Raises ConfigError with all problems, and UserError if the
    file cannot be found or run.

    Example: `mj.load("gpt3.py:gpt3_1_3b", "parallel.tensor=2", "steps=1e3")`
    """
    try:
        file = read(str(source), root)
        pairs = dict(setting(text) for text in settings)
        config, problems = assembled(file, root, patch_of(pairs.items()), devices)
        if problems:
            problems = resolve("megajax.command_line.foreign_flags:corrected")(problems, pairs, (), file)
            raise ConfigError(problems, file.name + (" + settings" if settings else ""))
    except UserError as error:
        # In a notebook, the frames inside of MegaJAX would be pages of no help.
        raise error.with_traceback(None) from None
    return config


def assembled(
    file: Source, root: str | type, settings: object, devices: int | None = None, *, trusted: bool = True
) -> tuple[Any, list[Problem]]:
    """The config of a file with settings over it, and all its problems; see `assemble`."""
    return assemble(root_type(root), file.base, file.over(settings), devices, trusted=trusted)


def read_stored(
    path: Path, root: str | type = ROOT, *, trusted: bool, recorded: tuple[str, str] | None = None
) -> Source:
    """The config that a run wrote to a file. It may be a stranger's: unless trusted, only classes of MegaJAX are used.

    recorded: (name, text) of the same config with the weights of a step, which decides. If the file has another model
    or tokenizer, because somebody has edited it, the differences are printed.
    Raises UserError for a config that needs other code, or that can't be read by this version.
    """
    label = display_path(path)
    settings = dict(resolve("megajax.config.yaml_and_json:parse")(path, label))
    if recorded is not None:
        name, text = recorded
        try:
            stored = dict(resolve("megajax.config.yaml_and_json:read_yaml")(text))
        except (ValueError, TypeError) as error:
            raise UserError(f"the config of {name} is damaged: {error}") from error
        parts = {key: (stored.get(key), settings.get(key)) for key in ("model", "tokenizer", "precision")}
        if lines := [line for key, pair in parts.items() for line in _differences(*pair, key)]:
            print(
                f"{label} has other settings than {name}, whose settings are used:", *lines, sep="\n  ", file=sys.stderr
            )
        label, settings = f"the config of {name}", stored
    if not trusted and (below := settings.pop("config", None)) is not None:
        problem = Problem("config", f"is based on {below}, and reading a run reads no other file", f"or add {TRUST}")
        raise ConfigError([problem], label)
    source = (
        read(str(path), root) if trusted and recorded is None else Source(label, None, settings, ((label, settings),))
    )
    config, problems = assembled(source, root, {}, trusted=trusted)
    if config is None:
        raise ConfigError(problems, label)
    return replace(source, base=config, settings=None)


def _differences(used: object, edited: object, name: str) -> Iterator[str]:
    """model.heads: 4, not 8."""
    if isinstance(used, list) and isinstance(edited, list) and len(used) == len(edited):
        used, edited = dict(enumerate(used)), dict(enumerate(edited))
    if isinstance(used, Mapping) and isinstance(edited, Mapping):
        for key in dict.fromkeys([*used, *edited]):
            yield from _differences(used.get(key), edited.get(key), f"{name}.{key}")
    elif used != edited:
        yield f"{name}: {used!s:.100}, not {edited!s:.100}"


def root_type(root: str | type) -> type:
    """The class at the root of the tree, imported if it is given as "module:Class"."""
    return resolve(root) if isinstance(root, str) else root


def read(source: str, root: str | type = ROOT, above: tuple[Path, ...] = ()) -> Source:
    """Find a config file and run or read it; `above`: the files based on it. Raises UserError."""
    name, function = split_source(source)
    path = find(name, above[-1].parent if above else None, function)
    if path in above:
        raise UserError(
            f"{display_path(path)}: is based on itself, through {', '.join(display_path(file) for file in above)}"
        )
    label = display_path(path)
    if path.suffix == ".py":
        config = run(path, function or "config", root_type(root))
        return Source(label, config, layers=((label + (f":{function}" if function else ""), None),))
    if function:
        raise UserError(f"{source}: only Python files have functions; write {label} without one")
    # Imported by name: Python configs need no yaml, so a missing package can be reported.
    settings = dict(resolve("megajax.config.yaml_and_json:parse")(path, label))
    based_on = settings.pop("config", None)
    lower = read(str(based_on), root, (*above, path)) if based_on is not None else Source(label, None)
    return Source(label, lower.base, lower.over(settings), (*lower.layers, (label, settings)))


def find(name: str, beside: Path | None = None, function: str = "") -> Path:
    """The file at the path `name`, relative to the folder `beside`, ".", "configs" or the shipped configs.

    `function`: its function to call, only for the hint. Raises UserError with the nearest config.
    """
    folders = [folder for folder in (beside, Path(), Path("configs"), SHIPPED) if folder is not None]
    path_given = Path(name).expanduser()
    for folder in folders:
        place = folder / path_given
        # In configs/ the suffix may be omitted. In the working folder that would match any script.
        candidates = [place.with_name(place.name + ".py")] if place.name and folder != Path() else []
        for path in (place, *candidates, place / "config.yaml"):
            if path.is_file():
                if path.suffix not in SUFFIXES:
                    raise UserError(f"{name}: a config file ends in {', '.join(SUFFIXES)}")
                return path.resolve()
    places = ", ".join(str(folder) for folder in ([path_given.parent] if path_given.is_absolute() else folders))
    convert = "python -m megajax.convert --from=hf:{} --to=runs/NAME, and give runs/NAME instead"
    hint = download_hint(name, convert) or _instead(path_given, function, (path_given.parent, *folders[-2:]))
    raise UserError(f"no config file {name} in {places}\n    {hint}")


def download_of(folder: str | Path) -> str:
    """The command that downloads a model to a folder, as a config here or a shipped one has it in its first lines."""
    texts = (file.read_text("utf-8") for place in (Path("configs"), SHIPPED) for file in _config_files(place))
    pattern = rf"hf download \S+ --local-dir {re.escape(str(folder))}$"
    commands = (match[0] for text in texts if (match := re.search(pattern, text, re.MULTILINE)))
    return next(commands, f"hf download ORGANIZATION/{Path(folder).name} --local-dir {folder}")


def functions_of(path: Path) -> list[str]:
    """Public functions without arguments in a Python file, in order; [] if it has none or cannot be parsed.

    The file is parsed, not run.
    """
    try:
        tree = ast.parse(path.read_bytes()) if path.suffix == ".py" else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return []
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [node.name for node in functions if not node.name.startswith("_") and not ast.unparse(node.args)]


def split_source(source: str) -> tuple[str, str]:
    """ "gpt3.py:debug" -> ("gpt3.py", "debug"); "" if no function is named."""
    match = re.fullmatch(r"(.+):([A-Za-z_]\w*)", source)
    return (match[1], match[2]) if match else (source, "")


def _config_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(
        file
        for file in folder.iterdir()
        if file.suffix in SUFFIXES and file.is_file() and not file.name.startswith("_")
    )


def _instead(missing: Path, function: str, folders: Iterable[Path]) -> str:
    """A hint for a missing file: the nearest file, or function of a file, in the folders."""
    files = {file.name: file for folder in folders for file in _config_files(folder)}
    if not files:
        return "these folders have no config files"
    functions = {
        name: f"{file.name}:{name}"
        for file in files.values()
        for name in functions_of(file)
        if name not in ("config", "debug")
    }
    # Without suffixes, which would make all names similar.
    choices = {file.rpartition(".")[0]: file for file in files} | functions
    stem = missing.stem if missing.suffix in SUFFIXES else missing.name
    if joined := functions.get(f"{stem}_{function}"):
        return f"did you mean {joined}?"
    if similar := nearest_names(stem, choices):
        return f"did you mean {either(choices[name] for name in similar)}?"
    return f"the configs are {', '.join(sorted(files))}; FILE:FUNCTION calls another function than config()"


def twin_of(source: str) -> str | None:
    """ "gpt3.py" -> "gpt3.py:debug", "gpt3.py:gpt3_175b" -> "gpt3.py:gpt3_175b_debug"; None: no debug twin.

    A run on the layout of other GPUs, gpt3_175b_h200, has the twin of the run.
    """
    name, function = split_source(source)
    twin = f"{function.removesuffix('_h200')}_debug" if function not in ("", "config") else "debug"
    try:
        return f"{name}:{twin}" if twin in functions_of(find(name)) else None
    except UserError:
        return None


def advised(error: ConfigError, source: str | None, verb: str) -> ConfigError:
    """The error; if devices are lacking, its first hint is the command of the debug twin, if one exists."""
    if not any(isinstance(problem, TooFewDevices) for problem in error.problems):
        return error
    twin = twin_of(source) if source else None
    run = f"its debug twin runs on any machine: python -m megajax.{verb} --config={twin} --devices=cpu:8"
    problems = [
        replace(problem, hint="\n".join([*[run] * bool(twin), problem.hint, _virtual(problem.wanted)]))
        if isinstance(problem, TooFewDevices)
        else problem
        for problem in error.problems
    ]
    return ConfigError(problems, error.place)


def _virtual(count: int) -> str:
    return f"for a small model, --devices=cpu:{count} makes {count} virtual devices of the CPU"
