"""Settings of text generation and serving; importing this imports neither jax nor flax."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from megajax.config.bounds import Bounds, Count, Index
from megajax.config.errors import Problem
from megajax.config.paths_and_store_urls import PathText
from megajax.kernels.paged.capability import PagedKernel
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.protocol import ModelConfig
from megajax.processes.xla_options import XlaConfig
from megajax.tokenizers.config import ByteTokenizerConfig, TokenizerBuilder, TokenizerConfig

type Dtype = Literal["float32", "bfloat16", "float16"]
type Drafts = Literal["text", "mtp"]
type ImageFit = Literal["pad", "crop", "stretch"]


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """The engine: its cache, the sizes of its steps, dtypes and kernels.

    Example: `mj.InferenceConfig(rows=64, cache_dtype="int8")`
    """

    rows: Count = 32
    """Maximum number of requests that generate at the same time, on each replica."""
    length: Annotated[int, Bounds(at_least=2)] | None = None
    """Maximum number of tokens of a request, prompt and answer. None: the model's sequence_length."""
    chunk: Count = 512
    """Maximum number of prompt tokens in a step, of one or several prompts, rounded up to whole tiles of 32. Longer
    prompts take several steps, while other requests continue."""
    block: Count = 16
    """Tokens of a block of the cache."""
    cache_tokens: Count | None = None
    """Tokens in the cache of each replica. None: as many as fit, see memory_share."""
    memory_share: Annotated[float, Bounds(above=0, at_most=1)] = 0.9
    """Share of the device memory left by the weights that the cache takes if cache_tokens is None. On CPUs, the cache
    has room for `rows` requests of `length` tokens, within a quarter of the free memory."""
    compute: Dtype = "bfloat16"
    """Dtype of weights and activations. With --run, the default is the run's precision.compute."""
    cache_dtype: Dtype | Literal["int8", "fp8"] | None = None
    """Dtype of the cache. None: the dtype `compute`. int8 and fp8 (e4m3) have a scale for each token and head."""
    kernel: PagedKernel = "auto"
    """Attention to the cache. auto: the fastest on the devices. triton: on NVIDIA GPUs. tiled: a tile of keys at a
    time. fixed: so, in the order of training's kernel=fixed. reference: gathers the keys and values of whole rows."""
    batch_invariant: bool = False
    """Compute every token in steps of one shape, so that a request's tokens do not depend on other requests. Steps
    with few requests then take as long as full ones."""
    equal_to_training: bool = False
    """Compute log-probabilities by the operations of training, in the same order: on CPUs they have the same bits as
    those of the run. Needs kernel=fixed in all attention layers, the run's parallel.tensor, and outside float32
    xla.options.xla_allow_excess_precision=false; mixtures need compute=bfloat16. Steps compute at least 64 rows."""
    look_ahead: bool = True
    """Start a step before the tokens of the previous one are read, so that the device does not wait for the host. With
    `speculate` steps begin with these tokens, and do not look ahead."""
    snapshots: Index = 8
    """For models with a state per request (Mamba): number of states that are kept, on each replica, at the ends of
    prompts and where they part, so that a prompt that begins like another one is computed from there on. 0: none."""
    speculate: Index = 0
    """Speculative decoding: a step verifies up to this many tokens for each request, which `drafts` gives. The
    answers are the same, in fewer steps if drafts are right. 0: none."""
    drafts: Drafts = "text"
    """text: the tokens that followed the request's last ones where they occurred before. mtp: by
    the model's heads of multi-token prediction; further tokens than they predict by its last head again."""
    warm_up: bool = True
    """`serve` compiles all steps before its first request. False: compile a step when first needed, as `generate`."""
    json_whitespace: bool = False
    """Allow spaces and line ends in answers that match a JSON schema. False: none, which takes the fewest tokens."""
    adapters: Index = 0
    """Number of low-rank adapters that may be loaded at the same time, one for each request."""
    adapter_rank: Count = 16
    """Maximum rank of these adapters. Each step computes `adapters` x `adapter_rank` columns beside each matrix."""
    image_fit: ImageFit = "crop"
    """Conversion of an image with another aspect ratio: padded with grey, cropped to the center, or stretched. With
    --run, the default is the run's data.fit."""
    template: PathText | None = None
    """Chat template: Jinja2 text, a file with a template, a model's folder, or a name such as chatml (see
    data.template). None: the template of the run's data or of the tokenizer's files."""

    def problems(self) -> list[Problem]:
        problems = []
        if self.equal_to_training:
            problems += self._equality_problems()
        elif self.kernel == "fixed":
            problems.append(Problem("kernel", "is fixed, without equal_to_training", "set equal_to_training=true"))
        if self.drafts == "mtp" and not self.speculate:
            message = "is mtp, and speculate=0, so that no step verifies drafts"
            problems.append(Problem("drafts", message, "set speculate to the number of tokens of a draft"))
        if self.cache_tokens is not None and self.cache_tokens < self.block:
            message = f"{self.cache_tokens} is less than a block of {self.block} tokens"
            problems.append(Problem("cache_tokens", message, "raise it, or lower block"))
        return problems

    def _equality_problems(self) -> Iterator[Problem]:
        """Settings that no training has."""
        used = {
            "kernel": self.kernel in ("auto", "fixed"),
            "cache_dtype": self.cache_dtype in (None, self.compute),
            "speculate": not self.speculate,
            "adapters": not self.adapters,
        }
        for name in (name for name, fits in used.items() if not fits):
            message = f"is {getattr(self, name)}, which equal_to_training does not allow"
            yield Problem(name, message, "leave it out, or set equal_to_training=false")


@dataclass(frozen=True, kw_only=True)
class InferenceParallelConfig:
    """How the devices share the work.

    Example: `mj.InferenceParallelConfig(expert=4, tensor=8)`
    """

    tensor: Count = 1
    """Number of devices over which each matrix is sharded."""
    expert: Count = 1
    """Number of devices over which the experts of a mixture are sharded, each time `tensor` devices. Each of them is a
    replica of all other layers, with separate requests."""
    data: Count | None = None
    """Replicas of the whole model. None: all devices / (`expert` x `tensor`)."""

    def layout(self) -> ParallelConfig:
        """The settings of the mesh."""
        return ParallelConfig(tensor=self.tensor, expert=self.expert, data=self.data, data_sharding="replicate")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Everything that generated text depends on, except the weights and the requests.

    Example: `mj.GenerationConfig(model=mj.gpt2("124m"), inference=mj.InferenceConfig(rows=8))`
    """

    model: DecoderConfig | ModelConfig
    """The model of the weights."""
    tokenizer: TokenizerConfig | TokenizerBuilder = field(default_factory=ByteTokenizerConfig)
    """Text to token ids and back."""
    parallel: InferenceParallelConfig = field(default_factory=InferenceParallelConfig)
    """How the devices share the work."""
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    """The engine."""
    xla: XlaConfig = field(default_factory=XlaConfig)
    """How programs are compiled and cached."""

    def problems(self, devices: int | None = None) -> list[Problem]:
        """Settings that do not fit the model, or the devices if their number is known."""
        return list(self._problems(devices))

    def length(self) -> int:
        """Maximum number of tokens of a request."""
        return self.inference.length or self.model.row_positions()

    def _problems(self, devices: int | None) -> Iterator[Problem]:
        layout = self.parallel.layout()
        if devices is not None:
            for problem in layout.device_problems(devices):
                yield replace(problem, setting=f"parallel.{problem.setting}".rstrip("."))
        for problem in self.model.parallel_problems(layout, None):
            yield replace(problem, setting=f"model.{problem.setting}")
        if self.length() > (trained := self.model.row_positions()):
            message = f"{self.length()} is more than model.sequence_length={trained}"
            yield Problem("inference.length", message, f"use at most {trained}, or set model.sequence_length as well")
