"""Find, run and read config files; `load` does it all for notebooks and tests."""

import ast
import importlib
import re
import sys
import traceback
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import megajax.config.schema as schema
from megajax.config.builds import resolve
from megajax.config.errors import ConfigError, UserError
from megajax.config.nearest import did_you_mean, either, nearest_names
from megajax.config.patch import Over, patch_of, setting
from megajax.config.tree import assemble

ROOT = "megajax.training.run_config:RunConfig"
PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = folder if (folder := PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"
"""The configs that come with MegaJAX: inside an installed package, or beside the package in a checkout."""
SUFFIXES = (".py", ".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Source:
    """What a config file says: a config built by Python (None: the defaults), settings over it, and who said what."""

    name: str
    base: Any
    written: Any = None  # None where Python said it all
    layers: tuple[tuple[str, Any], ...] = ()  # (file, its settings), lowest first; the base's file has no settings

    def over(self, upper: Any) -> Any:
        """The file's settings with others over them."""
        return upper if self.written is None else Over(self.written, upper)


def load(source: str, *settings: str, devices: int | None = None, root: str | type = ROOT) -> Any:
    """The config of a file with "dotted.name=value" settings over it, checked.

    `source` is a path, or a name in configs/, with ":function" behind it for another function than `config`.
    `devices` (the number in all) lets the layout be checked too. Raises ConfigError listing all that is wrong and
    UserError where the file cannot be found or run.
    """
    file = read(source, root)
    patch = patch_of(setting(text) for text in settings)
    config, problems = assemble(root_type(root), file.base, file.over(patch), devices)
    if problems:
        raise ConfigError(problems, file.name + (" + settings" if settings else ""))
    return config


def root_type(root: str | type) -> type:
    """The class at the root of the tree, imported now if it is given as "module:Class"."""
    return resolve(root) if isinstance(root, str) else root


def read(source: str, root: str | type = ROOT, above: tuple[Path, ...] = ()) -> Source:
    """Find a config file and run or read it; `above` are the files that are based on it. Raises UserError."""
    name, function = split_source(source)
    path = find(name, above[-1].parent if above else None, function)
    if path in above:
        raise UserError(f"{shown(path)}: is based on itself, through {', '.join(shown(file) for file in above)}")
    label = shown(path)
    if path.suffix == ".py":
        base = _run(path, function or "config", root_type(root))
        return Source(label, base, layers=((label + (f":{function}" if function else ""), None),))
    if function:
        raise UserError(f"{source}: only Python files have functions; {label} is read whole")
    # Imported by name: a Python config is read without yaml, so that a missing package can be reported.
    settings = dict(resolve("megajax.config.markup:parse")(path, label))
    based_on = settings.pop("config", None)
    lower = read(str(based_on), root, (*above, path)) if based_on is not None else Source(label, None)
    return Source(label, lower.base, lower.over(settings), (*lower.layers, (label, settings)))


def find(name: str, beside: Path | None = None, function: str = "") -> Path:
    """The file at the path `name`, or called that in the folder `beside`, ".", "configs" or among the shipped configs.

    `function` is what is to be called there; it serves the hint. Raises UserError naming the nearest config.
    """
    folders = [folder for folder in (beside, Path(), Path("configs"), SHIPPED) if folder is not None]
    wanted = Path(name).expanduser()
    for folder in folders:
        place = folder / wanted
        # The suffix may be left out in configs/. In the working folder that would match any script.
        named = [place.with_name(place.name + ".py")] if place.name and folder != Path() else []
        for path in (place, *named, place / "config.yaml"):
            if path.is_file():
                if path.suffix not in SUFFIXES:
                    raise UserError(f"{name}: a config file ends in {', '.join(SUFFIXES)}")
                return path.resolve()
    places = ", ".join(str(folder) for folder in ([wanted.parent] if wanted.is_absolute() else folders))
    hint = _instead(wanted, function, (wanted.parent, *folders[-2:]))
    raise UserError(f"no config file {name} in {places}\n    {hint}")


def functions_of(path: Path) -> list[str]:
    """Public functions without arguments in a Python file, in its order; [] where it has none or cannot be parsed.

    The file is parsed and not run.
    """
    try:
        tree = ast.parse(path.read_bytes()) if path.suffix == ".py" else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return []
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [node.name for node in functions if not node.name.startswith("_") and not ast.unparse(node.args)]


def shown(path: Path) -> str:
    """The path as people want to read it: relative where it lies below the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def split_source(source: str) -> tuple[str, str]:
    """ "gpt3.py:debug" -> ("gpt3.py", "debug"); the function is "" where none is named."""
    match = re.fullmatch(r"(.+):([A-Za-z_]\w*)", source)
    return (match[1], match[2]) if match else (source, "")


def _config_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES and not file.name.startswith("_"))


def _instead(wanted: Path, function: str, folders: Iterable[Path]) -> str:
    """What to write where there is no file `wanted`: the nearest file, or function of a file, in the folders."""
    files = {file.name: file for folder in folders for file in _config_files(folder)}
    if not files:
        return "there are no config files in these folders"
    named = {
        name: f"{file.name}:{name}"
        for file in files.values()
        for name in functions_of(file)
        if name not in ("config", "debug")
    }
    # Suffixes are left out: all names would be alike by them.
    choices = {file.rpartition(".")[0]: file for file in files} | named
    stem = wanted.stem if wanted.suffix in SUFFIXES else wanted.name
    if both := named.get(f"{stem}_{function}"):
        return f"did you mean {both}?"
    if near := nearest_names(stem, choices):
        return f"did you mean {either(choices[name] for name in near)}?"
    return f"there are {', '.join(sorted(files))}; FILE:FUNCTION calls another function than config()"


def _run(path: Path, function: str, root: type) -> Any:
    # The module stays known under a name of its own: dataclasses defined in it look their annotations up there.
    name = f"megajax_config_file {path}"
    module = ModuleType(name)
    module.__file__ = str(path)
    with _siblings_importable(path.parent), _faults_named(path, module):
        sys.modules[name] = module
        # Not through the loader: bytecode caches go by whole seconds, and a config edited twice in one must count.
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
        made = getattr(module, function, None)
        if not callable(made):
            found = [key for key, thing in vars(module).items() if getattr(thing, "__module__", "") == name]
            found = [key for key in found if callable(vars(module)[key]) and not isinstance(vars(module)[key], type)]
            found = [key for key in found if not key.startswith("_")]
            hint = did_you_mean(function, found) or "write def config(): return RunConfig(...)"
            there = f" (it has {', '.join(found)})" if found else ""
            raise UserError(f"{shown(path)}: has no function {function}{there}\n    {hint}")
        config = made()
    if not schema.is_config(config) or not isinstance(config, root):
        raise UserError(f"{shown(path)}: {function}() must return {root.__name__}, not {type(config).__name__}")
    return config


@contextmanager
def _siblings_importable(folder: Path) -> Generator[None]:
    """A config file may import those beside it; then they are forgotten, as other folders may use the same names."""
    before = set(sys.modules)
    sys.path.append(str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).parent == folder and not name.startswith("megajax"):
                del sys.modules[name]


@contextmanager
def _faults_named(path: Path, module: ModuleType) -> Generator[None]:
    """An error in a user's file becomes a UserError with the file, the line and the fault."""
    try:
        yield
    except UserError:
        raise
    except SyntaxError as error:
        text = f"\n    {error.text.strip()}" if error.text else ""
        where = shown(Path(error.filename)) if error.filename else shown(path)
        raise UserError(f"{where}, line {error.lineno}: {error.msg}{text}") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        # The innermost line of the user's own files is the one to look at.
        own = [frame for frame in frames if Path(frame.filename).parent == path.parent] or frames
        text = f"\n    {own[-1].line}" if own[-1].line else ""
        fault = f"{type(error).__name__}: {error}"
        where = f"{shown(Path(own[-1].filename))}, line {own[-1].lineno}"
        raise UserError(f"{where}: {fault}{text}{_keyword_hint(str(error), module)}") from error


def _keyword_hint(error: str, module: ModuleType) -> str:
    match = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", error)
    cls = vars(module).get(match[1]) if match else None
    hint = did_you_mean(match[2], schema.hints(cls)) if match and hasattr(cls, "__dataclass_fields__") else ""
    return f"\n    {hint}" if hint else ""
