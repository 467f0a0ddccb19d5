"""Runs with adapters: nothing else has gradients or moments, and they start from a base."""

from dataclasses import replace

import jax
import numpy as np
from tiny_runs import ONE, build_program, llama

from megajax.job.start.weights import frozen_weights_warning
from megajax.layers.block.step_work import Training
from megajax.layers.facts import total_size
from megajax.layers.lora.config import LoRAConfig
from megajax.models.facts import trained_share
from megajax.optim.config import AdamWConfig
from megajax.training.program import Program

LORA = LoRAConfig(rank=2, alpha=4.0)


def test_only_adapters_have_gradients_and_moments() -> None:
    lora = build_program(replace(llama(), lora=LORA), ONE, microbatches=2)
    trained, moments = {path for path in lora.declared if ".lora_" in path}, lora.state_like().optimizer
    assert set(moments["first_moment"]) == set(moments["second_moment"]) == trained == set(lora.adapters)
    assert set(lora.step_parts.gradient_shardings) == trained
    assert (
        set(jax.eval_shape(lora.grad_fn(), lora.state_like().inputs, lora.batch_like(), np.float32(1)).grads) == trained
    )


def test_weights_named_beside_adapters_are_trained_too() -> None:
    cfg = build_program(replace(llama(), lora=LORA), ONE, microbatches=2).cfg
    frozen_program = Program.of(
        cfg.but(optimizer=AdamWConfig(trainable=("norm.gain",))), build_program(llama(), ONE, microbatches=2).mesh
    )
    assert set(frozen_program.optimizer.declared) == {*frozen_program.adapters, "norm.gain"}


def test_a_run_without_a_source_reports_that_frozen_weights_are_fresh() -> None:
    line = frozen_weights_warning(build_program(replace(llama(), lora=LORA), ONE, microbatches=2))
    assert "adapters are trained beside fresh, frozen weights: set checkpoint.load" in line and ".lora_" not in line
    assert frozen_weights_warning(build_program(llama(), ONE, microbatches=2)) == ""


def test_formulas_count_the_adapters_of_the_program() -> None:
    for lora in (LORA, replace(LORA, decomposed=True)):
        config = replace(llama(), lora=lora)
        declared = build_program(config, ONE, microbatches=2).declared
        elements = sum(np.prod(declared[path].shape[1:]) for path in declared if ".lora_" in path)
        (section,) = config.section_facts()
        weights = section.stack_weights(0)
        share = trained_share(weights, Training(lora=lora), adapters=True)
        assert share * total_size(weights) == elements
