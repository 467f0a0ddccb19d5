"""Other weights for an engine that lives: on a tiny model, and with requests that run."""

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from compiled_steps import CHUNK, layout_of, loaded, programs_of
from jax.sharding import NamedSharding, PartitionSpec
from stand_in import StandIn, expected
from test_engine import Client, demand_equal, serve
from test_engine_on_a_model import LLAMA
from test_programs import MODELS, VOCABULARY
from user_errors import user_error

from megajax.config.errors import UserError
from megajax.inference.assembly import engine_of_run
from megajax.inference.config import InferenceConfig
from megajax.inference.device import ModelDevice, ModelWeights
from megajax.inference.engine import Engine
from megajax.inference.loaded_model import LoadedModel, layers_apart, model_on_mesh
from megajax.inference.sampling.chooser import choosers
from megajax.layers.param import specs
from megajax.mesh.config import ParallelConfig
from megajax.mesh.mesh import build_mesh
from megajax.mesh.sharding_rules import Plan
from megajax.precision.config import PrecisionConfig
from megajax.tokenizers.config import NullTokenizerConfig

PROMPTS = [[5, 17, 200, 4, 9], [77] * 12, [1, 2, 3]]


def engine_of(model: LoadedModel) -> Engine:
    programs = programs_of(layers_apart(model), choosers(VOCABULARY), chunks=(0, CHUNK), blocks=24)
    return Engine(ModelDevice(programs, VOCABULARY), weights=ModelWeights(programs))


def answers(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[Client]:
    """The requests, with their tokens and log-probabilities."""
    clients = [Client(prompt, max_tokens=8, logprobs=0) for prompt in prompts]
    serve(engine, *clients)
    return clients


def buffers(weight: Any) -> set[int]:
    """Addresses of the memory of a weight."""
    return {shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(weight) for shard in leaf.addressable_shards}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("llama", {}, id="llama"),
        pytest.param("llama", {"data": 2, "tensor": 4}, id="copied heads", marks=pytest.mark.slow),
    ],
)
def test_refitted_engines_equal_new_ones_and_compile_nothing(
    name: str, sizes: dict[str, int], compiled: list[str]
) -> None:
    cfg, whole = MODELS[name], NamedSharding(layout_of(**sizes)[1], PartitionSpec())
    states = [jax.device_put(dict(loaded(cfg, {}, seed).weights), whole) for seed in range(2)]
    parallel = ParallelConfig(**{"data": 1, "data_sharding": "replicate", **sizes})
    precision = PrecisionConfig(compute="float32")
    models = [model_on_mesh(cfg, state, parallel, whole.mesh, precision, {}) for state in states]
    wanted = [answers(engine_of(model)) for model in models]
    engine = engine_of(models[0])
    demand_equal(answers(engine), wanted[0])
    engine.refit(states[1])
    # As a step of training does with its state.
    for array in states[1].values():
        array.delete()
    demand_equal(answers(engine), wanted[1])
    compiled.clear()
    engine.refit(states[0])
    demand_equal(answers(engine), wanted[0])
    assert compiled == []
    engine.refit(states[0], shared=True)
    demand_equal(answers(engine), wanted[0])
    programs: Any = engine.device.programs
    if not sizes:
        assert len({arrays["tokens"].unsafe_buffer_pointer() for arrays in (programs.weights, states[0])}) == 1


@pytest.mark.slow
def test_arrays_of_another_layout_are_copied_by_one_program(compiled: list[str]) -> None:
    """A trainer shards weights over `data` (FSDP), and its engine on the same devices over `tensor`."""
    cfg, devices = MODELS["llama"], jax.devices()[:4]
    trainer, parallel = ParallelConfig(data=4), ParallelConfig(data=2, tensor=2, data_sharding="replicate")
    mesh, plan = build_mesh(trainer, devices), Plan.of(trainer)
    whole = [loaded(cfg, {}, seed).weights for seed in range(3)]
    declared = specs(loaded(cfg, {}).model)
    at_rest = {path: NamedSharding(mesh, plan.params.spec(spec.axes)) for path, spec in declared.items()}
    states = [{path: jax.device_put(np.asarray(w), at_rest[path]) for path, w in state.items()} for state in whole]
    assert any(not array.is_fully_replicated for array in states[0].values())
    engine = engine_of_run(
        SimpleNamespace(model=cfg, precision=PrecisionConfig(compute="float32")),
        *(states[0], mesh, {}, NullTokenizerConfig(vocabulary_size=VOCABULARY).build()),
        InferenceConfig(rows=2, chunk=CHUNK, cache_tokens=256),
        end_tokens=(),
        length=32,
        queue=8,
        parallel=parallel,
    )
    wanted = [answers(engine_of(loaded(cfg, {}, seed))) for seed in range(3)]
    demand_equal(answers(engine), wanted[0])
    engine.refit(states[1])
    demand_equal(answers(engine), wanted[1])
    compiled.clear()
    for state in (states[2], states[1], states[2]):
        engine.refit(state)
    demand_equal(answers(engine), wanted[2])
    assert compiled == []


def test_arrays_as_steps_read_them_are_shared_on_request() -> None:
    model, other = loaded(LLAMA, {"tensor": 2}), loaded(LLAMA, {"tensor": 2}, seed=1)
    engine, arrays = engine_of(model), dict(other.weights)
    programs: Any = engine.device.programs
    for shared in (False, True):
        engine.refit(arrays, shared=shared)
        jax.tree.map(np.testing.assert_array_equal, programs.weights, dict(layers_apart(other).weights))
        same = {path for path, weight in programs.weights.items() if buffers(weight) == buffers(arrays[path])}
        # Rows of layers are arrays of their own on CPUs.
        assert same == ({path for path, w in programs.weights.items() if not isinstance(w, tuple)} if shared else set())


def test_other_arrays_are_refused_before_anything_changes() -> None:
    model = loaded(LLAMA, {})
    engine, weights = engine_of(model), dict(model.weights)
    before, (path, *_) = answers(engine), sorted(weights)
    wrong = [
        ({**weights, "more": weights[path]}, "more: not in the model"),
        ({name: w for name, w in weights.items() if name != path}, f"{path}: missing"),
        ({**weights, path: weights[path][..., :1]}, "in the model"),
        ({**weights, path: weights[path].astype("int32")}, "int32 given, float32 in the model"),
        ({**weights, path: jax.device_put(weights[path], jax.devices()[1])}, "on other devices than the engine's"),
    ]
    running = Client(PROMPTS[0], max_tokens=8)
    engine.submit(running.request)
    engine.step()
    for arrays, message in wrong:
        with pytest.raises(UserError, match=message):
            engine.refit(arrays, running="abort")
    assert running.answer.finish is None
    serve(engine)
    demand_equal(answers(engine), before)


def test_sleep_moves_the_weights_to_the_host_and_back() -> None:
    model = loaded(LLAMA, {"tensor": 2})
    engine = engine_of(model)
    programs: Any = engine.device.programs
    before, client = answers(engine), Client(PROMPTS[1], max_tokens=8, logprobs=0)
    engine.submit(client.request)
    engine.step()
    engine.sleep()
    assert engine.asleep and not engine.step() and not programs.weights and "cache" not in vars(programs)
    late = Client(PROMPTS[0], max_tokens=8, logprobs=0)
    engine.submit(late.request)
    engine.wake()
    serve(engine)
    demand_equal([late, client], before[:2])
    assert late.answer.shared == 0, "the blocks of the dropped cache are not shared"
    demand_equal(answers(engine), before)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_releases_the_arrays_of_the_devices(level: int) -> None:
    model = loaded(LLAMA, {})
    engine = engine_of(model)
    answers(engine)
    programs: Any = engine.device.programs
    # On CPUs, level 1 leaves the weights where they are.
    arrays = [*programs.cache.values(), *(jax.tree.leaves(programs.weights) if level == 2 else ())]
    held = [weakref.ref(array) for array in arrays]
    del model, arrays
    engine.sleep(level)
    gc.collect()
    assert [array() for array in held] == [None] * len(held)


def test_an_engine_without_weights_sleeps_until_it_has_some() -> None:
    first, second = loaded(LLAMA, {}), loaded(LLAMA, {}, seed=1)
    engine, arrays = engine_of(first), dict(second.weights)
    before = answers(engine)
    engine.sleep(level=2)
    with user_error():
        engine.wake()
    engine.refit(arrays)
    assert engine.asleep
    engine.wake()
    demand_equal(answers(engine), answers(engine_of(second)))

    def lost() -> Any:
        raise OSError("the folder is gone")

    with pytest.raises(OSError, match="gone"):
        engine.refit(lost)
    assert engine.asleep and not engine.step()
    with user_error():
        engine.refit(lambda: {**layers_apart(first).weights, "other": arrays[sorted(arrays)[0]]})
    engine.refit(lambda: layers_apart(first).weights)
    engine.wake()
    demand_equal(answers(engine), before)
    for level in (0, 3):
        with user_error():
            engine.sleep(level=level)
    with user_error():
        engine.sleep(running="keep")


class OtherTokens(StandIn):
    """Weights are a number that is added to each token."""

    added = 0

    def candidates(self, row: Any, tokens: Any, ahead: int = 0) -> list[int]:
        return [(token + self.added) % self.vocabulary for token in super().candidates(row, tokens, ahead)]

    def prepare(self, weights: Any, *, shared: bool = False) -> Callable[[], Any]:
        return lambda: weights

    def replace(self, make: Callable[[], Any]) -> None:
        self.added = make()

    def sleep(self, *, keep: bool) -> None: ...

    def wake(self) -> None: ...


def started() -> tuple[Engine, list[Client]]:
    """Two requests with three tokens each, and one that waits."""
    device = OtherTokens(rows=2, block=2)
    engine = Engine(device, weights=device)
    clients = [Client([number, 1, 2, 3, 4], max_tokens=9) for number in range(3)]
    for client in clients:
        engine.submit(client.request)
    while len(clients[1].answer.tokens) < 3:
        engine.step()
    # Receives the results of the step that runs.
    engine.pause()
    engine.resume()
    return engine, clients


def other(tokens: list[int], count: int) -> list[int]:
    """The tokens that follow with other weights."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append((expected(tokens, 1)[0] + 7) % 50)
    return tokens


@pytest.mark.parametrize("running", ["finish", "abort", "recompute", "keep"])
def test_requests_that_run_while_the_weights_change(running: Any) -> None:
    engine, clients = started()
    counts, shared = [len(client.answer.tokens) for client in clients], engine.statistics().shared_tokens_total
    engine.refit(7, running=running)
    steps = engine.statistics().prompt_tokens_total
    while engine.step():
        pass
    for client, count in zip(clients, counts, strict=True):
        prompt, tokens = list(client.request.prompt), list(client.answer.tokens)
        if running == "abort":
            assert (client.answer.finish, len(tokens)) == ("abort", count)
            continue
        assert client.answer.finish == "length"
        # Tokens until the change are those of the old weights, for "finish" all.
        old = expected(prompt, 9 if running == "finish" else count)
        assert tokens == other([*prompt, *old], 9 - len(old))[5:]
    again = engine.statistics().prompt_tokens_total - steps
    assert again == {"finish": 0, "abort": 0, "recompute": 15, "keep": 5}[running]
    assert engine.statistics().shared_tokens_total == shared
    client = Client(clients[0].request.prompt, max_tokens=2)
    serve(engine, client)
    assert list(client.answer.tokens) == other(client.request.prompt, 2)[5:]
    assert client.answer.shared == (4 if running == "recompute" else 0)


def test_a_paused_engine_runs_no_step_and_queues_requests() -> None:
    engine, clients = started()
    engine.pause()
    counts = [len(client.answer.tokens) for client in clients]
    late = Client([7, 8], max_tokens=2)
    engine.submit(late.request)
    assert not engine.step() and [len(client.answer.tokens) for client in clients] == counts
    for action in (engine.pause, lambda running: engine.refit(1, running)):
        with user_error():
            action("finish")
    engine.resume()
    serve(engine)
    assert all(list(client.answer.tokens) == expected(client.request.prompt, 9) for client in clients)
    assert late.answer.finish == "length"


def test_an_engine_without_weights_of_its_own_refuses() -> None:
    with user_error():
        Engine(StandIn()).refit({})
