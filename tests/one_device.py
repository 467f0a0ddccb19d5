"""What has to equal one device: cases of families on layouts, in a line each.

tests/layouts/test_one_device.py checks every case; `python -m benchmarks layouts --devices=cpu:8` prints how far each
is off. A new family is a row of tests/families.py, and a few lines here.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from families import TOLERANCE, UNSEEN, Family, family_of
from tiny_decoders import VARIANTS, dispatched, in_segments
from tiny_runs import ONE, Run, differentiate, train

from megajax.layers.moe.config import DispatchConfig
from megajax.mesh.config import ParallelConfig

SAVED: dict[str, dict[str, Any]] = {
    "none": {"recompute": "none"},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "pairs": {"recompute": "full", "layers_per_checkpoint": 2},
    "pairs-offloaded": {"recompute": "full", "layers_per_checkpoint": 2, "offload": ("input",)},
    "parts": {
        "recompute": ("norm", "activation", "mlp"),
        "recompute_layers": 1,
        "offload": ("query_key_value", "residual"),
    },
    "unrolled": {"recompute": "selective", "unroll": None},
}
"""Word -> what is saved for the backward pass on the layout. One device recomputes nothing."""
STRATEGIES = {"gathered": "all_gather", "ring": "ring", "exchanged": "all_to_all", "grouped": "ring+all_to_all"}
SHARDINGS, SCHEDULES = ("replicate", "zero1", "fsdp"), ("gpipe", "1f1b", "interleaved")
SIZES = {name: name for name in ("pipeline", "data", "expert", "context", "tensor", "shards")}
SIZES |= {"virtual": "virtual_stages", "wait": "loss_wait", "rounds": "context_rounds"}
DISPATCH = ("gather", "ragged", "capacity")
FLAGS = {"sequence", "whole", "means", "open", "bfloat16", "evaluated", *STRATEGIES, *SHARDINGS, *SCHEDULES, *SAVED}
FLAGS |= set(DISPATCH)
NUMBERS = {"micro", "repeats", "steps", "chunks", "layers", *SIZES}


@dataclass(frozen=True)
class Case:
    """A line: a family, then words and numbers.

    Numbers are sizes of the layout, microbatches (`micro`), repeats of the pattern, layers of each chunk, chunks of a
    dispatch, and steps; without steps the gradients of one are compared. `means`: every microbatch weighs the same;
    `open`: documents of a row see each other; `evaluated`: rows are evaluated before and after the steps; `whole`:
    `tensor` distributes whole experts. Other words are values of settings.
    """

    line: str

    @cached_property
    def words(self) -> frozenset[str]:
        words = frozenset(word for word in self.line.split()[1:] if "=" not in word)
        assert words <= FLAGS, f"{self.line}: {words - FLAGS}"
        return words

    @cached_property
    def numbers(self) -> dict[str, str]:
        numbers = dict(word.split("=") for word in self.line.split()[1:] if "=" in word)
        assert numbers.keys() <= NUMBERS, f"{self.line}: {numbers.keys() - NUMBERS}"
        return numbers

    def one_of(self, choices: Any, default: str) -> str:
        """The word of the line that is among these."""
        return next(iter(self.words.intersection(choices)), default)

    def number(self, name: str, default: int) -> int:
        return int(self.numbers.get(name, default))

    @property
    def family(self) -> Family:
        return family_of(self.line.split()[0])

    @cached_property
    def parallel(self) -> ParallelConfig:
        sizes: dict[str, Any] = {"data": 1}
        sizes |= {SIZES[name]: int(value) for name, value in self.numbers.items() if name in SIZES}
        if "layers" in self.numbers:
            sizes["layers"] = tuple(map(int, self.numbers["layers"].split(",")))
        return ParallelConfig(
            **sizes,
            sequence="sequence" in self.words,
            data_sharding=self.one_of(SHARDINGS, "zero1"),
            schedule=self.one_of(SCHEDULES, "1f1b"),
            context_strategy=STRATEGIES[self.one_of(STRATEGIES, "gathered")],
            expert_tensor="whole" if "whole" in self.words else "cut",
        )

    @property
    def micro(self) -> int:
        return self.number("micro", 2)

    @property
    def average(self) -> Literal["tokens", "microbatches"]:
        return "microbatches" if "means" in self.words else "tokens"

    @property
    def recompute(self) -> str:
        """The word of SAVED."""
        return self.one_of(SAVED, "selective")

    @cached_property
    def alone(self) -> Any:
        """The model of one device: nothing is recomputed, and tokens go to experts as by default."""
        model = self.family.model
        if "repeats" in self.numbers:
            model = replace(model, stack=replace(model.stack, repeats=self.number("repeats", 0)))
        return replace(model, recompute="none")

    @cached_property
    def model(self) -> Any:
        """The model on the layout."""
        saved, model = SAVED[self.recompute], replace(self.alone, **SAVED[self.recompute])
        if hasattr(model, "vision"):
            model = replace(model, vision=replace(model.vision, **saved))
        if self.words.intersection(DISPATCH):
            way: Any = self.one_of(DISPATCH, "auto")
            model = dispatched(model, DispatchConfig(way=way, chunks=self.number("chunks", 1)))
        if self.parallel.pipeline > 1 and self.line.split()[0] in VARIANTS:
            model = in_segments(model)
        return model

    def counted(self) -> int:
        """Microbatches of one device, which has the rows of a microbatch where these have a loss together."""
        if self.average == "microbatches":
            return self.micro * self.parallel.data_size(8)
        return self.micro if self.family.balanced else 4

    def on_layout(self, **options: Any) -> Run:
        return self._run(self.model, self.parallel, self.micro, options)

    def on_one_device(self, **options: Any) -> Run:
        return self._run(self.alone, ONE, self.counted(), options)

    def _run(self, model: Any, parallel: ParallelConfig, microbatches: int, options: dict[str, Any]) -> Run:
        """Without steps the gradients of one. options: `quick` and `compute`."""
        options |= {"average": self.average, "isolated": "open" not in self.words, "draw": self.family.draw}
        if steps := self.number("steps", 0):
            options |= {"steps": steps, "evaluated": "evaluated" in self.words}
            return train(model, parallel, microbatches=microbatches, **options)
        return differentiate(model, parallel, microbatches=microbatches, **options)

    @cached_property
    def values(self) -> dict[str, object]:
        """Dimension -> value, for those that are not as on one device and by default."""
        parallel, model = self.parallel, self.alone
        values: dict[str, object] = {
            "data": parallel.data > 1,
            "tensor": parallel.tensor > 1,
            "sequence": parallel.sequence,
            "context": parallel.context > 1,
            "sharding": parallel.data_sharding if parallel.data * parallel.context > 1 else None,
            "groups": parallel.shards is not None,
            "recompute": self.recompute if self.recompute in ("selective", "full") else None,
            # GPT has a tied head, learned positions, biases and dropout.
            "gpt": model.tied and model.learned_positions and model.has_dropout(),
            "means": self.average == "microbatches",
            "open": "open" in self.words,
        }
        if parallel.pipeline > 1:
            values |= {
                # Of three stages or more, one is neither first nor last.
                "stages": min(parallel.pipeline, 3),
                "schedule": parallel.schedule,
                "chunks": parallel.virtual_stages > 1,
                "microbatches": kind_of_microbatches(self.micro, parallel.pipeline),
                "cut": layers_per_chunk(parallel, model.stack.repeats),
                "no wait": parallel.loss_wait == 0 and parallel.schedule != "gpipe",
            }
        return {name: value for name, value in values.items() if value not in (None, False, "even")}


def kind_of_microbatches(count: int, stages: int) -> str:
    """How their number suits the stages."""
    if count < stages:
        return "fewer than stages"
    return "uneven" if count % stages else "multiple"


def layers_per_chunk(parallel: ParallelConfig, repeats: int) -> str:
    """How layers are cut into chunks."""
    if parallel.layers is not None:
        return "stated"
    return "uneven" if repeats % parallel.chunks() else "even"


def listed(lines: str) -> tuple[Case, ...]:
    return tuple(map(Case, lines.strip().splitlines()))


QUICKEST = listed("""
llama repeats=4 micro=6 pipeline=2 context=2 tensor=2 sequence interleaved virtual=2 wait=0 means open
gpt repeats=8 micro=2 pipeline=4 tensor=2 gpipe open none
llama context=4 ring
experts-by-position gather context=2 micro=3
llava data=2 tensor=2 sequence micro=3
""")
"""Cases of the default suite."""

SLOW = listed("""
gpt repeats=5 micro=4 pipeline=2 interleaved virtual=2 wait=0 data=2 tensor=2 sequence fsdp shards=1 full means
gpt repeats=6 micro=3 pipeline=4 wait=0 layers=1,2,1,2 data=2 fsdp shards=1 means open
gpt repeats=3 micro=3 pipeline=2 gpipe data=2 context=2 ring replicate open
llama repeats=3 micro=6 pipeline=2 wait=0 layers=1,2 context=2 ring tensor=2 sequence replicate full open
gpt repeats=3 micro=1 pipeline=2 gpipe layers=1,2 data=2 context=2 exchanged shards=1 full means
gpt repeats=5 micro=6 pipeline=4 wait=0 data=2 shards=1 none open steps=3 evaluated
llama repeats=12 micro=4 pipeline=4 interleaved virtual=2 wait=0 layers=1,2,1,2,1,2,1,2 context=2 replicate full means
gpt repeats=6 micro=6 pipeline=4 gpipe layers=1,2,1,2 tensor=2 sequence full open
llama repeats=2 micro=3 pipeline=2 gpipe data=2 context=2 exchanged fsdp means steps=3
gpt repeats=3 micro=1 pipeline=2 gpipe data=2 tensor=2 sequence replicate open steps=3
llama repeats=6 micro=6 pipeline=2 gpipe virtual=2 layers=1,2,1,2 context=2 tensor=2 sequence replicate none
untied pipeline=2 data=2 tensor=2 fsdp shards=1
gpt micro=1 data=4 tensor=2 shards=2 steps=3 evaluated
hybrid--* pipeline=2
llama repeats=4 micro=4 parts pipeline=2 tensor=2
llama repeats=4 micro=4 pairs-offloaded pipeline=2 tensor=2
llama repeats=4 micro=4 unrolled pipeline=2 tensor=2
float32-residual repeats=4 micro=4 pipeline=2 tensor=2 sequence data=2 bfloat16
windows context=4 grouped bfloat16
windows data=2 tensor=2 sequence context=2 exchanged rounds=2 fsdp
latent micro=4 pipeline=2 data=2 context=2 ring rounds=2 gpipe fsdp
smooth data=2 context=2 ring steps=3 evaluated
ahead-microbatches micro=3 context=4 tensor=2 sequence
ahead-dropout micro=3 pipeline=2 context=2 tensor=2 rounds=2
copied-heads data=2 tensor=4 sequence fsdp steps=3 evaluated
experts gather chunks=2 data=2 expert=4 replicate micro=3
experts ragged data=4 expert=2 fsdp full steps=3 evaluated micro=3
experts capacity expert=2 context=2 tensor=2 sequence micro=3
experts ragged pipeline=2 expert=2 tensor=2 sequence whole
hybrid-M-*M micro=4 pipeline=2 interleaved virtual=2 tensor=2
hybrid-M-M*-M- micro=4 pipeline=4 gpipe layers=1,3,1,2 full
hybrid-ddeee pipeline=2 expert=2 tensor=2 layers=3,2
hybrid-ME*EM- data=2 context=2 expert=2 fsdp
mamba pipeline=2 context=2 tensor=2 sequence
delta pipeline=2 context=2 tensor=2 sequence
of-attention data=2 tensor=2 sequence fsdp
of-others pipeline=2 tensor=2 context=2
of-families pipeline=2 tensor=2 context=2 ring
lora data=2 tensor=2 fsdp sequence steps=3
dora repeats=3 micro=4 pipeline=2 data=2 tensor=2 layers=1,2
lora-experts expert=2 tensor=2 whole sequence
answers-dpo data=2 context=2 ring tensor=2 fsdp sequence
answers-kto pipeline=2 context=2 tensor=2 means
answers-grpo pipeline=2 context=2 tensor=2 means
answers-replay ragged context=2 ring expert=2 tensor=2 sequence fsdp
distilled data=2 context=2 ring tensor=2 sequence fsdp
bert-dropout micro=3 pipeline=2 context=2 tensor=2 sequence fsdp
bert-post-norm micro=3 data=2 tensor=2 context=2 ring
t5 micro=3 data=2 tensor=2 sequence full
t5-relative micro=3 context=4 tensor=2 fsdp
classifier-choices data=2 pipeline=2 tensor=2 sequence
classifier-span data=2 pipeline=2 tensor=2
classifier-decoder data=2 tensor=2 sequence
intern data=2 tensor=2 sequence micro=3
clip micro=3 data=2 tensor=2 sequence full
siglip micro=3 pipeline=2 data=2 tensor=2 sequence
segmenter micro=3 pipeline=2 data=2 tensor=2 sequence
vit-dropout micro=3 data=4 tensor=2 fsdp
llava-dropout micro=3 data=2 tensor=2 fsdp full
qwen-vl micro=3 data=2 tensor=2 sequence
""")


@dataclass(frozen=True)
class Difference:
    """A run against one device's."""

    loss: float
    """Largest relative error of a mean of the first step, and of an evaluation before it."""
    norm: float
    """The same of the norm of the first step's gradients."""
    later: float
    """The same of the losses of all steps, and of an evaluation after them."""
    norms: float
    """The same of the norms of all steps."""
    gradient: float
    """Largest error of a gradient of the first step over the largest gradient of its weight."""
    weight: str
    """Path of that weight."""
    observed: float
    """Largest error of what routers count, over the largest count."""
    padding: float
    """Largest absolute weight, gradient or moment that belongs to no layer."""

    def problems(self, family: Family) -> dict[str, float]:
        """Errors above the family's tolerances; a NaN is one."""
        bounds = {
            "loss": family.loss,
            "norm": TOLERANCE,
            "later": family.later,
            "norms": max(family.later, TOLERANCE),
            "gradient": family.tolerance,
            "observed": TOLERANCE,
            "padding": 0.0,
        }
        return {name: getattr(self, name) for name, bound in bounds.items() if not getattr(self, name) <= bound}


def difference(actual: Run, expected: Run, family: Family) -> Difference:
    """Between two runs of the same model and batch."""
    assert actual.gradients.keys() == expected.gradients.keys()
    top = max(np.abs(g).max() for g in expected.gradients.values())
    errors = {}
    for path, g in expected.gradients.items():
        if family.unseen and path.endswith(family.unseen):
            errors[path] = max(np.abs(run.gradients[path]).max() for run in (actual, expected)) / (UNSEEN * top)
        else:
            errors[path] = np.abs(actual.gradients[path] - g).max() / max(np.abs(g).max(), family.floor * top)
    worst = max(errors, key=lambda path: (np.isnan(errors[path]), errors[path]))
    assert actual.means.keys() == expected.means.keys() and actual.tokens == expected.tokens
    later = [apart(getattr(actual, name), getattr(expected, name)) for name in ("losses", "evaluation")]
    counts = [
        np.abs(actual.observed[path] - c).max() / max(np.abs(c).max(), 1) for path, c in expected.observed.items()
    ]
    return Difference(
        loss=float(np.max([apart(actual.means[name], mean) for name, mean in expected.means.items()])),
        norm=apart(actual.norms[0], expected.norms[0]),
        later=float(np.max(later)),
        norms=apart(actual.norms, expected.norms),
        gradient=float(errors[worst]),
        weight=worst,
        observed=float(np.max(counts, initial=0.0)),
        padding=actual.padding,
    )


def apart(actual: Any, expected: Any) -> float:
    """Largest relative error; numbers that both runs lack, and zeros of both (an accuracy), are equal."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected) & (actual.ndim == 0))
    return float(np.max(np.abs(np.divide(actual, expected, out=np.ones_like(actual), where=~same) - 1)))


def check_low_precision(case: Case) -> None:
    """In bfloat16, a step is at most 1.5 times as far from float32 as that of one device; gradients are float32."""
    low, unsplit = (run(compute="bfloat16") for run in (case.on_layout, case.on_one_device))
    exact = case.on_one_device()
    np.testing.assert_allclose(low.losses, unsplit.losses, rtol=2e-3)
    np.testing.assert_allclose(low.norms, exact.norms, rtol=2e-3)
    for path, g in exact.gradients.items():
        errors = [np.linalg.norm(run.gradients[path] - g) / np.linalg.norm(g) for run in (low, unsplit)]
        assert 1e-4 < errors[0] < min(1.5 * errors[1], case.family.rounding), (path, errors)
        assert low.gradients[path].dtype == np.float32


def check(case: Case) -> None:
    """A case equals one device."""
    if "bfloat16" in case.words:
        return check_low_precision(case)
    off = difference(case.on_layout(), case.on_one_device(), case.family)
    assert not off.problems(case.family), off
