"""Costs of instructions by closed forms, and when they run: waits in order, in loops and in branches."""

from pathlib import Path

import pytest

from megajax.planning.compiled.devices import GPUS
from megajax.planning.compiled.hlo import CompiledProgram
from megajax.planning.compiled.instruction_times import OVERHEAD, InstructionTimes
from megajax.planning.compiled.links import AxisSpan, seconds
from megajax.planning.compiled.timeline import Timeline, timeline

H100 = GPUS["h100"]
MESH = {"data": 1, "tensor": 8}
N, GATHERED = 4096, 2 * 8 * 4096 * 4096
GATHER = seconds("all-gather", GATHERED, AxisSpan(8, 8), H100)
MATMUL = OVERHEAD * 2 * N**3 / (H100.matmul_rate("bfloat16") * H100.matmul_share(N, N, N))
COPY = OVERHEAD * 2 * 2 * N * N / (H100.bandwidth * H100.stream)

HEAD = """\
HloModule jit_step, is_scheduled=true

"""
SQUARE = "bf16[4096,4096]{1,0}"
DOT = """custom-call(%x, %x), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],\
"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}"""
GATHERING = "replica_groups=[1,8]<=[8], dimensions={0}"


def gathers(number: int, matmuls: int, synchronous: bool = False) -> str:
    """A gather beside this many matmuls; each has scratch space of 1 GiB, which takes no time."""
    config = f', backend_config={{"collective_backend_config":{{"is_sync":{str(synchronous).lower()}}}}}'
    lines = [f"  %gather.{number} = (({SQUARE}), bf16[32768,4096]{{1,0}}) all-gather-start(%x), {GATHERING}{config}"]
    lines += [f"  %dot.{number}.{i} = ({SQUARE}, s8[1073741824]{{0}}) {DOT}" for i in range(matmuls)]
    lines += [f"  %gathered.{number} = bf16[32768,4096]{{1,0}} all-gather-done(%gather.{number})"]
    return "\n".join(lines)


def entry(*lines: str) -> str:
    body = "\n".join(lines)
    return f"ENTRY %main (x: {SQUARE}) -> {SQUARE} {{\n  %x = {SQUARE} parameter(0)\n{body}\n}}\n"


def played(text: str, unknown_trips: int = 1) -> Timeline:
    return timeline(InstructionTimes(CompiledProgram.read(HEAD + text), MESH, H100, 8), unknown_trips)


def test_a_gather_is_exposed_for_what_the_matmuls_beside_it_do_not_take() -> None:
    alone, some = played(entry(gathers(1, 0))), played(entry(gathers(1, 1)))
    assert GATHER > 2 * MATMUL, "not hidden by any of these"
    assert alone.exposed == {"gather.1": pytest.approx(GATHER)} and alone.seconds == pytest.approx(GATHER)
    assert some.exposed == {"gather.1": pytest.approx(GATHER - MATMUL)}
    assert (some.seconds, some.computing) == (pytest.approx(GATHER), pytest.approx(MATMUL))
    enough = int(GATHER / MATMUL) + 1
    assert played(entry(gathers(1, enough))) == (pytest.approx(enough * MATMUL),) * 2 + ({},)


def test_a_blocking_start_waits_at_once() -> None:
    blocked = played(entry(gathers(1, 2, synchronous=True)))
    assert blocked.exposed == {"gather.1": pytest.approx(GATHER)}
    assert blocked.computing == pytest.approx(2 * MATMUL)


def test_collectives_use_the_link_one_after_another() -> None:
    first, second = gathers(1, 0).splitlines(), gathers(2, 1).splitlines()
    both = played(entry(first[0], *second, first[1]))
    # The second one to start waits behind the first, which has arrived when its end is reached.
    assert both.exposed == {"gather.1": pytest.approx(GATHER - MATMUL), "gather.2": pytest.approx(GATHER)}
    assert both.computing == pytest.approx(MATMUL)


LOOP = """\
%body (x: {shape}) -> {shape} {{
  %x = {shape} parameter(0)
{lines}
}}

%more (y: {shape}) -> pred[] {{
  %y = {shape} parameter(0)
  ROOT %go = pred[] constant(true)
}}

"""


def looped(lines: str, attributes: str) -> str:
    loop = f"  %loop = {SQUARE} while(%x), condition=%more, body=%body{attributes}"
    return LOOP.format(shape=SQUARE, lines=lines) + entry(loop)


def test_a_loop_counts_by_its_trips() -> None:
    known = played(looped(gathers(1, 1), ', backend_config={"known_trip_count":{"n":"5"}}'))
    assert known.exposed == {"gather.1": pytest.approx(5 * (GATHER - MATMUL))}
    assert known.computing == pytest.approx(5 * MATMUL)
    unknown = played(looped(gathers(1, 1), ""), unknown_trips=7)
    assert unknown.exposed == {"gather.1": pytest.approx(7 * (GATHER - MATMUL))}
    ticks = ', metadata={op_name="jit(step)/runs_3_of_4/while"}'
    assert played(looped(gathers(1, 1), ticks)).exposed == {"gather.1": pytest.approx(0.75 * (GATHER - MATMUL))}


def test_a_gather_beside_a_loop_is_hidden_by_all_of_its_iterations() -> None:
    start, end = gathers(1, 0).splitlines()
    trips = int(GATHER / MATMUL)
    inner = "\n".join(gathers(2, 1).splitlines()[1:2])
    count = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    loop = f"  %loop = {SQUARE} while(%x), condition=%more, body=%body, {count}"
    text = LOOP.format(shape=SQUARE, lines=inner) + entry(start, loop, end)
    assert played(text).exposed == {"gather.1": pytest.approx(GATHER - trips * MATMUL)}


def test_a_branch_counts_by_its_share() -> None:
    branches = f"""\
%busy (x: {SQUARE}) -> {SQUARE} {{
  %x = {SQUARE} parameter(0)
{gathers(1, 1)}
}}

%idle (x: {SQUARE}) -> {SQUARE} {{
  %x = {SQUARE} parameter(0)
  ROOT %same = {SQUARE} copy(%x)
}}

"""
    name = 'metadata={op_name="jit(step)/runs_1_of_4/cond"}'
    taken = f"  %either = {SQUARE} conditional(%x, %x, %x), branch_computations={{%busy, %idle}}, {name}"
    line = played(branches + entry(taken))
    assert line.exposed == {"gather.1": pytest.approx((GATHER - MATMUL) / 4)}
    assert line.computing == pytest.approx((MATMUL + 3 * COPY) / 4)


def test_matmuls_by_their_sizes() -> None:
    batched = """  %a = bf16[4,512,256]{2,1,0} parameter(1)
  %b = bf16[4,128,256]{2,1,0} parameter(2)
  %c = bf16[4,512,128]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, \
rhs_contracting_dims={2}"""
    rate = H100.matmul_rate("bfloat16") * H100.matmul_share(512, 256, 128)
    moved = 2 * 4 * (512 * 256 + 128 * 256 + 512 * 128) / (H100.bandwidth * H100.stream)
    assert played(entry(batched)).seconds == pytest.approx(OVERHEAD * max(2 * 4 * 512 * 256 * 128 / rate, moved))
    grouped = """  %a = bf16[16384,4096]{1,0} parameter(1)
  %b = bf16[8,4096,2048]{2,1,0} parameter(2)
  %c = bf16[16384,2048]{1,0} ragged-dot(%a, %b)"""
    rate = H100.matmul_rate("bfloat16") * H100.matmul_share(16384 / 8, 4096, 2048)
    assert played(entry(grouped)).seconds == pytest.approx(OVERHEAD * 2 * 16384 * 4096 * 2048 / rate)
    half = timeline(InstructionTimes(CompiledProgram.read(HEAD + entry(grouped)), MESH, H100, 8, over_mean=2.0))
    rate = H100.matmul_rate("bfloat16") * H100.matmul_share(16384 / 8 / 2, 4096, 2048)
    # Rows without tokens are skipped.
    assert half.seconds == pytest.approx(OVERHEAD * 2 * 16384 / 2 * 4096 * 2048 / rate)


@pytest.mark.parametrize(("mask", "part"), [("CAUSAL", 0.5), ("NO_MASK", 1.0)])
def test_attention_by_its_mask(mask: str, part: float) -> None:
    call = f"""  %q = bf16[2,8192,32,128]{{3,2,1,0}} parameter(1)
  %k = bf16[2,8192,8,128]{{3,2,1,0}} parameter(2)
  %o = (bf16[2,8192,32,128]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %k, %k), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={{"mask_type":"{mask}"}}"""
    operations = 4 * 2 * 8192 * 8192 * 32 * 128 * part
    assert played(entry(call)).seconds == pytest.approx(operations / (0.6 * H100.peak))
    assert played(entry(call.replace("Softmax", "SoftmaxBackward"))).seconds == pytest.approx(
        2.5 * operations / (0.5 * H100.peak)
    )


def test_asynchronous_programs_have_the_collectives_that_the_reader_finds() -> None:
    text = Path(__file__).with_name("asynchronous.hlo.txt").read_text(encoding="utf-8")
    line = timeline(InstructionTimes(CompiledProgram.read(text), {"pipeline": 4, "tensor": 2}, H100, 8))
    # The wrapped start ends in async-done; the collectives of the loop beside the permute wait behind it.
    assert set(line.exposed) == {"uneven", "gather", "reduce", "late", "permute"}
    assert line.seconds == pytest.approx(line.computing + sum(line.exposed.values()))
