"""Models loaded for text generation: from folders and runs, with adapters, on several layouts."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from hugging_face_folders import write_adapter, write_llama
from user_errors import user_error

from megajax.config.errors import ConfigError
from megajax.convert import main as convert
from megajax.inference.assembly import FreeMemory, cache_size
from megajax.inference.config import GenerationConfig, InferenceConfig, InferenceParallelConfig
from megajax.inference.engine import Engine
from megajax.inference.request import Output, Request
from megajax.inference.sampling_settings import Sampling
from megajax.interop.loading import Loaded, adapter_reader, load, start_engine, weight_reader
from megajax.interop.weights.formats import Reading, has_files_of, named, open_stored
from megajax.interop.weights.origin import folder_sampling, generation_config, origin_of
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.param import bind, matrices_of
from megajax.layers.quantization.config import QuantizationConfig
from megajax.serve import main as serve

LORA = LoRAConfig(rank=2, alpha=6.0, targets=("*.mixer.query", "*.mlp.down"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base: a Hugging Face folder; run: the same as a run; adapter: of PEFT; lora, merged: runs with it.

    The weights are calm, so that float32 rounds log-probabilities to 1e-6.
    """
    folder = tmp_path_factory.mktemp("models")
    write_llama(folder / "base", dtype=np.float32, calm=True)
    write_adapter(folder / "adapter", folder / "base", LORA, seed=1, scale=0.3)
    hf, peft = f"hf:{folder / 'base'}", f"peft:{folder / 'adapter'}"
    assert convert([f"--from={hf}", f"--to={folder / 'run'}"]) == 0
    assert convert([f"--from={peft}", f"--base={hf}", f"--to={folder / 'lora'}"]) == 0
    assert convert([f"--from={peft}", f"--base={hf}", "--merge", f"--to={folder / 'merged'}"]) == 0
    return folder


def loaded(origin: str | Path, tensor: int = 1, data: int = 1, adapter: Path | None = None, **settings: Any) -> Loaded:
    config = generation_config(origin, GenerationConfig).base
    engine = replace(config.inference, **{"compute": "float32", "cache_tokens": 128, "rows": 2, **settings})
    parallel = InferenceParallelConfig(tensor=tensor, data=data)
    return load(replace(config, inference=engine, parallel=parallel), origin, Reading(adapter=adapter))


@pytest.mark.parametrize(
    ("name", "adapter"),
    [("base", "adapter"), ("run", "adapter"), ("lora", None), ("base", "lora")],
    ids=["folder and PEFT", "run and PEFT", "run with adapters", "folder and run with adapters"],
)
def test_adapters_are_added_to_the_weights(folder: Path, name: str, adapter: str | None) -> None:
    merged, origin = loaded(folder / "merged"), f"hf:{folder / name}" if name == "base" else folder / name
    found = loaded(origin, adapter=adapter and folder / adapter)
    for path, weight in found.model.weights.items():
        np.testing.assert_allclose(weight, merged.model.weights[path], rtol=0, atol=1e-6, err_msg=path)
    assert found.model.weights.keys() == merged.model.weights.keys()
    base = loaded(f"hf:{folder / 'base'}")
    assert not np.array_equal(base.model.weights[QUERY], merged.model.weights[QUERY])


QUERY = "stack.blocks.0.mixer.query"


def test_weights_are_on_their_devices_in_the_compute_dtype(folder: Path) -> None:
    one, four = (loaded(f"hf:{folder / 'base'}", **sizes) for sizes in ({}, {"tensor": 4}))
    key = four.model.weights["stack.blocks.0.mixer.key"]
    # Two key-value heads on four devices: each has the one that its queries use.
    np.testing.assert_array_equal(key, np.repeat(one.model.weights["stack.blocks.0.mixer.key"], 2, axis=2))
    for path, weight in four.model.weights.items():
        is_sharded = not path.endswith("norm.gain") and "norm" not in path
        assert weight.addressable_shards[0].data.size == weight.size // (4 if is_sharded else 1), path
    half = loaded(f"hf:{folder / 'base'}", compute="bfloat16", tensor=2, data=2)
    assert {weight.dtype for weight in half.model.weights.values()} == {jnp.dtype(jnp.bfloat16)}
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)

    def logits(model: Loaded) -> np.ndarray:
        with jax.set_mesh(model.model.mesh):
            return np.asarray(jax.jit(lambda w: bind(model.model.model, w)(tokens))(model.model.weights))

    np.testing.assert_allclose(logits(four), logits(one), rtol=0, atol=1e-5 * np.abs(logits(one)).max())


def test_settings_of_the_model_are_checked_against_its_weights(folder: Path) -> None:
    origin = f"hf:{folder / 'base'}"
    config = generation_config(origin, GenerationConfig).base
    with user_error():
        load(replace(config, model=replace(config.model, vocabulary_size=150)), origin)
    origin = folder / "run"
    with user_error():
        load(replace(config, model=replace(config.model, vocabulary_size=41)), origin)
    too_short = replace(config, inference=InferenceConfig(length=64))
    with user_error("inference.length", kind=ConfigError):
        load(too_short, origin)
    with user_error():
        loaded(f"hf:{folder / 'base'}", adapter=folder / "run")


def test_the_settings_of_the_step_decide(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights are never read with other settings than those that they were trained with, as in `convert`."""
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    document = yaml.safe_load((run / "config.yaml").read_text())
    document["model"]["stack"]["pattern"][0]["mixer"]["rope"]["base"] = 7.0
    (run / "config.yaml").write_text(yaml.safe_dump(document))
    (step,) = (run / "checkpoints").glob("0*")
    for path in (run, step):
        for trusted in (False, True):
            config = generation_config(path, GenerationConfig, Reading(trusted=trusted)).base
            assert config.model == open_stored(run).model
            assert "rope.base: 10000.0, not 7.0" in capsys.readouterr().err
    assert generation_config(folder / "run", GenerationConfig).base.model == config.model
    assert capsys.readouterr().err == ""


def test_origins(folder: Path) -> None:
    origin = {"run": None, "hf": None, "adapter": folder / "adapter", "trust_code": False, "ignore": ()}
    assert origin_of(origin) == (f"hf:{folder / 'base'}", Reading(adapter=folder / "adapter"))
    assert origin_of({**origin, "adapter": folder / "lora"}) == (str(folder / "lora"), Reading())
    assert origin_of({**origin, "run": folder / "run"})[0] == str(folder / "run")
    for wrong, message in (
        ({"run": Path(f"hf:{folder / 'base'}")}, r"--run: .* is FORMAT:DIR.*\n.*use --hf=DIR"),
        ({"adapter": Path(f"hf:{folder / 'base'}")}, "--adapter: .* is FORMAT:DIR"),
        ({"adapter": folder / "base"}, "--adapter: .*base has no adapter"),
    ):
        with pytest.raises(ConfigError, match=message):
            origin_of(origin | wrong)


def test_chat_settings_of_a_folder(folder: Path, tmp_path: Path) -> None:
    write_llama(tmp_path / "chat")
    assert generation_config(f"hf:{tmp_path / 'chat'}", GenerationConfig).base.inference.template is None
    (tmp_path / "chat/chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "chat/generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    config = generation_config(f"hf:{tmp_path / 'chat'}", GenerationConfig).base
    assert config.inference.template == str(tmp_path / "chat/chat_template.jinja")
    assert folder_sampling(None) == folder_sampling(tmp_path / "chat") == Sampling()
    settings = '{"temperature": 0.6, "top_k": 20, "top_p": null, "do_sample": true, "max_length": 5}'
    (tmp_path / "chat/generation_config.json").write_text(settings)
    assert folder_sampling(tmp_path / "chat") == Sampling(temperature=0.6, top_k=20)
    (tmp_path / "chat/generation_config.json").write_text('{"top_p": 2}')
    with user_error():
        folder_sampling(tmp_path / "chat")
    assert "template" not in (folder / "run/config.yaml").read_text()


def test_a_server_takes_the_sampling_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path / "chat")
    (tmp_path / "chat/generation_config.json").write_text('{"temperature": 0.6}')
    defaults, no_model = list[Sampling](), SimpleNamespace(tokenizer=None, conversation=None, where="")
    no_model.without_weights = lambda: no_model
    engine = SimpleNamespace(device=None)
    serving = SimpleNamespace(run=lambda *args, sampling, **options: defaults.append(sampling))
    monkeypatch.setattr("megajax.server.server.ReadyServer", lambda config, access: serving)
    monkeypatch.setattr("megajax.interop.loading.load", lambda config, *origin: no_model)
    monkeypatch.setattr("megajax.interop.loading.start_engine", lambda loaded, **options: engine)
    monkeypatch.setattr("megajax.job.start.compile_cache.use_cache", lambda xla: None)
    for more in ([], ["--server.generation_config=false"]):
        serve([f"--hf={tmp_path / 'chat'}", *more])
    assert defaults == [Sampling(temperature=0.6), Sampling()]


def test_capacity_of_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(f"hf:{folder / 'base'}", tensor=2, data=2)
    config = replace(model.config.inference, cache_tokens=None, rows=3)
    expected = cache_size(config, 32, model.model, "float32")
    assert (expected.blocks, expected.block, expected.slots) == (3 * 2, 16, 3)
    memory = "megajax.inference.assembly.free_memory"
    # A token: 3 layers x keys and values x 1 of 2 heads x 4 elements x 4 bytes.
    of_block = 16 * 3 * 2 * 4 * 4
    monkeypatch.setattr(memory, lambda devices: FreeMemory(of_block * 100 + 7, from_devices=True))
    assert cache_size(config, 32, model.model, "float32").blocks == 90
    assert cache_size(config, 32, model.model, "bfloat16").blocks == 180
    monkeypatch.setattr(memory, lambda devices: FreeMemory(of_block - 1, from_devices=True))
    with user_error():
        cache_size(config, 32, model.model, "float32")
    assert start_engine(model, queue=4).capacity == 2 * 2 + 4
    monkeypatch.setitem(vars(model.model.mesh), "is_multi_process", True)
    with user_error():
        start_engine(model, queue=4).sleep()


def test_all_processes_have_the_cache_of_the_fullest_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fullest device may be another process's."""
    model, of_block = loaded(f"hf:{folder / 'base'}", tensor=2, data=2), 16 * 3 * 2 * 4 * 4
    config, asked = replace(model.config.inference, cache_tokens=None, rows=3), list[Any]()

    def free(devices: Any) -> FreeMemory:
        asked.append(devices)
        return FreeMemory(of_block * 100, from_devices=True)

    other = SimpleNamespace(gather=lambda value: [value, of_block * 50])
    monkeypatch.setattr("megajax.inference.assembly.free_memory", free)
    monkeypatch.setattr("megajax.inference.assembly.Peers", lambda: other)
    assert cache_size(config, 32, model.model, "float32").blocks == 45
    assert asked == [model.model.mesh.local_devices]


def logprobs(model: Loaded, origin: str | Path, adapters: dict[str, Path], names: tuple[str | None, ...]) -> list[Any]:
    """Tokens and scores of the same prompt with these adapters, in the same steps."""
    engine = start_engine(model, queue=8)
    for name, path in adapters.items():
        engine.load_adapter(name, adapter_reader(model, origin)(path))
    return scores_of(engine, names)


def scores_of(engine: Engine, names: tuple[str | None, ...]) -> list[Any]:
    outputs = dict[int, Output]()
    for number, name in enumerate(names):
        outputs[number] = Output(0)

        def deliver(output: Output, number: int = number) -> None:
            outputs[number] = outputs[number].merge(output)

        sampling = Sampling(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
        engine.submit(
            Request(identifier=str(number), prompt=(1, 2, 3), sampling=sampling, deliver=deliver, adapter=name)
        )
    while engine.step():
        pass
    return [(output.tokens, [score.logprob for score in output.scores]) for output in outputs.values()]


def assert_same_scores(found: list[Any], expected: list[Any]) -> None:
    """The same tokens, with equal log-probabilities."""
    for (tokens, scores), (other_tokens, other_scores) in zip(found, expected, strict=True):
        assert tokens == other_tokens
        np.testing.assert_allclose(scores, other_scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "sizes", [pytest.param({}, id="one device"), pytest.param({"tensor": 4}, id="copied heads", marks=pytest.mark.slow)]
)
def test_adapters_of_folders_and_runs_for_single_requests(folder: Path, sizes: dict[str, int]) -> None:
    """The answers are those of the engine whose weights have the adapter merged."""
    origin = f"hf:{folder / 'base'}"
    few: dict[str, Any] = {"rows": 4, "batch_invariant": True}
    model = loaded(origin, **sizes, adapters=2, adapter_rank=3, **few)
    paths = {"peft": folder / "adapter", "run": folder / "lora"}
    found = logprobs(model, origin, paths, ("peft", None, "run"))
    ((base,), (merged,)) = (logprobs(loaded(of, **sizes, **few), of, {}, (None,)) for of in (origin, folder / "merged"))
    assert base[0] != merged[0]
    assert_same_scores(found, [merged, base, merged])


@pytest.mark.slow
def test_adapters_of_single_requests_on_quantized_weights(folder: Path) -> None:
    """The answers are those of float weights: what the 8 bits stand for, plus the adapter."""
    origin, paths = f"hf:{folder / 'base'}", {"peft": folder / "adapter"}
    config = generation_config(origin, GenerationConfig).base
    slots: dict[str, Any] = {"adapters": 1, "adapter_rank": 2, "batch_invariant": True}
    engine = replace(config.inference, compute="float32", cache_tokens=128, rows=2, **slots)
    eight_bit = replace(config.model, quantization=QuantizationConfig(weights="int8"))
    model = load(replace(config, model=eight_bit, inference=engine), origin)
    bound, whole = matrices_of(bind(model.model.model, model.model.weights)), loaded(origin, **slots)
    for path, matrix in bound.items():
        whole.model.weights[path] = jax.device_put(matrix[...], whole.model.weights[path].sharding)
    found, expected = (logprobs(one, origin, paths, ("peft", None)) for one in (model, whole))
    assert_same_scores(found, expected)
    assert found[0][0] != found[1][0]


@pytest.mark.slow
def test_adapters_beside_a_quantized_run_are_those_beside_a_plain_one(folder: Path, tmp_path: Path) -> None:
    assert convert([f"--from={folder / 'run'}", f"--to={tmp_path / 'int8'}", "--quantize=int8"]) == 0
    slots: dict[str, Any] = {"adapters": 1, "adapter_rank": 2}
    found, expected = (
        [adapter_reader(loaded(run, **slots), run)(folder / name) for name in ("adapter", "lora")]
        for run in (tmp_path / "int8", folder / "run")
    )
    for values, wanted in zip(found, expected, strict=True):
        assert values.keys() == wanted.keys()
        assert all(np.array_equal(values[path], wanted[path]) for path in wanted)


def test_a_model_with_an_adapter_in_its_folder_is_the_model(folder: Path, tmp_path: Path) -> None:
    """`named` means a whole model; `has_files_of` asks for an adapter."""
    shutil.copytree(folder / "base", tmp_path / "both")
    shutil.copytree(folder / "adapter", tmp_path / "both", dirs_exist_ok=True)
    assert named(tmp_path / "both") == f"hf:{tmp_path / 'both'}" and has_files_of(tmp_path / "both", "peft")
    assert named(folder / "adapter") == f"peft:{folder / 'adapter'}" and not has_files_of(folder / "base", "peft")
    assert named(folder / "run") == str(folder / "run")


def test_adapters_of_other_models(folder: Path) -> None:
    origin = f"hf:{folder / 'base'}"
    read = adapter_reader(loaded(origin, adapters=1, adapter_rank=1), origin)
    with user_error():
        read(folder / "adapter")
    with user_error():
        read(folder / "run")


def test_one_of_several_processes_reads_adapters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads adapters and other weights without the other processes, which follow its steps."""
    origin = folder / "run"
    model = loaded(origin, adapters=1)

    def together(value: Any) -> Any:
        raise AssertionError(f"the others do not take part in {value}")

    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("megajax.processes.peers.multihost_utils.broadcast_one_to_all", together)
    with user_error():
        adapter_reader(model, origin)(folder / "run")
    assert callable(weight_reader(model)(folder / "merged"))


def test_the_weights_of_a_folder_in_an_engine_that_runs(folder: Path) -> None:
    """They may be of a run or of a folder of Hugging Face. Adapters stay, and add to the other weights."""
    base, merged = f"hf:{folder / 'base'}", folder / "merged"
    slots: dict[str, Any] = {"rows": 4, "batch_invariant": True, "adapters": 1, "adapter_rank": 2}
    model = loaded(base, **slots)
    engine, read, names = start_engine(model, queue=8), weight_reader(model), (None, "peft")
    engine.load_adapter("peft", adapter_reader(model, base)(folder / "adapter"))
    first = scores_of(engine, names)
    engine.refit(read(folder / "merged"))
    second, wanted = scores_of(engine, names), loaded(merged, **slots)
    expected = logprobs(wanted, base, {"peft": folder / "adapter"}, names)
    assert_same_scores(second, expected)
    assert [tokens for tokens, _ in second] != [tokens for tokens, _ in first]
    engine.sleep(level=2)
    engine.refit(read(folder / "base"))
    engine.wake()
    assert scores_of(engine, names) == first


def test_the_weights_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    write_llama(tmp_path / "wider", dtype=np.float32, intermediate_size=80)
    read = weight_reader(loaded(f"hf:{folder / 'base'}"))
    with user_error():
        read(tmp_path / "wider")
    with user_error():
        read(tmp_path / "nowhere")
