"""Scripts of Megatron-LM's pretrain_vlm.py become configs of LLaVA that load."""

from pathlib import Path

import pytest
from flag_lines import VLM, config, convert_line, problem

from megajax.config import load
from megajax.data.images.config import MockCaptionsConfig
from megajax.interop.megatron.args import main
from megajax.layers.attention.config import AttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig, GatedMLPConfig
from megajax.layers.norm.config import IdentityNormConfig, LayerNormConfig
from megajax.layers.position.config import Llama3ScalingConfig, RopeConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.llava.config import LlavaConfig, ProjectorConfig
from megajax.models.vision.config import CLIP_DEVIATION, CLIP_MEAN, VisionTowerConfig
from megajax.tokenizers.config import ByteTokenizerConfig, GPT2TokenizerConfig, MultimodalTokenizerConfig

HERE = Path(__file__).parent
NORM = LayerNormConfig()
LANGUAGE = ("tokens", "stack.*", "norm.*", "head")


def test_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "vlm.py"
    places = ["runs/vlm", "runs/board", "v.json", "m.txt"]
    assert main([f"--output={file}", "--run-script", str(HERE / "vlm_2b.sh"), *places]) == 0
    cfg = load(str(file), devices=8)
    heads = {"heads": 16, "kv_heads": 8, "bias": True}
    parts = {"mlp": DenseMLPConfig(ffn=8192, activation="gelu_tanh", bias=True), "norm": NORM}
    assert cfg.model == LlavaConfig(
        hidden=2048,
        vocabulary_size=50258,
        sequence_length=1024 + 24 * 24,
        stack=StackConfig(
            # pretrain_vlm.py ignores --rotary-base.
            pattern=(BlockConfig(mixer=AttentionConfig(**heads, rope=RopeConfig(base=10_000.0)), **parts),),
            repeats=24,
        ),
        vocabulary_multiple=512,
        norm=NORM,
        tied=False,
        init_std=0.014,
        recompute="selective",
        vision=VisionTowerConfig(
            hidden=2048,
            stack=StackConfig(
                pattern=(BlockConfig(mixer=AttentionConfig(**heads, causal=False), **parts),), repeats=12
            ),
            height=336,
            width=336,
            patch=14,
            patch_bias=False,
            class_tokens=1,
            mean=CLIP_MEAN,
            deviation=CLIP_DEVIATION,
            positions_multiple=8,
            entry_norm=NORM,
            norm=IdentityNormConfig(),
            init_std=0.014,
            recompute="selective",
        ),
        projector=ProjectorConfig(ffn=8192, activation="gelu_tanh"),
        image_token=50257,
        keep_class_tokens=False,
    )
    assert cfg.data == MockCaptionsConfig()
    assert cfg.tokenizer == MultimodalTokenizerConfig(base=GPT2TokenizerConfig(vocabulary="v.json", merges="m.txt"))
    assert cfg.optimizer.trainable == ("projector.*",)
    assert (cfg.parallel.tensor, cfg.parallel.sequence, cfg.parallel.data_sharding) == (4, True, "zero1")
    stderr = capsys.readouterr().err
    for line in (
        "--encoder-num-layers 12 -> model.vision.stack.repeats=12",
        "--decoder-num-layers 24 -> model.stack.repeats=24",
        "--dataloader-seq-length 1024 -> model.sequence_length=1600",
        "--img-h 336 -> model.vision.height=336",
        "--vocab-file v.json -> tokenizer.base.vocabulary=v.json",
        "--rotary-base 500000: pretrain_vlm.py ignores it",
        "--tokenizer-type: <image> has the id 50257",
    ):
        assert line in stderr
    idle = stderr.partition("without effect")[2].partition("unnecessary:")[0]
    assert "--seq-length 576" in idle and "--max-position-embeddings 4096" in idle and "--split 949,50,1" in idle
    assert "refused" not in stderr


def test_the_length_of_rows() -> None:
    """Text, patches and class token, padded to a multiple of the tensor devices; or --decoder-seq-length."""
    tensor = "--tensor-model-parallel-size 2"
    assert config(VLM).model.sequence_length == 32 + 16 + 1
    assert config(f"{VLM} {tensor}").model.sequence_length == 49
    assert config(f"{VLM} {tensor} --sequence-parallel").model.sequence_length == 50
    assert config(f"{VLM} --disable-vision-class-token").model.sequence_length == 48
    overlap = f"{VLM} {tensor} --sequence-parallel --decoder-tp-comm-overlap"
    assert config(f"{overlap} --decoder-seq-length 64").model.sequence_length == 64
    assert "--decoder-seq-length: must be given" in problem(overlap)
    assert "48 is below the 32 tokens of text and 17 of an image" in problem(f"{overlap} --decoder-seq-length 48")
    idle = convert_line(f"{VLM} --decoder-seq-length 64").idle
    assert idle == ("--max-position-embeddings 32", "--decoder-seq-length 64")


def test_frozen_parts() -> None:
    rope = f"{VLM} --position-embedding-type rope"
    assert config(rope).optimizer.trainable == ("*",)
    assert config(f"{rope} --freeze-ViT").optimizer.trainable == ("projector.*", *LANGUAGE)
    assert config(f"{VLM} --freeze-ViT").optimizer.trainable == ("projector.*", "tokens", "positions", *LANGUAGE[1:])
    optimizer = config(f"{rope} --freeze-LM --embedding-init-method-std 1.0").optimizer
    assert (optimizer.trainable, optimizer.groups) == (("projector.*", "vision.*"), ())


def test_flags_that_pretrain_vlm_ignores() -> None:
    rope = f"{VLM} --position-embedding-type rope --use-rope-scaling"
    cfg = config(f"{rope} --rotary-base 500000 --rope-scaling-factor 32 --qk-layernorm")
    assert cfg.model == config(rope).model
    assert cfg.model.stack.pattern[0].mixer.rope == RopeConfig(scaling=Llama3ScalingConfig(factor=8.0))
    assert not config(VLM).model.tied


def test_the_tokenizer_has_bytes_and_an_image_token() -> None:
    cfg = config(f"{VLM} --vocab-size 1000")
    assert cfg.tokenizer == MultimodalTokenizerConfig(base=ByteTokenizerConfig())
    assert (cfg.model.vocabulary_size, cfg.model.image_token) == (1002, 257)
    multimodal = config(f"{VLM} --vocab-size 1000 --tokenizer-type NullMultimodalTokenizer")
    assert (multimodal.tokenizer, multimodal.model) == (cfg.tokenizer, cfg.model)


@pytest.mark.parametrize("flags", ["--window-size 8,0", "--mtp-num-layers 1", "--use-mup"])
def test_features_that_towers_lack_are_refused(flags: str) -> None:
    converted = convert_line(f"{VLM} {flags}")
    assert [flag for flag, _ in converted.refused] == [flags] and not converted.problems


def test_contradictory_flags_are_reported() -> None:
    height = "model.vision.height (--img-h 18, --patch-dim 4): 18 is not divisible by patch=4"
    assert height in problem(f"{VLM} --img-h 18")
    assert "stages cut the layers of one" in problem(f"{VLM} --pipeline-model-parallel-size 2")
    remarks = dict(convert_line(f"{VLM} --without mock-data --data-path a --swiglu --glu-linear-offset 1").remarks)
    assert "ImageTextConfig reads images" in remarks["--data-path"]
    assert "in Megatron-LM, to the projector too" in remarks["--glu-linear-offset"]


def test_the_projector_is_an_mlp_like_those_of_the_layers() -> None:
    model = config(f"{VLM} --swiglu --disable-bias-linear --ffn-hidden-size 96").model
    assert model.projector == ProjectorConfig(ffn=96, activation="silu", gated=True, bias=False)
    assert model.vision.stack.pattern[0].mlp == model.stack.pattern[0].mlp == GatedMLPConfig(ffn=96)
