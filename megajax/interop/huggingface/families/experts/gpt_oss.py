"""gpt-oss: sinks, biases everywhere, windows in every other layer, all experts of a layer in one tensor."""

from typing import Any

from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER, MIXER
from megajax.interop.huggingface.family import Settings
from megajax.interop.huggingface.tables import SINKS, Decoder, Experts, FeedForwardOf, Positions, Windows, sizes
from megajax.interop.weights.name_mapping import Row
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig
from megajax.models.decoder.config import DecoderConfig

DEFAULTS = sizes(201088, 2880, 2880, 36, 64, 8, 64, 131072, rms_norm_eps=1e-5, attention_bias=True, sliding_window=128)
DEFAULTS |= {"num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 4096}


class YarnPositions(Positions):
    """Rotary positions that are YaRN's unless config.json says otherwise."""

    def write(self, cfg: DecoderConfig) -> dict[str, Any]:
        settings = super().write(cfg)
        return settings if settings["rope_scaling"] else {**settings, "rope_parameters": {"rope_type": "default"}}


def _read(settings: Settings, mlp: GatedMLPConfig) -> FeedForwardOf:
    settings.only("swiglu_alpha", 1.702)
    limit = settings.need("swiglu_limit")
    expert = GatedMLPConfig(ffn=mlp.ffn, activation="quick_gelu", bias=True, clamp=limit, offset=1.0)
    moe = MoEConfig(
        experts=settings.need("num_local_experts"),
        top_k=settings.need("num_experts_per_tok"),
        expert=expert,
        router=decoders.router(settings, bias=True),
    )
    return lambda _: moe


def _write(cfg: DecoderConfig) -> dict[str, Any]:
    moe = decoders.feed_forwards(cfg).moe
    return {"hidden_act": "silu", "num_local_experts": moe.experts, "swiglu_limit": moe.expert.clamp}


TENSOR, PATH = f"{LAYER}.mlp", "stack.*.mlp"
UP, MATRICES, BIASES = f"{TENSOR}.experts.gate_up_proj", *(
    (f"{PATH}.experts.gate{end}", f"{PATH}.experts.up{end}") for end in ("", "_bias")
)  # fmt: skip
TWO = {"two": 2}
TABLE = Decoder(
    "gpt_oss", "GptOssForCausalLM", DEFAULTS, bias="attention_bias", mixer=lambda _: {"sink": "learned"},
    positions=YarnPositions(base=150000.0, assumed=YARN), windows=Windows(lambda _: lambda layer: layer % 2 == 0),
    experts=Experts(_read, _write),
    mixer_rows=[*MIXER, SINKS],
    mlp_rows=[
        Row(f"{TENSOR}.router.weight", f"{PATH}.router", "e d -> d e"),
        Row(f"{TENSOR}.router.bias", f"{PATH}.router_bias"),
        # In the fused tensor, columns of gate and up alternate.
        Row(UP, MATRICES, "e d f 1 -> e d f", split="e d (f two) -> e d f two", axis=3, sizes=TWO),
        Row(f"{UP}_bias", BIASES, "e f 1 -> e f", split="e (f two) -> e f two", axis=2, sizes=TWO),
        Row(f"{TENSOR}.experts.down_proj", f"{PATH}.experts.down"),
        Row(f"{TENSOR}.experts.down_proj_bias", f"{PATH}.experts.down_bias"),
    ],
    # hidden_act has no effect in transformers; the others are duplicates.
    unused=("hidden_act", "experts_per_token", "initial_context_length"),
)  # fmt: skip
FAMILIES = [TABLE.family()]
