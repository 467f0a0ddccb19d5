"""Facts of configs: enough for a layer that nothing else knows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_runs import with_block

from megajax.config.errors import Problem, UserError
from megajax.layers.facts import Elements, Layer, Matmul, MultiplyAdds, Side, Weight
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.facts import facts_of, flops_of
from megajax.models.presets.llama import llama3
from megajax.planning.compiled.devices import GPUS
from megajax.planning.cost.description import Description, describe
from megajax.planning.cost.estimate import estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """A user's feed-forward with experts, one per token."""

    experts: int
    ffn: int

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        shapes = {"up": (self.experts, hidden, self.ffn), "down": (self.experts, self.ffn, hidden)}
        axes = {"up": ("expert", "embed", "mlp"), "down": ("expert", "mlp", "embed")}
        return tuple(Weight(name, shapes[name], axes[name]) for name in shapes)

    def matmuls(self, hidden: int) -> tuple[Matmul, ...]:
        replicated, sharded = Elements(replicated=hidden), Elements(sharded=self.ffn)
        up = Matmul(inputs=replicated, outputs=sharded, result="mlp", experts=self.experts)
        return up, Matmul(inputs=sharded, outputs=replicated, experts=self.experts)

    def multiply_adds(self, hidden: int) -> MultiplyAdds:
        return MultiplyAdds(2 * hidden * self.ffn)

    def tensors(self, hidden: int) -> Mapping[Any, Elements]:
        return {"mlp": Elements(sharded=self.ffn), "activation": Elements(sharded=self.ffn)}

    def megatron_matrices(self, hidden: int, gains: int) -> int:
        return 2 * hidden * self.ffn * self.experts

    def tensor_sizes(self) -> list[int]:
        return [1, 2]

    def mesh_problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        if self.experts % sizes["expert"] or sizes["tensor"] > 2:
            yield Problem("experts", "do not fit")

    def matmul_sides(self, hidden: int, tensor: int) -> Iterator[Side]:
        yield Side("ffn", f"{self.ffn} is", self.ffn)

    def summary(self, hidden: int) -> str:
        return f"{self.experts} experts"


def with_layers(**layers: Any) -> DecoderConfig:
    """Llama-3 8B with other layers in its blocks."""
    return with_block(llama3("8b"), **layers)


def test_a_user_s_layer_works_in_counts_and_checks_and_plans() -> None:
    model, dense = with_layers(mlp=ExpertsConfig(experts=8, ffn=14_336)), llama3("8b")
    assert isinstance(ExpertsConfig(experts=8, ffn=1), Layer) and facts_of(model) is model
    assert model.parameter_count().layers - dense.parameter_count().layers == 32 * (8 * 2 - 3) * 4096 * 14_336
    assert flops_of(dense).full - flops_of(model).full == 6 * 32 * 4096 * 14_336
    (problem,) = model.mesh_problems({"pipeline": 1, "expert": 1, "context": 1, "tensor": 4}, sequence=False)
    assert (problem.setting, problem.hint) == ("stack.pattern.0.mlp.experts", "parallel.tensor can be 1, 2")
    parallel = ParallelConfig(tensor=2, sequence=True, data=4)
    machine = {"parallel": parallel, "device": GPUS["h100"], "per_node": 8, "global_size": 8}
    actual, theirs = (estimate(Description(model=config, **machine)) for config in (model, dense))
    assert 0 < actual.matmul_seconds < theirs.matmul_seconds
    more = 32 * (8 * 2 - 3) * 4096 * 14_336 / 2
    assert actual.memory.weights - theirs.memory.weights == pytest.approx(2 * more), (
        "a device holds half of all experts"
    )


def test_a_model_without_facts_has_unknown_flops_and_no_plan_by_formula() -> None:
    """An open union: a user's model and layers need not know our protocol."""
    expected = {
        "model: SimpleNamespace has no .*parameter_count": SimpleNamespace(layers=3),
        r"model.stack.pattern.0.mlp: SimpleNamespace has no weights, matmuls": with_layers(mlp=SimpleNamespace(ffn=8)),
        r"model.stack.pattern.0.mixer: SimpleNamespace has no .*heads": with_layers(mixer=SimpleNamespace(ffn=8)),
        r"model.stack.pattern.0.norm: SimpleNamespace has no weights": with_layers(norm=SimpleNamespace()),
        r"model.norm: SimpleNamespace has no weights": replace(llama3("8b"), norm=SimpleNamespace()),
    }
    for missing, model in expected.items():
        assert facts_of(model) is None and flops_of(model) is None
        cfg = SimpleNamespace(model=model)
        with pytest.raises(UserError, match=rf"has no facts.*\n.*\n  {missing}(.*\n)+.*without --formula"):
            describe(cfg, GPUS["h100"], 8)  # ty: ignore[invalid-argument-type] only the model is read
    assert flops_of(SimpleNamespace(flops=lambda: 12)) == 12
