"""The audit of a small program: bytes, kinds of work, loops, branches, donated arguments."""

import pytest

from megajax.planning.compiled.audit import audit

TEXT = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), {2}: (1, {}, may-alias) }, \
entry_computation_layout={(f32[4,256]{1,0}, s32[], bf16[256]{0})->(f32[4,256]{1,0}, f32[8]{0}, s32[])}

%row (p.0: f32[4,256], p.1: s32[]) -> f32[1,256] {
  %p.0 = f32[4,256]{1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,256]{1,0} dynamic-slice(%p.0, %p.1, %zero), dynamic_slice_sizes={1,256}
}

%update (q.0: f32[4,256], q.1: f32[1,256], q.2: s32[]) -> f32[4,256] {
  %q.0 = f32[4,256]{1,0} parameter(0)
  %q.1 = f32[1,256]{1,0} parameter(1)
  %q.2 = s32[] parameter(2)
  %nil = s32[] constant(0)
  %last = s32[] constant(3)
  %place = s32[] subtract(%last, %q.2)
  ROOT %new = f32[4,256]{1,0} dynamic-update-slice(%q.0, %q.1, %place, %nil)
}

%halved (h.0: f32[1,256], h.1: f32[1,256]) -> (bf16[1,256], f32[1,256]) {
  %h.0 = f32[1,256]{1,0} parameter(0)
  %h.1 = f32[1,256]{1,0} parameter(1)
  %product = f32[1,256]{1,0} multiply(%h.0, %h.1)
  %small = bf16[1,256]{1,0} convert(%product)
  ROOT %both = (bf16[1,256]{1,0}, f32[1,256]{1,0}) tuple(%small, %product)
}

%cast (c.0: f32[4,256]) -> bf16[4,256] {
  %c.0 = f32[4,256]{1,0} parameter(0)
  ROOT %cast.1 = bf16[4,256]{1,0} convert(%c.0)
}

%zeros () -> f32[4,256] {
  %nought = f32[] constant(0)
  ROOT %wide = f32[4,256]{1,0} broadcast(%nought), dimensions={}
}

%body (b: (s32[], f32[4,256])) -> (s32[], f32[4,256]) {
  %b = (s32[], f32[4,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %stack = f32[4,256]{1,0} get-tuple-element(%b), index=1
  %start = ((f32[4,256]{1,0}, s32[]), f32[1,256]{1,0}, u32[]) fusion-start(%stack, %i), kind=kLoop, calls=%row
  %done = f32[1,256]{1,0} fusion-done(%start)
  %pair = (bf16[1,256]{1,0}, f32[1,256]{1,0}) fusion(%done, %done), kind=kLoop, calls=%halved, \
metadata={op_name="jit(step)/mul"}
  %full = f32[1,256]{1,0} get-tuple-element(%pair), index=1
  %softmax = (bf16[2,4]{1,0}, u8[0]{0}) custom-call(%full), custom_call_target="__cudnn$fmhaSoftmax"
  %put = f32[4,256]{1,0} fusion(%stack, %full, %i), kind=kLoop, calls=%update
  ROOT %out = (s32[], f32[4,256]{1,0}) tuple(%i, %put)
}

%condition (c: (s32[], f32[4,256])) -> pred[] {
  %c = (s32[], f32[4,256]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (a.0: f32[4,256], a.1: s32[], a.2: bf16[256]) -> (f32[4,256], f32[8], s32[]) {
  %a.0 = f32[4,256]{1,0} parameter(0)
  %a.1 = s32[] parameter(1)
  %a.2 = bf16[256]{0} parameter(2)
  %filled = f32[4,256]{1,0} fusion(), kind=kLoop, calls=%zeros
  %thin = bf16[4,256]{1,0} fusion(%a.0), kind=kLoop, calls=%cast
  %turned = bf16[256,4]{1,0} transpose(%thin), dimensions={1,0}
  %first = (s32[], f32[4,256]{1,0}) tuple(%a.1, %filled)
  %loop = (s32[], f32[4,256]{1,0}) while(%first), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"4"}}
  ROOT %end = (s32[], f32[4,256]{1,0}) tuple(%loop)
}
"""
ROW = 4 * 256


@pytest.fixture(scope="module")
def program():
    return audit(TEXT)


def test_bytes_of_each_kernel(program) -> None:
    table = {one.name: (one.work, one.place.name, one.bytes_read, one.bytes_written) for one in program.kernels}
    assert table == {
        "filled": ("fill", "", 0, 4 * ROW),
        "thin": ("cast", "", 4 * ROW, 2 * ROW),
        "turned": ("move", "", 2 * ROW, 2 * ROW),
        # Of a slice or update only the row counts; computing an index is no arithmetic.
        "start": ("move", "1", ROW + 4, ROW),
        "pair": ("compute", "1", 2 * ROW, ROW // 2 + ROW),
        "softmax": ("attention", "1", ROW, 16),
        "put": ("move", "1", ROW + 4, ROW),
    }


def test_kernels_in_loops_count_once_per_iteration(program) -> None:
    assert program.by_work()["attention"] == 4 * (ROW + 16)
    (pair,) = (one for one in program.kernels if one.name == "pair")
    assert pair.total == 4 * pair.bytes == 4 * (3 * ROW + ROW // 2)
    assert (pair.place.name, pair.rounds, pair.origin) == ("1", 4, "jit(step)/mul")


def test_workspace_of_cublas_calls() -> None:
    text = TEXT.replace('"__cudnn$fmhaSoftmax"', '"__cublas$lt$matmul"').replace("u8[0]", "s8[64]")
    program = audit(text)
    assert program.workspace() == 4 * 64 and program.by_class()["matmul"] == 4 * (ROW + 16 + 64)


BRANCHES = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[256]{0}, s32[])->f32[256]{0}}

%idle (i: f32[256]) -> f32[256] {
  %i = f32[256]{0} parameter(0)
  ROOT %copied = f32[256]{0} copy(%i)
}

%working (w: f32[256]) -> f32[256] {
  %w = f32[256]{0} parameter(0)
  ROOT %sum = f32[256]{0} add(%w, %w)
}

%also (v: f32[256]) -> f32[256] {
  %v = f32[256]{0} parameter(0)
  ROOT %twice = f32[256]{0} multiply(%v, %v)
}

%fused (q: f32[256]) -> f32[256] {
  %q = f32[256]{0} parameter(0)
  ROOT %softmax = f32[256]{0} custom-call(%q), custom_call_target="__cudnn$fmhaSoftmax"
}

%other (r: f32[256]) -> f32[256] {
  %r = f32[256]{0} parameter(0)
  ROOT %kernel = f32[256]{0} custom-call(%r), custom_call_target="x", metadata={op_name="pallas_call"}
}

%tick (t: (s32[], f32[256])) -> (s32[], f32[256]) {
  %t = (s32[], f32[256]{0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %x = f32[256]{0} get-tuple-element(%t), index=1
  %maybe = f32[256]{0} conditional(%n, %x, %x), branch_computations={%idle, %working}
  %chunk = f32[256]{0} conditional(%n, %x, %x), branch_computations={%working, %also}
  %rows = f32[256]{0} conditional(%n, %x, %x), branch_computations={%other, %fused}
  ROOT %next = (s32[], f32[256]{0}) tuple(%n, %rows)
}

%go (g: (s32[], f32[256])) -> pred[] {
  %g = (s32[], f32[256]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (a: f32[256], b: s32[]) -> f32[256] {
  %a = f32[256]{0} parameter(0)
  %b = s32[] parameter(1)
  %first = (s32[], f32[256]{0}) tuple(%b, %a)
  %loop = (s32[], f32[256]{0}) while(%first), condition=%go, body=%tick, \
backend_config={"known_trip_count":{"n":"20"}}
  ROOT %end = f32[256]{0} get-tuple-element(%loop), index=1
}
"""


def test_a_branch_counts_by_its_frequency() -> None:
    """Named work runs in 8 of 20 ticks, and idle ticks copy; two equal chunks have half of the ticks each."""
    marked = 'metadata={op_name="jit(step)/runs_8_of_20/cond"}'
    pipelined = audit(BRANCHES.replace("{%idle, %working}", "{%idle, %working}, " + marked))
    assert [one.name for one in pipelined.kernels] == ["copied", "sum", "sum", "twice", "kernel", "softmax"]
    assert [one.share for one in pipelined.kernels] == pytest.approx([0.6, 0.4, 0.5, 0.5, 0.0, 1.0])
    assert {one.rounds for one in pipelined.kernels} == {20}
    assert pipelined.by_work() == {"move": 12 * 2048, "compute": 8 * 3072 + 20 * 3072, "attention": 20 * 2048}
    # Without a frequency in its name, an idle branch is never taken.
    assert [one.share for one in audit(BRANCHES).kernels][:2] == [0.0, 1.0]


def test_a_loop_of_unknown_trip_count_runs_as_often_as_the_loop_over_microbatches() -> None:
    text = BRANCHES.replace('backend_config={"known_trip_count":{"n":"20"}}', "")
    assert {one.rounds for one in audit(text, unknown_trips=7).kernels} == {7}
    assert {one.rounds for one in audit(text).kernels} == {1}


def test_a_loop_of_at_most_one_trip_counts_by_the_frequency_in_its_name() -> None:
    """The loop here runs in 8 of 20 ticks."""
    loop = """
  %maybe_loop = (s32[], f32[256]{0}) while(%t), condition=%go, body=%inner, metadata={op_name="a/runs_8_of_20/while"}
"""
    inner = """
%inner (t: (s32[], f32[256])) -> (s32[], f32[256]) {
  %u = (s32[], f32[256]{0}) parameter(0)
  %v = f32[256]{0} get-tuple-element(%u), index=1
  %negated = f32[256]{0} negate(%v)
  ROOT %w = (s32[], f32[256]{0}) tuple(%v, %negated)
}

%tick (t:"""
    text = BRANCHES.replace("\n%tick (t:", inner).replace("  %maybe = f32", loop.lstrip("\n") + "  %maybe = f32")
    (negated,) = (one for one in audit(text).kernels if one.name == "negated")
    assert (negated.rounds, negated.share, negated.total) == (20, 0.4, 8 * 2048)


@pytest.mark.parametrize(("target", "work"), [("__gpu$xla.gpu.triton", "attention"), ("mosaic_gpu_v2", "matmul")])
def test_kernels_of_experts_are_matmuls(target: str, work: str) -> None:
    call = f'custom_call_target="{target}", metadata={{op_name="a/pallas_call"}}'
    lines = "%q = f32[256]{0} parameter(0)", f"ROOT %k = f32[256]{{0}} custom-call(%q), {call}"
    text = "\n  ".join(["ENTRY %main (q: f32[256]) -> f32[256] {", *lines]) + "\n}\n"
    (kernel,) = audit(text).kernels
    assert kernel.work == work


@pytest.mark.parametrize("call", ["ragged-dot(%x, %w)", 'custom-call(%x, %w), custom_call_target="mosaic_gpu_v2"'])
def test_rows_without_tokens_are_not_read(call: str) -> None:
    text = f"""ENTRY %main (x: bf16[1024,64], w: bf16[8,64,32]) -> bf16[1024,32] {{
  %x = bf16[1024,64]{{1,0}} parameter(0)
  %w = bf16[8,64,32]{{2,1,0}} parameter(1)
  ROOT %y = bf16[1024,32]{{1,0}} {call}
}}
"""
    rows, matrices = 2 * 1024 * (64 + 32), 2 * 8 * 64 * 32
    for over_mean in (1, 4):
        assert audit(text, over_mean=over_mean).by_class()["matmul"] == rows / over_mean + matrices
