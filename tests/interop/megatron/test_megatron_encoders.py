"""Scripts of Megatron-LM's pretrain_bert.py and pretrain_t5.py become configs that can be loaded."""

from pathlib import Path

import pytest
from flag_lines import BERT, T5, config, convert_line, problem

from megajax.config import load
from megajax.data.masked.config import MaskedSentencesConfig, MaskedSpansConfig
from megajax.interop.megatron.args import main
from megajax.layers.attention.config import AttentionConfig, CrossAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import DenseMLPConfig
from megajax.layers.norm.config import IdentityNormConfig, LayerNormConfig
from megajax.layers.position.config import RelativeBiasConfig
from megajax.layers.stack.config import StackConfig
from megajax.models.bert.config import BertConfig
from megajax.models.t5.config import T5Config
from megajax.tokenizers.config import WordPieceTokenizerConfig

HERE = Path(__file__).parent
NORM = LayerNormConfig()


def test_the_script_of_bert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bert.py"
    places = ["runs/bert", "v.txt", "data/text_sentence"]
    assert main([f"--output={file}", "--run-script", str(HERE / "bert_340m.sh"), *places]) == 0
    cfg = load(str(file), devices=8)
    block = BlockConfig(
        mixer=AttentionConfig(heads=16, bias=True, causal=False, dropout=0.1),
        mlp=DenseMLPConfig(ffn=4096, activation="gelu_tanh", bias=True),
        norm=NORM,
        dropout=0.1,
    )
    assert cfg.model == BertConfig(
        hidden=1024,
        vocabulary_size=30524,
        sequence_length=512,
        stack=StackConfig(pattern=(block,), repeats=24),
        vocabulary_multiple=256,
        dropout=0.1,
        recompute="none",
    )
    assert cfg.data == MaskedSentencesConfig(
        paths=("data/text_sentence",), split="949,50,1", mask_probability=0.2, short_probability=0.05
    )
    assert cfg.tokenizer == WordPieceTokenizerConfig(vocabulary="v.txt")
    assert (cfg.parallel.tensor, cfg.parallel.pipeline, cfg.batch.loss_average) == (2, 2, "microbatches")
    stderr = capsys.readouterr().err
    assert "--mask-prob 0.2 -> data.mask_probability=0.2" in stderr and "refused" not in stderr
    assert "without effect" not in stderr


def test_the_script_of_t5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t5.py"
    places = ["runs/t5", "runs/board", "v.txt", "data/text_sentence"]
    assert main([f"--output={file}", "--run-script", str(HERE / "t5_220m.sh"), *places]) == 0
    cfg = load(str(file), devices=8)
    heads = {"heads": 12, "head_dim": 64, "bias": True, "dropout": 0.1}
    parts = {"mlp": DenseMLPConfig(ffn=3072, activation="gelu_tanh", bias=True), "norm": NORM, "dropout": 0.1}
    encoder_block = BlockConfig(mixer=AttentionConfig(**heads, causal=False), **parts)
    decoder_block = BlockConfig(mixer=AttentionConfig(**heads), cross=CrossAttentionConfig(**heads), **parts)
    assert cfg.model == T5Config(
        hidden=768,
        vocabulary_size=29098,
        encoder_length=512,
        sequence_length=128,
        encoder=StackConfig(pattern=(encoder_block,), repeats=12),
        stack=StackConfig(pattern=(decoder_block,), repeats=10),
        vocabulary_multiple=512,
        learned_positions=True,
        dropout=0.1,
        recompute="none",
    )
    assert cfg.data == MaskedSpansConfig(paths=("data/text_sentence",), split="99982,9,9")
    assert cfg.tokenizer == WordPieceTokenizerConfig(vocabulary="v.txt", lower=False, extra_ids=100)
    assert (cfg.parallel.tensor, cfg.parallel.sequence, cfg.parallel.data_sharding) == (4, True, "zero1")
    stderr = capsys.readouterr().err
    for line in (
        "--encoder-num-layers 12 -> model.encoder.repeats=12",
        "--decoder-num-layers 10 -> model.stack.repeats=10",
        "--encoder-seq-length 512 -> model.encoder_length=512",
        "--decoder-seq-length 128 -> model.sequence_length=128",
        "--vocab-extra-ids 100 -> tokenizer.extra_ids=100",
    ):
        assert line in stderr
    assert "refused" not in stderr and "without effect" not in stderr


def test_bert_without_its_second_head() -> None:
    cfg = config(f"{BERT} --bert-no-binary-head")
    assert (cfg.model.next_sentence, cfg.model.token_types, cfg.data.next_sentence) == (False, 0, False)


def test_positions_of_t5() -> None:
    relative = config(f"{T5} --position-embedding-type relative --relative-attention-num-buckets 16").model
    assert not relative.learned_positions
    assert relative.stack.pattern[0].mixer.relative == RelativeBiasConfig(buckets=16, shared=True)
    assert relative.encoder.pattern[0].mixer.relative == RelativeBiasConfig(buckets=16, both_ways=True, shared=True)
    assert relative.stack.pattern[0].cross.relative is None
    rope = config(f"{T5} --position-embedding-type rope").model
    assert rope.stack.pattern[0].mixer.rope and rope.encoder.pattern[0].mixer.rope
    assert convert_line("--position-embedding-type relative").refused, "decoders of Megatron-LM have no such positions"


def test_t5_without_transformer_engine_has_no_norm_after_its_sections() -> None:
    assert config(T5).model.norm == NORM
    assert config(f"{T5} --transformer-impl local").model.norm == IdentityNormConfig()


def test_the_decoder_is_as_deep_as_the_encoder_by_default() -> None:
    model = config(T5).model
    assert model.stack.repeats == model.encoder.repeats == 4


@pytest.mark.parametrize("flags", ["--window-size 8,0", "--mtp-num-layers 1"])
@pytest.mark.parametrize("script", [BERT, T5])
def test_decoder_features_are_refused(script: str, flags: str) -> None:
    refused = [flag for flag, _ in convert_line(f"{script} {flags}").refused]
    assert flags in refused


def test_missing_and_contradictory_flags_are_errors() -> None:
    assert "--decoder-seq-length: must be given" in problem(f"{T5} --without decoder-seq-length")
    assert "--max-position-embeddings" in problem(f"{T5} --decoder-seq-length 64")
    assert "stages cut the layers of one" in problem(f"{T5} --pipeline-model-parallel-size 2")
    assert convert_line(f"{BERT} --without data-path --mock-data").refused
    idle = convert_line("--mask-prob 0.3 --decoder-num-layers 3").idle
    assert idle == ("--mask-prob 0.3", "--decoder-num-layers 3"), "no effect on a decoder"
