"""Build a config tree from a base and settings over it. All errors are reported together."""

import dataclasses
import inspect
import re
import traceback
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

from megajax.config import field_types
from megajax.config.bounds import errors
from megajax.config.class_references import error_text, own_class, public_class, reference, resolve
from megajax.config.errors import NO_SETTING, ConfigError, Problem
from megajax.config.hints import did_you_mean, either
from megajax.config.parse_scalar import Mismatch, Text, precedence, scalar
from megajax.config.paths_and_store_urls import holds_path, may_be_stored, names_store, url_problem
from megajax.config.removed import removed
from megajax.config.settings_tree import (
    Additions,
    Mark,
    Over,
    Patch,
    join,
    leaves,
    patch_of,
    plain_name,
    setting,
    short_type,
)


def override(config: object, *settings: str, devices: int | None = None, place: str = "settings") -> Any:
    """A copy of the config with "dotted.name=value" settings, checked. Raises ConfigError with all errors."""
    patch = patch_of(setting(text) for text in settings)
    changed, problems = assemble(type(config), config, patch, devices)
    if problems:
        raise ConfigError(problems, place)
    return changed


def read_value(raw: object, annotation: object, where: str) -> tuple[Any, list[Problem]]:
    """One value by annotation, for flags that belong to no config, and its problems; Mark.INVALID if it has any."""
    builder = _Builder(object)
    return builder.value(raw, annotation, where, None), builder.problems


def problems_of(config: object, devices: int | None = None) -> list[Problem]:
    """All problems of a config and its parts: of types, of bounds, and of settings that do not fit each other."""
    return assemble(type(config), config, {}, devices)[1]


def check(config: object, devices: int | None = None) -> None:
    """Check types and cross-field rules again, such as when the number of devices is known. Raises ConfigError."""
    override(config, devices=devices, place=type(config).__name__)


def demand_fit(config: object, devices: int) -> None:
    """Raises ConfigError for settings that don't fit this number of devices. `config` has passed `check` without it."""
    try:
        problems = _cross_checks(config, "", devices)
    except Exception as error:
        problems = [_failure(error, "")]
    if problems:
        raise ConfigError(problems, type(config).__name__)


TRUST = "--trust-code"
"""The flag of verbs that read runs. Without it, the settings of a run import nothing but classes of MegaJAX."""


def assemble(
    cls: type, base: object, settings: object, devices: int | None = None, *, trusted: bool = True
) -> tuple[Any, list[Problem]]:
    """The config of type cls from `base` (None: the defaults) and settings over it, and all its problems.

    The config is None if it could not be built. Cross-field checks (`problems`) run on every part that was built; the
    root's gets `devices`, the total number of devices, or None if it is unknown. Placeholders replace wrong and missing
    values, so that parts with such values are checked too. trusted: whether the settings may name code that is not of
    MegaJAX; otherwise that is a problem, and nothing is imported.
    """
    builder = _Builder(cls, trusted=trusted)
    config = builder.value(settings, cls, "", base)
    problems, failures = list(builder.problems), []
    for where, node in builder.nodes.items():
        try:
            problems += _cross_checks(node, where, devices)
        except Exception as error:
            failures.append(_failure(error, where))
    # A check usually fails because of a problem that another check reports.
    faults = list(dict.fromkeys(problems or failures))
    return None if builder.problems or config is Mark.INVALID else config, faults


def _cross_checks(node: object, where: str, devices: int | None) -> list[Problem]:
    """The problems that a config reports on its settings."""
    check_problems = getattr(node, "problems", None)
    if not callable(check_problems):
        return []
    try:
        problems = check_problems(devices) if inspect.signature(check_problems).parameters else check_problems()
        return [dataclasses.replace(problem, setting=join(where, problem.setting) or "config") for problem in problems]
    except UnknownValue:
        return _cross_checks_of_the_rest(node, where, devices)


def _failure(error: Exception, where: str) -> Problem:
    if isinstance(error, ArithmeticError):
        return Problem(where or "config", f"its settings do not fit together: {error}", "is one of them zero?")
    line = traceback.extract_tb(error.__traceback__)[-1]
    message = f"its settings cannot be checked: {type(error).__name__}: {error}"
    return Problem(where or "config", message, f"{line.filename}, line {line.lineno}: {line.line}")


def _cross_checks_of_the_rest(node: Any, where: str, devices: int | None) -> list[Problem]:
    """Problems of the known settings. Defaults replace unknown ones; problems that mention these are dropped."""
    fields = {field.name: field_types.default(field) for field in dataclasses.fields(node) if field.init}
    unknown = [name for name in fields if isinstance(getattr(node, name), UnknownSetting)]
    if not unknown or any(fields[name] is MISSING for name in unknown):
        return []
    completed = dataclasses.replace(node, **{name: fields[name] for name in unknown})
    mention = re.compile(rf"\b({'|'.join(unknown)})\b")
    problems = _cross_checks(completed, where, devices)
    return [
        problem for problem in problems if not mention.search(f"{problem.setting.rpartition('.')[2]} {problem.message}")
    ]


def _example(where: str, annotation: object) -> str:
    return field_types.example(where.rpartition(".")[2], annotation)


def _python_hint(where: str, annotation: Any, raw: Any) -> str:
    """A hint for values that only a Python config can hold."""
    members = field_types.configs(annotation)
    nodes = field_types.holds_configs(annotation)
    if isinstance(raw, type) and dataclasses.is_dataclass(raw):
        return f"this is the class: write {field_types.call(raw)}"
    if nodes and callable(raw) and hasattr(raw, "__name__"):
        return f"this is the function: write {field_types.python_name(raw)}(...)"
    if members and isinstance(raw, tuple | list) and any(isinstance(item, members) for item in raw):
        return "the comma after the closing bracket makes it a tuple: remove the comma"
    listed = any(field_types.holds_configs(field_types.entry(kind, 0)) for kind in field_types.lists(annotation))
    if raw is Ellipsis or (raw is None and (nodes or listed)) or (listed and field_types.is_config(raw)):
        return _example(where, annotation)
    return ""


class UnknownValue(Exception):
    """Use of a missing or wrong value, which is reported elsewhere."""


class UnknownSetting:
    """An unknown value: it can be stored and passed on; any other use raises UnknownValue."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        raise UnknownValue(name)

    def _unknown(self, *args: object) -> NoReturn:
        raise UnknownValue

    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __call__ = __hash__ = _unknown
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _unknown
    __int__ = __float__ = __index__ = __str__ = __repr__ = __format__ = __round__ = _unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _unknown
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = _unknown
    __setattr__ = __delattr__ = __enter__ = __exit__ = _unknown


class _Builder:
    """One pass over a tree that collects problems and continues."""

    def __init__(self, root: type, *, trusted: bool = True):
        self.root, self.trusted = root, trusted
        self.problems: list[Problem] = []
        self.nodes: dict[str, Any] = {}

    def fault(self, where: str, message: str, hint: str = "") -> Mark:
        self.problems.append(Problem(where or "config", message, hint))
        return Mark.INVALID

    def expected(self, where: str, annotation: object, raw: object, hint: str = "") -> Mark:
        actual = field_types.described(str(raw) if isinstance(raw, Text) else raw)
        message = f"expected {field_types.kind_text(annotation)}, got {actual}"
        return self.fault(where, message, hint or _python_hint(where, annotation, raw))

    def value(self, raw: object, annotation: object, where: str, current: object) -> Any:
        """The value of one field by its annotation, from a setting or from the current value."""
        value = self._converted(raw, annotation, where, current)
        try:
            for message, hint in () if value is Mark.INVALID else errors(value, annotation):
                return self.fault(where, message, hint)
        except Exception as error:
            self.problems.append(_failure(error, where))
            return Mark.INVALID
        return value

    def _converted(self, raw: object, annotation: object, where: str, current: object) -> Any:
        """The value by the type of the field alone."""
        if isinstance(raw, Over):
            return self._over(raw, annotation, where, current)
        if raw is Mark.BARE:
            if bool in field_types.kinds(annotation):
                return True
            return self.fault(where, "needs a value", f"write --{where}=..., {field_types.kind_text(annotation)}")
        if isinstance(raw, Text) and raw[:1] in ("[", "{") and self._branches(annotation):
            try:
                raw = _read_yaml(raw)
            except ValueError as error:
                return self.expected(where, annotation, raw, str(error).partition(";")[0])
        if isinstance(raw, Mapping) or field_types.is_config(raw):
            return self._branch(raw, annotation, where, current)
        if isinstance(raw, list | tuple) and field_types.lists(annotation):
            return self._list(raw, annotation, where, current)
        return self._scalar(raw, annotation, where, current)

    def _over(self, raw: Over, annotation: object, where: str, current: object) -> Any:
        if field_types.holds_configs(annotation) and (settings := raw.merged()) is not None:
            return self.value(settings, annotation, where, current)
        if not isinstance(raw.upper, Patch):
            return self.value(raw.upper, annotation, where, current)
        lower = self.value(raw.lower, annotation, where, current)
        return lower if lower is Mark.INVALID else self.value(raw.upper, annotation, where, lower)

    def _branches(self, annotation: object) -> bool:
        return bool(
            field_types.holds_configs(annotation) or field_types.lists(annotation) or field_types.mappings(annotation)
        )

    def _branch(self, raw: object, annotation: object, where: str, current: object) -> Any:
        if isinstance(raw, Mapping) and field_types.lists(annotation) and isinstance(current, tuple | list):
            return self._list(raw, annotation, where, current)
        if field_types.holds_configs(annotation):
            return self.node(raw, annotation, where, current)
        if isinstance(raw, Mapping) and field_types.mappings(annotation):
            return self._mapping(raw, annotation, where, current)
        if Any in field_types.kinds(annotation) and not isinstance(raw, Patch):
            return raw
        if isinstance(raw, Patch):
            for leaf in leaves(raw, where):
                self.fault(leaf, NO_SETTING, f"{where} is one value: {field_types.kind_text(annotation)}")
            return Mark.INVALID
        return self.expected(where, annotation, raw)

    def _scalar(self, raw: Any, annotation: Any, where: str, current: Any) -> Any:
        options = field_types.kinds(annotation)
        stored = may_be_stored(annotation) and isinstance(raw, str | Path) and names_store(raw)
        if holds_path(annotation) and not stored and (problem := url_problem(raw)) is not None:
            return self.fault(where, *problem)
        if type(raw) in options and raw == raw:
            return raw
        is_text = type(raw) is str and any(kind in options for kind in field_types.TEXT_KINDS)
        hint = ""
        for kind in sorted(options, key=precedence):
            # In a file null is None, and the text none is text if text is allowed.
            if kind is type(None) and is_text:
                continue
            if kind in field_types.TEXT_KINDS and (unfolded := self._unfolded(raw, annotation, ",=")) is not None:
                return self.value(unfolded, annotation, where, current)
            try:
                return scalar(raw, kind)
            except Mismatch as mismatch:
                hint = hint or str(mismatch)
        if Any in options:
            try:
                return _read_yaml(raw) if isinstance(raw, Text) else raw
            except ValueError as error:
                return self.expected(where, annotation, raw, str(error).partition(";")[0])
        if (unfolded := self._unfolded(raw, annotation)) is not None:
            return self._one_or_list(raw, unfolded, annotation, where, hint)
        if isinstance(raw, str) and field_types.holds_configs(annotation):
            return self.node({"type": raw}, annotation, where, current)
        return self.expected(where, annotation, raw, hint)

    def _one_or_list(self, raw: str, unfolded: list | dict, annotation: object, where: str, hint: str) -> Any:
        """The unfolded value. If a word is neither a choice of the field nor a valid entry, the error names both."""
        before = len(self.problems)
        value = self.value(unfolded, annotation, where, None)
        if value is not Mark.INVALID or len(unfolded) > 1 or not field_types.choosable(annotation):
            return value
        fault = self.problems[before]
        del self.problems[before:]
        return self.expected(where, annotation, raw, hint or fault.hint)

    def _unfolded(self, raw: object, annotation: object, only_with: str = "") -> list | dict | None:
        """ "0.9,0.95" as a list, "web=0.7,code=0.3" as a mapping; None if the field or the text is neither."""
        if not isinstance(raw, str) or (only_with and not any(mark in raw for mark in only_with)):
            return None
        parts = [type(raw)(part.strip()) for part in raw.split(",")] if raw.strip() else []
        for kind in field_types.mappings(annotation):
            numbers = str not in field_types.kinds((*get_args(kind), str, str)[1])
            # Paths and texts may contain "=": split a pair at the side that can't.
            pairs = [part.rpartition("=") if numbers else part.partition("=") for part in parts]
            if all(equals for _, equals, _ in pairs):
                return {str(name).strip(): type(raw)(value.strip()) for name, _, value in pairs}
        return parts if field_types.lists(annotation) and (not only_with or "," in raw) else None

    def _list(self, raw: Any, annotation: Any, where: str, current: Any) -> Any:
        kind = field_types.lists(annotation)[0]
        _, count = field_types.entries(kind)
        # Numbered entries change the current list; a list replaces it and starts from the defaults.
        items = list(current if isinstance(raw, Mapping) else raw)
        before = list(current) if isinstance(raw, Mapping) else [None] * len(items)
        for key, value in raw.items() if isinstance(raw, Mapping) else ():
            if str(key).isdigit() and int(key) < len(items):
                items[int(key)] = value
            else:
                hint = f"its entries are 0 to {len(items) - 1}" if items else "it is empty"
                self.fault(join(where, str(key)), "no such entry", hint)
        if count is not None and count != len(items):
            return self.fault(where, f"expected {field_types.kind_text(kind)}, got {len(items)}")
        values = [
            self.value(item, field_types.entry(kind, index), f"{where}.{index}", before[index])
            for index, item in enumerate(items)
        ]
        if any(item is Mark.INVALID for item in values):
            return Mark.INVALID
        return values if (get_origin(kind) or kind) is list else tuple(values)

    def _mapping(self, raw: Mapping, annotation: object, where: str, current: object) -> Any:
        key_kind, value_kind = (*get_args(field_types.mappings(annotation)[0]), Any, Any)[:2]
        current = current if isinstance(current, Mapping) and isinstance(raw, Patch) else {}
        items = dict(raw)
        if isinstance(raw, Patch):
            names = {plain_name(name): name for name in current}
            if isinstance(raw, Additions):
                names |= {key: key for key in raw}
            elif value_kind is Any:  # arguments of a user's function: any name is allowed
                names = {key: key for key in raw} | names
            for key in [key for key in raw if key not in names]:
                hint = did_you_mean(key, names) or f"to add entries give all of them: --{where}=name=value,name=value"
                self.fault(join(where, key), "no such entry", hint)
            items = dict(current) | {names[key]: value for key, value in raw.items() if key in names}
        result = {}
        for key, value in items.items():
            path = join(where, str(key))
            name = self.value(Text(key) if isinstance(key, str) else key, key_kind, path, None)
            result[name] = self.value(value, value_kind, path, current.get(key))
        return Mark.INVALID if any(Mark.INVALID in pair for pair in result.items()) else result

    def node(self, raw: Any, annotation: Any, where: str, current: Any) -> Any:
        """A config: `raw` is a config or settings to change, with `type` to choose its class."""
        members = field_types.configs(annotation)
        if field_types.is_config(raw):
            if not (message := field_types.misfit(type(raw), annotation)):
                return self._fill(type(raw), {}, where, raw, annotation)
            if not field_types.protocols(annotation):
                message = f"expected {field_types.choices(annotation)}, got {field_types.described(raw)}"
            is_megajax = type(raw).__module__.startswith("megajax.")
            return self.fault(where, message, _example(where, annotation) if is_megajax or " got " in message else "")
        if "type" in raw and not any("type" in field_types.hints(cls) for cls in members):
            cls = self._class_named(raw["type"], annotation, where, current)
            raw = {key: value for key, value in raw.items() if key != "type"}
        elif field_types.is_config(current) and not field_types.misfit(type(current), annotation):
            cls = type(current)
        elif len(members) == 1:
            cls = members[0]
        else:
            cls = self.fault(where, "has no type", f"add --{where}.type={field_types.choices(annotation)}")
        if isinstance(cls, Mark):
            return cls
        return self._fill(cls, raw, where, current if type(current) is cls else None, annotation)

    def _class_named(self, name: object, annotation: object, where: str, current: object) -> type | Mark:
        if not isinstance(name, str):
            return self.fault(join(where, "type"), "needs a value", f"one of {field_types.choices(annotation)}")
        members = field_types.configs(annotation)
        for normalize in (str, short_type):
            matches = [cls for cls in members if normalize(name) == normalize(cls.__name__)]
            if len(matches) == 1:
                return matches[0]
        if field_types.is_config(current) and name == reference(type(current)):
            return type(current)
        if message := removed(name.rpartition(":")[2]):
            return self.fault(join(where, "type"), f"{name} {message}")
        if ":" in name:
            if not self.trusted and own_class(name) is None:
                return self._class_refused(join(where, "type"), name)
            try:
                cls = resolve(name)
            except Exception as error:  # of a file of the user's
                message = f"cannot find {name}: {error_text(error)}"
                return self.fault(join(where, "type"), message, "write module:Class or file.py:Class")
            wrong = field_types.misfit(cls, annotation)
            return self.fault(join(where, "type"), wrong) if wrong else cls
        # One that fits a protocol of the annotation, but belongs to a package above that of the field.
        public = public_class(name)
        if public is not None and not field_types.misfit(public, annotation):
            return public
        class_names = [cls.__name__ for cls in members]
        completions = [cls for cls in class_names if cls.lower().startswith(name.lower())]
        hint = f"did you mean {either(completions)}?" if completions and name else did_you_mean(name, class_names)
        if not hint and "." in name:  # a file, which some of the classes read
            readers = [cls for cls in members if any(field.name == "path" for field in field_types.fields(cls))]
            hint = "\n".join(f"write --{where}.type={cls.__name__} --{where}.path={name}" for cls in readers)
        return self.fault(join(where, "type"), f"expected {field_types.choices(annotation)}, got {str(name)!r}", hint)

    def _fill(self, cls: type, raw: Mapping, where: str, base: object, annotation: object) -> Any:
        annotations = field_types.hints(cls)
        settings = {plain_name(key): value for key, value in raw.items()}
        for key in [key for key in settings if key not in annotations]:
            self._unknown(key, settings.pop(key), where, cls, annotation)
        values = {}
        for field in field_types.fields(cls):
            if not field.init:
                continue
            path = join(where, field.name)
            current = getattr(base, field.name) if base is not None else field_types.default(field)
            if current is MISSING:
                if field.name not in settings:
                    kind = field_types.kind_text(annotations[field.name])
                    self.fault(path, "has no default and is not given", f"give it: {kind}")
                    values[field.name] = UnknownSetting()
                    continue
                current = None
            value = self.value(settings.get(field.name, current), annotations[field.name], path, current)
            # The wrong setting is already reported; the others are still checked.
            values[field.name] = UnknownSetting() if value is Mark.INVALID else value
        try:
            self.nodes[where] = cls(**values)
        except Exception as error:
            if self.problems:
                return Mark.INVALID
            return self.fault(where, f"{cls.__name__} refuses these settings: {error}")
        if not self.trusted and not self.problems and (names_code := getattr(cls, "code", None)):
            for name, value in names_code(self.nodes[where]).items():
                message = f"{value} may run code that is not of MegaJAX, and reading a run runs none"
                self.fault(join(where, name), message, f"if you trust it, add {TRUST} (in Python: trusted=True)")
        return self.nodes[where]

    def _class_refused(self, where: str, name: str) -> Mark:
        module, _, cls = name.rpartition(":")
        hint = f"if you trust it, add {TRUST} (in Python: trusted=True): it imports {module} and uses its {cls}"
        return self.fault(where, f"{name} is no class of MegaJAX, and reading a run imports no other code", hint)

    def _unknown(self, key: str, value: object, where: str, cls: type, annotation: object) -> None:
        owners = [c.__name__ for c in field_types.configs(annotation) if c is not cls and key in field_types.hints(c)]
        # Without the settings of other classes for the same field.
        elsewhere = (name for name in field_types.names(self.root) if not name.startswith(f"{where}."))
        candidates = [*(join(where, name) for name in field_types.names(cls)), *elsewhere]
        path = join(where, key)
        for leaf in leaves(value, path) if isinstance(value, Patch) else [path]:
            hint = did_you_mean(leaf, candidates)
            if owners:
                hint = f"a setting of {either(owners)}, but this is {cls.__name__}; add --{where}.type={owners[0]}"
            message = removed(key, cls) or removed("" if where else key)
            self.fault(leaf, message or NO_SETTING, "" if message else hint)


def _read_yaml(text: str) -> Any:
    return resolve("megajax.config.yaml_and_json:read_yaml")(
        text
    )  # by name, so that the front doors start without yaml
