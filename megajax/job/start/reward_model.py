"""Loads the reward model of a run of reinforcement learning: a classifier of another run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megajax.config.errors import UserError
from megajax.inference.assembly import engine_layout
from megajax.inference.loaded_model import LoadedModel, load_weights
from megajax.interop.formats import open_stored, split_name
from megajax.interop.loading import quantized_weights
from megajax.interop.origin import Origin, run_config
from megajax.job.start.same_tokens import demand_same_tokens
from megajax.mesh.rules import Plan
from megajax.models.classifier.config import ChoiceHeadConfig, RegressionHeadConfig
from megajax.precision.config import PrecisionConfig
from megajax.training.check_compiler_options import inference_options
from megajax.training.session import Parts


def load_reward_model(source: str, parts: Parts, *, say: Callable[[str], None]) -> LoadedModel:
    """The model of a run or of hf:DIR, on the devices of these parts, in their compute dtype; sharded as an engine's
    where its sizes allow, else each device has all of it.

    Raises UserError for a model without one score for each sequence, and for one with other tokens.
    """
    path = Path(source).expanduser()
    library, folder = split_name(path)
    if library not in ("", "hf"):
        raise UserError(f"data.reward_model={source}: must be a run or hf:DIR, got {library}:")
    cfg = open_stored(source).model if library else run_config(path, trusted=False).base.model
    origin = Origin(hf=folder) if library else Origin(run=path)
    if not isinstance(head := getattr(cfg, "head", None), ChoiceHeadConfig | RegressionHeadConfig):
        what = type(cfg if head is None else head).__name__
        raise UserError(
            f"data.reward_model={source}: has no score for each answer, but {what}. Use a run of a model with "
            "ChoiceHeadConfig or RegressionHeadConfig, or a ForSequenceClassification of transformers with num_labels=1"
        )
    demand_same_tokens(parts.tokenizer, path, "the reward model", say)
    cfg = replace(cfg, head=replace(head, dropout=0.0))
    layout, mesh = engine_layout(parts.program.mesh)
    sharded = not any(True for _ in cfg.parallel_problems(layout, None))
    plan = Plan.of(layout) if sharded else Plan.of(layout).over_batch()
    weights, precision = quantized_weights(origin, cfg), PrecisionConfig(compute=parts.cfg.precision.compute)
    options = inference_options(parts.cfg.xla, mesh.devices.flat[0])
    loaded = load_weights(cfg, weights, plan, mesh, precision, options)
    say(f"reward model: {weights.where}")
    return loaded
