"""Vision transformers: ViT (Dosovitskiy et al. 2021), CLIP (Radford et al. 2021), SigLIP (Zhai et al. 2023), InternViT.

Sizes are those of the papers and the released configs; InternViT is from Chen et al. 2023.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.norm.config import IdentityNormConfig, LayerNormConfig, LayerScaleConfig, RMSNormConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.decoder.config import DecoderConfig
from megajax.models.llava.config import LlavaConfig
from megajax.models.presets.sizes import Size, pick
from megajax.models.transformer import settings_of
from megajax.models.vision.config import CLIP_DEVIATION, CLIP_MEAN, VisionTowerConfig
from megajax.models.vit.config import ClassifierConfig, ViTConfig, with_image_head

VIT = {
    "debug": Size(2, 64, 4, ffn=256),
    "ti16": Size(12, 192, 3, ffn=768),
    "s16": Size(12, 384, 6, ffn=1536),
    "b16": Size(12, 768, 12, ffn=3072),
    "l14": Size(24, 1024, 16, ffn=4096),
    "h14": Size(32, 1280, 16, ffn=5120),
}

CLIP = {"debug": VIT["debug"], "b16": VIT["b16"], "l14": VIT["l14"], "l14-336": VIT["l14"]}

SIGLIP = {"b16": VIT["b16"], "so400m14": Size(27, 1152, 16, ffn=4304)}

INTERN = {"300m": Size(24, 1024, 16, ffn=4096), "6b": Size(45, 3200, 25, ffn=12800)}

IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def vit(size: str, *, classes: int = 1000, image: int = 224) -> ViTConfig:
    """ViT with a class token, LayerNorm and exact GELU. Raises UserError for an unknown size.

    Example: `mj.vit("b16", classes=1000)`
    """
    return replace(with_image_head(vit_tower(size, image=image), ClassifierConfig(classes=classes)), family="vit")


def vit_tower(size: str, *, image: int = 224) -> VisionTowerConfig:
    """The tower of `vit`. Raises UserError for an unknown size.

    Example: `mj.vit_tower("b16", image=224)`
    """
    row, norm = pick("vit", VIT, size), LayerNormConfig(epsilon=1e-6)
    return _tower(row, _block(row, norm), image, _patch(size))


def clip(size: str) -> VisionTowerConfig:
    """CLIP's tower: an additional norm before the blocks, quick GELU. Raises UserError for an unknown size.

    Example: `mj.clip("l14-336")`
    """
    row, norm = pick("clip", CLIP, size), LayerNormConfig()
    image = 336 if size.endswith("336") else 224
    tower = _tower(row, _block(row, norm, activation="quick_gelu"), image, _patch(size))
    return replace(tower, patch_bias=False, entry_norm=norm, mean=CLIP_MEAN, deviation=CLIP_DEVIATION)


def siglip(size: str, *, image: int = 224) -> VisionTowerConfig:
    """SigLIP's tower: no class token, tanh GELU. Raises UserError for an unknown size.

    Example: `mj.siglip("so400m14")`
    """
    row, norm = pick("siglip", SIGLIP, size), LayerNormConfig(epsilon=1e-6)
    tower = _tower(row, _block(row, norm, activation="gelu_tanh"), image, _patch(size))
    return replace(tower, class_tokens=0)


def internvit(size: str) -> VisionTowerConfig:
    """InternViT's tower at 448 pixels: layer scale, no norm after the blocks. Raises UserError for an unknown size.

    The 6 B size has RMSNorm, also on queries and keys.

    Example: `mj.internvit("300m")`
    """
    row = pick("internvit", INTERN, size)
    large = size == "6b"
    norm = RMSNormConfig(epsilon=1e-6) if large else LayerNormConfig(epsilon=1e-6)
    attention: dict[str, Any] = {"qkv_bias": False, "qk_norm": norm, "qk_norm_over": "heads"} if large else {}
    block = replace(_block(row, norm, **attention), layer_scale=LayerScaleConfig(initial=0.1))
    tower = _tower(row, block, 448, 14)
    return replace(tower, norm=IdentityNormConfig(), mean=IMAGENET_MEAN, deviation=IMAGENET_DEVIATION)


TOWERS: Mapping[str, Callable[..., VisionTowerConfig]] = {
    "vit": vit_tower,
    "clip": clip,
    "siglip": siglip,
    "internvit": internvit,
}
"""Tower functions by family."""


def _patch(size: str) -> int:
    """Side of a patch in pixels, from the number in the name of a size; 2 for debug."""
    return 2 if size == "debug" else int(size.partition("-")[0][-2:])


def _block(
    row: Size, norm: LayerNormConfig | RMSNormConfig, *, activation: Any = "gelu", **attention: Any
) -> BlockConfig:
    mixer = AttentionConfig(heads=row.heads, bias=True, causal=False, **attention)
    return BlockConfig(mixer=mixer, mlp=DenseMLPConfig(ffn=row.ffn, activation=activation), norm=norm)


def _tower(row: Size, block: BlockConfig, image: int, patch: int) -> VisionTowerConfig:
    return VisionTowerConfig(
        hidden=row.hidden,
        stack=StackConfig(pattern=(block,), repeats=row.layers),
        height=image,
        width=image,
        patch=patch,
        norm=block.norm,
    )


def llava(language: DecoderConfig, vision: VisionTowerConfig, *, image_token: int, **more: Any) -> LlavaConfig:
    """LLaVA with the decoder `language` and the tower `vision`; `more` are other settings of LlavaConfig.

    image_token: id that marks positions of images, below language.vocabulary_size.

    Example: `mj.llava(mj.llama2("7b", vocabulary_size=32_001), mj.clip("l14-336"), image_token=32_000)`
    """
    settings: dict[str, Any] = {**settings_of(language), "family": "llava", **more}
    return LlavaConfig(**settings, vision=vision, image_token=image_token)
