"""Mixtral (Jiang et al. 2024, table 1; 8x22B: Mistral AI's release of April 2024), as in the released configs."""

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.moe.config import MoEConfig, RouterConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.position.config import RopeConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.presets.sizes import Size, decoder, pick

MIXTRAL = {
    "debug": Size(4, 64, 4, 2, 96, experts=8, top_k=2),
    "8x7b": Size(32, 4096, 32, 8, 14336, experts=8, top_k=2),
    "8x22b": Size(56, 6144, 48, 8, 16384, experts=8, top_k=2),
}


def mixtral(size: str, *, sequence_length: int = 4096, vocabulary_size: int = 32000) -> DecoderConfig:
    """Llama with 8 experts, 2 per token. Raises UserError for an unknown size.

    The balancing loss has the coefficient of the released configs.

    Example: `mj.mixtral("8x7b")`
    """
    row = pick("mixtral", MIXTRAL, size)
    block = BlockConfig(
        mixer=AttentionConfig(heads=row.heads, kv_heads=row.kv_heads, rope=RopeConfig(base=1000000.0)),
        mlp=MoEConfig(
            experts=row.experts,
            top_k=row.top_k,
            expert=GatedMLPConfig(ffn=row.ffn),
            router=RouterConfig(aux_loss=0.02),
        ),
        norm=RMSNormConfig(),
    )
    return decoder(row, block, sequence_length=sequence_length, vocabulary_size=vocabulary_size)
