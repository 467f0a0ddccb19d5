"""Loads a model for text generation from a run or a Hugging Face folder, with or without adapters."""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from megajax.batch import Params
from megajax.checkpoint.weight_source import WeightSource
from megajax.config.errors import UserError
from megajax.config.hints import listed
from megajax.data.chat.choose_template import of_folder
from megajax.inference.assembly import encoder_engine, for_steps, make_engine
from megajax.inference.config import GenerationConfig
from megajax.inference.engine import Engine
from megajax.inference.loaded_model import LoadedModel, demand_shapes, load_weights, stored_specs
from megajax.inference.sampling_settings import GuideLimits
from megajax.interop.huggingface.folder import CONFIG
from megajax.interop.huggingface.format import START_TOKEN
from megajax.interop.peft.format import with_adapter
from megajax.interop.weights.fit import weights_of
from megajax.interop.weights.formats import Reading, named, open_stored, split_name
from megajax.interop.weights.model_differences import demand_same_model
from megajax.interop.weights.model_parts import served, without_quantization
from megajax.interop.weights.regrouped import groups_of, regrouped
from megajax.interop.weights.stored_model import StoredModel
from megajax.layers.lora.add_adapters import AdapterSlots
from megajax.layers.low_rank import ADAPTERS
from megajax.layers.param import Adapter, specs
from megajax.mesh.replicated_heads import with_copied_heads
from megajax.mesh.sharding_rules import Plan
from megajax.models.protocol import ModelConfig, ids_below
from megajax.precision.config import PrecisionConfig
from megajax.tokenizers.base import Tokenizer, end_tokens_of
from megajax.tokenizers.chat_template import ChatTemplate
from megajax.tokenizers.conversation import Conversation
from megajax.tokenizers.folder import FolderTokens, tokenizer_folder
from megajax.training.check_compiler_options import inference_options
from megajax.training.resolved import fitting_mesh
from megajax.training.session import build_tokenizer


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


def load(config: GenerationConfig, name: str | Path, reading: Reading | None = None) -> Loaded:
    """A stored model with the settings of `origin.generation_config` and the command line.

    name, reading: as in `open_stored`. Raises UserError if the settings do not fit the devices, or if the weights or
    the tokenizer do not fit the model.
    """
    if (encoder := config.model.text_encoder()) is not None:
        config = replace(config, model=encoder)
    parallel, inference = config.parallel.layout(), config.inference
    mesh = fitting_mesh(config, parallel)
    remedy = "set the tokenizer that the weights were trained with"
    tokenizer = build_tokenizer(config.tokenizer, ids_below(config.model), remedy)
    folder, stored = tokenizer_folder(config.tokenizer), open_stored(name, reading)
    answer_start = start_of_answers(config.model, stored, tokenizer)
    if inference.template is not None and answer_start:
        raise UserError("inference.template: the model has an encoder, which reads texts, no messages: remove it")
    conversation, setting = None, "inference.template"
    if inference.template is not None:
        conversation = Conversation(ChatTemplate(of_folder(inference.template, setting), setting), tokenizer)
    weights = weights_of(stored, config.model)
    options = inference_options(config.xla, mesh.devices.flat[0])
    adapters = AdapterSlots(inference.adapters, inference.adapter_rank) if inference.adapters else None
    precision = PrecisionConfig(compute=inference.compute)
    return Loaded(
        config,
        load_weights(config.model, weights, Plan.of(parallel), mesh, precision, options, adapters),
        tokenizer,
        end_tokens_of(tokenizer) | (frozenset() if folder is None else FolderTokens(folder).ends),
        conversation,
        weights.where,
        answer_start,
    )


def start_of_answers(model: ModelConfig, stored: StoredModel, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token before every answer of a model with an encoder; none without an encoder.

    Raises UserError if it is not known.
    """
    if not model.memory_length():
        return ()
    if not split_name(stored.name)[0]:
        token, place = tokenizer.specials.get("bos"), "the tokenizer has no bos"
    else:
        token, place = stored.origin.settings.get(START_TOKEN), f"{stored.files}/{CONFIG} has no {START_TOKEN}"
    if type(token) is not int:
        raise UserError(f"{place}, the token with which the decoder's answers begin: add it")
    return (token,)


def adapter_reader(loaded: Loaded, name: str | Path, reading: Reading | None = None) -> Callable[[Path], Params]:
    """Reads an adapter of a loaded model, a PEFT folder or a run, as the values of `Engine.load_adapter`.

    name, reading: as in `load`. It may be called from any thread, and by one of several processes. Raises UserError for
    an adapter that does not fit the model or its slots.
    """
    single = replace(reading or Reading(), single=True)
    base = open_stored(name, single)

    def read(folder: Path) -> Params:
        adapted = with_adapter(base, folder, single)
        lora = adapted.model.lora
        if lora.decomposed:
            raise UserError(f"{folder} is a DoRA adapter, which can't be one of several: merge it with --adapter")
        adapter = regrouped(adapted.weights, groups_of(adapted.declared), groups_of(specs(loaded.model.model, Adapter)))
        paths = [path for path in adapter.shapes if path.endswith(ADAPTERS)]
        return slot_values(loaded.model, adapter, paths, lora.rank, lora.scale())

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


def weight_reader(loaded: Loaded, reading: Reading | None = None) -> Callable[[Path], Callable[[], Params]]:
    """Reads other weights of a loaded model for `Engine.refit`: a run, one of its steps, or a Hugging Face folder.

    A folder is opened and compared with the model -> a function that loads the weights; both may be called from any
    thread. Raises UserError for a folder that can't be read and for another model.
    """
    config, described = loaded.config, loaded.model.described()
    model, plain = config.model, without_quantization(config.model)
    single = replace(reading or Reading(), adapter=None, single=True)

    def read(folder: Path) -> Callable[[], Params]:
        stored = open_stored(named(folder), single)
        message = f"{folder} (here) has the weights of another model than the engine's (there):"
        demand_same_model(without_quantization(served(stored.model)), plain, message)
        weights, precision = weights_of(stored, model), PrecisionConfig(compute=config.inference.compute)
        demand_shapes(weights, stored_specs(described.model))

        def make() -> Params:
            settings = Plan.of(config.parallel.layout()), described.mesh, precision, described.options
            return for_steps(load_weights(model, weights, *settings)).weights

        return make

    return read


def start_engine(loaded: Loaded, *, queue: int, guide_limits: GuideLimits | None = None) -> Engine:
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
        guide_limits=guide_limits,
    )
