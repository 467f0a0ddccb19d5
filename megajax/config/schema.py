"""Annotations of config dataclasses: members of a union, entries of lists, and their names in messages."""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from megajax.config.builds import reference
from megajax.config.nearest import either

MOST_OF_A_VALUE = 60  # characters of a wrong value that are shown
WRITTEN = (str, Path)  # the kinds that take any text


def fields(cls: type) -> tuple[dataclasses.Field, ...]:
    """The fields of a config class, in order. Raises TypeError if it is no dataclass."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is no dataclass")
    return dataclasses.fields(cls)


def hints(cls: type) -> dict[str, Any]:
    """Field name -> annotation, for the fields that can be set."""
    resolved = typing.get_type_hints(cls)
    return {field.name: resolved[field.name] for field in fields(cls) if field.init}


def default(field: dataclasses.Field) -> Any:
    """The field's default, or dataclasses.MISSING where it must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def kinds(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the one kind; aliases and Annotated are seen through."""
    if isinstance(annotation, typing.TypeAliasType):
        return kinds(annotation.__value__)
    if get_origin(annotation) is typing.Annotated:
        return kinds(get_args(annotation)[0])
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(dict.fromkeys(kind for part in get_args(annotation) for kind in kinds(part)))
    return (types.NoneType if annotation is None else annotation,)


def is_config(thing: Any) -> bool:
    """Whether this is a dataclass instance: a node of the tree."""
    return dataclasses.is_dataclass(thing) and not isinstance(thing, type)


def configs(annotation: Any) -> tuple[type, ...]:
    """The dataclasses among the kinds."""
    classes = tuple(k for k in kinds(annotation) if isinstance(k, type) and dataclasses.is_dataclass(k))
    if len(classes) > 1 and any(field.name == "type" for cls in classes for field in dataclasses.fields(cls)):
        raise TypeError(f"a member of the union {annotation} has a field 'type', the key that names the member")
    return classes


def protocols(annotation: Any) -> tuple[type, ...]:
    """The protocols among the kinds: one of them opens the union to every frozen dataclass that has its members."""
    return tuple(k for k in kinds(annotation) if isinstance(k, type) and getattr(k, "_is_protocol", False))


def holds_configs(annotation: Any) -> bool:
    """Whether a config may stand there."""
    return bool(configs(annotation) or protocols(annotation))


def misfit(cls: Any, annotation: Any) -> str:
    """Why a config of this class may not stand in a field with this annotation; "" where it may."""
    if isinstance(cls, type) and issubclass(cls, configs(annotation)):
        return ""
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls) or not protocols(annotation):
        return f"expected {choices(annotation)}, got {described(cls)}"
    if not getattr(cls, "__dataclass_params__").frozen:  # noqa: B009, dataclasses declare it nowhere
        return f"{cls.__name__} can be changed after it is checked: write @dataclass(frozen=True)"
    if any(field.name == "type" for field in dataclasses.fields(cls)):
        return f"{cls.__name__} has a field 'type', the key that names the class"
    try:
        hints(cls)
    except Exception as error:  # of a class of the user's
        return f"the annotations of {cls.__name__} cannot be read: {error}"
    there = {*dir(cls), *(field.name for field in dataclasses.fields(cls))}
    lacking = [sorted(members(protocol) - there) for protocol in protocols(annotation)]
    fewest = min(lacking, key=len)
    return f"{cls.__name__} lacks {', '.join(fewest)}" if fewest else ""


def members(protocol: type) -> frozenset[str]:
    """The names that a protocol asks for."""
    return frozenset(getattr(protocol, "__protocol_attrs__"))  # noqa: B009, typing.get_protocol_members is of Python 3.13


def lists(annotation: Any) -> tuple[Any, ...]:
    """The tuple and list kinds."""
    return tuple(k for k in kinds(annotation) if (get_origin(k) or k) in (tuple, list, Sequence))


def choosable(annotation: Any) -> bool:
    """Whether words of a Literal are among the kinds."""
    return any(get_origin(kind) is Literal for kind in kinds(annotation))


def mappings(annotation: Any) -> tuple[Any, ...]:
    """The dict and Mapping kinds."""
    return tuple(k for k in kinds(annotation) if (get_origin(k) or k) in (dict, Mapping))


def entries(kind: Any) -> tuple[Any, int | None]:
    """A list kind -> (annotation of the entries: one, or a tuple of them, and their number or None for any)."""
    args = get_args(kind) or (Any,)
    if get_origin(kind) is not tuple or args[-1] is Ellipsis:
        return args[0], None
    return (() if args == ((),) else args), len(args)


def entry(annotation: Any, index: int) -> Any:
    """Annotation of entry `index` of the list in this annotation."""
    for kind in lists(annotation):
        each, count = entries(kind)
        if count is None:
            return each
        if index < count:
            return each[index]
    return Any


def tag(cls: type, annotation: Any) -> str:
    """The `type:` that tells this class from what else the annotation allows; "" where it is the only one."""
    members = configs(annotation)
    if members == (cls,):
        return ""
    alone = [member.__name__ for member in members].count(cls.__name__) == 1
    return cls.__name__ if cls in members and alone else reference(cls)


def names(cls: type, prefix: str = "", above: tuple[type, ...] = ()) -> Iterator[str]:
    """Every dotted name below a config, of all union members; list entries are shown by the first, 0."""
    if cls in above:
        return
    for name, annotation in hints(cls).items():
        path = f"{prefix}{name}"
        yield path
        inner = [(path, annotation)]
        inner += [(f"{path}.0", entry(annotation, 0))] if lists(annotation) else []
        for place, what in inner:
            if len(configs(what)) + len(protocols(what)) > 1:
                yield f"{place}.type"
            for member in configs(what):
                yield from names(member, f"{place}.", (*above, cls))


def words(annotation: Any) -> str:
    """What may be written there, for people: "a whole number or none"."""
    return " or ".join(_word(kind) for kind in kinds(annotation))


def _word(kind: Any) -> str:
    plain = {
        types.NoneType: "none",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        Path: "a path",
    }
    origin = get_origin(kind) or kind
    if kind in plain:
        return plain[kind]
    if origin is Literal:
        return f"{'one of ' if len(get_args(kind)) > 1 else ''}{', '.join(str(value) for value in get_args(kind))}"
    if lists(kind):
        each, count = entries(kind)
        if count is None:
            return f"a list (each {words(each)})"
        return f"{count} value{'s' if count != 1 else ''} ({', '.join(words(one) for one in each)})"
    if mappings(kind):
        args = get_args(kind)
        return f"name=value pairs (each value {words(args[1])})" if args else "name=value pairs"
    if protocols(kind):
        return own(kind)
    return kind.__name__ if isinstance(kind, type) else "anything"


def own(protocol: type) -> str:
    """The classes that a protocol allows, in words."""
    asked = ", ".join(sorted(members(protocol)))
    return f"module:Class of your own frozen dataclass{f' with {asked}' if asked else ''}"


def example(name: str, annotation: Any) -> str:
    """How a value is written in Python: "write data=BlendConfig(...) or MockConfig(...), from megajax.data.config"."""
    members = configs(annotation)
    many = () if members else tuple(part for kind in lists(annotation) for part in configs(entry(kind, 0)))
    if not members and not many:
        return f"write {name}=..., {words(annotation)}"
    calls = either(f"({call(cls)},)" if many else call(cls) for cls in (*members, *many))
    written = calls if name.isdigit() else f"{name}={calls}"
    modules = {cls.__module__ for cls in (*members, *many)}
    parents = {module.rpartition(".")[0] for module in modules}
    # Files of one folder, which exports what is in them.
    source = parents.pop() if len(modules) > 1 and len(parents) == 1 else either(sorted(modules))
    return f"write {written}, from {source}"


def call(cls: type) -> str:
    """BlockConfig(mixer=..., mlp=...): the settings without a default."""
    needed = [field.name for field in fields(cls) if field.init and default(field) is dataclasses.MISSING]
    return f"{cls.__name__}({', '.join(f'{name}=...' for name in needed) or '...'})"


def described(value: Any) -> str:
    """A value that is wrong, in a few words."""
    if is_config(value):
        return f"{'an' if type(value).__name__[0] in 'AEIOU' else 'a'} {type(value).__name__}"
    if value is Ellipsis:
        return "..."
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of a class of the user's
        text = f"a {type(value).__name__}"
    return text if len(text) <= MOST_OF_A_VALUE else text[: MOST_OF_A_VALUE - 3] + "..."


def choices(annotation: Any) -> str:
    """AdamWConfig or MuonConfig."""
    return either([cls.__name__ for cls in configs(annotation)] + [own(kind) for kind in protocols(annotation)])
