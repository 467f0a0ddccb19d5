"""Layouts to compare with one device: models, batches and every dimension of ParallelConfig, in combination.

The list covers pairs: of any two values of two dimensions that can be had together (say interleaved and fsdp, or a
padded chunk and masked idle microbatches) at least one combination has both; tests/layouts checks that. It was drawn by
a greedy search for that and is kept as it is; whoever adds a dimension adds rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from typing import Any, Literal

import numpy as np
from tiny_runs import Trained, gpt, llama, pair, train

from megajax.layers.recompute import Recompute
from megajax.mesh.config import ParallelConfig
from megajax.models.decoder.config import DecoderConfig

STEPS = 5
TOLERANCE = 1e-5
"""Largest relative error of a loss, and of a gradient against the largest of its weight."""
UNSEEN = 0.01
"""Biases of keys that are not rotated have no gradient, for softmax does not see them. What rounding makes of it is
held against this share of the model's largest gradient."""

MODELS = {
    "llama": llama,
    "gpt": gpt,
    "pair-untied-learned-dropout": lambda recompute, repeats: pair(
        recompute, repeats, tied=False, learned_positions=True, dropout=0.1
    ),
    "pair-tied-rope-dropout": lambda recompute, repeats: pair(
        recompute, repeats, tied=True, learned_positions=False, dropout=0.1
    ),
    "pair-tied-learned": lambda recompute, repeats: pair(recompute, repeats, tied=True, learned_positions=True),
}
"""Name -> (recompute, repeats) -> config. Of tied, learned positions, dropout and two blocks by turns, any two values
of two of these occur in one of them."""


STRATEGIES = {"gathered": "all_gather", "ring": "ring", "exchanged": "all_to_all"}
WORDS = {"data_sharding": ("replicate", "zero1", "fsdp"), "schedule": ("gpipe", "1f1b", "interleaved")}
NUMBERS = {"virtual": "virtual_stages", "wait": "loss_wait"}


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One run."""

    name: str
    model: str
    repeats: int
    recompute: Recompute
    microbatches: int
    parallel: ParallelConfig
    average: Literal["tokens", "microbatches"] = "tokens"
    isolated: bool = True

    @classmethod
    def of(cls, line: str) -> "Combination":
        """From a line of the table."""
        model, repeats, recompute, microbatches, *options = line.split()
        flags = {word for word in options if "=" not in word}
        numbers = dict(word.split("=") for word in options if "=" in word)
        settings: dict[str, Any] = {"data": 1, "data_sharding": "zero1", "sequence": "sequence" in flags}
        settings |= {NUMBERS.get(name, name): int(n) for name, n in numbers.items() if name != "layers"}
        if "layers" in numbers:
            settings["layers"] = tuple(map(int, numbers["layers"].split(",")))
        for name, choices in WORDS.items():
            settings |= {name: word for word in flags.intersection(choices)}  # noqa: B035
        settings |= {"context_strategy": STRATEGIES[word] for word in flags.intersection(STRATEGIES)}  # noqa: B035
        assert flags <= {"sequence", "means", "open", *STRATEGIES, *chain(*WORDS.values())}, line
        return cls(
            name=line,
            model=model,
            repeats=int(repeats),
            recompute=recompute,
            microbatches=int(microbatches),
            parallel=ParallelConfig(**settings),
            average="microbatches" if "means" in flags else "tokens",
            isolated="open" not in flags,
        )

    def config(self, recompute: Recompute | None = None) -> DecoderConfig:
        return MODELS[self.model](recompute or self.recompute, self.repeats)

    def run(self, *, quick: bool = True) -> Trained:
        """Five steps on the layout."""
        return train(
            self.config(),
            self.parallel,
            microbatches=self.microbatches,
            steps=STEPS,
            average=self.average,
            isolated=self.isolated,
            evaluated=False,
            quick=quick,
        )

    def on_one_device(self, *, quick: bool = True) -> Trained:
        """The same on one device, without recomputation."""
        # Where microbatches are weighed, one device's must have the rows that one device has on the layout.
        of_tokens = self.average == "tokens"
        return train(
            self.config("none"),
            microbatches=4 if of_tokens else self.microbatches * self.parallel.data,
            steps=STEPS,
            average=self.average,
            isolated=self.isolated,
            evaluated=False,
            quick=quick,
        )

    @property
    def kind_of_microbatches(self) -> str | None:
        """How their number suits the stages."""
        stages = self.parallel.pipeline
        if stages == 1:
            return None
        if self.microbatches < stages:
            return "fewer than stages"
        return "uneven" if self.microbatches % stages else "multiple"

    @property
    def layers_per_chunk(self) -> str | None:
        """How layers are cut into chunks."""
        if self.parallel.pipeline == 1:
            return None
        if self.parallel.layers is not None:
            return "stated"
        return "uneven" if self.repeats % self.parallel.chunks() else "even"

    @cached_property
    def values(self) -> dict[str, object]:
        """Dimension -> value; those that mean nothing here are left out."""
        parallel, cfg = self.parallel, self.config()
        values = {
            "pipeline": parallel.pipeline,
            "data": parallel.data,
            "tensor": parallel.tensor,
            "sequence": parallel.sequence if parallel.tensor > 1 else None,
            "context": parallel.context,
            "sharding": parallel.data_sharding if parallel.data * parallel.context > 1 else None,
            "groups": True if parallel.shards else None,
            "recompute": self.recompute,
            "tied": cfg.tied,
            "learned positions": cfg.learned_positions,
            "dropout": cfg.has_dropout(),
            "blocks in pattern": len(cfg.stack.pattern),
            "average": self.average,
            "isolated": self.isolated,
        }
        if parallel.pipeline > 1:
            values |= {
                "virtual stages": parallel.virtual_stages,
                "schedule": parallel.schedule,
                "loss wait": parallel.loss_wait if parallel.schedule != "gpipe" else None,
                "microbatches": self.kind_of_microbatches,
                "cut": self.layers_per_chunk,
            }
        return {name: value for name, value in values.items() if value is not None}


TABLE = """
llama 8 selective 6 pipeline=2 context=2 tensor=2 sequence zero1 interleaved virtual=2 wait=0 means open
pair-tied-learned 5 selective 1 data=4 context=2 ring fsdp
pair-tied-learned 5 none 3 pipeline=4 tensor=2 sequence 1f1b wait=0 layers=1,2,1,1 means
gpt 5 selective 1 pipeline=2 context=2 exchanged tensor=2 zero1 gpipe layers=1,4 open
llama 8 full 12 pipeline=2 tensor=4 interleaved virtual=3 wait=1 layers=2,1,1,2,1,1 means
llama 12 full 12 pipeline=8 gpipe means
llama 5 full 2 data=4 tensor=2 sequence replicate means open
pair-tied-rope-dropout 8 none 3 pipeline=2 tensor=4 sequence 1f1b wait=1
gpt 5 none 2 pipeline=2 tensor=4 interleaved virtual=2 wait=0
pair-untied-learned-dropout 16 full 4 pipeline=4 context=2 fsdp interleaved virtual=3 wait=1 open
llama 5 selective 3 pipeline=2 data=4 fsdp 1f1b wait=0 layers=1,4 means open
pair-untied-learned-dropout 8 full 2 pipeline=2 context=2 ring tensor=2 sequence replicate gpipe virtual=2 open
pair-tied-rope-dropout 5 full 1 pipeline=2 data=4 replicate gpipe means
pair-untied-learned-dropout 8 full 3 pipeline=8 1f1b wait=1 open
pair-tied-rope-dropout 16 selective 4 pipeline=4 data=2 replicate gpipe virtual=3 layers=1,2,1,1,2,1,1,2,1,1,2,1
pair-untied-learned-dropout 5 selective 4 pipeline=2 tensor=4 1f1b wait=0 open
llama 8 none 2 pipeline=2 data=2 tensor=2 sequence zero1 gpipe virtual=3 means open
gpt 8 selective 12 pipeline=4 data=2 zero1 interleaved virtual=2 wait=1
pair-tied-learned 12 full 6 pipeline=2 data=4 replicate interleaved virtual=3 wait=0 open
pair-tied-rope-dropout 8 none 12 data=2 context=2 exchanged replicate open
gpt 5 selective 6 pipeline=2 data=4 fsdp gpipe virtual=2 layers=1,2,1,1
pair-untied-learned-dropout 16 none 24 pipeline=8 interleaved virtual=2 wait=0
pair-untied-learned-dropout 5 full 6 pipeline=4 data=2 zero1 1f1b wait=0 open
gpt 12 selective 6 pipeline=8 1f1b wait=1 layers=1,2,1,2,1,2,1,2 means
pair-untied-learned-dropout 5 full 3 pipeline=2 context=2 tensor=2 replicate 1f1b wait=1 layers=1,4
llama 8 selective 1 pipeline=2 data=2 tensor=2 sequence fsdp gpipe open
pair-tied-learned 5 full 1 pipeline=2 data=4 replicate 1f1b wait=1 layers=1,4
pair-tied-rope-dropout 8 none 4 context=2 ring tensor=4 replicate open
llama 5 none 6 data=4 tensor=2 zero1 means
pair-tied-learned 5 selective 3 data=2 tensor=4 fsdp means open
pair-tied-learned 5 selective 4 data=2 tensor=4 zero1
gpt 8 none 2 pipeline=4 tensor=2 gpipe open
pair-tied-rope-dropout 5 selective 1 pipeline=2 tensor=4 sequence gpipe layers=1,4
llama 8 none 2 pipeline=4 data=2 shards=1 zero1 1f1b wait=1 means
pair-untied-learned-dropout 8 full 4 pipeline=2 data=2 shards=1 context=2 ring fsdp interleaved virtual=2 wait=0 open
gpt 8 selective 6 pipeline=2 data=4 shards=2 fsdp gpipe virtual=3
llama 5 selective 3 pipeline=2 data=2 shards=1 tensor=2 sequence zero1 1f1b wait=1 layers=1,4 means
pair-tied-rope-dropout 5 none 3 data=2 shards=1 tensor=4 zero1
pair-tied-learned 5 full 3 data=4 shards=2 tensor=2 fsdp open
"""
"""Model, repeats of its blocks, recomputation, microbatches; settings of the layout. means: every microbatch weighs the
same; open: documents of a row see each other."""

COMBINATIONS = tuple(Combination.of(line) for line in TABLE.strip().splitlines())
QUICKEST = tuple(COMBINATIONS[row] for row in (0, 31))
"""Those that the default suite compares. Tests of jobs, of own models and of encoders train in further pipelines, those
of reductions with FSDP."""


def pairs(combination: Combination) -> Iterator[tuple]:
    """Any two of its values, each with its dimension."""
    return combinations(combination.values.items(), 2)


@dataclass(frozen=True)
class Difference:
    """A run against one device's."""

    loss: float
    """Largest relative error of the losses of all steps."""
    norm: float
    """The same of the norm of the first step's gradients."""
    gradient: float
    """Largest error of a gradient of the first step over the largest gradient of its weight."""
    weight: str
    """Path of that weight."""
    padding: float
    """Largest absolute weight, gradient or moment that belongs to no layer."""
    seconds: float
    """To compile the layout's step."""


def difference(actual: Trained, expected: Trained) -> Difference:
    """Between two runs of the same model and batch; a NaN is the largest error."""
    assert actual.gradients.keys() == expected.gradients.keys()
    top = max(np.abs(g).max() for g in expected.gradients.values())
    errors = {
        path: np.abs(actual.gradients[path] - g).max() / np.abs(g).max() for path, g in expected.gradients.items()
    }
    for path in unseen(expected.program.cfg.model):
        errors[path] = max(np.abs(run.gradients[path]).max() for run in (actual, expected)) / (UNSEEN * top)
    worst = max(errors, key=lambda path: (np.isnan(errors[path]), errors[path]))
    loss = float(np.abs(actual.losses / expected.losses - 1).max())
    norm = float(np.abs(actual.norms / expected.norms - 1)[0])
    return Difference(loss, norm, float(errors[worst]), worst, actual.padding, actual.seconds)


def unseen(model: DecoderConfig) -> list[str]:
    """Paths of the biases of keys that are not rotated."""
    mixers = [block.mixer for block in model.stack.pattern]
    return [f"stack.blocks.{i}.mixer.key_bias" for i, mixer in enumerate(mixers) if mixer.bias and mixer.rope is None]
