"""A family of decoders as a table: what differs from Llama in its settings, layers and names of tensors.

A table reads config.json, writes it and names the tensors. Parts that are not values are objects: where positions are
rotated, which layers have windows, how experts are described.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from megajax.interop.huggingface import balanced_experts, decoders
from megajax.interop.huggingface.decoders import LAYER, MIXER, experts, gated, outer_rows
from megajax.interop.huggingface.family import Family, Settings, layers_of, norm
from megajax.interop.huggingface.rotary import ROPE, layered_rope, layered_rope_settings, rope, rope_settings, ropes_of
from megajax.interop.weights.name_mapping import Row
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import NormPlacement
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.moe.config import FeedForwardConfig, MoEConfig
from megajax.layers.norm.config import LayerNormConfig, RMSNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.models.decoder.config import DecoderConfig

type RopeOf = Callable[[int, bool], RopeConfig | None]
"""(number of a layer, whether it has a sliding window) -> its rotary positions."""
type Slides = Callable[[int], bool]
"""Number of a layer -> whether it has a sliding window."""
type FeedForwardOf = Callable[[int], FeedForwardConfig]
"""Number of a layer -> its feed-forward config."""

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "head_dim", "max_position_embeddings")


def sizes(*values: int | None, **more: Any) -> dict[str, Any]:
    """Settings that config.json may lack: those of `SIZES` in this order, None for what the family derives."""
    defaults = dict(zip(SIZES, values, strict=False))
    return {name: value for name, value in defaults.items() if value is not None} | {"rms_norm_eps": 1e-6} | more


@dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """Rotary positions that all layers have."""

    base: float = 10000.0
    """Default of rope_theta."""
    interleaved: bool = False
    fraction: float | None = None
    """Default of partial_rotary_factor; None: whole heads are rotated."""
    assumed: Mapping[str, Any] | None = None
    """Default of rope_parameters."""

    def rotation(self, settings: Settings) -> RopeConfig:
        """The settings of rotated layers."""
        if (
            self.assumed
            and not settings.remaining.get("rope_parameters")
            and not settings.remaining.get("rope_scaling")
        ):
            settings.remaining["rope_parameters"] = self.assumed
        settings.assume({"partial_rotary_factor": self.fraction or 1.0})
        partial = self.fraction is not None
        rotation = rope(settings, settings.peek("max_position_embeddings"), base=self.base, partial=partial)
        return replace(rotation, interleaved=self.interleaved)

    def read(self, settings: Settings) -> RopeOf:
        """The rotary positions of each layer."""
        rotation = self.rotation(settings)
        return lambda layer, slides: rotation

    def write(self, cfg: DecoderConfig) -> dict[str, Any]:
        """The settings of `read`."""
        ropes = [mixer.rope for mixer in decoders.attention_mixers(cfg)]
        rotation = next((rotation for rotation in ropes if rotation is not None), RopeConfig(base=self.base))
        fraction = {} if self.fraction is None else {"partial_rotary_factor": rotation.fraction}
        return {**rope_settings(rotation), **fraction}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlidingPositions(Positions):
    """Rotary positions of layers with sliding windows."""

    always: bool = False
    """A model without a window has none; otherwise, all its layers have them."""

    def read(self, settings: Settings) -> RopeOf:
        rotation, windowed = self.rotation(settings), bool(settings.remaining["sliding_window"])
        return lambda layer, slides: rotation if slides or not (windowed or self.always) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayeredPositions(Positions):
    """Other rotary positions in layers with sliding windows."""

    local: float
    """Default of their base."""
    named: bool = False
    """config.json has their base as rope_local_base_freq."""

    def read(self, settings: Settings) -> RopeOf:
        length = settings.peek("max_position_embeddings")
        full, local = layered_rope(settings, length, base=self.base, local_base=self.local)
        return lambda layer, slides: local if slides else full

    def write(self, cfg: DecoderConfig) -> dict[str, Any]:
        full, local = ropes_of(cfg, full=RopeConfig(base=self.base), local=RopeConfig(base=self.local))
        implied = RopeConfig(base=local.base if self.named else self.local)
        name = {"rope_local_base_freq": local.base} if self.named else {}
        return {**layered_rope_settings(full, local, implied), **name}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPositions(Positions):
    """Rotary positions of the layers in no_rope_layers, which are 1 there; if it is absent, of all but every n-th."""

    def read(self, settings: Settings) -> RopeOf:
        rotation, every, layers = self.rotation(settings), settings.count("no_rope_layer_interval"), settings.layers()
        settings.remaining["num_hidden_layers"] = layers
        rotated = settings.take("no_rope_layers", kind=list) or [(layer + 1) % every for layer in range(layers)]
        if len(rotated) != layers:
            settings.refuse("no_rope_layers", f"({len(rotated)} layers)", f"num_hidden_layers={layers}")
            rotated = [1] * layers
        return lambda layer, slides: rotation if rotated[layer] else None

    def write(self, cfg: DecoderConfig) -> dict[str, Any]:
        rotated = [int(mixer.rope is not None) for mixer in decoders.attention_mixers(cfg)]
        return {**Positions.write(self, cfg), "no_rope_layers": rotated}


class NoPositions(Positions):
    """No rotary positions."""

    def read(self, settings: Settings) -> RopeOf:
        return lambda layer, slides: None

    def write(self, cfg: DecoderConfig) -> dict[str, Any]:
        return {}


class Windows(NamedTuple):
    """Sliding windows."""

    slides: Callable[[Settings], Slides]
    """The layers that have one if there is no layer_types."""
    names: tuple[str, ...] = ("sliding_window", "layer_types")
    """Settings that an export writes."""


def all_but_every(count: int | str) -> Windows:
    """All layers but the last of so many; of a setting's value, which may also be letters, L for a window."""

    def slides(settings: Settings) -> Slides:
        pattern = count if isinstance(count, int) else settings.take(count, kind=object)
        if isinstance(pattern, str):
            return lambda layer: pattern[layer % len(pattern)] == "L"
        return lambda layer: (layer + 1) % pattern != 0

    return Windows(slides)


def _from_layer(settings: Settings) -> Slides:
    first = settings.take("max_window_layers", 0)
    return lambda layer: layer >= first


EVERYWHERE = Windows(lambda _: lambda layer: True, ("sliding_window",))
FROM_LAYER = Windows(_from_layer)


class Experts(NamedTuple):
    """Layers with experts."""

    read: Callable[[Settings, GatedMLPConfig], FeedForwardOf]
    """mlp: a layer without experts."""
    write: Callable[[Any], dict[str, Any]]
    rows: Sequence[Row] = ()
    """Further tensors."""


def plain_experts(settings: Settings, mlp: GatedMLPConfig) -> MoEConfig:
    """Experts by softmax, each a copy of `mlp`."""
    return MoEConfig(
        experts=settings.count("num_experts"),
        top_k=settings.count("num_experts_per_tok"),
        expert=mlp,
        router=decoders.router(settings),
    )


def _read_plain(settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    moe = plain_experts(settings, mlp)
    return lambda _: moe


def _read_weighted(settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    moe = plain_experts(settings, mlp)
    normalise = "chosen" if settings.take("norm_topk_prob", False) else "all"
    moe = replace(moe, router=replace(moe.router, normalise=normalise))
    return lambda _: moe


def _write_plain(cfg: DecoderConfig) -> dict[str, Any]:
    return {"num_experts": decoders.feed_forwards(cfg).moe.experts}


def _write_weighted(cfg: DecoderConfig) -> dict[str, Any]:
    return {**_write_plain(cfg), "norm_topk_prob": decoders.feed_forwards(cfg).moe.router.normalise == "chosen"}


def _read_balanced(by_kinds: bool, settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    dense = balanced_experts.dense_layers(settings, by_kinds=by_kinds)
    moe = balanced_experts.balanced(settings, balanced_experts.experts(settings, mlp))
    return lambda layer: mlp if layer in dense else moe


PLAIN = Experts(_read_plain, _write_plain)
"""Experts in all layers, by softmax."""
WEIGHTED = Experts(_read_weighted, _write_weighted)
"""The same, with norm_topk_prob, which is usually false."""
BALANCED = Experts(partial(_read_balanced, False), balanced_experts.write_balanced, [balanced_experts.BIAS])
"""DeepSeek-V3's."""
BALANCED_BY_KINDS = Experts(
    partial(_read_balanced, True), partial(balanced_experts.write_balanced, by_kinds=True), [balanced_experts.BIAS]
)
"""The same, with mlp_layer_types."""

PLACES: Mapping[str, Mapping[str, str]] = {
    "pre": {"input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm"},
    "input": {"input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm"},
    "parallel": {"input_layernorm": "norm"},
    "parallel_norms": {"input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm"},
    "output": {"post_attention_layernorm": "mixer_norm", "post_feedforward_layernorm": "mlp_norm"},
    "sandwich": {
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "mixer_output_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_output_norm",
    },
}
"""Placement of norms -> name of a norm in most families -> name of the module."""
QKV = tuple(f"stack.*.mixer.{name}" for name in ("query", "key", "value"))
FUSED_MIXER = [
    Row(f"{LAYER}.self_attn.qkv_proj.weight", QKV, "(n h) d -> d n h"),
    Row(f"{LAYER}.self_attn.qkv_proj.bias", tuple(f"{path}_bias" for path in QKV), "(n h) -> n h"),
    *(row for row in MIXER if not re.search(r"\.[qkv]_proj\.", row.tensor)),
]
"""Attention with queries, keys and values in one tensor."""
OUTPUT = [row for row in MIXER if ".o_proj." in row.tensor or "_norm." in row.tensor]
"""Attention without queries, keys and values."""
SINKS = Row(f"{LAYER}.self_attn.sinks", "stack.*.mixer.core.sink")
FEED_FORWARD = [
    *gated(f"{LAYER}.mlp", "stack.*.mlp"),
    *experts(f"{LAYER}.mlp"),
    *gated(f"{LAYER}.mlp.shared_experts", "stack.*.mlp.shared"),
]
"""A feed-forward with or without a gate, experts and shared ones."""
FUSED_FEED_FORWARD = [
    Row(f"{LAYER}.mlp.gate_up_proj.weight", ("stack.*.mlp.gate", "stack.*.mlp.up"), "o i -> i o"),
    Row(f"{LAYER}.mlp.down_proj.weight", "stack.*.mlp.down", "o i -> i o"),
]
"""Gate and up in one tensor."""


def fused(
    tensor: str, groups: Callable[[AttentionConfig], int], order: Sequence[str] = QKV
) -> Callable[[list[Row], DecoderConfig], list[Row]]:
    """`Decoder.finish` for queries, keys and values in one tensor, in this order for each group of heads."""

    def finish(rows: list[Row], cfg: DecoderConfig) -> list[Row]:
        parts: dict[str, Any] = {"axis": 1, "sizes": {"g": groups(layers_of(cfg)[0].mixer)}}
        paths, biases = tuple(order), tuple(f"{path}_bias" for path in order)
        return [
            *rows,
            Row(f"{tensor}.weight", paths, "g (n h) d -> d (g n) h", split="(g x) d -> g x d", **parts),
            Row(f"{tensor}.bias", biases, "g (n h) -> (g n) h", split="(g x) -> g x", **parts),
        ]

    return finish


def one_group(settings: Settings) -> None:
    """For classes without grouped queries and without a head size, whatever config.json says of them."""
    for name in ("num_key_value_heads", "head_dim"):
        settings.remaining.pop(name, None)


class Decoder(NamedTuple):
    """A family of decoders."""

    name: str
    architecture: str
    defaults: Mapping[str, Any]
    """Values of settings that are missing from config.json, see `sizes`."""
    settings: Mapping[str, str] = {}
    """Names of settings -> those of Llama or DeepSeek."""
    tensors: Mapping[str, str] = {}
    """Parts of names of tensors that other families have -> those of the family."""
    bias: str | bool = False
    """Biases of all matrices of attention, or their setting."""
    qkv_bias: str | bool | None = None
    """Of queries, keys and values; None: as `bias`."""
    mlp_bias: str | bool = False
    norm: RMSNormConfig | LayerNormConfig = RMSNormConfig()
    placement: NormPlacement = "pre"
    norms: Mapping[str, Mapping[str, str]] = PLACES
    """Placement of norms -> name of a norm -> name of the module."""
    qk_norm: Literal["", "head", "heads"] = ""
    """Norms of queries and keys; "": none."""
    positions: Positions = Positions()
    windows: Windows | None = None
    gate: bool = True
    """Whether the feed-forward has a gate."""
    activation: str = "hidden_act"
    """Name of the setting."""
    experts: Experts | None = None
    prepare: Callable[[Settings], None] = lambda settings: None
    """Changes settings before they are read."""
    mixer: Callable[[Settings], dict[str, Any]] = lambda settings: {}
    """Further fields of AttentionConfig."""
    mixers: Callable[[Settings, Sequence[AttentionConfig]], Sequence[Any]] = lambda settings, attention: attention
    """The mixer of each layer, from the attention of each."""
    model: Callable[[Settings], dict[str, Any]] = lambda settings: {}
    """Further arguments of `decoders.decoder`."""
    written: Callable[[Any], dict[str, Any]] = lambda cfg: {}
    """Settings of a model config for the two."""
    mixer_rows: Sequence[Row] = MIXER
    mlp_rows: Sequence[Row] = FEED_FORWARD
    finish: Callable[[list[Row], DecoderConfig], list[Row]] = lambda rows, cfg: rows
    """Changes the table of names."""
    unused: tuple[str, ...] = ()
    """Patterns of settings without effect."""
    parts: Mapping[str, Any] = {}
    """Further fields of Family."""

    def read(self, settings: Settings) -> Any:
        """config.json -> model config."""
        settings.rename(self.settings)
        settings.assume({"num_hidden_layers": 32, **self.defaults})
        self.prepare(settings)
        bias, qkv_bias, mlp_bias = self._biases(settings)
        layers, length = settings.layers(), settings.peek("max_position_embeddings")
        settings.remaining["num_hidden_layers"] = layers
        normalisation = replace(self.norm, epsilon=settings.peek("rms_norm_eps"))
        rope_of = self.positions.read(settings)
        window, sliding = None, [False] * layers
        if self.windows is not None:
            window, sliding = decoders.windows(settings, layers, length, self.windows.slides(settings))
        fields: dict[str, Any] = {"qk_norm": normalisation, "qk_norm_over": self.qk_norm} if self.qk_norm else {}
        mixer = AttentionConfig(
            **decoders.heads(settings),
            bias=bias,
            qkv_bias=None if qkv_bias == bias else qkv_bias,
            **{**fields, **self.mixer(settings)},
        )
        activation = settings.activation(self.activation, "silu")
        mlp: Any = (GatedMLPConfig if self.gate else DenseMLPConfig)(
            ffn=settings.count("intermediate_size"), activation=activation, bias=mlp_bias
        )
        changes: dict[str, Any] = {"norm": normalisation, "norm_placement": self.placement, **self.model(settings)}
        mixers = [
            replace(mixer, window=window if slides else None, rope=rope_of(layer, slides))
            for layer, slides in enumerate(sliding)
        ]
        feed_forward = self.experts.read(settings, mlp) if self.experts else lambda _: mlp
        every = self.mixers(settings, mixers)
        settings.take("rms_norm_eps")
        return decoders.with_scores(settings, decoders.decoder(settings, every, feed_forward, **changes))

    def _biases(self, settings: Settings) -> tuple[bool, bool, bool]:
        names = (self.bias, self.bias if self.qkv_bias is None else self.qkv_bias, self.mlp_bias)
        values = {name: settings.take(name, False) for name in {*names} if isinstance(name, str)}
        bias, qkv_bias, mlp_bias = (values.get(name, name) for name in names)
        return bias, qkv_bias, mlp_bias

    def write(self, cfg: DecoderConfig) -> dict[str, Any]:
        """The reverse of `read`."""
        mixer, mlps = decoders.attention_mixers(cfg)[0], [block.mlp for block in layers_of(cfg)]
        moe = next((mlp for mlp in mlps if isinstance(mlp, MoEConfig)), None)
        settings = decoders.write(cfg, *(self.windows.names if self.windows else ()), moe=moe)
        settings[self.activation] = settings.pop("hidden_act")
        biases = {self.mlp_bias: (moe.expert if moe else mlps[0]).bias, self.bias: mixer.bias}
        biases[self.qkv_bias] = mixer.has_qkv_bias()
        settings.pop("attention_bias")
        settings |= {name: value for name, value in biases.items() if isinstance(name, str)}
        settings = {name: value for name, value in settings.items() if name not in ROPE} | self.positions.write(cfg)
        settings |= self.experts.write(cfg) if self.experts else {}
        settings |= self.written(cfg) | decoders.scores_settings(cfg, self.architecture)
        theirs = {name: theirs for theirs, name in self.settings.items()}
        return {theirs.get(name, name): value for name, value in settings.items()}

    def rows(self, cfg: DecoderConfig) -> list[Row]:
        """The table of names."""
        norms = self.norms[layers_of(cfg)[0].norm_placement]
        rows = [
            *outer_rows(cfg),
            *self.mixer_rows,
            *(row for theirs, module in norms.items() for row in norm(f"{LAYER}.{theirs}", f"stack.*.{module}")),
            *self.mlp_rows,
            *(self.experts.rows if self.experts else ()),
        ]
        return self.finish(renamed(rows, self.tensors), cfg)

    def family(self) -> Family:
        """The functions of the table."""
        functions: Any = {"read": self.read, "write": self.write, "rows": self.rows, "unused": frozenset(self.unused)}
        family = decoders.family(self.name, self.architecture, **functions, **self.parts)
        heads = [[renamed([Row(name, "")], self.tensors)[0].tensor for name in pair] for pair in family.heads.items()]
        return replace(family, heads=dict(heads))


def renamed(rows: Sequence[Row], tensors: Mapping[str, str]) -> list[Row]:
    """Rows with these parts of the names of tensors replaced."""
    parts = re.compile("|".join(map(re.escape, sorted(tensors, key=len, reverse=True))) or "$^")
    return [replace(row, tensor=parts.sub(lambda match: tensors[match[0]], row.tensor)) for row in rows]
