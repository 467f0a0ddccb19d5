"""Annotations of config dataclasses: members of a union, entries of lists, and their names in messages."""

import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from megajax.config import bounds
from megajax.config.class_references import reference
from megajax.config.hints import either

MOST_OF_A_VALUE = 60  # maximum characters of a wrong value in messages
TEXT_KINDS = (str, Path)  # annotations that accept any text


def fields(cls: type) -> tuple[dataclasses.Field, ...]:
    """The fields of a config class, in order. Raises TypeError if it is not a dataclass."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass")
    return dataclasses.fields(cls)


def hints(cls: type) -> dict[str, Any]:
    """Field name -> annotation, for the fields that can be set."""
    resolved = typing.get_type_hints(cls, include_extras=True)
    return {field.name: _with_rules(cls, field.name, resolved[field.name]) for field in fields(cls) if field.init}


def _with_rules(cls: type, name: str, annotation: Any) -> Any:
    """The annotation; one without rules has those of the field that it replaces, of a base class."""
    if next(bounds.rules(annotation), None) is None:
        _, *replaced = (base for base in cls.__mro__ if name in inspect.get_annotations(base))
        for base in replaced:
            if inherited := tuple(bounds.rules(typing.get_type_hints(base, include_extras=True)[name])):
                return typing.Annotated[annotation, *inherited]
    return annotation


def default(field: dataclasses.Field) -> Any:
    """The field's default, or dataclasses.MISSING if it must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def kinds(annotation: object) -> tuple[Any, ...]:
    """The members of a union, or the single annotation; aliases and Annotated are unwrapped."""
    if isinstance(annotation, typing.TypeAliasType):
        return kinds(annotation.__value__)
    if get_origin(annotation) is typing.Annotated:
        return kinds(get_args(annotation)[0])
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(dict.fromkeys(kind for part in get_args(annotation) for kind in kinds(part)))
    return (types.NoneType if annotation is None else annotation,)


def is_config(value: object) -> bool:
    """Whether this is a dataclass instance: a node of the tree."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def items(value: object) -> tuple[Any, ...]:
    """The entries of a list or tuple; () for another value."""
    return tuple(value) if isinstance(value, tuple | list) else ()


def configs(annotation: object) -> tuple[type, ...]:
    """The dataclasses among the kinds."""
    classes = tuple(k for k in kinds(annotation) if isinstance(k, type) and dataclasses.is_dataclass(k))
    if len(classes) > 1 and any(field.name == "type" for cls in classes for field in dataclasses.fields(cls)):
        raise TypeError(f"a member of the union {annotation} has a field 'type', the key that names the member")
    return classes


def protocols(annotation: object) -> tuple[type, ...]:
    """The protocols among the kinds. A protocol opens the union to every frozen dataclass with its members."""
    return tuple(k for k in kinds(annotation) if isinstance(k, type) and getattr(k, "_is_protocol", False))


def holds_configs(annotation: object) -> bool:
    """Whether a field with this annotation may hold a config."""
    return bool(configs(annotation) or protocols(annotation))


def misfit(cls: object, annotation: object) -> str:
    """The reason why a field with this annotation can't hold a config of this class; "" if it can."""
    if isinstance(cls, type) and issubclass(cls, configs(annotation)):
        return ""
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls) or not protocols(annotation):
        return f"expected {choices(annotation)}, got {described(cls)}"
    if not getattr(cls, "__dataclass_params__").frozen:  # noqa: B009, dataclasses declare it nowhere
        return f"{cls.__name__} could be changed after its check: write @dataclass(frozen=True)"
    if any(field.name == "type" for field in dataclasses.fields(cls)):
        return f"{cls.__name__} has a field 'type', the key that names the class"
    try:
        hints(cls)
    except Exception as error:  # of a class of the user's
        return f"the annotations of {cls.__name__} cannot be read: {error}"
    attributes = {*dir(cls), *(field.name for field in dataclasses.fields(cls))}
    lacking = [sorted(members(protocol) - attributes) for protocol in protocols(annotation)]
    fewest = min(lacking, key=len)
    return f"{cls.__name__} lacks {', '.join(fewest)}" if fewest else ""


def members(protocol: type) -> frozenset[str]:
    """The names of a protocol's members."""
    return frozenset(getattr(protocol, "__protocol_attrs__"))  # noqa: B009, typing.get_protocol_members is of Python 3.13


def lists(annotation: object) -> tuple[Any, ...]:
    """The tuple and list kinds."""
    return tuple(k for k in kinds(annotation) if (get_origin(k) or k) in (tuple, list, Sequence))


def choosable(annotation: object) -> bool:
    """Whether a Literal is among the kinds."""
    return any(get_origin(kind) is Literal for kind in kinds(annotation))


def mappings(annotation: object) -> tuple[Any, ...]:
    """The dict and Mapping kinds."""
    return tuple(k for k in kinds(annotation) if (get_origin(k) or k) in (dict, Mapping))


def entries(kind: object) -> tuple[Any, int | None]:
    """A list kind -> (annotation of every entry, None) for any length, or (tuple of annotations, length)."""
    args = get_args(kind) or (Any,)
    if get_origin(kind) is not tuple or args[-1] is Ellipsis:
        return args[0], None
    return (() if args == ((),) else args), len(args)


def entry(annotation: object, index: int) -> Any:
    """Annotation of entry `index` of the list in this annotation."""
    for kind in lists(annotation):
        entry_annotation, count = entries(kind)
        if count is None:
            return entry_annotation
        if index < count:
            return entry_annotation[index]
    return Any


def tag(cls: type, annotation: object) -> str:
    """The `type:` that selects this class among the classes of the annotation; "" if it is the only one."""
    members = configs(annotation)
    if members == (cls,):
        return ""
    is_unique = [member.__name__ for member in members].count(cls.__name__) == 1
    return cls.__name__ if cls in members and is_unique else reference(cls)


def names(cls: type, prefix: str = "", above: tuple[type, ...] = ()) -> Iterator[str]:
    """Every dotted name below a config, of all union members; only entry 0 of lists."""
    if cls in above:
        return
    for name, annotation in hints(cls).items():
        path = f"{prefix}{name}"
        yield path
        inner = [(path, annotation)]
        inner += [(f"{path}.0", entry(annotation, 0))] if lists(annotation) else []
        for place, inner_annotation in inner:
            if len(configs(inner_annotation)) + len(protocols(inner_annotation)) > 1:
                yield f"{place}.type"
            for member in configs(inner_annotation):
                yield from names(member, f"{place}.", (*above, cls))


def kind_text(annotation: object) -> str:
    """The accepted values in words: "a whole number or none"."""
    return " or ".join(_one_kind_text(kind) for kind in kinds(annotation))


def help_text(annotation: object) -> str:
    """The accepted values in words, with the bounds of the field: "a whole number or none, at least 1"."""
    return kind_text(annotation) + bounds.words(annotation)


def _one_kind_text(kind: object) -> str:
    plain: dict[object, str] = {
        types.NoneType: "none",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        Path: "a path",
        Any: "anything",
    }
    origin = get_origin(kind) or kind
    if kind in plain:
        return plain[kind]
    if origin is Literal:
        return f"{'one of ' if len(get_args(kind)) > 1 else ''}{', '.join(str(value) for value in get_args(kind))}"
    if lists(kind):
        entry_annotation, count = entries(kind)
        if count is None:
            return f"a list (each {kind_text(entry_annotation)})"
        return f"{count} value{'s' if count != 1 else ''} ({', '.join(kind_text(part) for part in entry_annotation)})"
    if mappings(kind):
        args = get_args(kind)
        return f"name=value pairs (each value {kind_text(args[1])})" if args else "name=value pairs"
    if opened := protocols(kind):
        return protocol_text(opened[0])
    return kind.__name__ if isinstance(kind, type) else "anything"


def protocol_text(protocol: type) -> str:
    """The classes that a protocol accepts, in words."""
    attributes = ", ".join(sorted(members(protocol)))
    return f"module:Class of your own frozen dataclass{f' with {attributes}' if attributes else ''}"


def example(name: str, annotation: object) -> str:
    """A hint in Python: "write data=mj.BlendConfig(...) or mj.MockConfig(...)"."""
    members = configs(annotation)
    list_members = () if members else tuple(part for kind in lists(annotation) for part in configs(entry(kind, 0)))
    if not members and not list_members:
        return f"write {name}=..., {kind_text(annotation)}"
    calls = either(f"({call(cls)},)" if list_members else call(cls) for cls in (*members, *list_members))
    return f"write {calls}" if name.isdigit() else f"write {name}={calls}"


def python_name(value: type | types.FunctionType) -> str:
    """A class or function as a config file names it: mj.AdamWConfig, or the plain name if it is the user's."""
    return f"mj.{value.__name__}" if value.__module__.startswith("megajax.") else value.__name__


def call(cls: type) -> str:
    """A constructor call with the settings that have no default: mj.BlockConfig(mixer=..., mlp=...)."""
    needed = [field.name for field in fields(cls) if field.init and default(field) is dataclasses.MISSING]
    return f"{python_name(cls)}({', '.join(f'{name}=...' for name in needed) or '...'})"


def described(value: object) -> str:
    """A short text of a wrong value."""
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


def choices(annotation: object) -> str:
    """The classes of an annotation in words: "AdamWConfig or MuonConfig"."""
    return either(
        [cls.__name__ for cls in configs(annotation)] + [protocol_text(kind) for kind in protocols(annotation)]
    )
