"""Settings and tensor names of DeepSeek's experts, which other families have too.

Shared experts, layers without experts first, sigmoid scores with a bias that balances the choice, and multi-token
prediction blocks.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from megajax.interop.huggingface import decoders
from megajax.interop.huggingface.decoders import LAYER, gated
from megajax.interop.huggingface.decoders import experts as expert_rows
from megajax.interop.huggingface.family import Settings
from megajax.interop.weights.name_mapping import Row
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig, SharedExpertConfig
from megajax.models.decoder.config import DecoderConfig, PredictionConfig

COPIES = ("model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight")
"""Copies of the embedding and the head, which prediction blocks share."""


SPARSE, DENSE = "sparse", "dense"
"""Kinds of layers in mlp_layer_types."""


def dense_layers(settings: Settings, default: int = 0, *, by_kinds: bool = False) -> Collection[int]:
    """Numbers of the layers without experts: the first ones, or those that mlp_layer_types says.

    default: of first_k_dense_replace; by_kinds: whether the class reads mlp_layer_types.
    """
    count, kinds = settings.take("first_k_dense_replace", default), settings.take("mlp_layer_types", kind=list)
    if kinds is None:
        return range(count)
    layers, dense = settings.peek("num_hidden_layers"), [number for number, kind in enumerate(kinds) if kind == DENSE]
    if len(kinds) != layers or not {*map(str, kinds)} <= {DENSE, SPARSE}:
        settings.refuse("mlp_layer_types", kinds, f"must be {DENSE} or {SPARSE} for each of {layers} layers")
    elif dense != [*range(len(dense))] and not by_kinds:
        settings.refuse("mlp_layer_types", kinds, f"only {DENSE} layers before {SPARSE} ones are supported")
    return dense


def experts(settings: Settings, mlp: GatedMLPConfig) -> MoEConfig:
    """The experts, with a default router. mlp: of layers without experts."""
    ffn, shared = settings.need("moe_intermediate_size"), settings.take("n_shared_experts", 0)
    return MoEConfig(
        experts=settings.need("n_routed_experts"),
        top_k=settings.need("num_experts_per_tok", int),
        expert=replace(mlp, ffn=ffn, bias=False),
        shared=SharedExpertConfig(mlp=replace(mlp, ffn=shared * ffn)) if shared else None,
    )


def groups(settings: Settings, top_k: int, scores: int) -> dict[str, Any]:
    """Router settings that limit the groups of a token's experts. scores: number of best scores of a group to sum."""
    groups, chosen_groups = settings.take("n_group", 1), settings.take("topk_group", 1)
    if chosen_groups >= groups:
        return {}
    group_scores = None if top_k == scores * chosen_groups else scores
    return {"groups": groups, "chosen_groups": chosen_groups, "group_scores": group_scores}


def balanced(settings: Settings, moe: MoEConfig) -> MoEConfig:
    """These experts with DeepSeek-V3's router."""
    normalised = settings.take("norm_topk_prob", True)
    if normalised and moe.top_k == 1:
        refuse_single(settings)
    router = RouterConfig(
        score="sigmoid",
        normalise="chosen" if normalised else "all",
        scale=settings.need("routed_scaling_factor"),
        balance_rate=0.001,
        row_loss=0.0001,
        **groups(settings, moe.top_k, scores=2),
    )
    return replace(moe, router=router)


def refuse_single(settings: Settings) -> None:
    """Reports a single expert for each token, with scores that would be divided by their sum."""
    reason = "with norm_topk_prob, MegaJAX weighs a single expert by its score, not 1"
    settings.refuse("num_experts_per_tok", 1, reason)


def prediction(settings: Settings) -> PredictionConfig | None:
    """The multi-token prediction blocks."""
    depth = settings.need("num_nextn_predict_layers", int)
    return PredictionConfig(depth=depth, weight=0.3) if depth else None


def layer_kinds(cfg: DecoderConfig) -> dict[str, Any]:
    """mlp_layer_types."""
    dense = decoders.feed_forwards(cfg).dense
    return {"mlp_layer_types": [DENSE if layer in dense else SPARSE for layer in range(cfg.stack.layers())]}


def write(cfg: DecoderConfig, *, by_kinds: bool = False) -> dict[str, Any]:
    """The settings of the experts. by_kinds: see `dense_layers`."""
    moe, dense, ffn = decoders.feed_forwards(cfg)
    shared = 0 if moe.shared is None else moe.shared.mlp.ffn
    if (dense != [*range(len(dense))] and not by_kinds) or shared % moe.expert.ffn:
        raise ValueError("layers without experts are not the first ones, or shared experts have another width")
    return {
        "intermediate_size": ffn,
        "n_shared_experts": shared // moe.expert.ffn,
        **(layer_kinds(cfg) if by_kinds else {"first_k_dense_replace": len(dense)}),
        **experts_settings(moe),
    }


def experts_settings(moe: MoEConfig) -> dict[str, Any]:
    """The settings of the experts and of the choice among them."""
    return {
        "moe_intermediate_size": moe.expert.ffn,
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "n_group": moe.router.groups or 1,
        "topk_group": moe.router.chosen_groups or 1,
        "routed_scaling_factor": moe.router.scale,
    }


def write_balanced(cfg: DecoderConfig, *, by_kinds: bool = False) -> dict[str, Any]:
    """Those of `balanced` and `prediction` besides."""
    return {
        **write(cfg, by_kinds=by_kinds),
        "norm_topk_prob": decoders.feed_forwards(cfg).moe.router.normalise == "chosen",
        "num_nextn_predict_layers": 0 if cfg.prediction is None else cfg.prediction.depth,
    }


def rows() -> list[Row]:
    """Layers without experts, and experts with shared ones."""
    dense, shared = gated(f"{LAYER}.mlp", "stack.*.mlp"), gated(f"{LAYER}.mlp.shared_experts", "stack.*.mlp.shared")
    return [*dense, *expert_rows(f"{LAYER}.mlp"), *shared]


BIAS = Row(f"{LAYER}.mlp.gate.e_score_correction_bias", "stack.*.mlp.load.sum", index=(0,))
"""The biases that balance experts, which are observations in the model here."""


def with_prediction(rows: Sequence[Row], cfg: DecoderConfig) -> list[Row]:
    """Rows of layers, and of the multi-token prediction blocks, which are numbered after the layers."""
    table = list(rows)
    for number in range(0 if cfg.prediction is None else cfg.prediction.depth):
        layer, block = f"model.layers.{cfg.stack.layers() + number}", f"predictions.{number}"
        halves = (f"{block}.from_embedding", f"{block}.from_state")
        table += [
            Row(f"{layer}.enorm.weight", f"{block}.embedding_norm.gain"),
            Row(f"{layer}.hnorm.weight", f"{block}.state_norm.gain"),
            Row(f"{layer}.eh_proj.weight", halves, "e d -> d e", axis=1),
            Row(f"{layer}.shared_head.norm.weight", f"{block}.norm.gain"),
        ]
        for row in rows:
            if row.tensor.startswith(LAYER):
                paths = (row.paths,) if isinstance(row.paths, str) else row.paths
                paths = tuple(path.replace("stack.*", f"{block}.block") for path in paths)
                table.append(replace(row, tensor=row.tensor.replace(LAYER, layer), paths=paths))
    return table


def without_missing_blocks(cfg: DecoderConfig, names: Collection[str]) -> DecoderConfig:
    """transformers does not save multi-token prediction blocks, even if config.json declares them."""
    has_blocks = f"model.layers.{cfg.stack.layers()}.eh_proj.weight" in names
    return cfg if has_blocks else replace(cfg, prediction=None)
