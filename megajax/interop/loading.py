"""Loads a model for text generation from a run or a Hugging Face folder, with or without adapters."""

import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from megajax.batch import Params
from megajax.checkpoint.weights.foreign import WeightSource, declared_by
from megajax.checkpoint.weights.quantize_on_load import Quantizing
from megajax.config.errors import UserError
from megajax.config.hints import listed
from megajax.config.read_limits import read_json
from megajax.inference.assembly import encoder_engine, for_steps, make_engine
from megajax.inference.config import GenerationConfig
from megajax.inference.engine import Engine
from megajax.inference.loaded_model import LoadedModel, demand_shapes, load_weights, stored_specs
from megajax.interop.formats import Reading, open_stored
from megajax.interop.huggingface.format import family_for
from megajax.interop.origin import Origin, folder_stop_tokens, generation_config, tokenizer_folder, without_adapters
from megajax.interop.peft.folder import JoinedWeights, MergedWeights, read_adapter
from megajax.interop.peft.format import moved_biases
from megajax.interop.peft.settings import CONFIG as PEFT_CONFIG
from megajax.interop.runs.format import RunModel, StepWeights, open_step
from megajax.interop.stored.model_differences import describe_differences, differences
from megajax.layers.lora.add_adapters import AdapterSlots
from megajax.layers.low_rank import ADAPTERS
from megajax.layers.param import Adapter, specs
from megajax.mesh.replicated_heads import with_copied_heads
from megajax.mesh.rules import Plan
from megajax.models.protocol import ModelConfig, ids_below
from megajax.precision.config import PrecisionConfig
from megajax.tokenizers.base import Tokenizer, end_tokens_of
from megajax.tokenizers.chat_template import ChatTemplate
from megajax.tokenizers.conversation import Conversation
from megajax.training.check_compiler_options import inference_options
from megajax.training.resolved import fitting_mesh
from megajax.training.session import build_tokenizer

START_TOKEN = "decoder_start_token_id"


class Loaded(NamedTuple):
    """A model with its weights and its tokenizer."""

    config: GenerationConfig
    model: LoadedModel
    tokenizer: Tokenizer
    stop_tokens: frozenset[int]
    """Ids of tokens that end an answer."""
    conversation: Conversation | None
    """Turns messages into prompts; None without a chat template."""
    where: str
    """The source of the weights, for messages."""
    answer_start: tuple[int, ...] = ()
    """As in `Engine`."""

    def without_weights(self) -> "Loaded":
        """The model with the shapes of its weights alone."""
        return self._replace(model=self.model.described())


def load(config: GenerationConfig, origin: Origin) -> Loaded:
    """The model of an origin, with the settings of `origin.generation_config` and the command line.

    Raises UserError if the settings do not fit the devices, or if the weights or the tokenizer do not fit the model.
    """
    if (encoder := config.model.text_encoder()) is not None:
        config = replace(config, model=encoder)
    parallel = config.parallel.layout()
    mesh = fitting_mesh(config, parallel)
    remedy = "set the tokenizer that the weights were trained with"
    tokenizer = build_tokenizer(config.tokenizer, ids_below(config.model), remedy)
    answer_start = start_of_answers(config.model, origin, tokenizer)
    template = config.inference.template
    if template is not None and answer_start:
        raise UserError("inference.template: the model has an encoder, which reads texts, no messages: remove it")
    template = None if template is None else ChatTemplate(template, "inference.template")
    weights = quantized_weights(origin, config.model)
    precision = PrecisionConfig(compute=config.inference.compute)
    options = inference_options(config.xla, mesh.devices.flat[0])
    inference = config.inference
    adapters = AdapterSlots(inference.adapters, inference.adapter_rank) if inference.adapters else None
    return Loaded(
        config,
        load_weights(config.model, weights, Plan.of(parallel), mesh, precision, options, adapters),
        tokenizer,
        end_tokens_of(tokenizer) | folder_stop_tokens(tokenizer_folder(config.tokenizer)),
        None if template is None else Conversation(template, tokenizer),
        weights.where,
        answer_start,
    )


def start_of_answers(model: ModelConfig, origin: Origin, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token before every answer of a model with an encoder; none without an encoder.

    Raises UserError if it is not known.
    """
    if not model.memory_length():
        return ()
    if origin.hf is None:
        token, place = tokenizer.specials.get("bos"), "the tokenizer has no bos"
    else:
        file = origin.hf / "config.json"
        token, place = read_json(file).get(START_TOKEN), f"{file} has no {START_TOKEN}"
    if type(token) is not int:
        raise UserError(f"{place}, the token with which the decoder's answers begin: add it")
    return (token,)


def quantized_weights(origin: Origin, model: Any) -> WeightSource:
    """`weights_of`, quantized while they are read if the model's config is quantized and the stored weights are not."""
    quantizing = Quantizing.if_any(model)
    stored = None if origin.run is None else open_step(origin.run, trusted=origin.trusted).config.model
    # Adapters beside quantized weights are merged into dequantized ones.
    if quantizing is None or getattr(without_adapters(stored), "quantization", None) is not None:
        return weights_of(origin, model)
    return quantizing.weights(weights_of(origin, replace(model, quantization=None)))


def weights_of(origin: Origin, model: Any) -> WeightSource:
    """The weights of a model, with the origin's adapters merged.

    Raises UserError for an adapter of another model.
    """
    if origin.run is not None:
        step = open_step(origin.run, trusted=origin.trusted)
        weights, family = run_weights(step, model), _family(step)
    else:
        stored = open_stored(f"hf:{origin.hf}", Reading(ignore=origin.ignore))
        # An encoder has no heads, which its folder may lack.
        stored.demand_fit(None if model.text_encoder() is None else declared_by(model))
        weights, family = stored.weights, stored.origin.family
        if stored.note:
            print(f"{weights.where}: {stored.note}", file=sys.stderr)
    if origin.adapter is None:
        return weights
    adapter, adapted = stored_adapter(origin.adapter, model, family, trusted=origin.trusted, weights=weights)
    return merged(JoinedWeights(weights, adapter), adapted)


def stored_adapter(
    folder: Path, model: Any, family: str, *, trusted: bool, single: bool = False, weights: WeightSource | None = None
) -> tuple[WeightSource, Any]:
    """A source with the adapter of a PEFT folder or a run, and its model config, with `lora`.

    model: the adapted one; family: the recorded name of its table of names, or empty; trusted: as in `Origin`; single:
    as in `open_step`; weights: those of the model, for the magnitudes of DoRA. Raises UserError for an adapter of
    another model.
    """
    if (folder / PEFT_CONFIG).is_file():
        peft = read_adapter(folder, model, family_for(model, recorded=family).rows(model), weights)
        return peft, peft.model
    step = open_step(folder, trusted=trusted, single=single)
    adapted = step.config.model
    if getattr(adapted, "lora", None) is None:
        raise UserError(f"{folder}: its run has no adapters (model.lora)")
    pairs = [pair for pair in differences(without_adapters(adapted), model) if pair.name != "sequence_length"]
    if pairs:
        lines = "\n".join(f"  {line}" for line in describe_differences(pairs))
        raise UserError(f"the adapter of {folder} (here) belongs to another model (there):\n{lines}")
    source = step.weights()
    if weights is not None and (biases := moved_biases(declared_by(adapted), source, weights)):
        problem = f"the biases by which experts are chosen are not those of {weights.where}: {listed(biases)} differ"
        raise UserError(f"{folder}: {problem}. Its adapter alone is another model: give the run itself.")
    return source, adapted


def adapter_reader(loaded: Loaded, origin: Origin) -> Callable[[Path], Params]:
    """Reads an adapter of a loaded model, a PEFT folder or a run, as the values of `Engine.load_adapter`.

    It may be called from any thread, and by one of several processes. Raises UserError for an adapter that does not fit
    the model or its slots.
    """
    model: Any = loaded.config.model
    if getattr(model, "quantization", None) is not None:
        model = replace(model, quantization=None)
    if origin.run is not None:
        family = _family(open_step(origin.run, trusted=origin.trusted, single=True))
    else:
        family = open_stored(f"hf:{origin.hf}", Reading(ignore=origin.ignore)).origin.family

    def read(folder: Path) -> Params:
        source, adapted = stored_adapter(folder, model, family, trusted=origin.trusted, single=True)
        if adapted.lora.decomposed:
            raise UserError(f"{folder} is a DoRA adapter, which can't be one of several: merge it with --adapter")
        paths = [path for path in source.shapes() if path.endswith(ADAPTERS)]
        return slot_values(loaded.model, source, paths, adapted.lora.rank, adapted.lora.scale())

    return read


def slot_values(
    loaded: LoadedModel, source: WeightSource, paths: Collection[str], rank: int, scale: float
) -> dict[str, np.ndarray]:
    """The arrays of an adapter for `Programs.write_adapter`, on the host; may be called from any thread.

    source: may hold other weights as well; paths: of the matrices A and B of the adapter in it; scale: factor on its
    output. Raises UserError for a model without slots, a larger rank, and matrices that have no slot.
    """
    slots, where = loaded.adapters, source.where
    if slots is None:
        raise UserError(f"{where}: the engine has no slots for adapters: set inference.adapters")
    if rank > slots.rank:
        message = f"{where} has rank {rank}, and slots have rank {slots.rank}"
        raise UserError(f"{message}: set inference.adapter_rank={rank}")
    declared = specs(loaded.model, Adapter)
    if others := sorted(path for path in paths if path not in declared):
        names = listed([path.rpartition(".")[0] for path in others])
        raise UserError(f"{where} adapts {names}, which can't have several adapters, such as experts: merge it instead")
    values = {}
    for path, spec in declared.items():
        axis, dtype = spec.axes.index("rank"), jax.tree.leaves(loaded.weights[path])[0].dtype
        slot = np.zeros((*spec.shape[:axis], slots.rank, *spec.shape[axis + 1 :]), dtype)
        if path in paths:
            box = tuple(slice(0, rank if at == axis else size) for at, size in enumerate(slot.shape))
            stored, is_output = source.read(path, box).astype(np.float32), axis < slot.ndim - 1
            slot[box] = stored * np.float32(scale) if is_output else stored
        values[path] = with_copied_heads(slot, spec.axes, loaded.layout.plan.tensor)
    return values


def weight_reader(loaded: Loaded, origin: Origin) -> Callable[[Path], Callable[[], Params]]:
    """Reads other weights of a loaded model for `Engine.refit`: a run, one of its steps, or a Hugging Face folder.

    A folder is opened and compared with the model -> a function that loads the weights; both may be called from any
    thread. Raises UserError for a folder that can't be read and for another model.
    """
    config, described = loaded.config, loaded.model.described()
    model: Any = config.model
    wanted = replace(model, quantization=None) if getattr(model, "quantization", None) is not None else model

    def read(folder: Path) -> Callable[[], Params]:
        is_hf = (folder / "config.json").is_file()
        other = Origin(hf=folder, ignore=origin.ignore) if is_hf else Origin(run=folder, trusted=origin.trusted)
        stored: Any = generation_config(other, GenerationConfig).base.model
        if getattr(stored, "quantization", None) is not None:
            stored = replace(stored, quantization=None)
        if pairs := [pair for pair in differences(stored, wanted) if pair.name != "sequence_length"]:
            lines = "\n".join(f"  {line}" for line in describe_differences(pairs))
            raise UserError(f"{folder} (here) has the weights of another model than the engine's (there):\n{lines}")
        weights, precision = quantized_weights(other, model), PrecisionConfig(compute=config.inference.compute)
        demand_shapes(weights, stored_specs(described.model))

        def make() -> Params:
            settings = Plan.of(config.parallel.layout()), described.mesh, precision, described.options
            return for_steps(load_weights(model, weights, *settings)).weights

        return make

    return read


def _family(step: RunModel) -> str:
    return step.meta.get("source", {}).get("family", "")


def run_weights(step: RunModel, model: Any) -> WeightSource:
    """The weights of a run, with its adapters merged. Raises UserError for a model with another vocabulary size."""
    stored = step.config.model
    if (stored_tokens := ids_below(stored)) != (tokens := ids_below(model)):
        raise UserError(f"the weights of {step.path} are for {stored_tokens} tokens, this model has {tokens}")
    lora = getattr(stored, "lora", None)
    if lora is None:
        chunks = [range(*bounds) for bounds in step.meta.get("rows", [])]
        return StepWeights(step.path, declared_by(model), chunks)
    return merged(step.weights(), stored)


def merged(weights: WeightSource, model: Any) -> WeightSource:
    """Weights with their adapters merged. model: a config with `lora`."""
    return MergedWeights(weights, model)


def start_engine(loaded: Loaded, *, queue: int) -> Engine:
    """An engine for a model; see `megajax.inference.assembly.make_engine`."""
    config = loaded.config
    stop_tokens, length = loaded.stop_tokens, config.length()
    if config.model.text_encoder() is not None:
        return encoder_engine(loaded.model, config.inference, loaded.tokenizer, length=length, queue=queue)
    return make_engine(
        loaded.model,
        config.inference,
        loaded.tokenizer,
        end_tokens=stop_tokens,
        length=length,
        queue=queue,
        answer_start=loaded.answer_start,
    )
