"""What attention sends and holds where `context` cuts rows, by the strategies of megajax.kernels.context.

Counts and bytes are those of compiled programs of Llama-3 8B and 70B (benchmarks/context.py). Ids of documents, 4 bytes
a position, are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from megajax.planning.cost.description import Description, Tower


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Collectives of one kind, of one row of a stack's pattern and one microbatch."""

    kind: str
    what: str
    parts: list[float]
    """Bytes that a device holds of what each moves: of a gather, before it."""
    beside: str = ""
    """What the compiler runs beside them."""
    share: float = 1.0
    """Of the collectives, those beside which it runs something."""
    members: int | None = None
    """Devices of a group; None: all that the strategy has in one."""
    forward: bool = False
    """Whether they are of the forward pass."""

    @property
    def gathered(self) -> bool:
        """Whether the bytes of a collective count on its full side."""
        return self.kind in ("all-gather", "reduce-scatter")


@dataclass(frozen=True, slots=True)
class RowTraffic:
    """Bytes of the tensors of attention that a device holds, of one row of a pattern and one microbatch."""

    run: Description
    queries: float
    keys: float
    """And values; with copies of the heads that devices exchange."""
    outputs: float

    @classmethod
    def of(cls, tower: Tower) -> "RowTraffic":
        """Of mixers whose tokens meet all tokens of their row."""
        run, sums = tower.run, [0.0, 0.0, 0.0]
        tensor, apart = run.parallel.tensor, run.parallel.exchanging()
        mixers = [mixer for block in tower.blocks for mixer in block.mixers]
        for mixer in (one for one in mixers if one.work.scores >= one.heads * tower.section.length):
            kernel, result = mixer.tensors
            copies = apart // gcd(apart, max(1, kernel.groups // tensor))
            keys = copies * (kernel.grouped / tensor + kernel.copied(tensor))
            each = kernel.cut / tensor, keys, result.local(tensor)
            sums = [total + tower.tokens * run.width * one for total, one in zip(sums, each, strict=True)]
        return cls(run, *sums)

    @property
    def gathers(self) -> bool:
        """Whether each device has all keys of a row at once."""
        return self.run.parallel.context > 1 and self.run.parallel.context_strategy == "all_gather"

    @property
    def gathered_bytes(self) -> float:
        """Keys and values of whole rows: the compiler gathers them early in a layer's backward pass."""
        return self.keys * self.run.parallel.context if self.gathers else 0.0

    def sent(self, *, again: bool) -> Iterator[Sent]:
        """again: attention is recomputed."""
        parallel, times = self.run.parallel, 1 + again
        both, sums = [self.keys / 2] * 2, [self.keys / 2 * 4 / self.run.width] * 2
        if parallel.exchanging() > 1:
            way = [self.queries, *both, self.outputs]
            yield Sent(kind="all-to-all", what="heads, forward", parts=way * times, forward=True)
            # Gradients of the outputs are exchanged beside matmuls.
            yield Sent(kind="all-to-all", what="heads, backward", parts=2 * way, beside="matmuls", share=1 / 4)
        steps = parallel.context // parallel.exchanging() - 1
        if self.gathers:
            yield Sent(kind="all-gather", what="keys and values, forward", parts=both * times, forward=True)
            yield Sent(kind="all-gather", what="keys and values, backward", parts=both, beside="matmuls")
            yield Sent(kind="reduce-scatter", what="their gradients, backward", parts=both, beside="matmuls")
        elif steps:
            for what, parts, beside, forward in (
                ("keys and values, forward", both * steps * times, "forward kernels", True),
                ("both and gradients, backward", (both + sums) * steps, "backward kernels", False),
                ("last gradients, backward", both, "matmuls", False),
            ):
                sent = Sent(kind="collective-permute", what=what, parts=parts, beside=beside, forward=forward)
                if parallel.pipeline > 1 and self.run.system.lockstep:
                    # By gathers of two devices, two of them where the ring has more: one runs beside kernels. An odd
                    # number of devices gathers at once.
                    hops = 1 if steps == 1 or steps % 2 == 0 else 2
                    members = 2 if steps % 2 else steps + 1
                    sent = replace(sent, kind="all-gather", parts=parts * hops, share=1 / hops, members=members)
                yield sent
