"""Files of torch.save: the parts that are read, and refusals without execution."""

import builtins
import operator
import os
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.config.read_limits import Limits, OverBudget
from megajax.interop.megatron.checkpoints import archive
from megajax.interop.megatron.checkpoints.archive import TorchArchive, memory_map, write_archive
from megajax.interop.megatron.checkpoints.names import LazyTensor
from megajax.interop.megatron.checkpoints.pickles import Name, Record, TensorPlace, read_pickle


class Called:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, state: Any = None):
        self.reduced = (function, arguments, state) if state is not None else (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


class Attributes:
    """Pickled as a new object of this class with attributes."""

    def __init__(self) -> None:
        self.value = 1


HOSTILE = {
    "a command": (Called(os.system, "touch executed"), "posix.system"),
    "eval": (Called(eval, "open('executed', 'w')"), "builtins.eval"),
    "exec in a state": ({"args": Called(exec, "open('executed', 'w')")}, "builtins.exec"),
    "open": (Called(open, "executed", "w"), "io.open"),
    "import": (Called(builtins.__import__, "os"), "builtins.__import__"),
    "getattr of an allowed class": (Called(getattr, Namespace, "__init__"), "builtins.getattr with odd arguments"),
    "getattr of a module's": (Called(getattr, Called(getattr, OrderedDict, "x"), "y"), "builtins.getattr with odd"),
    "a getter": (Called(operator.attrgetter, "x"), "operator.attrgetter"),
    "an object of any class": (Attributes(), "test_megatron_pickles.Attributes"),
    "an OrderedDict of a call": (OrderedDict(a=Called(os.getcwd)), "posix.getcwd"),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_of_a_pickle_is_executed(
    kind: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value, name = HOSTILE[kind]
    with pytest.raises(UserError, match=name) as caught:
        read_pickle(pickle.dumps(value, protocol), "a/model_optim_rng.pt")
    assert "a/model_optim_rng.pt" in str(caught.value)
    assert not (tmp_path / "executed").exists()


def global_(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


ODD = {
    "a call of a container": b"\x80\x02]U\x01a\x85R.",
    "a call of a text": b"\x80\x02U\x01a)R.",
    "a call without a tuple": global_("collections", "OrderedDict") + b"]R.",
    "attributes of a list": b"\x80\x02]}U\x01aK\x01sb.",
    "attributes of a name": global_("argparse", "Namespace") + b"}U\x01aK\x01sb.",
    "items of a name": global_("argparse", "Namespace") + b"U\x01aK\x01s.",
    "an instance by its class": b"(" + global_("os", "system")[1:].join([b"i", b""]) + b".",
    "an object by its class": b"(" + global_("argparse", "Namespace") + b"o.",
    "named arguments": global_("argparse", "Namespace") + b")}U\x01aK\x01s\x92.",
    "a tensor of no storage": global_("torch._utils", "_rebuild_tensor_v2") + b"(K\x01K\x00K\x01\x85K\x01\x85tR.",
    "a size of texts": global_("torch", "Size") + b"U\x01a\x85\x85R.",
    "a storage of another kind": b"(U\x07storage" + global_("torch", "Size") + b"U\x010U\x03cpuK\x01tQ.",
    "an extension": b"\x82\x01.",
    "a list as a key": b"\x80\x02}]K\x01s.",
    "a value that is missing": b"\x80\x02a.",
    "a mark that is missing": b"\x80\x02t.",
    "a memory that is missing": b"\x80\x02h\x05.",
    "no end": b"\x80\x02K\x01",
    "cut off": b"\x80\x02X\xff\x00\x00\x00abc",
    "nothing": b"",
    "no pickle": b"PK\x03\x04hello",
}


@pytest.mark.parametrize("kind", ODD)
def test_an_unusual_pickle_is_refused(kind: str) -> None:
    with user_error("a.pt"):
        read_pickle(ODD[kind], "a.pt")


def test_plain_containers_are_read() -> None:
    value = {
        "args": Namespace(layers=2, rate=0.5, tags={"a"}, path=Path("/a"), nothing=None),
        "list": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), True, -(2**40), 2**70, 2.5, b"bytes", "ä"],
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
    }
    for protocol in range(2, 6):
        read = read_pickle(pickle.dumps(value, protocol), "a.pt")
        assert read["args"].kind == "argparse.Namespace"
        assert read["args"].fields["layers"] == 2
        assert read["args"].fields["path"].arguments == ("/", "a")
        assert list(map(type, read["list"])) == list(map(type, value["list"]))
        assert read["list"] == value["list"]
        assert list(read["ordered"].items()) == [("b", 1), ("a", 2)]


def arrays() -> dict[str, np.ndarray]:
    numbers = np.arange(24).reshape(2, 3, 4)
    names = ("float32", "float16", "float64", "int64", "int32", "uint8")
    return {name: numbers.astype(name) for name in names} | {
        "bfloat16": numbers.astype(jnp.bfloat16),
        "scalar": np.asarray(3.0, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "bool": numbers % 2 == 0,
    }


def test_an_archive_round_trips(tmp_path: Path) -> None:
    path, expected = tmp_path / "model_optim_rng.pt", arrays()
    args = Record("argparse.Namespace", (), {"layers": 2, "dtype": Name("torch.bfloat16"), "window": (127, 0)})
    lazy = LazyTensor((2, 2), np.dtype(np.float32), lambda: np.eye(2, dtype=np.float32))
    write_archive(path, {"args": args, "iteration": 7, "model": {**expected, "lazy": lazy}})
    archive = TorchArchive(memory_map(path), str(path))
    assert archive.content["iteration"] == 7
    assert archive.content["args"].fields == args.fields
    model = archive.content["model"]
    for name, array in expected.items():
        view = archive.view(model[name])
        assert (view.dtype, view.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(view, array)
        assert not view.size or not view.flags.writeable
    np.testing.assert_array_equal(archive.view(model["lazy"]), np.eye(2))


def test_a_transposed_tensor_is_a_view(tmp_path: Path) -> None:
    path, array = tmp_path / "a.pt", np.arange(6, dtype=np.float32).reshape(2, 3)
    write_archive(path, {"a": array})
    archive = TorchArchive(memory_map(path), str(path))
    place = archive.content["a"]
    turned = TensorPlace(place.storage, place.dtype, 1, (3, 1), (1, 3))
    np.testing.assert_array_equal(archive.view(turned)[:2, 0], array.reshape(-1)[1:3])


def rewritten(path: Path, change: Callable[[str, bytes], tuple[str, bytes] | None], method: int = 0) -> Path:
    """The archive with its entries changed."""
    with zipfile.ZipFile(path) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in filter(None, (change(name, data) for name, data in entries)):
            archive.writestr(name, data)
    return path


def renamed(old: str, new: str) -> Callable[[str, bytes], tuple[str, bytes]]:
    return lambda name, data: (name.replace(old, new), data)


TRICKS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "compressed": (lambda path: rewritten(path, lambda name, data: (name, data), zipfile.ZIP_DEFLATED), "compressed"),
    "a path upwards": (lambda path: rewritten(path, renamed("archive/data/0", "archive/../../x")), r"\.\./\.\./x"),
    "an absolute path": (lambda path: rewritten(path, renamed("archive/version", "/etc/x")), "/etc/x"),
    "two of one name": (lambda path: rewritten(path, renamed("byteorder", "version")), "two entries"),
    "a storage less": (lambda path: rewritten(path, lambda n, d: None if n.endswith("data/0") else (n, d)), "data/0"),
    "a short storage": (
        lambda path: rewritten(path, lambda n, d: (n, d[:-4] if n.endswith("data/0") else d)),
        "has 20 bytes, but 6 elements of float32 are 24",
    ),
    "no pickle": (lambda path: rewritten(path, renamed("data.pkl", "x.pkl")), "no data.pkl"),
    "big-endian": (lambda path: rewritten(path, lambda n, d: (n, b"big" if "order" in n else d)), "big-endian"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-30]), "cut off"),
    "no archive": (lambda path: path.write_bytes(b"hello"), "not a file of torch.save"),
    "of old torch": (lambda path: path.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2)), "before 1.6"),
    "empty": (lambda path: path.write_bytes(b""), "can't be read"),
}


@pytest.mark.parametrize("kind", TRICKS)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_damaged_archive_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write_archive(path, {"a": np.arange(6, dtype=np.float32)})
    spoil, message = TRICKS[kind]
    spoil(path)
    with pytest.raises(UserError, match=message) as caught:
        archive = TorchArchive(memory_map(path), str(path))
        archive.view(archive.content["a"])
    assert str(path) in str(caught.value)


def test_a_directory_that_points_outside_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write_archive(path, {"a": np.arange(6, dtype=np.float32)})
    data = bytearray(path.read_bytes())
    place = data.rindex(b"archive/data/0") - 4
    data[place : place + 4] = (8).to_bytes(4, "little")
    path.write_bytes(data)
    with user_error():
        archive = TorchArchive(memory_map(path), str(path))
        archive.view(archive.content["a"])


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [(0, (7,), (1,)), (1, (6,), (1,)), (0, (2, 3), (4, 1)), (0, (2,), (-1,)), (-1, (2,), (1,)), (0, (2**62,), (2**62,)),
     (0, (2, 2), (1,)), (0, (True,), (1,))],
)  # fmt: skip
def test_a_tensor_outside_of_its_storage_is_refused(offset: int, shape: tuple[int, ...], strides: Any) -> None:
    storage = (
        b"(X\x07\x00\x00\x00storage" + global_("torch", "FloatStorage") + b"X\x01\x00\x00\x000X\x00\x00\x00\x00K\x06tQ"
    )
    numbers = b"".join(pickle.dumps(number, 2)[2:-1] for number in (offset, shape, strides))
    data = b"\x80\x02" + global_("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + numbers + b"tR."
    with user_error("a.pt"):
        read_pickle(data, "a.pt")


def shared(build: bytes, count: int = 60) -> bytes:
    """A value that holds the one before it twice, and so on: 2**count values."""
    return b"".join(b"q%ch%c" % (number, number) + build for number in range(count))


SMALL = Limits(bytes=100_000, entries=10_000, depth=100)
BOMBS = {
    "tuples as a key": b"}" + b")" + shared(b"\x86") + b"K\x01s",
    "tuples as keys": b"}(" + b")" + shared(b"\x86") + b"K\x01u",
    "tuples as keys at once": b"(" + b")" + shared(b"\x86") + b"K\x01d",
    "tuples in a set": b"\x8f(" + b")" + shared(b"\x86") + b"\x90",
    "tuples in a set of a call": global_("builtins", "set") + b"(](" + b")" + shared(b"\x86") + b"etR",
    "tuples as a key of a call": global_("collections", "OrderedDict") + b"(](" + b")" + shared(b"\x86")
    + b"K\x01\x86etR",
    "tuples as a value": b")" + shared(b"\x86"),
    "tuples in an object": global_("argparse", "Namespace") + b"(" + b")" + shared(b"\x86") + b"tR",
    "attributes of an object": global_("argparse", "Namespace") + b")R}U\x01a)" + shared(b"\x86") + b"sb",
    "a size in a message": global_("torch", "Size") + b")" + shared(b"\x86") + b"\x85R",
    "an attribute in a message": global_("builtins", "getattr") + b")" + shared(b"\x86") + b"K\x01\x86R",
    "a shape in a message": global_("torch._utils", "_rebuild_tensor_v2")
    + b"((U\x07storage" + global_("torch", "FloatStorage") + b"U\x010U\x03cpuK\x01tQK\x00)" + shared(b"\x86")
    + b"K\x01\x85tR",
    "a list in itself": b"]q\x00h\x00a",
    "a mapping in itself": b"}q\x00U\x01ah\x00s",
    "lists in lists": b"]" * 200 + b"a" * 199,
    "many instructions": b"N0" * 20_000 + b"N",
    "keys with the same hash": b"}(" + b"\x8a\x09" + (2**61 - 1).to_bytes(9, "little") + b"Nu",
    "keys of numbers with the same hash": b"}(" + b"\x8a\x09" + (2**61 - 1).to_bytes(9, "little") + b"\x85Nu",
    "a large file": b"U\x01a0" * 50_000 + b"N",
    "one list in many calls": b"(" + b"N" * 1000 + b"lq\x00"
    + (global_("collections", "OrderedDict") + b"h\x00\x85R0") * 100,
    "one text in many calls": b"X\xe8\x03\x00\x00" + b"a" * 1000 + b"q\x00U\x06latin1q\x01"
    + (global_("_codecs", "encode") + b"h\x00h\x01\x86R0") * 100,
    "a number of many digits": b"\x8b\xd0\x07\x00\x00" + b"\x01" * 2000,
    "a long name": b"X\xd0\x07\x00\x00" + b"a" * 2000 + b"q\x00h\x00\x93",
    "a text of 2**62 bytes": b"\x8d" + (2**62).to_bytes(8, "little") + b"a",
    "bytes of 2**63": b"\x8e" + (2**63).to_bytes(8, "little") + b"a",
    "a number of 2**31 - 1 bytes": b"\x8b\xff\xff\xff\x7f1",
    "a tensor of one element 10**12 times": global_("torch._utils", "_rebuild_tensor_v2")
    + b"((U\x07storage" + global_("torch", "FloatStorage") + b"U\x010U\x03cpuK\x01tQK\x00\x8a\x06"
    + (10**12).to_bytes(6, "little") + b"\x85K\x00\x85tR",
}  # fmt: skip


@pytest.mark.parametrize("kind", BOMBS)
def test_a_pickle_without_an_end_or_of_endless_size_is_refused(kind: str) -> None:
    with user_error("a.pt") as caught:
        read_pickle(b"\x80\x02" + BOMBS[kind] + b".", "a.pt", SMALL)
    assert len(str(caught.value)) < 400


def test_the_limits_of_a_pickle_are_raised_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    many = b"\x80\x02" + BOMBS["many instructions"] + b"."
    with pytest.raises(OverBudget, match=r"a\.pt: refused: 10,001 entries, at most 10,000 .*MEGAJAX_READ_LIMITS=10"):
        read_pickle(many, "a.pt", SMALL)
    monkeypatch.setenv("MEGAJAX_READ_LIMITS", "10")
    assert read_pickle(many, "a.pt", SMALL) is None


def test_an_archive_with_a_long_directory_or_byte_order_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", pickle.dumps({}, 2))
        file.writestr("a/byteorder", b"little" * 100)
    with user_error():
        TorchArchive(memory_map(path), str(path))
    monkeypatch.setattr(archive, "DIRECTORY", Limits(bytes=100))
    with pytest.raises(OverBudget, match=r"a\.pt: refused: .* bytes, at most 100"):
        TorchArchive(memory_map(path), str(path))
