"""An engine for a loaded model, or for a training run on its mesh: the size of its cache, its steps, its kernel."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from megajax.batch import Params
from megajax.config.compose import problems_of
from megajax.config.errors import UserError
from megajax.display.text import byte_size
from megajax.inference.admission import AdapterTable, AnswerRules
from megajax.inference.config import InferenceConfig
from megajax.inference.device import ModelDevice, ModelWeights
from megajax.inference.encoder import EncoderDevice, EncoderPrograms
from megajax.inference.engine import Engine
from megajax.inference.images import image_leaves
from megajax.inference.loaded_model import CacheSize, LoadedModel, layers_apart, model_on_mesh
from megajax.inference.programs import Programs
from megajax.inference.sampling.chooser import choosers
from megajax.inference.sampling.guide import Guides, token_pieces
from megajax.inference.sampling_settings import GuideLimits
from megajax.inference.speculation.earlier_text import EarlierText
from megajax.inference.speculation.prediction_heads import FromStep, PredictionHeads, heads_alone
from megajax.inference.step_arrays import buckets_up_to
from megajax.kernels.attention.attention import local_device
from megajax.kernels.paged.capability import PagedKernel, PagedRequest, choose_paged
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.cache_spec import EIGHT_BIT, CacheLeaf, stored_leaves
from megajax.layers.moe.config import MoEConfig
from megajax.mesh.config import DATA_AXES, ParallelConfig, devices_over
from megajax.mesh.mesh import build_mesh
from megajax.models.decoder.config import DecoderConfig
from megajax.models.protocol import ModelConfig, ids_below
from megajax.precision.config import PrecisionConfig
from megajax.processes.peers import Peers
from megajax.tokenizers.base import Tokenizer

TILE = 32
"""Tokens of a tile of a prompt: the most that a prompt is padded by, and the queries that read the same keys."""
CPU_SHARE = 0.25
"""Maximum share of the host's free memory for the cache, if devices do not report their memory."""
EQUAL_ROWS = 64
"""Least rows of a step with `equal_to_training`. On CPUs, products with 56 rows or more gave the same bits for any
number of rows; those with 2 to 48 gave others."""
LARGEST_POOL = 2**30
"""Maximum number of tokens in a replica's pool; `step_arrays` uses larger numbers for invalid slots."""
HOST = Path("/proc/meminfo")


def make_engine(
    model: LoadedModel,
    config: InferenceConfig,
    tokenizer: Tokenizer,
    *,
    end_tokens: Collection[int],
    length: int,
    queue: int,
    answer_start: tuple[int, ...] = (),
    each_process: bool = False,
    guide_limits: GuideLimits | None = None,
) -> Engine:
    """Steps are compiled when first needed; see `ModelDevice.programs`.

    end_tokens: tokens that end an answer; length: maximum number of tokens of a row; queue: maximum number of waiting
    requests; answer_start: as in `AnswerRules`; each_process: all processes have such an engine and give it the same
    requests, instead of one that leads; guide_limits: as in
    `Guides`. Raises UserError if there is no memory for the cache, if a layer cannot take
    back the tokens of a draft, and for drafts by heads that the model lacks.
    """
    least = 2
    if config.equal_to_training:
        demand_equality(model, config)
        least, config = EQUAL_ROWS, replace(config, kernel="fixed", rows=max(EQUAL_ROWS, config.rows))
    dtype = config.cache_dtype or config.compute
    vocabulary, chunk = min(ids_below(model.cfg) or 0, tokenizer.vocabulary_size), min(config.chunk, length)
    tensor, invariant = model.mesh.shape["tensor"], config.batch_invariant
    # A recurrence runs over a whole prompt, and an encoder reads the text of one.
    tiled = all(leaf.per == "token" for leaf in model.cfg.cache_leaves(tensor))
    tile = min(TILE, chunk) if tiled else chunk
    buckets = buckets_up_to(max(2, config.rows), chunk, tile, drafts=config.speculate, invariant=invariant, least=least)
    predicting = heads_alone(model.cfg, config.speculate) if config.drafts == "mtp" else None
    size = cache_size(config, length, model, dtype, () if predicting is None else predicting.cache_leaves(tensor))
    model, heads, settings = for_steps(model), None, dict[str, Any](length=length, dtype=dtype)
    if predicting is not None:
        # Rows have drafts in almost all steps.
        buckets = tuple(bucket for bucket in buckets if bucket.drafts)
        kernel = choose_kernel(config.kernel, predicting, config.compute, dtype)
        heads = PredictionHeads(model, size, buckets=buckets, vocabulary=vocabulary, kernel=kernel, **settings)
    programs = Programs(
        model,
        size,
        buckets=buckets,
        choosers=choosers(vocabulary, invariant=invariant),
        kernel=choose_kernel(config.kernel, model.cfg, config.compute, dtype),
        heads=heads,
        **settings,
    )
    whitespace = config.json_whitespace
    pieces = partial(token_pieces, tokenizer, vocabulary)
    guides = Guides(pieces, end_tokens, whitespace=whitespace, limits=guide_limits)
    adapters = None if model.adapters is None else AdapterTable(model.adapters.count, programs.write_adapter)
    device = ModelDevice(programs, vocabulary)
    rules = AnswerRules(
        tokenizer=tokenizer,
        end_tokens=end_tokens,
        answer_start=answer_start,
        guide=guides.start,
        drafter=EarlierText if heads is None else FromStep,
    )
    # Processes that follow would keep theirs.
    weights = ModelWeights(programs) if each_process or not model.mesh.is_multi_process else None
    return Engine(device, rules, queue=queue, adapters=adapters, weights=weights, look_ahead=config.look_ahead)


def demand_equality(model: LoadedModel, config: InferenceConfig) -> None:
    """Raises UserError unless log-probabilities of `config.equal_to_training` can equal those of training."""
    cfg, excess = model.cfg, "xla_allow_excess_precision"
    problems = [f"inference.{problem.setting} {problem.message}" for problem in problems_of(config)]
    if config.compute != "float32" and model.options.get(excess) is not False:
        problems.append(
            f"in {config.compute}, XLA may skip roundings: set xla.options.{excess}=false, also in training"
        )
    if not isinstance(cfg, DecoderConfig):
        problems.append(f"{type(cfg).__name__} is not a decoder")
    for setting, mixer in cfg.own_mixers("stack").items() if isinstance(cfg, DecoderConfig) else ():
        if not isinstance(mixer, AttentionConfig) or mixer.sink != "none" or mixer.relative is not None:
            kind = type(mixer).__name__.removesuffix("Config")
            problems.append(f"model.{setting} ({kind}) has other operations in training than in steps")
        elif mixer.kernel != "fixed":
            problems.append(f"model.{setting}.kernel is {mixer.kernel}: set it to fixed, also in training")
    blocks = cfg.named_blocks().values() if isinstance(cfg, DecoderConfig) else ()
    if config.compute == "float32" and any(isinstance(block.mlp, MoEConfig) for block in blocks):
        problems.append("in float32, the softmax over experts has other bits in steps of few tokens: use bfloat16")
    if problems:
        raise UserError("\n  ".join(["inference.equal_to_training=true:", *problems]))


def encoder_engine(
    model: LoadedModel, config: InferenceConfig, tokenizer: Tokenizer, *, length: int, queue: int
) -> Engine:
    """An engine that gives embeddings. Programs are compiled when first needed; the arguments as in `make_engine`.

    Raises UserError for settings that need a model of text.
    """
    for setting, value in (("adapters", config.adapters), ("speculate", config.speculate)):
        if value:
            name = type(model.cfg).__name__
            raise UserError(f"inference.{setting}={value}: {name} gives embeddings, and no text. Set it to 0")
    vocabulary = min(ids_below(model.cfg) or 0, tokenizer.vocabulary_size)
    device = EncoderDevice(EncoderPrograms(for_steps(model), rows=config.rows, length=length), vocabulary)
    return Engine(device, AnswerRules(tokenizer=tokenizer), queue=queue)


def for_steps(model: LoadedModel) -> LoadedModel:
    """The model with its weights as steps read them without a copy: those of each layer apart on CPUs."""
    return layers_apart(model) if model.mesh.devices.flat[0].platform == "cpu" else model


def choose_kernel(kernel: PagedKernel, model: ModelConfig, compute: str, stored: str) -> PagedKernel:
    """One kernel for attention to the cache in all layers of a model, on the first device jax finds.

    compute: dtype of queries; stored: of the cache, or int8 or fp8. Raises UserError if the named kernel does not
    support a layer or the device.
    """
    requests = model.paged_requests(PagedRequest(dtype=compute, stored=EIGHT_BIT.get(stored, stored)))
    return choose_paged(kernel, requests, local_device(), "inference.kernel").kernel


def cache_size(
    config: InferenceConfig, length: int, model: LoadedModel, dtype: str, of_heads: Sequence[CacheLeaf] = ()
) -> CacheSize:
    """The cache of each replica: as configured, or as large as fits beside the weights.

    length: most tokens of a row; of_heads: leaves of the cache of heads, which has as many blocks. Raises UserError
    where that is less than a block.
    """
    rows, needed = max(2, config.rows), max(2, config.rows) * -(-length // config.block)
    cfg, tensor = model.cfg, model.layout.plan.tensor
    states = any(leaf.per == "row" for leaf in cfg.cache_leaves(tensor))
    # The memory of an encoder belongs to a request.
    snapshots = config.snapshots if states and not cfg.memory_length() else 0
    size = CacheSize(blocks=needed, block=config.block, slots=rows, snapshots=snapshots)
    if config.cache_tokens is not None:
        return replace(size, blocks=config.cache_tokens // config.block)
    bytes_of = {"token": 0, "row": 0}
    for leaves in ((*cfg.cache_leaves(tensor, config.speculate), *image_leaves(cfg)), of_heads):
        like = model.like_cache(leaves, replace(size, blocks=1), dtype)
        for leaf in stored_leaves(leaves, dtype):
            bytes_of[leaf.per] += shard_bytes(like[leaf.name])
    if not bytes_of["token"]:
        return size
    free = least_free_memory(model.mesh)
    usable = free.bytes * (config.memory_share if free.from_devices else CPU_SHARE) - bytes_of["row"]
    blocks = int(usable // bytes_of["token"])
    if blocks < 1:
        of_block = f"a block of {config.block} tokens takes {byte_size(bytes_of['token'])}"
        sizes = f"{byte_size(free.bytes)} are free on a device, and {of_block}"
        raise UserError(f"the cache has no room: {sizes}. Use more devices (parallel.tensor)")
    return replace(size, blocks=min(blocks, LARGEST_POOL // config.block if free.from_devices else needed))


def shard_bytes(like: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on one device."""
    sharding = like.sharding
    return prod(sharding.shard_shape(like.shape)) * like.dtype.itemsize


class FreeMemory(NamedTuple):
    """Memory available for arrays."""

    bytes: int
    """Bytes on one device."""
    from_devices: bool
    """Whether the devices report their memory; else they share the memory of the host."""


def least_free_memory(mesh: Mesh) -> FreeMemory:
    """Free memory of the fullest device of a mesh, the same in all processes."""
    free = free_memory(mesh.local_devices)
    return free._replace(bytes=min(Peers().gather(free.bytes)))


def free_memory(devices: Sequence[jax.Device]) -> FreeMemory:
    """Free memory of the fullest device; for CPUs, an equal share of the host's free memory."""
    stats = [device.memory_stats() or {} for device in devices]
    if all({"bytes_in_use", "bytes_limit"} <= counts.keys() for counts in stats):
        return FreeMemory(min(counts["bytes_limit"] - counts["bytes_in_use"] for counts in stats), True)
    available = re.search(r"MemAvailable:\s+(\d+) kB", HOST.read_text() if HOST.exists() else "")
    free = int(available[1]) * 1024 if available else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return FreeMemory(free // len(devices), False)


class RunSettings(Protocol):
    """The settings of a run that an engine depends on."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def precision(self) -> PrecisionConfig: ...
    @property
    def batch(self) -> Any: ...


def engine_refusal(model: ModelConfig, mesh: Mesh) -> str | None:
    """Why no engine can use the weights of a model on this mesh as they are; None if one can."""
    if jax.process_count() > 1:
        return f"the run has {jax.process_count()} processes, an engine has one"
    if axes := [f"{name}={mesh.shape[name]}" for name in ("pipeline", "context") if mesh.shape[name] > 1]:
        return f"the mesh has {' and '.join(axes)}, an engine shards over data, expert and tensor only"
    return model_refusal(model, mesh.shape["tensor"])


def model_refusal(model: ModelConfig, tensor: int) -> str | None:
    """Why a model can't generate texts with an engine over `tensor` devices; None if it can."""
    try:
        model.cache_leaves(tensor)
    except UserError as error:
        return str(error)
    return "encoder-decoder models continue no text" if model.memory_length() else None


def engine_layout(mesh: Mesh) -> tuple[ParallelConfig, Mesh]:
    """The layout and mesh of an engine on the devices of a run: its `tensor` and `expert`, else replicas."""
    sizes = {name: mesh.shape[name] for name in ("expert", "tensor")}
    data, others = devices_over(mesh.shape, DATA_AXES), devices_over(mesh.shape, ("pipeline", "context"))
    parallel = ParallelConfig(data=data * others, **sizes, data_sharding="replicate")
    return parallel, mesh if others == 1 else build_mesh(parallel, list(mesh.devices.flat))


def engine_of_run(
    cfg: RunSettings,
    arrays: Params,
    mesh: Mesh,
    options: Mapping[str, Any],
    tokenizer: Tokenizer,
    config: InferenceConfig,
    *,
    end_tokens: Collection[int],
    length: int,
    queue: int,
    parallel: ParallelConfig | None = None,
) -> Engine:
    """An engine for a mesh without `engine_refusal`, with the weights of a run that goes on training: `Engine.refit`
    gives it those of later steps, without a file and without compiling. Several processes each have an engine, which
    takes the same steps as long as all call the same methods with equal requests that have seeds.

    arrays: weights and observations of a training state; options: compiler options; config: its compute dtype is the
    run's; parallel: another layout of the same devices for the engine, None: the mesh as it is. The others: as in
    `make_engine`. Raises UserError where `config.equal_to_training` cannot hold.
    """
    if config.equal_to_training and (tokens := cfg.batch.micro_size * cfg.model.row_positions()) < EQUAL_ROWS:
        raise UserError(
            f"inference.equal_to_training=true: a microbatch of batch.micro_size={cfg.batch.micro_size} has {tokens} "
            f"tokens, and products with fewer than {EQUAL_ROWS} are summed in another order: raise batch.micro_size"
        )
    if parallel is None:
        parallel, mesh = engine_layout(mesh)
    else:
        for name in ("expert", "tensor") if config.equal_to_training else ():
            if (size := getattr(parallel, name)) != mesh.shape[name]:
                message = f"the engine has parallel.{name}={size}, and the run has {mesh.shape[name]}"
                raise UserError(f"inference.equal_to_training=true: {message}: set them to the same number")
        mesh = build_mesh(parallel, list(mesh.devices.flat))
    model = model_on_mesh(cfg.model, arrays, parallel, mesh, cfg.precision, options)
    config = replace(config, compute=cfg.precision.compute)
    return make_engine(model, config, tokenizer, end_tokens=end_tokens, length=length, queue=queue, each_process=True)
