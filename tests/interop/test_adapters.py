"""Adapter files: PEFT's names and orders, both directions, merging, and refusals."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging_face_folders import ArraySource, read_all, read_weight, write_llama
from hugging_face_folders import random_weights as drawn
from safetensors.numpy import load_file, save_file
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.convert import main
from megajax.interop import conversion
from megajax.interop.conversion import open_source, options, write
from megajax.interop.huggingface.family import Settings
from megajax.interop.huggingface.registry import families
from megajax.interop.peft.folder import TENSORS, PeftAdapter, adapter_files, read_adapter
from megajax.interop.peft.settings import CONFIG, read_settings
from megajax.interop.weights.adapters import JoinedWeights, MergedWeights, leading, merge
from megajax.interop.weights.foreign import ForeignModel, declared_by
from megajax.interop.weights.name_mapping import tensors_of
from megajax.interop.weights.provenance import Provenance
from megajax.interop.weights.stored_model import StoredModel
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.low_rank import LORA_A, LORA_B, MAGNITUDE
from megajax.optim.config import AdamWConfig
from megajax.storage.atomic_folders import new_folder

LLAMA = {
    "model_type": "llama", "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "vocab_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 16,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 12, "n_head": 3, "n_layer": 2, "n_positions": 16, "vocab_size": 32}
LORA = LoRAConfig(rank=2, alpha=6.0)


@cache
def base(kind: str) -> ForeignModel:
    """A model without tensors."""
    config = {"llama": LLAMA, "mixtral": MIXTRAL, "gpt2": GPT2}[kind]
    family = families()[kind]
    model = family.read(Settings(config))
    return ForeignModel(model=model, tensors=None, rows=family.rows(model))  # ty: ignore[invalid-argument-type]


def random_weights(model: Any) -> ArraySource:
    return drawn(declared_by(model))


def theirs(kind: str, source: Any, paths: set[str]) -> dict[str, np.ndarray]:
    """Their tensors that hold these weights; zeros for others."""
    declared, tensors = declared_by(base(kind).model), {}
    for tensor in tensors_of(base(kind).rows, declared):
        if paths.intersection(piece.path for piece in tensor.pieces):
            parts = [read_weight(source, piece.path)[piece.index] for piece in tensor.pieces]
            tensors[tensor.name.removesuffix(".weight")] = tensor.from_weights(parts)
    return tensors


def of_peft(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What PEFT adds to each module: scale B A, transposed for Conv1D."""
    deltas = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b, last = tensors[name.replace("lora_A", "lora_B")], module.rpartition(".")[2]
            rank, alpha = config["r"], config["lora_alpha"]
            for key in (last, module):
                rank, alpha = config["rank_pattern"].get(key, rank), config["alpha_pattern"].get(key, alpha)
            assert a.shape[0] == b.shape[1] == rank
            delta = alpha / (rank**0.5 if config["use_rslora"] else rank) * b @ a
            deltas[module] = delta.T if config["fan_in_fan_out"] else delta
    return deltas


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_magnitudes_are_the_norms_of_merged_weights_and_are_read_as_written(kind: str, tmp_path: Path) -> None:
    """GPT-2 stores queries, keys and values in one tensor, and outputs last."""
    lora = replace(LORA, targets=("*.mixer.*", "*.mlp.*"), decomposed=True)
    model = replace(base(kind).model, lora=lora)
    weights = random_weights(model)
    for path, change in weights.weights.items():
        if path.endswith(MAGNITUDE):
            change[...] = np.abs(change)
    config, tensors = adapter_files(model, families()[kind], weights, None)
    merged = theirs(kind, MergedWeights(weights, model), {path.removesuffix(LORA_A) for path in weights.weights})
    vectors = {name for name in tensors if name.endswith(".lora_magnitude_vector")}
    assert config["use_dora"] and len(vectors) == len(tensors) // 3
    for name in vectors:
        whole = merged[name.removeprefix("base_model.model.").removesuffix(".lora_magnitude_vector")]
        norms = np.linalg.norm(whole, axis=0 if config["fan_in_fan_out"] else 1)
        np.testing.assert_allclose(tensors[name], norms, rtol=1e-5, err_msg=name)
    folder = write_adapter(tmp_path, config, tensors)
    adapter = read_adapter(folder, base(kind).model, base(kind).rows, weights)
    assert adapter.model.lora.decomposed and set(adapter.shapes) == {path for path in weights.shapes if "lora_" in path}
    for path in (path for path in adapter.shapes if path.endswith(MAGNITUDE)):
        np.testing.assert_allclose(read_weight(adapter, path), weights.weights[path], rtol=0, atol=1e-6, err_msg=path)
    incomplete = {name: tensor for name, tensor in tensors.items() if name not in vectors}
    with user_error():
        read_adapter(write_adapter(tmp_path, config, incomplete), base(kind).model, base(kind).rows, weights)
    with user_error():
        read_adapter(write_adapter(tmp_path, {**config, "use_dora": False}, tensors), base(kind).model, base(kind).rows)


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("llama", LORA),
        ("gpt2", replace(LORA, targets=("*.query", "*.value"), rank_stabilized=True)),
    ],
)
def test_adapters_in_their_layout_equal_adapters_in_ours(kind: str, lora: LoRAConfig) -> None:
    model = replace(base(kind).model, lora=lora)
    weights, declared = random_weights(model), declared_by(model)
    config, tensors = adapter_files(model, families()[kind], weights, "base")
    deltas = {
        path.removesuffix(LORA_A): merge(
            np.zeros_like(weights.weights[path.removesuffix(LORA_A)]),
            weights.weights[path],
            weights.weights[path.replace(LORA_A, LORA_B)],
            lora.scale(),
            leading(spec),
        )
        for path, spec in declared.items()
        if path.endswith(LORA_A)
    }
    zeros = {path: np.zeros(spec.shape, np.float32) for path, spec in declared.items()}
    expected, actual = theirs(kind, ArraySource({**zeros, **deltas}), {*deltas}), of_peft(config, tensors)
    assert expected.keys() == actual.keys()
    for module, delta in expected.items():
        np.testing.assert_allclose(actual[module], delta, rtol=1e-5, atol=1e-5, err_msg=module)


def test_names_are_those_of_peft() -> None:
    """PEFT 0.21 writes these for q_proj, o_proj and gate_proj of LlamaForCausalLM."""
    model = replace(base("llama").model, lora=replace(LORA, targets=("*.mixer.query", "*.mixer.output", "*.mlp.gate")))
    config, tensors = adapter_files(model, families()["llama"], random_weights(model), None)
    modules = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj")
    names = {
        f"base_model.model.model.layers.{n}.{name}.lora_{x}.weight" for n in (0, 1) for name in modules for x in "AB"
    }
    assert set(tensors) == names
    assert tensors["base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"].shape == (2, 16)
    assert tensors["base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"].shape == (12, 2)
    assert config["target_modules"] == ["gate_proj", "o_proj", "q_proj"]
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["rank_pattern"]) == ("LORA", 2, 6, {})


def adapter_of(folder: Path, kind: str) -> PeftAdapter:
    return read_adapter(folder, base(kind).model, base(kind).rows)


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(dict(tensors), folder / TENSORS)
    return folder


def test_ranks_and_scales_and_layers_may_differ(tmp_path: Path) -> None:
    rng, before = np.random.default_rng(0), "base_model.model.model.layers"
    shapes = {f"{before}.0.self_attn.q_proj": (3, 12, 16), f"{before}.1.self_attn.q_proj": (2, 12, 16),
              f"{before}.1.mlp.down_proj": (2, 20, 12)}  # fmt: skip
    tensors = {}
    for module, (rank, inputs, outputs) in shapes.items():
        tensors[f"{module}.lora_A.weight"] = rng.normal(size=(rank, inputs)).astype(np.float32)
        tensors[f"{module}.lora_B.weight"] = rng.normal(size=(outputs, rank)).astype(np.float32)
    # Of matching patterns, the first counts.
    alphas = {r"1\..*\.q_proj": 5, "1.self_attn.q_proj": 7}
    patterns = {"rank_pattern": {"0.self_attn.q_proj": 3, "q_proj": 2}, "alpha_pattern": alphas}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **patterns}
    adapter = adapter_of(write_adapter(tmp_path / "adapter", config, tensors), "llama")
    assert adapter.model.lora.rank == 3
    zeros = ArraySource(
        {path: np.zeros(spec.shape, np.float32) for path, spec in declared_by(base("llama").model).items()}
    )
    merged = MergedWeights(JoinedWeights(zeros, adapter), adapter.model)
    actual = theirs("llama", merged, {"stack.blocks.0.mixer.query", "stack.blocks.0.mlp.down"})
    for module, scale in zip(shapes, (4 / 3, 5 / 2, 4 / 2), strict=True):
        delta = scale * tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
        np.testing.assert_allclose(actual.pop(module.removeprefix("base_model.model.")), delta, rtol=1e-5, atol=1e-5)
    assert len(actual) == 1 and not actual["model.layers.0.mlp.down_proj"].any()


@pytest.mark.parametrize("lora", [LORA, replace(LORA, targets=("*.mixer.*",), decomposed=True)], ids=["lora", "dora"])
def test_a_box_of_merged_weights_equals_that_part_of_the_whole(lora: LoRAConfig) -> None:
    model = replace(base("mixtral").model, lora=lora)
    weights = random_weights(model)
    merged = MergedWeights(weights, model)
    assert set(merged.shapes) == set(declared_by(base("mixtral").model))
    for path, shape in merged.shapes.items():
        box = tuple(slice(size // 3, max(1, size - size // 4)) for size in shape)
        np.testing.assert_allclose(merged.read(path, box), read_weight(merged, path)[box], rtol=0, atol=1e-6)
    up = "stack.blocks.0.mlp.experts.up"
    if lora.decomposed:
        return
    product = weights.weights[up + LORA_A] @ weights.weights[up + LORA_B]
    np.testing.assert_allclose(read_weight(merged, up), weights.weights[up] + 3 * product, rtol=1e-5, atol=1e-5)


def refused(tmp_path: Path, **changes: Any) -> str:
    """The message for a folder with these changes of settings, and of tensors (None: it is absent)."""
    model = replace(base("llama").model, lora=replace(LORA, targets=("*.query",)))
    config, tensors = adapter_files(model, families()["llama"], random_weights(model), None)
    for name, value in changes.items():
        if "." in name and value is None:
            del tensors[name]
        elif "." in name:
            tensors[name] = value
        else:
            config[name] = value
    with pytest.raises(UserError) as caught:
        adapter_of(write_adapter(tmp_path / "adapter", config, tensors), "llama")
    return str(caught.value)


def test_all_unsupported_settings_are_refused_together(tmp_path: Path) -> None:
    text = refused(tmp_path, use_qalora=True, bias="all", init_lora_weights="pissa_niter_4")
    assert all(line in text for line in ("use_qalora=True", "bias=all", "init_lora_weights=pissa_niter_4"))
    assert "peft_type=IA3" in refused(tmp_path, peft_type="IA3")
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    odd = {
        f"{q}.lora_B.weight": np.zeros((16, 3), np.float32),
        f"{q.replace('q_proj', 'qq')}.lora_A.weight": np.zeros((2, 12)),
    }
    text = refused(tmp_path, **odd, **{f"{q.replace('0', '1')}.lora_B.weight": None})
    assert "layers.1.self_attn.q_proj.lora_B.weight: missing" in text
    assert "qq.lora_A.weight: the model has no such layer; it has" in text
    assert "shapes (2, 12) and (16, 3), but (2, 12) and (16, 2) by the model" in text


def test_all_settings_with_invalid_values_are_refused_together(tmp_path: Path) -> None:
    values = {
        "r": True, "lora_alpha": None, "lora_dropout": 1, "use_rslora": "yes", "target_modules": "(",
        "rank_pattern": [], "layers_to_transform": ["0"], "alpha_pattern": {"q_proj": None, "*": 3},
    }  # fmt: skip
    lines = refused(tmp_path, **values).splitlines()[1:]
    assert [line.split("=")[0].split(":")[0].strip() for line in lines] == [
        "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "layers_to_transform", "rank_pattern",
        "alpha_pattern.q_proj", "alpha_pattern",
    ]  # fmt: skip
    for alpha in (0, -1, [8], float("nan"), 10**400, "8"):
        assert "is not a number above 0" in refused(tmp_path, lora_alpha=alpha)
    for dropout in (-0.1, "0", None):
        assert "is not a number at least 0 and below 1" in refused(tmp_path, lora_dropout=dropout)


@pytest.mark.parametrize(
    ("pattern", "reads"),
    [
        (r"(?:.*?(?:vision|image).*?(?:self_attn|mlp).*?(?:q_proj|k_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.q)", True),
        (r"model\.layers\.(?:[0-9]+)\.(?:self_attn|mlp)\..*[*+?(]", True),
        (r"(a+)+b", False),
        (r"(a|b*)+?c", False),
        (r".*.*.*.*.*.*.*x", False),
        (r"a?" * 30 + "a" * 30, False),
        ("a" * 20_000, False),
    ],
)
def test_patterns_with_unbounded_matching_time_are_refused(pattern: str, reads: bool, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"r": 4, "target_modules": pattern}))
    if reads:
        assert read_settings(tmp_path / CONFIG).values["target_modules"] == pattern
        return
    with user_error():
        read_settings(tmp_path / CONFIG)


def test_settings_that_contradict_the_tensors_are_refused(tmp_path: Path) -> None:
    first = "model.layers.0.self_attn.q_proj"
    assert f"{first} and 1 more: rank 2, but 99 by r and rank_pattern" in refused(tmp_path, r=99)
    assert f"{first}: rank 2, but 3 by" in refused(tmp_path, rank_pattern={"0.self_attn.q_proj": 3, "q_proj": 2})
    assert f"{first} and 1 more: target_modules=['up_proj'] excludes" in refused(tmp_path, target_modules=["up_proj"])
    assert "target_modules=q_proj excludes it" in refused(tmp_path, target_modules="q_proj")
    assert f"{first}: layers_to_transform=[1] excludes it" in refused(tmp_path, layers_to_transform=[1])
    assert f"{first}: exclude_modules=" in refused(tmp_path, exclude_modules=[first])
    whole_numbers = {f"base_model.model.{first}.lora_A.weight": np.zeros((2, 12), np.int32)}
    assert "dtype int32 is not a floating-point dtype" in refused(tmp_path, **whole_numbers)


def test_adapters_of_heads_and_tables_are_refused(tmp_path: Path) -> None:
    names = ("lm_head.lora_A.weight", "model.embed_tokens.lora_embedding_A")
    text = refused(tmp_path, **{f"base_model.model.{name}": np.zeros((2, 12), np.float32) for name in names})
    for name in names:
        assert f"base_model.model.{name}: adapters of heads and tables are not supported" in text


def test_a_failed_folder_is_deleted_while_files_are_still_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining, delete = ["late"], shutil.rmtree

    def written_meanwhile(folder: Path, **settings: Any) -> None:
        delete(folder, **settings)
        if remaining:
            folder.mkdir()
            (folder / remaining.pop()).touch()

    monkeypatch.setattr(shutil, "rmtree", written_meanwhile)
    with pytest.raises(ValueError, match="stopped"), new_folder(tmp_path / "new"):
        raise ValueError("stopped")
    assert not remaining and not [*tmp_path.iterdir()]


def test_the_folder_of_a_killed_process_is_deleted_by_the_next(tmp_path: Path, capsys) -> None:
    """The folder of a running process is not, nor one without a lock, which something else made."""
    code = f"""
import os, sys
from pathlib import Path
from megajax.storage.atomic_folders import new_folder
with new_folder(Path({str(tmp_path / "new")!r})) as folder:
    (folder / "weights").write_text("half of them")
    print(folder, flush=True)
    sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder, unrelated = Path(process.stdout.readline().strip()), tmp_path / "new.backup.converting"
    unrelated.mkdir()
    with user_error():
        new_folder(tmp_path / "new").__enter__()
    process.kill()
    process.communicate()
    assert (folder / "weights").is_file()
    with new_folder(tmp_path / "new") as made:
        (made / "weights").write_text("all of them")
    assert f"deleted {folder}, left by a killed process" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"new", unrelated.name}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["weights"]


def test_folders_that_are_no_adapters_are_refused(tmp_path: Path) -> None:
    for name, content, message in (
        ("other", b"", r"not an adapter folder of PEFT: adapter_config\.json can't be read"),
        (CONFIG, b"[1]", "is a list, not a mapping of settings"),
        (CONFIG, b'{"peft_type": "LORA", "r": 2}', r"holds no adapter_model\.safetensors"),
        (TENSORS, b"\x40\0\0\0\0\0\0\0{", "was cut off"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            adapter_of(tmp_path, "llama")


def test_convert_passes_adapters_to_a_run_and_back_and_merges_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, adapter, run = tmp_path / "hf", tmp_path / "adapter", tmp_path / "run"
    model = replace(base("llama").model, lora=replace(LORA, targets=("*.mixer.*",)))
    weights = random_weights(model)
    table = tensors_of(base("llama").rows, declared_by(base("llama").model))
    tensors = {one.name: one.from_weights([weights.weights[p.path][p.index] for p in one.pieces]) for one in table}
    hf.mkdir()
    (hf / "config.json").write_text(json.dumps(LLAMA))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, hf / "model.safetensors")
    config, adapter_tensors = adapter_files(model, families()["llama"], weights, str(hf))
    write_adapter(adapter, config, adapter_tensors)

    assert main([f"--from=peft:{adapter}", f"--to={run}", "--verify"]) == 0
    assert main([f"--from={run}", f"--to=peft:{tmp_path / 'back'}", "--verify"]) == 0
    back = load_file(tmp_path / "back" / TENSORS)
    assert back.keys() == adapter_tensors.keys() and all(
        np.array_equal(back[name], adapter_tensors[name]) for name in adapter_tensors
    )
    recorded = json.loads((tmp_path / "back" / CONFIG).read_text())
    assert (recorded["task_type"], recorded["base_model_name_or_path"]) == ("CAUSAL_LM", str(hf))
    assert main([f"--from={run}", "--merge", f"--to=hf:{tmp_path / 'merged'}", "--verify"]) == 0
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for module, delta in of_peft(config, adapter_tensors).items():
        expected = tensors[f"{module}.weight"] + delta
        np.testing.assert_allclose(merged[f"{module}.weight"], expected, rtol=1e-5, atol=1e-5)
    output = capsys.readouterr().out
    assert "16 adapters" not in output and "8 adapters of rank 2 on k_proj, o_proj, q_proj, v_proj, float32" in output

    with user_error("--to"):
        main([f"--from={run}", f"--to=hf:{tmp_path / 'other'}"])
    with user_error("--merge"):
        main([f"--from=hf:{hf}", "--merge", f"--to=hf:{tmp_path / 'other'}"])
    (adapter / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": "not/here"}))
    with user_error():
        main([f"--from=peft:{adapter}", f"--to={tmp_path / 'other'}"])
    with user_error("--base"):
        main([f"--from={run}", f"--base={run}", f"--to={tmp_path / 'other'}"])
    stored = open_source(str(run))
    cfg = stored.config(run, []).but(optimizer=AdamWConfig(trainable=("*norm*",)))
    stored = replace(stored, config=lambda run, files: cfg)
    with user_error("--to"):
        write(stored, f"peft:{tmp_path / 'other'}", options(None), lambda elements: None)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "adapter", "run", "back", "merged"}


def test_an_adapter_names_its_base_model_and_its_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The source of the weights, unless they were trained since; or the given folder."""
    hf, run = tmp_path / "hf", tmp_path / "run"
    write_llama(hf)
    assert main([f"--from=hf:{hf}", f"--to={run}"]) == 0
    plain = conversion.open_source(str(run))
    model = replace(plain.model, lora=replace(LORA, targets=("*.mixer.query",)))
    adapters = random_weights(model).weights
    arrays = read_all(plain.weights)
    arrays |= {path: values for path, values in adapters.items() if path not in arrays}
    trained = {path: values + 0.01 * path.endswith("mlp.up") for path, values in arrays.items()}
    unknown = replace(plain, origin=Provenance())

    def recorded(arrays: dict[str, np.ndarray], source: StoredModel = plain, name: str = "") -> dict[str, Any]:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        stored = source.derived(model, ArraySource(arrays))
        lines = write(stored, f"peft:{folder}", options(None, base=name), lambda elements: None)
        return {**json.loads((folder / CONFIG).read_text()), "told": lines[-1]}

    config = recorded(arrays)
    assert config["told"] == f"base model: {hf}" and config["base_model_name_or_path"] == str(hf)
    assert (config["task_type"], config["auto_mapping"]) == ("CAUSAL_LM", None)
    config = recorded(trained)
    assert config["base_model_name_or_path"] is None
    assert f"are not those of {hf}: stack.blocks.0.mlp.up differ; write the model that" in config["told"]
    with user_error("--base"):
        recorded(trained, name=f"hf:{hf}")
    config = recorded(arrays, unknown)
    assert config["base_model_name_or_path"] is None and "base model: not known; write the model" in config["told"]
    assert recorded(arrays, unknown, f"hf:{hf}")["base_model_name_or_path"] == str(hf)
    config = recorded(arrays, name="example/llama")
    assert config["base_model_name_or_path"] == "example/llama" and "were not compared" in config["told"]
    hf.rename(tmp_path / "elsewhere")
    assert recorded(arrays)["base_model_name_or_path"] == str(hf)


@pytest.mark.slow
def test_biases_of_experts_that_moved_are_not_lost_in_silence(tmp_path: Path) -> None:
    """Those of the base model need no place in the folder; others are refused, and named if there is no base."""
    write_llama(tmp_path / "llama")
    plain = replace(conversion.open_source(f"hf:{tmp_path / 'llama'}"), origin=Provenance())
    experts = {"n_routed_experts": 3, "moe_intermediate_size": 8, "first_k_dense_replace": 0, "n_shared_experts": 1}
    config = {**LLAMA, "model_type": "glm4_moe", "partial_rotary_factor": 0.5, "num_experts_per_tok": 2, **experts}
    base_cfg = families()["glm4_moe"].read(Settings({**config, "routed_scaling_factor": 1.0}))
    arrays, hf = dict(random_weights(base_cfg).weights), tmp_path / "hf"
    write(plain.derived(base_cfg, ArraySource(arrays)), f"hf:{hf}", options(None), lambda elements: None)
    model = replace(base_cfg, lora=replace(LORA, targets=("*.mixer.query",)))
    arrays |= {
        path: values for path, values in random_weights(model).weights.items() if path.endswith((LORA_A, LORA_B))
    }
    path, *others = (name for name in arrays if name.endswith("load.sum"))
    moved = {**arrays, path: arrays[path] + np.float32(0.001) * (np.arange(3) == 1)}

    def written(arrays: dict[str, np.ndarray], name: str) -> tuple[str, str]:
        target, stored = f"peft:{tmp_path / str(len([*tmp_path.iterdir()]))}", plain.derived(model, ArraySource(arrays))
        lines = write(stored, target, options(None, base=name), lambda elements: None)
        return "\n".join(lines), conversion.verify(stored, target, options(None, base=name), lambda elements: None)

    lines, verified = written(arrays, f"hf:{hf}")
    assert "are chosen" not in lines + verified and verified.endswith("all equal")
    with user_error("--to"):
        written(moved, f"hf:{hf}")
    for lines in written(moved, ""):
        assert "not in the folder: the biases by which experts are chosen, which the base model must have:" in lines
        assert path in lines
    assert "equal" not in lines
    still = arrays | {name: np.zeros_like(arrays[name]) for name in (path, *others)}
    assert "are chosen" not in "".join(written(still, ""))


def test_families_have_the_tasks_of_peft() -> None:
    tasks = {name: family.task for name, family in families().items()}
    others = {"bert", "megatron-bert", "t5", "mt5", "vit", "clip", "siglip", "llava", "qwen3_vl"}
    assert {name for name, task in tasks.items() if task != "CAUSAL_LM"} == others
    config = {"model_type": "vit", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 32}
    family = families()["vit"]
    model = replace(family.read(Settings(config)), lora=replace(LORA, targets=("*.mixer.query",)))
    settings = adapter_files(model, family, random_weights(model), None)[0]
    mapping = {"base_model_class": "ViTForImageClassification", "parent_library": "transformers"}
    assert (settings["task_type"], settings["auto_mapping"]) == (None, mapping), "the class of models without a task"
