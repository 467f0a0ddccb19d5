"""T5 with rotary and relative positions against plain numpy, and that padding changes nothing."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_runs import ONE

from megajax.layers.attention.config import AttentionConfig, CrossAttentionConfig
from megajax.layers.block.config import BlockConfig
from megajax.layers.mlp.config import GatedMLPConfig
from megajax.layers.norm.config import RMSNormConfig
from megajax.layers.param import bind, specs
from megajax.layers.position.config import RelativeBiasConfig, RopeConfig
from megajax.layers.stack.config import StackConfig
from megajax.mesh.layout import Layout
from megajax.mesh.sharding_rules import Plan
from megajax.models.t5.config import T5Config

HEADS, SIZE, HIDDEN, WORDS = 2, 8, 12, 50
RELATIVE = RelativeBiasConfig(buckets=8, distance=12, shared=True)
NORM = RMSNormConfig(epsilon=1e-6)
MLP = GatedMLPConfig(ffn=20, activation="gelu_tanh")


def config(*, rope: bool, read: int = 13, written: int = 7) -> T5Config:
    plain = AttentionConfig(heads=HEADS, head_dim=SIZE, rope=RopeConfig(base=100.0) if rope else None)
    encoder_mixer = replace(plain, causal=False, relative=None if rope else replace(RELATIVE, both_ways=True))
    writing = replace(plain, relative=None if rope else RELATIVE)
    cross = CrossAttentionConfig(heads=HEADS, head_dim=SIZE)
    return T5Config(
        hidden=HIDDEN,
        vocabulary_size=WORDS,
        sequence_length=written,
        encoder_length=read,
        encoder=StackConfig(pattern=(BlockConfig(mixer=encoder_mixer, mlp=MLP, norm=NORM),), repeats=2),
        stack=StackConfig(pattern=(BlockConfig(mixer=writing, cross=cross, mlp=MLP, norm=NORM),), repeats=2),
        norm=NORM,
        vocabulary_multiple=1,
    )


def build_with_values(cfg: T5Config) -> tuple[nnx.Module, dict[str, np.ndarray]]:
    """The module without values, and weights by path."""
    assert cfg.problems() == []
    abstract = nnx.eval_shape(lambda: cfg.build(Layout(Plan.of(ONE))))
    draw = np.random.default_rng(0)
    return abstract, {path: draw.normal(0, 0.5, spec.shape) for path, spec in specs(abstract).items()}


def turned(x: np.ndarray) -> np.ndarray:
    """[S, N, H]: pairs (i, i + H/2) as complex numbers, multiplied by exp(i position base^(-2 i / H))."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * 100.0 ** (-np.arange(half) / half)[None]
    y = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([y.real, y.imag], axis=-1)


def bucket(after: int, both_ways: bool) -> int:
    """Raffel et al. 2020, section 2.1, one distance at a time."""
    buckets = 4 if both_ways else 8
    first, away = (buckets if both_ways and after > 0 else 0), abs(after) if both_ways else max(-after, 0)
    single = buckets // 2
    if away < single:
        return first + away
    return first + min(buckets - 1, single + int(np.log(away / single) / np.log(12 / single) * (buckets - single)))


class Plain:
    """The model in numpy, one row at a time."""

    def __init__(self, cfg: T5Config, w: dict[str, np.ndarray]):
        self.cfg, self.w = cfg, w

    def norm(self, x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain

    def attention(self, path, layer, x, memory, *, causal, positions, table=None) -> np.ndarray:
        wq, wk, wv, wo = (self.w[f"{path}.{name}"][layer] for name in ("query", "key", "value", "output"))
        q, k, v = (np.einsum("sd,dnh->snh", y, m) for y, m in ((x, wq), (memory, wk), (memory, wv)))
        if positions and self.cfg.stack.pattern[0].mixer.rope is not None:
            q, k = turned(q), turned(k)
        scores = np.einsum("snh,tnh->nst", q, k) / np.sqrt(SIZE)
        if table is not None:
            rows = [[bucket(t - s, not causal) for t in range(len(k))] for s in range(len(q))]
            scores = scores + np.moveaxis(table[np.array(rows)], -1, 0)
        if causal:
            scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("nst,tnh,nhd->sd", p / p.sum(-1, keepdims=True), v, wo)

    def mlp(self, path: str, layer: int, x: np.ndarray) -> np.ndarray:
        gate, up = x @ self.w[f"{path}.gate"][layer], x @ self.w[f"{path}.up"][layer]
        gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        return (gelu * up) @ self.w[f"{path}.down"][layer]

    def stack(self, path: str, x: np.ndarray, memory: np.ndarray | None) -> np.ndarray:
        b, table = f"{path}stack.blocks.0", self.w.get(f"{path}stack.relative.table")
        for layer in range(2):
            h = self.norm(x, self.w[f"{b}.mixer_norm.gain"][layer])
            causal = memory is not None
            x = x + self.attention(f"{b}.mixer", layer, h, h, causal=causal, positions=True, table=table)
            if memory is not None:
                h = self.norm(x, self.w[f"{b}.cross_norm.gain"][layer])
                x = x + self.attention(f"{b}.cross", layer, h, memory, causal=False, positions=False)
            x = x + self.mlp(f"{b}.mlp", layer, self.norm(x, self.w[f"{b}.mlp_norm.gain"][layer]))
        return self.norm(x, self.w[f"{path}norm.gain"])

    def logits(self, encoder_tokens: np.ndarray, decoder_tokens: np.ndarray) -> np.ndarray:
        memory = self.stack("encoder.", self.w["tokens"][encoder_tokens], None)
        return self.stack("", self.w["tokens"][decoder_tokens], memory) @ self.w["tokens"].T + self.w["head_bias"]


@pytest.mark.parametrize("rope", [pytest.param(True, marks=pytest.mark.slow), False], ids=["rotary", "relative"])
def test_logits_match_numpy_and_padding_changes_nothing(rope: bool) -> None:
    cfg = config(rope=rope)
    abstract, weights = build_with_values(cfg)
    draw = np.random.default_rng(1)
    encoder_tokens, decoder_tokens = draw.integers(0, WORDS, (2, 13)), draw.integers(0, WORDS, (2, 7))
    lengths = np.array([[9, 5], [13, 7]])
    ids = [jnp.asarray(np.arange(n)[None] < of[:, None], jnp.int32) for n, of in zip((13, 7), lengths.T, strict=True)]

    @jax.jit
    def run(encoder_tokens: jax.Array, decoder_tokens: jax.Array) -> jax.Array:
        params = {path: jnp.asarray(w, jnp.float32) for path, w in weights.items()}
        return bind(abstract, params)(decoder_tokens, None, ids[1], encoder_tokens, ids[0])

    with jax.default_matmul_precision("highest"):
        logits = run(encoder_tokens, decoder_tokens)
        changed_inputs = [
            np.where(np.asarray(mask) == 1, x, (x + 1) % WORDS)
            for x, mask in zip((encoder_tokens, decoder_tokens), ids, strict=True)
        ]
        changed = run(*changed_inputs)
    plain = Plain(cfg, weights)
    for row, (reads, writes) in enumerate(lengths):
        expected = plain.logits(encoder_tokens[row, :reads], decoder_tokens[row, :writes])
        np.testing.assert_allclose(logits[row, :writes], expected, atol=1e-4 * np.abs(expected).max())
        np.testing.assert_array_equal(changed[row, :writes], logits[row, :writes])


def test_tables_that_do_not_fit_their_section_are_refused() -> None:
    cfg = config(rope=False)
    (encoder_block,), (decoder_block,) = cfg.encoder.pattern, cfg.stack.pattern
    for changed, place in (
        (
            replace(
                cfg,
                encoder=StackConfig(
                    pattern=(replace(encoder_block, mixer=replace(encoder_block.mixer, relative=RELATIVE)),), repeats=2
                ),
            ),
            "encoder.pattern.0.mixer.relative.both_ways",
        ),
        (
            replace(
                cfg,
                stack=StackConfig(
                    pattern=(
                        replace(
                            decoder_block, mixer=replace(decoder_block.mixer, relative=encoder_block.mixer.relative)
                        ),
                    ),
                    repeats=2,
                ),
            ),
            "stack.pattern.0.mixer.relative.both_ways",
        ),
    ):
        assert [problem.setting for problem in changed.problems()] == [place]
