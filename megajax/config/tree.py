"""Build a config tree: what is written is laid over what is there, and everything wrong is listed at once."""

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any, get_args, get_origin

import megajax.config.schema as schema
from megajax.config.builds import resolve
from megajax.config.coerce import Mismatch, Text, precedence, scalar
from megajax.config.errors import ConfigError, Problem
from megajax.config.nearest import did_you_mean, either
from megajax.config.patch import Additions, Mark, Over, Patch, join, leaves, patch_of, plain_name, setting, short_type


def override(config: Any, *settings: str, devices: int | None = None, place: str = "settings") -> Any:
    """A copy of the config with "dotted.name=value" settings, checked. Raises ConfigError listing all that is wrong."""
    patch = patch_of(setting(text) for text in settings)
    changed, problems = assemble(type(config), config, patch, devices)
    if problems:
        raise ConfigError(problems, place)
    return changed


def read_value(raw: Any, annotation: Any, where: str) -> tuple[Any, list[Problem]]:
    """One value by annotation, for flags that belong to no config; Mark.INVALID where it cannot be."""
    builder = _Builder(object)
    return builder.value(raw, annotation, where, None), builder.problems


def check(config: Any, devices: int | None = None) -> None:
    """Check types and cross-field rules again, e.g. once the number of devices is known. Raises ConfigError."""
    override(config, devices=devices, place=type(config).__name__)


def assemble(cls: type, base: Any, written: Any, devices: int | None = None) -> tuple[Any, list[Problem]]:
    """The config of type cls from `base` (None: the defaults alone) and settings over it, and all that is wrong.

    The config is None where it could not be built. Cross-field checks (`problems`) run on every part that could
    be; the root's is given `devices`, the number of devices in all, or None where not known.
    """
    builder = _Builder(cls)
    config = builder.value(written, cls, "", base)
    problems = builder.problems
    for where, node in builder.built.items():
        problems += _cross_checks(node, where, devices)
    return None if config is Mark.INVALID else config, list(dict.fromkeys(problems))


def _cross_checks(node: Any, where: str, devices: int | None) -> list[Problem]:
    ask = getattr(node, "problems", None)
    if not callable(ask):
        return []
    try:
        found = ask(devices) if inspect.signature(ask).parameters else ask()
        return [dataclasses.replace(problem, where=join(where, problem.where) or "config") for problem in found]
    except ArithmeticError as error:
        return [Problem(where or "config", f"its settings do not fit together: {error}", "is one of them zero?")]


class _Builder:
    """One pass over a tree; notes problems and goes on."""

    def __init__(self, root: type):
        self.root = root
        self.problems: list[Problem] = []
        self.built: dict[str, Any] = {}

    def fault(self, where: str, what: str, hint: str = "") -> Mark:
        self.problems.append(Problem(where or "config", what, hint))
        return Mark.INVALID

    def expected(self, where: str, annotation: Any, raw: Any, hint: str = "") -> Mark:
        shown = repr(str(raw) if isinstance(raw, Text) else raw)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return self.fault(where, f"expected {schema.words(annotation)}, got {shown}", hint)

    def value(self, raw: Any, annotation: Any, where: str, old: Any) -> Any:
        """What was written for one field (or what is there already), as its annotation wants it; `old` is there now."""
        if isinstance(raw, Over):
            return self._over(raw, annotation, where, old)
        if raw is Mark.BARE:
            if bool in schema.kinds(annotation):
                return True
            return self.fault(where, "needs a value", f"write --{where}=..., {schema.words(annotation)}")
        if isinstance(raw, Text) and raw[:1] in ("[", "{") and self._branches(annotation):
            import yaml

            try:
                raw = yaml.safe_load(raw)
            except yaml.YAMLError:
                return self.expected(where, annotation, raw, "the brackets do not match up")
        if isinstance(raw, Mapping) or schema.is_config(raw):
            return self._branch(raw, annotation, where, old)
        if isinstance(raw, list | tuple) and schema.lists(annotation):
            return self._list(raw, annotation, where, old)
        return self._scalar(raw, annotation, where, old)

    def _over(self, raw: Over, annotation: Any, where: str, old: Any) -> Any:
        if schema.configs(annotation) and (settings := raw.merged()) is not None:
            return self.value(settings, annotation, where, old)
        if not isinstance(raw.upper, Patch):
            return self.value(raw.upper, annotation, where, old)
        before = self.value(raw.lower, annotation, where, old)
        return before if before is Mark.INVALID else self.value(raw.upper, annotation, where, before)

    def _branches(self, annotation: Any) -> bool:
        return bool(schema.configs(annotation) or schema.lists(annotation) or schema.mappings(annotation))

    def _branch(self, raw: Any, annotation: Any, where: str, old: Any) -> Any:
        if isinstance(raw, Mapping) and schema.lists(annotation) and isinstance(old, tuple | list):
            return self._list(raw, annotation, where, old)
        if schema.configs(annotation):
            return self.node(raw, schema.configs(annotation), where, old)
        if isinstance(raw, Mapping) and schema.mappings(annotation):
            return self._mapping(raw, annotation, where, old)
        if Any in schema.kinds(annotation) and not isinstance(raw, Patch):
            return raw
        if isinstance(raw, Patch):
            for leaf in leaves(raw, where):
                self.fault(leaf, "no such setting", f"{where} is one value: {schema.words(annotation)}")
            return Mark.INVALID
        return self.expected(where, annotation, raw)

    def _scalar(self, raw: Any, annotation: Any, where: str, old: Any) -> Any:
        options = schema.kinds(annotation)
        if type(raw) in options and raw == raw:
            return raw
        written = type(raw) is str and any(kind in options for kind in schema.WRITTEN)
        hint = ""
        for kind in sorted(options, key=precedence):
            # In a file null is None, and the text none is text where text is allowed.
            if kind is type(None) and written:
                continue
            if kind in schema.WRITTEN and (found := self._unfolded(raw, annotation, ",=")) is not None:
                return self.value(found, annotation, where, old)
            try:
                return scalar(raw, kind)
            except Mismatch as mismatch:
                hint = hint or str(mismatch)
        if Any in options:
            import yaml

            return yaml.safe_load(raw) if isinstance(raw, Text) else raw
        if (found := self._unfolded(raw, annotation)) is not None:
            return self._one_or_list(raw, found, annotation, where, hint)
        if isinstance(raw, str) and schema.configs(annotation):
            return self.node({"type": raw}, schema.configs(annotation), where, old)
        return self.expected(where, annotation, raw, hint)

    def _one_or_list(self, raw: str, found: list | dict, annotation: Any, where: str, hint: str) -> Any:
        """What was unfolded; where a single word is neither one of the field's words nor an entry, both are told."""
        before = len(self.problems)
        value = self.value(found, annotation, where, None)
        if value is not Mark.INVALID or len(found) > 1 or not schema.choosable(annotation):
            return value
        fault = self.problems[before]
        del self.problems[before:]
        return self.expected(where, annotation, raw, hint or fault.hint)

    def _unfolded(self, raw: Any, annotation: Any, only_with: str = "") -> list | dict | None:
        """ "0.9,0.95" as a list, "web=0.7,code=0.3" as a mapping, None where the field or the text is neither."""
        if not isinstance(raw, str) or (only_with and not any(mark in raw for mark in only_with)):
            return None
        parts = [type(raw)(part.strip()) for part in raw.split(",")] if raw.strip() else []
        for kind in schema.mappings(annotation):
            numbers = str not in schema.kinds((*get_args(kind), str, str)[1])
            # A path may hold "=", so may a text: split a pair at the end that cannot.
            pairs = [part.rpartition("=") if numbers else part.partition("=") for part in parts]
            if all(equals for _, equals, _ in pairs):
                return {str(name).strip(): type(raw)(value.strip()) for name, _, value in pairs}
        return parts if schema.lists(annotation) and (not only_with or "," in raw) else None

    def _list(self, raw: Any, annotation: Any, where: str, old: Any) -> Any:
        kind = schema.lists(annotation)[0]
        _, count = schema.entries(kind)
        # Numbered entries change what is there; a list is a whole new value and starts from the defaults.
        items = list(old if isinstance(raw, Mapping) else raw)
        before = list(old) if isinstance(raw, Mapping) else [None] * len(items)
        for key, value in raw.items() if isinstance(raw, Mapping) else ():
            if str(key).isdigit() and int(key) < len(items):
                items[int(key)] = value
            else:
                there = f"its entries are 0 to {len(items) - 1}" if items else "it is empty"
                self.fault(join(where, str(key)), "no such entry", there)
        if count is not None and count != len(items):
            return self.fault(where, f"expected {schema.words(kind)}, got {len(items)}")
        built = [
            self.value(item, schema.entry(kind, index), f"{where}.{index}", before[index])
            for index, item in enumerate(items)
        ]
        if any(item is Mark.INVALID for item in built):
            return Mark.INVALID
        return built if (get_origin(kind) or kind) is list else tuple(built)

    def _mapping(self, raw: Mapping, annotation: Any, where: str, old: Any) -> Any:
        key_kind, value_kind = (*get_args(schema.mappings(annotation)[0]), Any, Any)[:2]
        old = old if isinstance(old, Mapping) and isinstance(raw, Patch) else {}
        items = dict(raw)
        if isinstance(raw, Patch):
            known = {plain_name(name): name for name in old}
            if isinstance(raw, Additions):
                known |= {key: key for key in raw}
            for key in [key for key in raw if key not in known]:
                hint = did_you_mean(key, known) or f"to add entries give it whole: --{where}=name=value,name=value"
                self.fault(join(where, key), "no such entry", hint)
            items = dict(old) | {known[key]: value for key, value in raw.items() if key in known}
        result = {}
        for key, value in items.items():
            path = join(where, str(key))
            name = self.value(Text(key) if isinstance(key, str) else key, key_kind, path, None)
            result[name] = self.value(value, value_kind, path, old.get(key))
        return Mark.INVALID if any(Mark.INVALID in pair for pair in result.items()) else result

    def node(self, raw: Any, members: tuple[type, ...], where: str, old: Any) -> Any:
        """A config: `raw` is one already, or the settings to change, with `type` to choose among the members."""
        if schema.is_config(raw):
            if isinstance(raw, members):
                return self._fill(type(raw), {}, where, raw, members)
            return self.fault(where, f"expected {schema.choices(members)}, got {type(raw).__name__}")
        if "type" in raw and "type" not in schema.hints(members[0]):
            cls = self._chosen(raw["type"], members, where)
            raw = {key: value for key, value in raw.items() if key != "type"}
        elif isinstance(old, members):
            cls = type(old)
        elif len(members) == 1:
            cls = members[0]
        else:
            cls = self.fault(where, "which one?", f"add --{where}.type={schema.choices(members)}")
        if isinstance(cls, Mark):
            return cls
        return self._fill(cls, raw, where, old if type(old) is cls else None, members)

    def _chosen(self, name: Any, members: tuple[type, ...], where: str) -> type | Mark:
        if not isinstance(name, str):
            return self.fault(join(where, "type"), "needs a value", f"one of {schema.choices(members)}")
        for same in (str, short_type):
            found = [cls for cls in members if same(name) == same(cls.__name__)]
            if len(found) == 1:
                return found[0]
        if ":" in str(name):
            try:
                cls = resolve(str(name))
            except (ImportError, AttributeError) as error:
                return self.fault(join(where, "type"), f"cannot find {name}: {error}")
            if isinstance(cls, type) and issubclass(cls, members) and dataclasses.is_dataclass(cls):
                return cls
        known = [cls.__name__ for cls in members]
        hint = did_you_mean(str(name), known)
        return self.fault(join(where, "type"), f"expected {schema.choices(members)}, got {str(name)!r}", hint)

    def _fill(self, cls: type, raw: Mapping, where: str, base: Any, members: tuple[type, ...]) -> Any:
        annotations = schema.hints(cls)
        given = {plain_name(key): value for key, value in raw.items()}
        for key in [key for key in given if key not in annotations]:
            self._unknown(key, given.pop(key), where, cls, members)
        values = {}
        for field in schema.fields(cls):
            if not field.init:
                continue
            path = join(where, field.name)
            there = getattr(base, field.name) if base is not None else schema.default(field)
            if field.name not in given and there is MISSING:
                what = schema.words(annotations[field.name])
                values[field.name] = self.fault(path, "has no default and is not given", f"give it: {what}")
                continue
            written = given.get(field.name, there)
            known = there is not MISSING
            there = None if there is MISSING else there
            value = self.value(written, annotations[field.name], path, there)
            # A faulty setting is reported already: its old value lets the checks of the others run too.
            values[field.name] = there if value is Mark.INVALID and known else value
        if any(value is Mark.INVALID for value in values.values()):
            return Mark.INVALID
        try:
            self.built[where] = cls(**values)
        except (TypeError, ValueError, ArithmeticError) as error:
            return self.fault(where, f"{cls.__name__} refuses these settings: {error}")
        return self.built[where]

    def _unknown(self, key: str, value: Any, where: str, cls: type, members: tuple[type, ...]) -> None:
        others = [member.__name__ for member in members if member is not cls and key in schema.hints(member)]
        near = [*(join(where, name) for name in schema.names(cls)), *schema.names(self.root)]
        there = join(where, key)
        for leaf in leaves(value, there) if isinstance(value, Patch) else [there]:
            hint = did_you_mean(leaf, near)
            if others:
                hint = f"a setting of {either(others)}, and this is {cls.__name__}; add --{where}.type={others[0]}"
            self.fault(leaf, "no such setting", hint)
