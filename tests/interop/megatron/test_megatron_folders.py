"""Checkpoints of Megatron-LM in every layout of ranks give their original weights."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging_face_folders import read_all
from megatron_folders import LLAMA, MODELS, T5, Shares, write_ranks, write_sharded
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.interop.megatron.checkpoints.checkpoint import MegatronCheckpoint, MegatronModel, iteration_folder
from megajax.interop.megatron.checkpoints.format import model_config, open_model, write_model
from megajax.interop.megatron.checkpoints.tables import table
from megajax.interop.weights.foreign import declared_by
from megajax.interop.weights.name_mapping import resolved


@cache
def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's weights by their names. Tables have padding."""
    args, script = MODELS[name]
    model, tensors = model_config(args, script), {}
    for tensor in resolved(table(model), declared_by(model)):
        shape = tensor.shape()
        padded = tensor.name.endswith(("word_embeddings.weight", "output_layer.weight", "output_layer.bias"))
        tensors[tensor.name] = (32, *shape[1:]) if padded else shape
    return tensors


def random_tensors(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of a model."""
    draw = np.random.default_rng(seed)
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes(name).items()}


def demand_equal(opened: MegatronModel, weights: Mapping[str, np.ndarray], source: Any = None) -> None:
    """Asserts that the weights equal those in the tensors."""
    values, elements = read_all(source or opened.foreign.weights), 0
    for tensor in opened.foreign.table:
        theirs = weights[tensor.name][: tensor.shape()[0]]
        for piece, part in zip(tensor.pieces, tensor.to_weights(theirs), strict=True):
            np.testing.assert_array_equal(values[piece.path][piece.index], part, err_msg=tensor.name)
            elements += part.size
    assert elements == sum(
        array[: tensor.shape()[0]].size
        for tensor, array in zip(opened.foreign.table, (weights[t.name] for t in opened.foreign.table), strict=True)
    )


@pytest.mark.parametrize(
    ("name", "sizes", "engine"),
    [
        ("llama", {"tensor": 2, "pipeline": 2}, False),
        ("llama", {"pipeline": 2, "virtual": 2}, False),
        ("gpt", {"tensor": 4}, True),
        ("mixtral", {"tensor": 2, "pipeline": 2}, True),
        ("bert", {"tensor": 2, "pipeline": 2}, True),
        ("t5", {"tensor": 2, "pipeline": 2}, False),
    ],
)
def test_files_of_ranks(name: str, sizes: dict[str, int], engine: bool, tmp_path: Path) -> None:
    args, script = MODELS[name]
    weights, shares = random_tensors(name), Shares(**sizes, gated=bool(args.get("swiglu")))
    write_ranks(tmp_path, weights, args, shares, engine=engine)
    assert MegatronCheckpoint(tmp_path).script() == script
    opened = open_model(tmp_path)
    assert (opened.iteration, opened.consumed_samples) == (7, 56)
    demand_equal(opened, weights)


@pytest.mark.parametrize("experts", ["", "engine", "packed"])
def test_ranks_of_experts(experts: str, tmp_path: Path) -> None:
    args = MODELS["mixtral"][0]
    weights = random_tensors("mixtral")
    write_ranks(tmp_path, weights, args, Shares(tensor=1, pipeline=2, expert=2), experts=experts)
    demand_equal(open_model(tmp_path), weights)


@pytest.mark.parametrize(("name", "stacked"), [("mixtral", True), ("bert", False), ("t5", True)])
def test_shards(name: str, stacked: bool, tmp_path: Path) -> None:
    """Other tests have the shards of Llama."""
    args = MODELS[name][0]
    weights = random_tensors(name)
    write_sharded(tmp_path, weights, args, Shares(tensor=2, gated=bool(args.get("swiglu"))), stacked=stacked)
    opened = open_model(tmp_path)
    assert opened.updates == 7
    demand_equal(opened, weights)


@pytest.mark.parametrize("engine", [False, True])
def test_tensors_of_t5_have_two_names(engine: bool, tmp_path: Path) -> None:
    """Megatron-LM's T5 stores its positions and its output layer twice, and demands both when it loads."""
    args, weights = {**T5, "transformer_impl": "transformer_engine" if engine else "local"}, random_tensors("t5")
    if not engine:
        weights = {name: array for name, array in weights.items() if "final_layernorm" not in name}
    owners = {"position_embeddings.weight": "embedding", "output_layer.bias": "lm_head"}
    copies = {name: weights[f"{owner}.{name}"] for name, owner in owners.items()}
    write_sharded(tmp_path / "theirs", weights | copies, args, Shares(gated=False), stacked=False)
    opened = open_model(tmp_path / "theirs")
    demand_equal(opened, weights)
    (tmp_path / "back").mkdir()
    write_model(tmp_path / "back", opened.foreign.model, opened.foreign.weights, engine=engine)
    content = MegatronCheckpoint(tmp_path / "back").contents
    assert set(content.names()) == set(weights) | set(copies)


def test_shards_with_a_common_file(tmp_path: Path) -> None:
    """megatron-core before 0.19 wrote what is no array into a file of its own."""
    weights = random_tensors("llama")
    folder = write_sharded(tmp_path, weights, LLAMA, Shares(tensor=2), common="common.pt")
    opened = open_model(tmp_path)
    assert opened.updates == 7
    demand_equal(opened, weights)
    (folder / "iter_0000007" / "common.pt").unlink()
    with user_error():
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("write", "master"), [(write_ranks, "fp32_param"), (write_sharded, "fp32_param"), (write_sharded, "param")]
)
def test_moments_and_masters(write: Any, master: str, tmp_path: Path) -> None:
    weights = random_tensors("llama")
    moments = {"exp_avg": random_tensors("llama", 1), "exp_avg_sq": random_tensors("llama", 2)}
    if write is write_sharded:
        moments[master] = random_tensors("llama", 3)
    write(tmp_path, weights, LLAMA, Shares(tensor=2, pipeline=2 if write is write_ranks else 1), moments=moments)
    opened = open_model(tmp_path)
    demand_equal(opened, moments.get(master, weights))
    demand_equal(opened, moments["exp_avg"], opened.moments["first_moment"])
    demand_equal(opened, moments["exp_avg_sq"], opened.moments["second_moment"])
    assert opened.updates == 7
    assert not any("optimizer" in line for line in opened.dropped)


def test_losses_of_a_conversion_are_reported(tmp_path: Path) -> None:
    write_ranks(tmp_path / "ranks", random_tensors("llama"), LLAMA, Shares())
    dropped = open_model(tmp_path / "ranks").dropped
    assert dropped[0] == "the optimizer's state: the checkpoint has none"
    assert any("schedule" in line for line in dropped)
    write_sharded(tmp_path / "shards", random_tensors("llama"), LLAMA, Shares(), flat=True)
    dropped = open_model(tmp_path / "shards").dropped
    assert "--dist-ckpt-optim-fully-reshardable" in dropped[0]


def test_a_layer_is_read_without_the_others(tmp_path: Path) -> None:
    weights = random_tensors("llama")
    write_sharded(tmp_path, weights, LLAMA, Shares(tensor=2))
    read = open_model(tmp_path).foreign
    entries = read.tensors.entries
    assert entries["decoder.layers.3.mlp.linear_fc1.weight"].shape == (48, 16)
    name = "decoder.layers.3.input_layernorm.weight"
    layer = read.tensors.read(name)
    np.testing.assert_array_equal(layer, weights[name])
    assert not layer.flags.writeable, "a view of the file"


def test_a_gated_query_has_its_gate_beside_it_in_each_group() -> None:
    name = "decoder.layers.0.self_attention"
    assert shapes("gated")[f"{name}.linear_qkv.weight"] == (2 * (2 + 2 + 1 + 1) * 4, 16)
    assert shapes("gated")[f"{name}.linear_qkv.bias"] == (48,)
    assert shapes("gated")[f"{name}.core_attention.softmax_offset"] == (4,)


def test_the_iteration(tmp_path: Path) -> None:
    args = MODELS["gpt"][0]
    weights = random_tensors("gpt")
    for iteration in (7, 12):
        write_ranks(tmp_path, weights, args, Shares(), iteration=iteration)
    assert iteration_folder(tmp_path).name == "iter_0000012"
    assert MegatronCheckpoint(tmp_path / "iter_0000007").iteration() == 7
    (tmp_path / "iter_0000012").rename(tmp_path / "release")
    with user_error():
        iteration_folder(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert iteration_folder(tmp_path).name == "release"
    with user_error():
        iteration_folder(tmp_path / "release" / "mp_rank_00")


@pytest.mark.parametrize(
    "name",
    [
        b"../../x/y.pt",
        b"/etc/a.distc",
        b"__7_0.distcp",
    ],
)
def test_a_path_in_the_metadata_of_shards_is_refused(name: bytes, tmp_path: Path) -> None:
    """It may be the path of all chunks, or of the common object alone."""
    folder = write_sharded(tmp_path / "all", random_tensors("llama"), LLAMA, Shares())
    metadata = folder / "iter_0000007" / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", name))
    one = write_sharded(tmp_path / "one", random_tensors("llama"), LLAMA, Shares(), common=name.decode())
    for damaged in (folder, one):
        with user_error():
            MegatronCheckpoint(damaged)


@pytest.mark.parametrize("common", ["common.pt", "__0_0.distcp"])
def test_truncated_shards_are_refused(common: str, tmp_path: Path) -> None:
    """When tensors are read, or the common object, which stands last in its file."""
    write_sharded(tmp_path, random_tensors("llama"), LLAMA, Shares(tensor=2), common=common)
    path = tmp_path / "iter_0000007" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])
    with user_error():
        read_all(open_model(tmp_path).foreign.weights)


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    weights = random_tensors("llama")
    write_ranks(tmp_path, weights, LLAMA, Shares(tensor=2, pipeline=2))
    folder = tmp_path / "iter_0000007"
    (folder / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with user_error():
        MegatronCheckpoint(tmp_path)
    (folder / "mp_rank_01_001").rmdir()
    with user_error():
        MegatronCheckpoint(tmp_path)


def test_a_model_that_does_not_fit_the_arguments(tmp_path: Path) -> None:
    write_ranks(tmp_path, random_tensors("llama"), {**LLAMA, "ffn_hidden_size": 32, "num_layers": 2}, Shares())
    with pytest.raises(UserError) as caught:
        open_model(tmp_path)
    text = str(caught.value)
    assert "decoder.layers.0.mlp.linear_fc1.weight: shape [48, 16], but [64, 16] by the model's config" in text
    assert "decoder.layers.3.mlp.linear_fc2.weight: the model has no such weight" in text


def test_unsupported_features_are_listed_together(tmp_path: Path) -> None:
    lacking = {"qk_clip": True, "position_embedding_type": "mrope"}
    write_ranks(tmp_path, random_tensors("llama"), {**LLAMA, **lacking}, Shares())
    with user_error():
        open_model(tmp_path)


def test_the_vocabulary(tmp_path: Path) -> None:
    without = {name: value for name, value in LLAMA.items() if name != "vocab_size"}
    write_ranks(tmp_path, random_tensors("llama"), without, Shares())
    assert open_model(tmp_path).foreign.model.vocabulary_size == 32
    assert open_model(tmp_path, vocabulary=30).foreign.weights.shapes["tokens"][0] >= 30
    with user_error():
        open_model(tmp_path, vocabulary=33)
