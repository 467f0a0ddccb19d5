"""safetensors files and indices that are damaged or malicious: one message each, no crash, nothing read."""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hugging_face_folders import write_llama
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load as reference_load
from safetensors.numpy import load_file, save_file
from user_errors import user_error

from megajax.checkpoint.weight_source import Entry
from megajax.config.errors import UserError
from megajax.interop.conversion import open_source
from megajax.interop.weights.safetensors import SafetensorsFile, SafetensorsFolder, ShardWriter, TensorFile
from megajax.tokenizers.tokenizer_files import copy_files

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write_file(path: Path, header: object, data: bytes = bytes(8), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


OFFSETS = st.lists(st.sampled_from([-8, 0, 4, 8, 12, 16, False]), min_size=1, max_size=3)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F32", "F32", "F16", "F64", "F31", ["F32"], None]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 2, 3, 4, -1, 2**70, True, "2", 2.0]), max_size=3)
        | st.sampled_from(["2", None, [1] * 200 + [2]]),
        "data_offsets": st.sampled_from([[0, 8], [0, 4], [4, 8]]) | OFFSETS | st.just({"0": 0}),
    },
)
HEADERS = st.dictionaries(st.sampled_from("ab"), ENTRIES | st.sampled_from([[2], None]), max_size=2)


@settings(max_examples=400, deadline=None)
@given(header=HEADERS)
@example(header={"a": ENTRY})
@example(header={"a": ENTRY, "b": ENTRY})
@example(header={"a": {**ENTRY, "shape": [1] * 200 + [2]}})
def test_a_header_is_read_as_by_the_reference_implementation(header: dict[str, Any]) -> None:
    """What it refuses is refused. Fewer are read here: a tensor has to follow the one before it without a gap."""
    with TemporaryDirectory() as name:
        path = write_file(Path(name) / "model.safetensors", header)
        try:
            file = SafetensorsFile(path)
        except UserError as error:
            assert "model.safetensors" in str(error)
            return
        found = {tensor: file.read(tensor) for tensor in file.entries}
        expected = reference_load(path.read_bytes())
    assert found.keys() == expected.keys()
    for tensor, values in expected.items():
        assert (found[tensor].dtype, found[tensor].shape) == (values.dtype, values.shape)
        assert found[tensor].tobytes() == values.tobytes()


@pytest.mark.parametrize(
    "header",
    [
        [ENTRY],
        "text",
        7,
        {"a": {**ENTRY, "data_offsets": [0, 4], "shape": [1]}},
        {"a": {**ENTRY, "shape": [2**70, 0, 2**70]}},
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"a": ' * 50_000,
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}',
        b"{}",
        b"",
    ],
)
def test_false_headers_are_refused(tmp_path, header) -> None:
    """The reference implementation refuses them too."""
    path = write_file(tmp_path / "model.safetensors", header)
    with user_error():
        SafetensorsFile(path)
    with pytest.raises((SafetensorError, ValueError, KeyError, TypeError, OverflowError)):
        reference_load(path.read_bytes())


def test_a_duplicate_name_in_a_header_is_refused(tmp_path) -> None:
    header = b'{"a": %b, "a": %b}' % (2 * (json.dumps(ENTRY).encode(),))
    with user_error():
        SafetensorsFile(write_file(tmp_path / "model.safetensors", header))


@pytest.mark.parametrize("length", [0, 1, 7, 2**31, 2**63, 2**64 - 1])
def test_false_lengths_of_headers_are_refused(tmp_path, length) -> None:
    with user_error():
        SafetensorsFile(write_file(tmp_path / "model.safetensors", {"a": ENTRY}, length=length))


def test_a_file_truncated_anywhere_is_refused(tmp_path) -> None:
    """It ends at each byte of the header, and of the tensors."""
    intact = tmp_path / "whole"
    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float16)}, intact)
    content = intact.read_bytes()
    assert SafetensorsFile(intact).read("a").tolist() == [[0, 1, 2], [3, 4, 5]]
    for length in range(len(content)):
        path = tmp_path / "cut"
        path.write_bytes(content[:length])
        with user_error():
            SafetensorsFile(path)
    (tmp_path / "long").write_bytes(content + b"\0")
    with user_error():
        SafetensorsFile(tmp_path / "long")


@settings(max_examples=150, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3))
def test_changed_bytes_never_crash(changes: list[tuple[int, int]]) -> None:
    """Any bytes of a header changed: a message, or tensors within the file."""
    with TemporaryDirectory() as name:
        path = Path(name) / "changed"
        save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(3, np.float16)}, path)
        content = bytearray(path.read_bytes())
        length = 8 + int.from_bytes(content[:8], "little")
        for place, value in changes:
            content[place % length] = value
        path.write_bytes(content)
        try:
            file = SafetensorsFile(path)
        except UserError:
            return
        assert sum(file.read(tensor).nbytes for tensor in file.entries) == len(content) - length


def test_unaligned_and_empty_tensors_are_read(tmp_path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "none": {"dtype": "F32", "shape": [0, 4], "data_offsets": [3, 3]},
        "b": {"dtype": "F32", "shape": [], "data_offsets": [3, 7]},
    }
    data = bytes([1, 2, 3]) + np.float32(2.5).tobytes()
    file = SafetensorsFile(write_file(tmp_path / "model.safetensors", header, data))
    assert file.read("b") == 2.5 and file.read("b").shape == () and file.read("none").shape == (0, 4)
    assert file.read("a").tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "index",
    [
        {"a": "../model.safetensors"},
        {"a": "/etc/passwd"},
        {"a": "inner/model.safetensors"},
        {"a": ".."},
        {"a": ""},
        {"a": "model.safetensors\0.png"},
        {"a": "..\\model.safetensors"},
        {"a": "gone-00001-of-00002.safetensors"},
        {"a": 7},
        {"a": ["model.safetensors"]},
        {"a": None, "b": "model.safetensors"},
        ["a"],
        {"b": "model.safetensors"},
        b'{"weight_map": {"a": "model.safetensors", "a": "model.safetensors"}}',
        b"[" * 100_000,
        b"{}",
        b"\xff",
        {},
    ],
)
def test_false_indices_are_refused(tmp_path, index) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_file(tmp_path / "model.safetensors", {"a": ENTRY})
    write_file(folder / "model.safetensors", {"a": ENTRY})
    text = index if isinstance(index, bytes) else json.dumps({"weight_map": index}).encode()
    (folder / "model.safetensors.index.json").write_bytes(text)
    with user_error():
        SafetensorsFolder(folder)


def test_links_out_of_a_folder_are_refused_except_within_the_cache(tmp_path) -> None:
    write_file(tmp_path / "secret", {"a": ENTRY})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/model.safetensors").symlink_to(tmp_path / "secret")
    with user_error():
        SafetensorsFolder(tmp_path / "folder")
    # The layout of huggingface_hub's cache.
    for name in ("blobs", "snapshots/1a2b"):
        (tmp_path / "cache/models--me--tiny" / name).mkdir(parents=True)
    write_file(tmp_path / "cache/models--me--tiny/blobs/4f", {"a": ENTRY})
    link = tmp_path / "cache/models--me--tiny/snapshots/1a2b/model.safetensors"
    link.symlink_to("../../blobs/4f")
    assert [*SafetensorsFolder(link.parent).entries] == ["a"]
    link.unlink()
    link.symlink_to(tmp_path / "secret")
    with user_error():
        SafetensorsFolder(link.parent)
    # Copied files are read as well.
    (link.parent / "tokenizer.json").symlink_to("../../blobs/4f")
    assert copy_files(link.parent, tmp_path / "copy") == ["tokenizer.json"]
    (link.parent / "vocab.json").symlink_to(tmp_path / "secret")
    with user_error():
        copy_files(link.parent, tmp_path / "copy")


def test_only_regular_files_are_read(tmp_path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    index = {"weight_map": {"a": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with user_error():
        SafetensorsFolder(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with user_error():
        SafetensorsFolder(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path) -> None:
    for name in ("one", "two"):
        write_file(tmp_path / f"{name}.safetensors", {"a": ENTRY})
    with user_error():
        SafetensorsFolder(tmp_path)


def test_pickles_are_refused_with_advice(tmp_path) -> None:
    write_llama(tmp_path / "llama")
    (tmp_path / "llama/model.safetensors").rename(tmp_path / "llama/pytorch_model.bin")
    with user_error():
        open_source(f"hf:{tmp_path / 'llama'}")


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, np.int8, np.bool_])
def test_weights_that_need_scales_are_refused_by_name(tmp_path, dtype) -> None:
    """Mixtures of float32, float16 and bfloat16 are not."""
    folder = tmp_path / "llama"
    tensors = write_llama(folder, num_hidden_layers=1)
    entries = {name: Entry(tensor.shape, np.dtype(tensor.dtype)) for name, tensor in tensors.items()}
    changed = {"lm_head.weight": np.dtype(jnp.bfloat16), "model.layers.0.mlp.up_proj.weight": np.dtype(dtype)}
    (folder / "model.safetensors").unlink()
    for name, new in changed.items():
        entries[name] = Entry(entries[name].shape, new)
    for name, file in ShardWriter(folder, entries, 10**9):
        file.write(name, tensors[name].astype(entries[name].dtype))
    dtype_name = np.dtype(dtype).name
    with pytest.raises(UserError, match=rf"mlp.up_proj.weight: {dtype_name} needs scales") as raised:
        open_source(f"hf:{folder}")
    assert "lm_head" not in str(raised.value)


def test_written_files_equal_those_of_the_library(tmp_path) -> None:
    """Every dtype that numpy has, an empty tensor, a number, names in other scripts."""
    draw = np.random.default_rng(0)
    kinds = (np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint8, np.bool_)
    tensors = {f"größe.{np.dtype(kind).name}": draw.integers(0, 2, (3, 5)).astype(kind) for kind in kinds}
    tensors |= {"number": np.asarray(np.float32(2.5)), "none": np.zeros((0, 4), np.float16)}
    entries = {name: Entry(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    for name, file in ShardWriter(tmp_path, entries, 100):
        file.write(name, tensors[name])
    read = {name: each for path in tmp_path.glob("*.safetensors") for name, each in load_file(path).items()}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and read[name].tobytes() == tensor.tobytes()
        np.testing.assert_array_equal(SafetensorsFolder(tmp_path).read(name), tensor)
    with pytest.raises(ValueError, match="is not the next tensor"), TensorFile(tmp_path / "new", entries) as file:
        file.write("number", tensors["number"])
