"""Reads pickles as data, without executing them: plain containers, numbers, strings and references to tensors.

A pickle is a program for a stack machine (see Python's `pickletools`). The machine here runs the opcodes of containers
and scalars. When an opcode calls an object, it looks up the object's name: a few names have a function in this file,
the other allowed names give a `Record` of the name and its arguments, and any other name is refused. No name is ever
imported, so allowed names are harmless too.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from dataclasses import dataclass, field
from math import prod
from pickletools import genops
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from megajax.config.errors import UserError
from megajax.config.read_limits import Budget, Limits, OverBudget, inner_values

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(dtype)
    for names, dtype in (
        ("torch.float32 torch.FloatStorage", np.float32),
        ("torch.float64 torch.DoubleStorage", np.float64),
        ("torch.float16 torch.HalfStorage", np.float16),
        ("torch.bfloat16 torch.BFloat16Storage", jnp.bfloat16),
        ("torch.float8_e4m3fn", jnp.float8_e4m3fn),
        ("torch.float8_e5m2", jnp.float8_e5m2),
        ("torch.int64 torch.LongStorage", np.int64),
        ("torch.int32 torch.IntStorage", np.int32),
        ("torch.int16 torch.ShortStorage", np.int16),
        ("torch.int8 torch.CharStorage", np.int8),
        ("torch.uint8 torch.ByteStorage", np.uint8),
        ("torch.uint16", np.uint16),
        ("torch.uint32", np.uint32),
        ("torch.uint64", np.uint64),
        ("torch.bool torch.BoolStorage", np.bool_),
        # Untyped storages are measured in bytes.
        ("torch.storage.UntypedStorage torch.UntypedStorage", np.uint8),
    )
    for name in names.split()
}
"""Names of dtypes and of storages -> dtype."""

LIMITS = Limits(bytes=2**30, entries=50_000_000, depth=100)
"""Of a pickle: its size, the number of its instructions and values, and containers inside of each other."""
LONGEST_NAME = 1000
"""Maximum characters of a module and a name in it."""
MOST_BITS = 1024
"""Of a whole number."""
MOST_BITS_OF_KEYS = 60
"""Of a whole number as a key. Multiples of 2**61 - 1 have the same hash: a mapping of 40,000 of them takes seconds."""
MOST_REPEATED = 2**20
"""Maximum elements of a tensor that has more elements than its storage."""
MOST_DIMENSIONS = 32
"""Largest number of dimensions of a numpy array."""

ALLOWED = frozenset({
    "argparse.Namespace", "types.SimpleNamespace", "_io.BytesIO", "_codecs.encode", "builtins.getattr",
    "builtins.set", "builtins.dict", "builtins.list", "builtins.bytearray", "builtins.slice", "builtins.complex",
    "collections.OrderedDict", "collections.defaultdict", "pathlib.PosixPath", "pathlib.PurePosixPath",
    "pathlib.WindowsPath", "pathlib._local.PosixPath", "signal.Signals", "torch.Size", "torch.Tensor", "torch.device",
    "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
    "torch._tensor._rebuild_from_type_v2", "torch.nn.parameter.Parameter", "torch.serialization._get_layout",
    "torch._C._nn.gelu", "torch.nn.functional.gelu", "torch.nn.functional.silu", "torch.nn.functional.relu",
    "numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", *DTYPES,
})  # fmt: skip
MODULES = "megatron torch.distributed.checkpoint torch.distributed._shard transformer_engine nvidia_resiliency_ext"
"""Modules with enums, plans and settings in checkpoints. They become records, like all allowed names."""
ALLOWED_BELOW = tuple(f"{module}." for module in MODULES.split())


class Name(NamedTuple):
    """A global name in a pickle, not imported."""

    dotted: str


@dataclass(slots=True, eq=False)
class Record:
    """An object that was not built: the name of its class or function, its arguments and its attributes."""

    kind: str
    arguments: tuple[Any, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Storage:
    """The storage of tensors: an entry of the archive."""

    key: str
    dtype: np.dtype
    numel: int


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor: part of a storage. offset and strides count elements."""

    storage: Storage
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_pickle(data: bytes | memoryview, where: str, limits: Limits = LIMITS) -> Any:
    """The content of a pickle.

    A pickle may refer to an earlier value, and so describe 2**n nested values in n instructions; programs that walk
    over them, or hash them, would never end. The values of the content are counted as often as they are reached.

    where: the file, for messages.
    Raises UserError for a name or an opcode that is not allowed, for a pickle that is damaged, and beyond the limits.
    """
    budget = Budget(where, limits, inner=_inner)
    budget.spend(bytes=len(data))
    content = _Machine(where, budget).run(data)
    budget.demand_tree(content)
    return content


def _inner(value: object) -> Collection[Any] | None:
    return [*value.arguments, value.fields] if isinstance(value, Record) else inner_values(value)


class _Mark:
    """The beginning of a list of arguments on the stack."""


MARK = _Mark()


class _Machine:
    """Runs the opcodes of one pickle."""

    def __init__(self, where: str, budget: Budget):
        self.where, self.stack, self.memo = where, list[Any](), dict[int, Any]()
        self.budget = budget

    def run(self, data: bytes | memoryview) -> Any:
        try:
            for opcode, argument, _ in genops(bytes(data)):
                self.budget.spend(1)
                if opcode.name == "STOP":
                    return self._pop()
                step = STEPS.get(opcode.name)
                if step is None:
                    raise UserError(f"{self.where}: its pickle was refused: it has the opcode {opcode.name}")
                step(self, argument)
        except OverBudget:
            raise
        except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, MemoryError) as error:
            raise UserError(f"{self.where}: its pickle is damaged: {error}") from error
        raise UserError(f"{self.where}: its pickle is damaged: it has no end")

    def _pop(self) -> Any:
        value = self.stack.pop()
        if value is MARK:
            raise ValueError("a value is missing")
        return value

    def _above_mark(self) -> list[Any]:
        """Pops the last mark and the values above it -> the values."""
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is MARK:
                values = self.stack[place + 1 :]
                del self.stack[place:]
                return values
        raise ValueError("a mark is missing")

    def _top(self, kind: type) -> Any:
        if not isinstance(top := self.stack[-1], kind):
            raise ValueError(f"a {kind.__name__} was expected, not a {type(top).__name__}")
        return top

    def push(self, value: object) -> None:
        if type(value) is int and value.bit_length() > MOST_BITS:
            raise ValueError(f"a number of {value.bit_length()} bits, at most {MOST_BITS} are read")
        self.stack.append(value)

    def keys(self, keys: Iterable[Any]) -> None:
        """Counts the values of tuples that are hashed: they do not keep their hash. Raises ValueError for other keys
        than those that pickles of torch have.
        """
        for key in keys:
            if type(key) is tuple:
                self.budget.demand_tree(key)
            if not _is_key(key):
                raise ValueError(f"a {type(key).__name__} as a key, or a number of more than {MOST_BITS_OF_KEYS} bits")

    def nothing(self, _: object) -> None:
        """Opcodes of the framing of the file."""

    def drop(self, _: object) -> None:
        self._pop()

    def drop_to_mark(self, _: object) -> None:
        self._above_mark()

    def remember(self, place: Any) -> None:
        self.memo[len(self.memo) if place is None else place] = self.stack[-1]

    def recall(self, place: int) -> None:
        self.push(self.memo[place])

    def tuple_of(self, count: int | None) -> None:
        """A tuple of the values above a mark, or of `count` values."""
        values = self._above_mark() if count is None else [self._pop() for _ in range(count)][::-1]
        self.push(tuple(values))

    def list_of(self, _: object) -> None:
        self.push(self._above_mark())

    def dict_of(self, _: object) -> None:
        values = self._above_mark()
        self.keys(values[::2])
        self.push(dict(zip(values[::2], values[1::2], strict=True)))

    def append(self, _: object) -> None:
        value = self._pop()
        self._top(list).append(value)

    def appends(self, _: object) -> None:
        values = self._above_mark()
        self._top(list).extend(values)

    def set_item(self, _: object) -> None:
        value, key = self._pop(), self._pop()
        self.keys((key,))
        self._top(dict)[key] = value

    def set_items(self, _: object) -> None:
        values = self._above_mark()
        self.keys(values[::2])
        self._top(dict).update(zip(values[::2], values[1::2], strict=True))

    def add_items(self, _: object) -> None:
        values = self._above_mark()
        self.keys(values)
        self._top(set).update(values)

    def global_name(self, text: str) -> None:
        """A name as "module name" in the opcode."""
        self._name(*text.split(" "))

    def stacked_name(self, _: object) -> None:
        name, module = self._pop(), self._pop()
        self._name(module, name)

    def _name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name that is not a text")
        if len(module) + len(name) > LONGEST_NAME:
            raise ValueError(f"a name of {len(module) + len(name)} characters")
        module = {"__builtin__": "builtins"}.get(module, module)
        dotted = f"{module}.{name}"
        if dotted not in ALLOWED and not dotted.startswith(ALLOWED_BELOW):
            raise UserError(
                f"{self.where}: its pickle was refused: it asks for {dotted}, and only tensors, plain containers and "
                "settings are read. Nothing of it was executed."
            )
        self.push(Name(dotted))

    def call(self, _: object) -> None:
        """REDUCE and NEWOBJ."""
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise UserError(f"{self.where}: its pickle was refused: it calls something other than an allowed name")
        self.push(self.result(function.dotted, arguments))

    def result(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """The substitute for the result of a call."""
        if name not in BUILDERS:
            return Record(name, arguments)
        # A builder may copy its arguments, and one value may be the argument of many calls.
        self.budget.spend(sum(len(value) for value in arguments if isinstance(value, Sized)))
        try:
            return BUILDERS[name](self, arguments)
        except (ValueError, TypeError, IndexError, AttributeError) as error:
            raise UserError(f"{self.where}: its pickle was refused: {name} with odd arguments ({error})") from error

    def call_with_names(self, _: object) -> None:
        names = self._pop()
        if names:
            raise UserError(f"{self.where}: its pickle was refused: it calls a class with named arguments")
        self.call(None)

    def build(self, _: object) -> None:
        """Sets attributes of the object below. Those of a dict or a tensor are not needed."""
        state, target = self._pop(), self.stack[-1]
        if isinstance(target, Record):
            parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
            if all(part is None or (isinstance(part, dict) and all(map(_is_text, part))) for part in parts):
                self.budget.spend(sum(len(part or ()) for part in parts))
                target.fields.update({key: value for part in parts for key, value in (part or {}).items()})
            else:
                target.fields["state"] = state
        elif not isinstance(target, dict | TensorPlace | bytes):
            raise UserError(f"{self.where}: its pickle was refused: it sets attributes of a {type(target).__name__}")

    def persistent(self, _: object) -> None:
        """A storage: ("storage", class, key, device, number of elements)."""
        reference = self._pop()
        if not isinstance(reference, tuple) or len(reference) != 5:
            raise ValueError("a reference to something other than a storage")
        type_name, kind, key, _, numel = reference
        if type_name != "storage" or not isinstance(kind, Name):
            raise ValueError("a reference to something other than a storage")
        if kind.dotted not in DTYPES or not isinstance(key, str) or not _are_sizes((numel,)):
            raise ValueError(f"the storage {key!r} of {kind.dotted} has no known dtype or size")
        self.push(Storage(key, DTYPES[kind.dotted], numel))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_key(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_key, value))
    if type(value) is int:
        return value.bit_length() <= MOST_BITS_OF_KEYS
    return value is None or isinstance(value, str | bytes | bool | float | Name | Record)


def _are_sizes(numbers: Iterable[Any]) -> bool:
    """Whether all are whole numbers of at least 0."""
    return all(type(number) is int and number >= 0 for number in numbers)


def _tensor(_: _Machine, arguments: tuple[Any, ...], dtype: np.dtype | None = None) -> TensorPlace:
    """(storage, offset, shape, strides, …)."""
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise ValueError("no storage, shape and strides")
    if len(shape) != len(strides) or len(shape) > MOST_DIMENSIONS or not _are_sizes((offset, *shape, *strides)):
        raise ValueError("its shape, strides or offset are not whole numbers of at least 0")
    dtype = dtype or storage.dtype
    elements = storage.numel * storage.dtype.itemsize // dtype.itemsize
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if prod(shape) and last >= elements:
        raise ValueError(f"it ends at element {last} of a storage of {elements}")
    if prod(shape) > max(elements, MOST_REPEATED):
        raise ValueError(f"it repeats the {elements} elements of its storage {prod(shape)} times")
    return TensorPlace(storage, dtype, offset, shape, strides)


def _tensor_with_dtype(machine: _Machine, arguments: tuple[Any, ...]) -> TensorPlace:
    """_rebuild_tensor_v3, with the dtype after the arguments of `_tensor`."""
    name = arguments[6]
    if not isinstance(name, Name) or name.dotted not in DTYPES:
        raise ValueError("an unknown dtype")
    return _tensor(machine, arguments, DTYPES[name.dotted])


def _first(kind: type) -> Callable[[_Machine, tuple[Any, ...]], Any]:
    """The first argument, which must be of this kind."""

    def first(_: _Machine, arguments: tuple[Any, ...]) -> Any:
        if not isinstance(arguments[0], kind):
            raise ValueError(f"expected a {kind.__name__}, got a {type(arguments[0]).__name__}")
        return arguments[0]

    return first


def _size(_: _Machine, arguments: tuple[Any, ...]) -> tuple[int, ...]:
    if not isinstance(arguments[0], tuple) or not _are_sizes(arguments[0]):
        raise ValueError("its sizes are not whole numbers of at least 0")
    return arguments[0]


def _rebuilt(machine: _Machine, arguments: tuple[Any, ...]) -> Any:
    """A tensor with attributes of its own: (function, type, its arguments, attributes)."""
    function, _, tensor_arguments, *_ = arguments
    if not isinstance(function, Name) or not function.dotted.startswith("torch._utils._rebuild_"):
        raise ValueError("it rebuilds something other than a tensor")
    return machine.result(function.dotted, tensor_arguments)


def _mapping(machine: _Machine, arguments: tuple[Any, ...]) -> dict[Any, Any]:
    """An OrderedDict, empty or of pairs."""
    if not arguments or not isinstance(arguments[0], list):
        return {}
    machine.keys(key for key, _ in arguments[0])
    return dict(arguments[0])


def _attribute(_: _Machine, arguments: tuple[Any, ...]) -> Record:
    """getattr(enum, name), as some versions of Python pickle a member of an enum."""
    owner, name = arguments
    if not isinstance(owner, Name) or not owner.dotted.startswith(ALLOWED_BELOW) or not isinstance(name, str):
        raise ValueError("it is not a member of an enum")
    return Record(f"{owner.dotted}.{name}")


def _encoded(_: _Machine, arguments: tuple[Any, ...]) -> bytes:
    """Bytes in protocol 2: a text in latin-1."""
    text, code = arguments
    if not isinstance(text, str) or code not in ("latin1", "latin-1"):
        raise ValueError("it is not a text in latin-1")
    return text.encode("latin-1")


def _members(machine: _Machine, arguments: tuple[Any, ...]) -> set[Any]:
    members = arguments[0] if arguments and isinstance(arguments[0], list) else []
    machine.keys(members)
    return set(members)


BUILDERS: Mapping[str, Callable[[_Machine, tuple[Any, ...]], Any]] = {
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": lambda machine, arguments: {},
    "builtins.set": _members,
    "builtins.getattr": _attribute,
    "_codecs.encode": _encoded,
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_with_dtype,
    "torch._utils._rebuild_parameter": _first(TensorPlace),
    "torch._utils._rebuild_parameter_with_state": _first(TensorPlace),
    "torch._tensor._rebuild_from_type_v2": _rebuilt,
}
"""Names of functions with a result other than a record."""

SCALARS = (
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 STRING "
    "BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8"
)

STEPS: Mapping[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(SCALARS.split(), _Machine.push),
    **dict.fromkeys(("PROTO", "FRAME"), _Machine.nothing),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.remember),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.recall),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.call),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_SET": lambda machine, _: machine.push(set()),
    "MARK": lambda machine, _: machine.push(MARK),
    "TUPLE": lambda machine, _: machine.tuple_of(None),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "LIST": _Machine.list_of,
    "DICT": _Machine.dict_of,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "ADDITEMS": _Machine.add_items,
    "POP": _Machine.drop,
    "POP_MARK": _Machine.drop_to_mark,
    "GLOBAL": _Machine.global_name,
    "STACK_GLOBAL": _Machine.stacked_name,
    "NEWOBJ_EX": _Machine.call_with_names,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}
"""Opcode -> method of the machine. Opcodes of older or other pickles are refused."""
