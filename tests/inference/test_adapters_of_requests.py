"""Several adapters in one engine: each request gets the tokens and scores of the model with its adapter merged."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_steps import CHUNK, loaded, programs_of
from flax import nnx
from jax.sharding import NamedSharding
from stand_in import Known
from test_engine import Client, demand_equal, idle, serve
from test_programs import HEADS, LENGTH, MODELS, ROPE, VOCABULARY, decoder
from user_errors import user_error

from megajax.inference.admission import AdapterTable
from megajax.inference.device import ModelDevice
from megajax.inference.engine import Engine
from megajax.inference.loaded_model import LoadedModel, layers_apart
from megajax.inference.programs import Programs
from megajax.inference.request import RefusedRequest
from megajax.inference.sampling.chooser import choosers
from megajax.interop.loading import slot_values
from megajax.layers.lora.add_adapters import AdapterSlots
from megajax.layers.lora.config import LoRAConfig
from megajax.layers.param import Adapter, specs

LLAMA = decoder(replace(HEADS, rope=ROPE), repeats=2)
ONE_MATRIX = LoRAConfig(rank=2, alpha=3, targets=("*.mixer.query",))


class Drawn:
    """The arrays of an adapter, a `WeightSource`."""

    def __init__(self, cfg: Any, lora: LoRAConfig, seed: int):
        draw, self.where, self.lora = np.random.default_rng(seed), f"adapter {seed}", lora
        self.declared = specs(nnx.eval_shape(lambda: replace(cfg, lora=lora).build(loaded(cfg, {}).layout)), Adapter)
        self.arrays = {path: draw.normal(0, 0.2, spec.shape).astype(np.float32) for path, spec in self.declared.items()}
        self.shapes = {path: array.shape for path, array in self.arrays.items()}

    def read(self, path: str, box: Any) -> np.ndarray:
        return self.arrays[path][box]

    def values(self, model: LoadedModel) -> dict[str, np.ndarray]:
        return slot_values(model, self, self.arrays.keys(), self.lora.rank, self.lora.scale())

    def merged(self, model: LoadedModel) -> LoadedModel:
        weights = dict(model.weights)
        for path, a in self.arrays.items():
            matrix, _, leaf = path.rpartition(".")
            if leaf == "lora_a":
                b, w = self.arrays[f"{matrix}.lora_b"], weights[matrix]
                delta = np.einsum("lir,lro->lio", a.reshape(len(a), -1, a.shape[-1]), b.reshape(*b.shape[:2], -1))
                weights[matrix] = jax.device_put(w + self.lora.scale() * delta.reshape(w.shape), w.sharding)
        return replace(model, weights=weights)


def with_slots(model: LoadedModel, slots: AdapterSlots) -> LoadedModel:
    cfg = replace(model.cfg, lora=slots)
    abstract, weights = nnx.eval_shape(lambda: cfg.build(model.layout)), dict(model.weights)
    for path, spec in specs(abstract, Adapter).items():
        sharding = NamedSharding(model.mesh, model.layout.plan.compute.spec(spec.axes))
        weights[path] = jnp.zeros(spec.shape, jnp.float32, device=sharding)
    return replace(model, model=abstract, weights=weights, adapters=slots)


def compiled(model: LoadedModel) -> Programs:
    return programs_of(model, choosers(VOCABULARY), rows=4, tile=4, chunks=(0, CHUNK), blocks=64)


def engine_of(programs: Programs, slots: int = 0, blocks: int = 64) -> Engine:
    """An engine with this many of the slots and blocks."""
    device = ModelDevice(programs, VOCABULARY)
    device.blocks = blocks
    return Engine(device, adapters=AdapterTable(slots, programs.write_adapter))


def load(engine: Engine, name: str, adapter: Drawn) -> None:
    assert isinstance(engine.device, ModelDevice)
    engine.load_adapter(name, adapter.values(engine.device.programs.loaded))


def client(prompt: Iterable[int], adapter: str | None, **settings: Any) -> Client:
    asked = Client(list(prompt), **{"max_tokens": 12, "logprobs": 2, **settings})
    asked.request.adapter = adapter
    return asked


def demand_same(found: list[Client], expected: list[Client]) -> None:
    demand_equal(found, expected)
    assert all(one.answer.finish == "length" for one in found)


@pytest.fixture(scope="module")
def base() -> LoadedModel:
    return loaded(LLAMA, {})


@pytest.fixture(scope="module")
def adapters() -> dict[str, Drawn]:
    """One adapter is on all matrices, and one, with a lower rank, on one."""
    return {"a": Drawn(LLAMA, LoRAConfig(rank=3, alpha=4.5), 1), "b": Drawn(LLAMA, ONE_MATRIX, 2)}


PROMPT = (7, 3, 99, 5, 18, 44, 2, 60, 31)


def prompts() -> list[tuple[int, ...]]:
    draw = np.random.default_rng(3)
    return [(*PROMPT, *draw.integers(0, VOCABULARY, draw.integers(0, 5)).tolist()) for _ in range(9)]


@pytest.fixture(scope="module")
def slots(base: LoadedModel) -> Programs:
    """The programs of a model with three slots of rank 4."""
    return compiled(layers_apart(with_slots(base, AdapterSlots(3, 4))))


@pytest.fixture(scope="module")
def merged(base: LoadedModel, adapters: dict[str, Drawn]) -> dict[str | None, Engine]:
    """Engines of the model itself, and of the model with each adapter merged."""
    models = {None: base} | {name: adapter.merged(base) for name, adapter in adapters.items()}
    return {name: engine_of(compiled(model)) for name, model in models.items()}


def answered(merged: dict[str | None, Engine], asked: list[Client]) -> list[Client]:
    """The same requests to the engines of merged weights."""
    clients = []
    for one in asked:
        clients.append(client(one.request.prompt, None))
        clients[-1].request.sampling = one.request.sampling
        serve(merged[one.request.adapter], clients[-1])
    return clients


def test_rows_of_different_adapters_in_the_same_steps(
    slots: Programs, merged: dict[str | None, Engine], adapters: dict[str, Drawn]
) -> None:
    """Rows are preempted, and only requests of one adapter share the blocks of equal prompts."""
    engine = engine_of(slots, 3, blocks=14)
    for name, adapter in adapters.items():
        load(engine, name, adapter)
    names = [None, "a", "b"] * 3
    asked = [client(prompt, name) for prompt, name in zip(prompts(), names, strict=True)]
    asked += [client(PROMPT, name) for name in names]
    serve(engine, *asked)
    statistics = engine.statistics()
    assert statistics.preemptions_total > 2
    assert statistics.shared_tokens_total > 0
    demand_same(asked, answered(merged, asked))
    tokens = {one.answer.tokens for one in asked[9:]}
    assert len(tokens) == 3, "the adapters change the answer to the same prompt"


@pytest.mark.slow
def test_drafts_are_verified_with_the_adapter_of_their_row(
    base: LoadedModel, merged: dict[str | None, Engine], adapters: dict[str, Drawn]
) -> None:
    model = layers_apart(with_slots(base, AdapterSlots(3, 4)))
    sizes: dict[str, Any] = {"rows": 4, "tile": 4, "chunks": (0, CHUNK), "blocks": 64}
    engine = engine_of(programs_of(model, choosers(VOCABULARY), drafts=4, **sizes), 3)
    for name, adapter in adapters.items():
        load(engine, name, adapter)
    asked = [client(prompt, name) for prompt, name in zip(prompts(), [None, "a", "b"] * 3, strict=True)]
    expected = answered(merged, asked)
    for one in asked:
        engine.submit(one.request)
    for sequence in engine.schedulers[0].waiting:
        known = expected[sequence.order[0]]
        sequence.drafter = Known((*known.request.prompt, *known.answer.tokens), wrong=0.2)
    serve(engine)
    demand_same(asked, expected)
    assert engine.statistics().accepted_tokens_total > 40


def test_no_block_is_shared_between_adapters(
    slots: Programs, merged: dict[str | None, Engine], adapters: dict[str, Drawn]
) -> None:
    """Adapters that had the same slot or the same name one after the other share none either."""
    engine = engine_of(slots, 1)
    answers, shared = [], []
    for adapter in adapters.values():
        load(engine, "mine", adapter)
        for _ in range(2):
            answers.append(client(PROMPT, "mine"))
            serve(engine, answers[-1])
            shared.append(answers[-1].answer.shared)
        engine.drop_adapter("mine")
    plain = client(PROMPT, None)
    serve(engine, plain)
    assert shared == [0, 8, 0, 8] and plain.answer.shared == 0
    asked = [client(PROMPT, name) for name in ("a", "a", "b", "b", None)]
    demand_same([*answers, plain], answered(merged, asked))


def test_adapters_are_loaded_and_dropped_while_requests_run(
    slots: Programs, merged: dict[str | None, Engine], adapters: dict[str, Drawn]
) -> None:
    engine = engine_of(slots, 2)
    asked = [client(PROMPT, None), client(PROMPT, "a")]
    engine.submit(asked[0].request)
    engine.step()
    load(engine, "a", adapters["a"])
    engine.submit(asked[1].request)
    engine.step()
    load(engine, "b", adapters["b"])
    asked.append(client(PROMPT, "b"))
    engine.submit(asked[2].request)
    engine.step()
    engine.drop_adapter("a")
    with user_error():
        load(engine, "c", adapters["a"])
    with user_error(kind=RefusedRequest):
        engine.submit(client(PROMPT, "a").request)
    while engine.step():
        pass
    idle(engine)
    load(engine, "c", adapters["a"])
    asked.append(client(PROMPT, "c"))
    serve(engine, asked[3])
    same = [client(PROMPT, name) for name in (None, "a", "b", "a")]
    demand_same(asked, answered(merged, same))


def test_loading_compiles_nothing_after_the_warm_up(base: LoadedModel, adapters: dict[str, Drawn]) -> None:
    programs = programs_of(with_slots(base, AdapterSlots(1, 4)), choosers(VOCABULARY)[:1], chunks=(0, CHUNK), blocks=16)
    engine = engine_of(programs, 1, 16)
    assert len(list(programs.compile())) == programs.count
    compiled = dict(programs.compiled)
    load(engine, "a", adapters["a"])
    serve(engine, client(PROMPT, "a", logprobs=None))
    assert programs.compiled == compiled


def test_refusals(base: LoadedModel, slots: Programs, adapters: dict[str, Drawn]) -> None:
    engine = engine_of(slots, 2)
    load(engine, "a", adapters["a"])
    with user_error():
        load(engine, "a", adapters["b"])
    with user_error():
        engine.drop_adapter("b")
    with user_error():
        load(engine, "b", Drawn(LLAMA, LoRAConfig(rank=6), 5))
    experts = ["stack.blocks.0.mlp.experts.up.lora_a"]
    with user_error():
        slot_values(slots.loaded, adapters["b"], experts, 1, 1.0)
    plain = engine_of(programs_of(base, [], blocks=4))
    with user_error():
        load(plain, "a", adapters["a"])
    with user_error(kind=RefusedRequest):
        plain.check(client(PROMPT, "a").request)


def test_beams_scores_of_prompts_and_embeddings(
    slots: Programs, merged: dict[str | None, Engine], adapters: dict[str, Drawn]
) -> None:
    engine = engine_of(slots, 2)
    load(engine, "b", adapters["b"])
    load(engine, "a", adapters["a"])
    scored: dict[str, Any] = {"prompt_logprobs": 0, "max_tokens": 0, "logprobs": None}
    for settings, pooling in (
        ({"beams": 3, "n": 2}, None),
        (scored, None),
        (scored | {"prompt_logprobs": None}, "mean"),
    ):
        one, other = client(PROMPT, "a", **settings), client(PROMPT, None, **settings)
        one.request.pooling = other.request.pooling = pooling
        serve(engine, client(PROMPT, "b"), one)
        serve(merged["a"], other)
        assert [answer.tokens for answer in one.answers()] == [answer.tokens for answer in other.answers()]
        scores = [[s.logprob for s in c.answers()[0].prompt_scores if s] for c in (one, other)]
        np.testing.assert_allclose(*scores, rtol=0, atol=1e-5)
        vectors = [c.answers()[0].embedding for c in (one, other)]
        assert len(vectors[0]) == (LLAMA.hidden if pooling else 0)
        np.testing.assert_allclose(*vectors, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, {}) for name in ("latent", "mixture", "mamba 1")),
        *(("gpt", {"tensor": 2}), ("nemotron-h", {"data": 2})),
    ],
)
def test_all_layers(name: str, sizes: dict[str, int]) -> None:
    """All matrices of these layers may have adapters, on several devices too; but not those of experts."""
    cfg, targets = MODELS[name], ("*.mixer.*",) if name == "mixture" else ("*.blocks.*",)
    base, adapter = loaded(cfg, sizes), Drawn(cfg, LoRAConfig(rank=2, alpha=1, targets=targets), 1)
    programs = [
        programs_of(model, choosers(VOCABULARY), chunks=(0, CHUNK), blocks=24)
        for model in (with_slots(base, AdapterSlots(2, 2)), adapter.merged(base))
    ]
    engines = [Engine(ModelDevice(one, VOCABULARY), adapters=AdapterTable(2, one.write_adapter)) for one in programs]
    load(engines[0], "a", adapter)
    asked = [client(PROMPT, name, max_tokens=LENGTH - len(PROMPT)) for name in ("a", None, "a")]
    serve(engines[0], *asked)
    other = client(PROMPT, None, max_tokens=LENGTH - len(PROMPT))
    serve(engines[1], other)
    demand_same([asked[0], asked[2]], [other, other])
    assert asked[1].answer.tokens != other.answer.tokens
