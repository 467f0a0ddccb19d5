"""`megajax.convert`: both directions, byte for byte; runs that plain Orbax reads; nothing half-written."""

import json
import resource
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hugging_face_folders import LLAMA, write_llama
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import load_file, save_file
from user_errors import user_error

from megajax import convert
from megajax.checkpoint import array_serialization, boxes, manifest
from megajax.checkpoint.boxes import box_of, chunk_shape, chunks_of
from megajax.checkpoint.step_folders import META
from megajax.checkpoint.weight_source import Entry, contiguous, converted
from megajax.checkpoint.zarr_reader import StoredArrays
from megajax.config import load
from megajax.config.dump import to_yaml
from megajax.config.errors import UserError
from megajax.data.images.config import ClassFoldersConfig
from megajax.data.masked.config import MaskedSentencesConfig, MaskedSpansConfig
from megajax.interop import conversion
from megajax.interop.huggingface.folder import model_of
from megajax.interop.huggingface.format import chosen_family, config_for
from megajax.interop.huggingface.registry import families
from megajax.interop.weights import run_format as run_format
from megajax.interop.weights.foreign import declared_by
from megajax.interop.weights.run_format import StepWeights
from megajax.interop.weights.step_writer import ArrayWriter
from megajax.interop.weights.stored_model import Options
from megajax.interop.weights.weights_config import DATA, special_tokens
from megajax.layers.mamba.config import Mamba1Config
from megajax.models.presets.llama import llama3
from megajax.pipeline.partition import Partition
from megajax.storage import disk
from megajax.tokenizers.config import ByteTokenizerConfig, HuggingFaceTokenizerConfig

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theirs") / "llama"
    write_llama(path)
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    path = folder.parent / "run"
    conversion.write(conversion.open_source(f"hf:{folder}"), str(path), Options(), lambda elements: None)
    return path


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def demand_same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert (tensor.dtype, tensor.shape) == (second[name].dtype, second[name].shape), name
        assert tensor.tobytes() == second[name].tobytes(), name


def nothing_but(folder: Path, *names: str) -> bool:
    return {path.name for path in folder.iterdir()} == set(names)


def test_a_round_trip_keeps_every_byte(folder, tmp_path, capsys) -> None:
    run, back = tmp_path / "runs/llama", tmp_path / "back"
    assert convert.main([f"--from=hf:{folder}", f"--to={run}", "--verify"]) == 0
    assert "verified: 30 arrays, 7,152 elements, all equal" in capsys.readouterr().out
    assert convert.main([f"--from={run}", f"--to=hf:{back}", "--verify", "--shard-size=0.000002"]) == 0
    output = capsys.readouterr().out
    assert "23 in float16, 7 in float32" in output and "verified: 12 arrays" in output
    demand_same(tensors_of(back), tensors_of(folder))
    assert json.loads((back / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert (back / "tokenizer_config.json").is_file()
    index = json.loads((back / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_of(folder).values())
    for shard in shards:
        (length,) = np.fromfile(back / shard, np.uint64, 1)
        header = json.loads((back / shard).read_bytes()[8 : 8 + int(length)])
        assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
        sizes = {"F16": 2, "F32": 4}
        assert all(entry["data_offsets"][0] % sizes[entry["dtype"]] == 0 for entry in header.values())
        assert all(index["weight_map"][name] == shard for name in header)
    assert nothing_but(tmp_path, "runs", "back")


def test_plain_orbax_reads_a_run_with_layers_in_natural_order(folder, run) -> None:
    """It needs no module of MegaJAX: names are `params.` and the path of a weight."""
    tensors, sharding = load_file(folder / "model.safetensors"), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    step = str(run / "checkpoints/00000000/arrays")
    like = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for name, leaf in ocp.metadata(step).metadata.items()
    }
    stored = ocp.load(step, like)
    query = stored["params.stack.blocks.0.mixer.query"]
    assert query.dtype == np.float32
    for layer in range(3):
        theirs = tensors[f"model.layers.{layer}.self_attn.q_proj.weight"].astype(np.float32)
        np.testing.assert_array_equal(query[layer], theirs.T.reshape(16, 4, 4))
    np.testing.assert_array_equal(stored["params.tokens"][:40], tensors["model.embed_tokens.weight"])
    assert not np.asarray(stored["params.tokens"][40:]).any()


def test_a_run_has_a_config_and_remembers_its_source(run) -> None:
    cfg, meta = load(run / "config.yaml"), manifest.read_meta(run / "checkpoints/00000000")
    assert to_yaml(cfg) == meta["config"]
    assert cfg.model.stack.layers() == 3 and cfg.tokenizer.vocabulary_size == 40
    assert cfg.checkpoint.weights[0].run == run and cfg.run_dir == f"{run}-tuned"
    source = meta["source"]
    assert source["format"] == "hf" and source["family"] == "llama" and source["dtype"] == "float16"
    assert source["settings"]["eos_token_id"] == 7 and len(source["dtypes"]) == 7


def test_narrow_dtypes_are_stored_and_read_back(folder, tmp_path) -> None:
    convert.main([f"--from=hf:{folder}", f"--to={tmp_path / 'run'}", "--dtype=bfloat16", "--verify"])
    expected = load_file(folder / "model.safetensors")["model.norm.weight"].astype(jnp.bfloat16)
    step = StoredArrays(tmp_path / "run/checkpoints/00000000")
    like = {name: jax.ShapeDtypeStruct(*facts) for name, facts in array_serialization.stored_shapes(step).items()}
    read = array_serialization.read(step, like)["params.norm.gain"]
    assert read.dtype == jnp.bfloat16
    np.testing.assert_array_equal(read, expected)
    with user_error():
        array_serialization.read(step, like | {"params.norm.gain": jax.ShapeDtypeStruct((16,), np.float16)})


def test_values_that_a_dtype_cannot_hold_are_refused(tmp_path) -> None:
    tensors = write_llama(tmp_path / "llama", np.float32)
    back = tmp_path / "back"
    convert.main([f"--from=hf:{tmp_path / 'llama'}", f"--to={tmp_path / 'run'}"])
    convert.main([f"--from={tmp_path / 'run'}", f"--to=hf:{back}", "--dtype=float16"])
    assert json.loads((back / "config.json").read_text())["torch_dtype"] == "float16"
    name = "model.layers.1.mlp.up_proj.weight"
    np.testing.assert_array_equal(tensors_of(back)[name], tensors[name].astype(np.float16))
    large = {**tensors, name: tensors[name] * 1e6}
    shutil.rmtree(tmp_path / "llama")
    folder = tmp_path / "llama"
    write_llama(folder, np.float32)
    save_file(large, folder / "model.safetensors")
    with user_error():
        convert.main([f"--from=hf:{folder}", f"--to=hf:{tmp_path / 'half'}", "--dtype=float16"])
    assert nothing_but(tmp_path, "llama", "run", "back")


def move_step(source: Path, target: Path) -> None:
    """Make a step the step of another number, with its checksum."""
    meta = json.loads((source / META).read_text()) | {"step": int(target.name)}
    (source / META).write_text(json.dumps(meta))
    (source / manifest.MANIFEST).unlink()
    manifest.complete_step(source)
    shutil.move(source, target)


def test_the_mean_of_steps(tmp_path) -> None:
    folders = [write_llama(tmp_path / f"theirs{seed}", np.float32, seed) for seed in range(3)]
    for seed in range(3):
        convert.main([f"--from=hf:{tmp_path}/theirs{seed}", f"--to={tmp_path}/run{seed}"])
        if seed:
            move_step(tmp_path / f"run{seed}/checkpoints/00000000", tmp_path / f"run0/checkpoints/{seed:08d}")
    steps = ",".join(f"{tmp_path}/run0/{step}" for step in (0, 1, 2))
    assert convert.main([f"--average={steps}", f"--to=hf:{tmp_path}/mean", "--verify"]) == 0
    mean = tensors_of(tmp_path / "mean")
    for name, tensor in mean.items():
        np.testing.assert_allclose(tensor, np.mean([tensors[name] for tensors in folders], 0), rtol=1e-6, atol=1e-7)
    assert convert.main([f"--from={tmp_path}/run0", "--average-last=2", f"--to={tmp_path}/last", "--verify"]) == 0
    assert convert.main([f"--from={tmp_path}/last", f"--to=hf:{tmp_path}/last_two"]) == 0
    for name, tensor in tensors_of(tmp_path / "last_two").items():
        np.testing.assert_allclose(tensor, (folders[1][name] + folders[2][name]) / 2, rtol=1e-6, atol=1e-7)
    with user_error("--average-last"):
        convert.main([f"--from={tmp_path}/run0", "--average-last=4", f"--to={tmp_path}/more"])
    with user_error("--average-last"):
        convert.main([f"--from={tmp_path}/last", "--average-last=4", f"--to={tmp_path}/more"])


def test_rows_of_pipelines_are_read_in_natural_order(folder, tmp_path) -> None:
    """Five layers over two stages of two chunks: some rows are padding."""
    model = model_of(folder)
    model = replace(model, stack=replace(model.stack, repeats=5))
    declared, partition = declared_by(model), Partition.even(5, 2, 2)
    draw = np.random.default_rng(0)
    natural = {path: draw.normal(size=spec.shape).astype(np.float32) for path, spec in declared.items()}
    order = partition.order()
    stored = {
        path: np.stack([array[row] if row >= 0 else np.zeros_like(array[0]) for row in order])
        if declared[path].layers
        else array
        for path, array in natural.items()
    }
    writer = ArrayWriter(
        tmp_path / "step/arrays", {f"params.{path}": Entry(array.shape, array.dtype) for path, array in stored.items()}
    )
    for name, box in writer.chunks():
        writer.write(name, box, stored[name.removeprefix("params.")][box])
    writer.finish()
    manifest.complete_step(tmp_path / "step")
    meta = {
        "rows": [[chunk.start, chunk.stop] for chunk in partition.stored()],
        "layers": {path: list(spec.layers) for path, spec in declared.items() if spec.layers},
    }
    weights = StepWeights(StoredArrays(tmp_path / "step"), meta)
    assert -1 in order
    for path, array in natural.items():
        assert weights.shapes[path] == array.shape
        for _ in range(4):
            bounds = [sorted(draw.choice(size + 1, 2, replace=False)) for size in array.shape]
            box = tuple(slice(int(start), int(stop)) for start, stop in bounds)
            np.testing.assert_array_equal(weights.read(path, box), array[box])


def test_chunks_cover_an_array_once_and_are_small(monkeypatch) -> None:
    monkeypatch.setattr(boxes, "CHUNK_BYTES", 200)
    draw = np.random.default_rng(0)
    for _ in range(50):
        shape = tuple(int(size) for size in draw.integers(1, 12, draw.integers(0, 5)))
        chunk, covered = chunk_shape(shape, 4), np.zeros(shape, int)
        for box in chunks_of(box_of((), shape), chunk):
            covered[box] += 1
        assert (covered == 1).all() and np.prod(chunk) * 4 <= 200


def test_a_target_that_exists_is_refused(folder, run, tmp_path) -> None:
    (tmp_path / "there").mkdir()
    for target in (tmp_path / "there", run, f"hf:{folder}"):
        with user_error():
            convert.main([f"--from=hf:{folder}", f"--to={target}"])
    assert nothing_but(tmp_path, "there") and nothing_but(tmp_path / "there")


@pytest.mark.parametrize("target", ["hf:{}/new", "{}/new"])
def test_a_full_disk_leaves_nothing(folder, tmp_path, target, monkeypatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # The limit would truncate the files of modules.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        with user_error():
            convert.main([f"--from=hf:{folder}", f"--to={target.format(tmp_path)}"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert nothing_but(tmp_path)


def test_too_little_space_is_an_early_error(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda path: 10_000)
    with user_error():
        convert.main([f"--from=hf:{folder}", f"--to={tmp_path}/new"])
    assert nothing_but(tmp_path)


def test_a_folder_that_differs_loses_its_name(run, tmp_path, monkeypatch) -> None:
    def changed(*arguments):
        lines = write(*arguments)
        path = tmp_path / "back/model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        return lines

    write = conversion.write
    monkeypatch.setattr(conversion, "write", changed)
    with user_error():
        convert.main([f"--from={run}", f"--to=hf:{tmp_path}/back", "--verify"])
    assert nothing_but(tmp_path, "back.unverified")


def test_the_mean_of_different_models_is_refused(tmp_path) -> None:
    for base in (10000.0, 500000.0):
        write_llama(tmp_path / f"theirs{base:g}", rope_theta=base)
        convert.main([f"--from=hf:{tmp_path}/theirs{base:g}", f"--to={tmp_path}/run{base:g}"])
    with user_error():
        convert.main([f"--average={tmp_path}/run10000,{tmp_path}/run500000", f"--to={tmp_path}/mean"])


@pytest.mark.parametrize("largest", [3.6e299, 1e30])
def test_advice_on_dtypes_proposes_dtypes_that_hold_the_values(largest) -> None:
    advice = "use --dtype=bfloat16" if largest < 1e38 else "neither can float32"
    with pytest.raises(UserError, match=advice):
        converted(np.array([largest]), np.dtype(np.float16), "w")


def test_the_next_command_names_the_data_of_the_model(folder, tmp_path, capsys) -> None:
    convert.main([f"--from=hf:{folder}", f"--to={tmp_path}/run"])
    assert "--data.paths=PREFIX" in capsys.readouterr().out
    setting = {type(data): run_format._data_setting(data) for data in DATA}
    assert setting[MaskedSpansConfig] == setting[MaskedSentencesConfig] == " --data.paths=SENTENCES_PREFIX"
    assert setting[ClassFoldersConfig] == " --data.path=FOLDER" and run_format._data_setting(object()) == ""


def test_a_model_without_a_family_lists_the_losses(folder) -> None:
    model = model_of(folder)
    assert chosen_family(model)[0].name == "llama" and chosen_family(model, "mistral")[0].name == "mistral"
    block = model.stack.pattern[0]
    odd = replace(model, stack=replace(model.stack, pattern=(replace(block, mixer=Mamba1Config(inner=32, rank=2)),)))
    with user_error():
        chosen_family(odd)
    with user_error("--family"):
        chosen_family(model, "lama")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--to=x"],
        ["--from=a", "--to=x", "--dtype=int8"],
        ["--from=a", "--to=x", "--average=b,c"],
        ["--to=x", "--average=b"],
        ["--from=a", "--to=x", "--shard-size=0"],
        ["--from=a", "--to=x", "--shard-size=inf"],
        ["--from=HF:a", "--to=x"],
        ["--from=gguf:a", "--to=x"],
        ["--from=a", "--to=gguf:x"],
        ["--average=hf:a,hf:b", "--to=x"],
        ["--from=hf:", "--to=x"],
        ["--from=a", "--to="],
        ["--from=a", "--to=hf:"],
        ["--from=nowhere", "--to=x"],
        ["--from=FOLDER", "--to=x"],
        ["--from=hf:nowhere", "--to=x"],
    ],
)
def test_wrong_command_lines(folder, arguments) -> None:
    with user_error():
        convert.main([argument.replace("FOLDER", str(folder)) for argument in arguments])


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "stretched", "factor": 2.0}, "hidden_act": "relu6", "new_kind_of_gate": 3},
        {"model_type": "lama"},
        {"num_hidden_layers": 2},
        {"num_hidden_layers": 4},
        {"intermediate_size": 25},
    ],
)  # fmt: skip
def test_folders_that_do_not_fit_write_nothing(folder, tmp_path, changes) -> None:
    shutil.copytree(folder, tmp_path / "theirs")
    (tmp_path / "theirs/config.json").write_text(json.dumps({**LLAMA, **changes}))
    with user_error():
        convert.main([f"--from=hf:{tmp_path / 'theirs'}", f"--to={tmp_path}/run"])
    assert nothing_but(tmp_path, "theirs")


def test_transposed_copies_are_copies() -> None:
    draw = np.random.default_rng(0)
    cases = {(300, 200): (1, 0), (3, 140, 150): (2, 0, 1), (40, 5, 130): (2, 1, 0), (7,): (0,), (): ()}
    for shape, axes in cases.items():
        source = draw.normal(size=shape).astype(np.float32).transpose(axes)
        np.testing.assert_array_equal(contiguous(source), source)
        assert contiguous(source).flags.c_contiguous
    reverse = draw.normal(size=(300, 200))[::-1, ::-1].T
    np.testing.assert_array_equal(contiguous(reverse), reverse)


def test_parts_of_large_chunks_are_read_by_themselves(tmp_path, monkeypatch) -> None:
    """The chunks are those that a run writes: the shards of its devices."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    values = np.arange(4 * 6 * 10).reshape(4, 6, 10).astype(jnp.bfloat16)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "a", "b"))
    array_serialization.start_writing(tmp_path / "arrays", {"w": jax.device_put(values, sharding)}).result()
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 100)
    manifest.complete_step(tmp_path)
    stored, draw = StoredArrays(tmp_path), np.random.default_rng(0)
    assert stored.arrays["w"].pieces == (1, 2, 2)
    monkeypatch.setattr(stored, "_other", None)  # Nothing is read through TensorStore's arrays.
    for _ in range(20):
        bounds = [sorted(draw.choice(size + 1, 2, replace=False)) for size in values.shape]
        box = tuple(slice(int(start), int(stop)) for start, stop in bounds)
        np.testing.assert_array_equal(stored.read("w", box), values[box])


def test_special_tokens_are_those_of_the_tokenizer() -> None:
    """Without ids, transformers would use those of the family's first model."""
    model = llama3("debug", vocabulary_size=257)
    for tokenizer, eos in ((ByteTokenizerConfig(), 256), (HuggingFaceTokenizerConfig(path="absent.json"), None)):
        special = special_tokens(model, tokenizer)
        assert special == {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": None}
        assert special.items() <= config_for(model, families()["llama"], {}, [], special).items()
