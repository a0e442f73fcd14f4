"""The emulated GPU: what instructions give, and what it refuses."""

import numpy as np
import pytest
import torch

from perf.emulator import launches
from perf.emulator.errors import EmulationError
from perf.emulator.instructions import approximations
from perf.emulator.launches import EmulatedKernel
from perf.emulator.numbers import FLOAT8

THREADS = 64
GROUP = 128

HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u64 .ptr .global .align 1 kernel_param_1,
    .param .u32 kernel_param_2
)
.reqntid 64
{
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b64 %rd2, [kernel_param_1];
    ld.param.b32 %r8, [kernel_param_2];
    mov.u32 %r7, %tid.x; // the thread
    mul.wide.u32 %rd3, %r7, 4;
    add.s64 %rd4, %rd1, %rd3; // its results
    add.s64 %rd5, %rd2, %rd3; // its inputs
"""
TAIL = "\n    ret;\n}\n"


def run(
    body,
    inputs=None,
    scalar=0,
    *,
    num_programs=1,
    shared_bytes=1024,
    result_bytes=4 * THREADS,
    **options,
):
    """What a kernel of this body stores, as u32: thread t's inputs and results are their t-th."""
    result = torch.zeros(result_bytes, dtype=torch.uint8)
    inputs = torch.arange(THREADS, dtype=torch.int32) if inputs is None else inputs
    kernel = EmulatedKernel(HEAD + body + TAIL, **options)
    kernel.launch((num_programs, 1, 1), [result, inputs, scalar], shared_bytes)
    return result.numpy().view(np.uint32)


def of_each(instruction, *operands):
    """Results u32 of an instruction from %r1, %r2 and %r3 into %r0."""
    words = [np.uint32(word & 0xFFFFFFFF) for word in (*operands, 0, 0)[:3]]
    setup = "".join(f"mov.b32 %r{i + 1}, {int(word)};\n" for i, word in enumerate(words))
    return int(run(setup + instruction + "\nst.global.b32 [%rd4], %r0;")[0])


def bits(value):
    return int(np.float32(value).view(np.uint32))


NAN = 0x7FC00000


@pytest.mark.parametrize(
    ("instruction", "operands", "expected"),
    [
        ("sub.s32 %r0, %r1, %r2;", (3, 5), 2**32 - 2),
        ("mul.hi.u32 %r0, %r1, %r2;", (2**31, 6), 3),
        ("mul.hi.s32 %r0, %r1, %r2;", (-(2**31), 6), 2**32 - 3),
        ("cvt.u16.u32 %rs1, %r1; mul.hi.u16 %rs1, %rs1, 1171; cvt.u32.u16 %r0, %rs1;", (700,), 12),
        ("div.s32 %r0, %r1, %r2;", (-7, 2), 2**32 - 3),
        ("rem.s32 %r0, %r1, %r2;", (-7, 2), 2**32 - 1),
        ("shr.s32 %r0, %r1, 40;", (-7,), 2**32 - 1),
        ("shl.b32 %r0, %r1, 32;", (7,), 0),
        ("bfe.u32 %r0, %r1, 4, 8;", (0xABCDE,), 0xCD),
        ("bfe.s32 %r0, %r1, 4, 8;", (0xABCDE,), 0xFFFFFFCD),
        ("shf.l.wrap.b32 %r0, %r1, %r2, 8;", (0x11223344, 0xAABBCCDD), 0xBBCCDD11),
        ("prmt.b32 %r0, %r1, %r2, 0x5410U;", (0x33221100, 0x77665544), 0x55441100),
        ("prmt.b32 %r0, %r1, %r2, 0x000B;", (0x80221100, 0), 0xFF),
        ("lop3.b32 %r0, %r1, %r2, 0x43004300, 0xEA;", (0xABCDABCD, 0xF000F), 0x430D430D),
        ("lop3.b32 %r0, %r1, %r2, 0x0000FFFF, 0x1A;", (0x00FF00FF, 0x0F0F0F0F), 0x00F0FF00),
        ("add.s16x2 %r0, %r1, %r2;", (0x0001FFFF, 0x00020003), 0x00030002),
        ("sub.f16x2 %r0, %r1, %r2;", (0x64FF6400, 0x64806480), 0x57F0D800),
        ("fma.rn.bf16x2 %r0, %r1, %r2, %r3;", (0x40003F80, 0x40404000, 0x3F803F80), 0x40E04040),
        ("popc.b32 %r0, %r1;", (0xF0F,), 8),
        ("max.relu.s32 %r0, %r1, %r2;", (-7, -5), 0),
        ("mad.lo.s32 %r0, %r1, %r2, %r3;", (-7, 3, 1), 2**32 - 20),
        ("max.f32 %r0, %r1, %r2;", (NAN, bits(1)), bits(1)),
        ("max.NaN.f32 %r0, %r1, %r2;", (NAN, bits(1)), NAN),
        ("min.xorsign.abs.f32 %r0, %r1, %r2;", (bits(-3), bits(2)), bits(-2)),
        ("fma.rn.f32 %r0, %r1, %r2, %r3;", (bits(1 + 2**-12), bits(1 + 2**-12), bits(-1)),
         bits(2**-11 + 2**-24)),
        ("mul.ftz.f32 %r0, %r1, %r2;", (bits(2**-100), bits(2**-30)), 0),
        ("mul.f32 %r0, %r1, %r2;", (bits(2**-100), bits(2**-30)), bits(2**-130)),
        ("ex2.approx.ftz.f32 %r0, %r1;", (bits(-np.inf),), 0),
        ("cvt.rn.f32.s32 %r0, %r1;", (-7,), bits(-7)),
        ("cvt.rzi.s32.f32 %r0, %r1;", (bits(-7.9),), 2**32 - 7),
        ("cvt.rzi.s32.f32 %r0, %r1;", (bits(1e20),), 2**31 - 1),
        ("cvt.rzi.s32.f32 %r0, %r1;", (NAN,), 0),
        ("cvt.rmi.ftz.f32.f32 %r0, %r1;", (bits(-7.1),), bits(-8)),
        ("cvt.rn.bf16x2.f32 %r0, %r1, %r2;", (bits(1), bits(1 + 2**-8)), 0x3F803F80),
        ("cvt.rn.bf16x2.f32 %r0, %r1, %r2;", (NAN, bits(1 + 3 * 2**-8)), 0x7FFF3F82),
        ("cvt.rn.f16x2.f32 %r0, %r1, %r2;", (bits(65504), bits(1)), 0x7BFF3C00),
        ("cvt.rna.tf32.f32 %r0, %r1;", (bits(-1 - 2**-11),), bits(-1 - 2**-10)),
        ("cvt.rna.tf32.f32 %r0, %r1;", (bits(1 + 2**-11 - 2**-20),), bits(1)),
        ("setp.ne.f32 %p1, %r1, %r2; selp.b32 %r0, 1, 0, %p1;", (NAN, NAN), 0),
        ("setp.neu.f32 %p1, %r1, %r2; selp.b32 %r0, 1, 0, %p1;", (NAN, NAN), 1),
        ("setp.lt.s32 %p1|%p2, %r1, %r2; selp.b32 %r0, 1, 0, %p2;", (-1, 0), 0),
        ("setp.lt.u32 %p1, %r1, %r2; selp.b32 %r0, 1, 0, %p1;", (-1, 0), 0),
        ("{ .reg .b16 low, high; mov.b32 {low, high}, %r1; mov.b32 %r0, {high, low}; }",
         (0x11223344,), 0x33441122),
        ("mov.b32 %r0, 9; setp.eq.s32 %p1, %r1, 1; @!%p1 mov.b32 %r0, 8;", (1,), 9),
    ],
)  # fmt: skip
def test_an_instruction_gives_what_the_manual_says(instruction, operands, expected):
    assert of_each(instruction, *operands) == expected


ALLOWED_ULPS = {
    "ex2.approx.ftz.f32 %r0, %r1;": (lambda a, _: 2**a, 2.5),
    "rcp.approx.ftz.f32 %r0, %r1;": (lambda a, _: 1 / a, 1),
    "sqrt.approx.ftz.f32 %r0, %r1;": (lambda a, _: a**0.5, 1),
    "rsqrt.approx.ftz.f32 %r0, %r1;": (lambda a, _: a**-0.5, 1),
    "div.full.f32 %r0, %r1, %r2;": (lambda a, b: a / b, 2),
    "rcp.rn.f32 %r0, %r1;": (lambda a, _: 1 / a, 0.5),
    "sqrt.rn.f32 %r0, %r1;": (lambda a, _: a**0.5, 0.5),
    "div.rn.f32 %r0, %r1, %r2;": (lambda a, b: a / b, 0.5),
}


@pytest.mark.parametrize("instruction", ALLOWED_ULPS)
def test_an_approximation_errs_as_far_as_the_manual_lets_it(instruction):
    function, allowed = ALLOWED_ULPS[instruction]
    load = "ld.global.b32 %r1, [%rd5];\nmov.b32 %r2, 0f40490FDB;\n"
    off = []
    for seed in range(8):
        values = np.random.default_rng(seed).uniform(0.01, 20, THREADS).astype(np.float32)
        inputs = torch.from_numpy(values.view(np.int32))
        got = run(load + instruction + "\nst.global.b32 [%rd4], %r0;", inputs).view(np.float32)
        exact = function(values.astype(np.float64), np.float64(np.float32(np.pi)))
        off += [np.abs(got - exact) / np.spacing(exact.astype(np.float32))]
    assert np.max(off) <= allowed
    assert np.max(off) > allowed * (0.8 if allowed > 0.5 else 0.1)
    assert (np.max(off) > 0.5) == (allowed > 0.5)


def test_logarithms_err_within_a_bound_of_their_own():
    values = np.random.default_rng(0).uniform(0.51, 40, 10_000).astype(np.float32)
    exact = np.log2(values.astype(np.float64))
    off = np.abs(approximations.UNARY["lg2"](values) - exact)
    assert (off <= 2**-22 * np.maximum(1, np.abs(exact))).all()
    assert off.max() > 2**-23


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("ex2", -np.inf, 0), ("ex2", 0, 1), ("rcp", np.inf, 0), ("rcp", 0, np.inf), ("lg2", 1, None)],
)
def test_approximations_keep_what_the_manual_names(name, value, expected):
    with np.errstate(divide="ignore"):
        got = approximations.UNARY[name](np.float32([value]))[0]
    assert abs(got) <= 2**-22 if expected is None else got == expected


@pytest.mark.parametrize(("name", "dtype"), FLOAT8.items(), ids=FLOAT8)
@pytest.mark.parametrize("word", [0x0123, 0x7E7F, 0x80FE, 0xC8B7])
def test_pairs_of_float8_become_halves(word, name, dtype):
    pair = torch.tensor([word & 255, word >> 8], dtype=torch.uint8).view(dtype)
    low, high = pair.half().view(torch.int16).tolist()
    convert = f"cvt.rn.f16x2.{name} %r0, a;"
    got = of_each(f"{{ .reg .b16 a, b; mov.b32 {{a, b}}, %r1; {convert} }}", word)
    is_nan = [bool(value) for value in pair.float().isnan()]
    for half, expected, nan in zip((got & 0xFFFF, got >> 16), (low, high), is_nan, strict=True):
        assert (half & 0x7C00 == 0x7C00) if nan else half == expected & 0xFFFF


@pytest.mark.parametrize(("name", "dtype"), FLOAT8.items(), ids=FLOAT8)
@pytest.mark.parametrize(
    "values", [(1.0, -448.0), (1e9, -1e9), (2.0**-9, 0.3), (17.0, 19.0), (-0.0, 2.0**-17)]
)
def test_float8_of_numbers_saturates_and_rounds_to_even(values, name, dtype):
    most = torch.finfo(dtype).max
    expected = torch.tensor(values).clamp(-most, most).to(dtype).view(torch.uint8)
    instruction = f"cvt.rn.satfinite.{name}.f32 %rs1, %r1, %r2; mov.b32 %r0, {{%rs1, %rs1}};"
    got = of_each(instruction, bits(values[1]), bits(values[0])) & 0xFFFF
    assert [got & 255, got >> 8] == expected.tolist()
    nan = of_each(instruction, bits(float("nan")), bits(-float("nan"))) & 0xFFFF
    assert nan == 0x7F7F


def test_products_of_64_bits_have_an_upper_half():
    body = """
    mov.b64 %rd6, 0xFFFFFFFFFFFFFFFF;
    mul.hi.u64 %rd7, %rd6, %rd6;
    shr.u64 %rd7, %rd7, 32;
    cvt.u32.u64 %r0, %rd7;
    st.global.b32 [%rd4], %r0;"""
    assert run(body)[0] == 0xFFFFFFFF
    assert run(body.replace("hi.u64", "hi.s64"))[0] == 0


def test_threads_that_parted_meet_again():
    body = """
    mov.b32 %r0, 0;
    mov.b32 %r1, 0;
$loop:
    add.s32 %r0, %r0, %r7;
    add.s32 %r1, %r1, 1;
    and.b32 %r2, %r7, 3;
    setp.le.s32 %p1, %r1, %r2;
    @%p1 bra $loop;
    bar.sync 0;
    st.global.b32 [%rd4], %r0;"""
    threads = np.arange(THREADS)
    assert (run(body) == threads * (threads % 4 + 1)).all()


def test_programs_that_end_early_leave_the_others_alone():
    body = """
    mov.u32 %r1, %ctaid.x;
    and.b32 %r2, %r1, 7;
    setp.ne.s32 %p1, %r2, 3;
    @%p1 ret;
    mul.wide.u32 %rd6, %r1, 256;
    add.s64 %rd4, %rd4, %rd6;
    st.global.b32 [%rd4], %r1;"""
    got = run(body, num_programs=64, result_bytes=64 * 256).reshape(64, -1)
    programs = np.arange(64)
    assert (got == np.where(programs % 8 == 3, programs, 0)[:, None]).all()


EXCHANGE = """
    shl.b32 %r1, %r7, 2;
    st.shared.b32 [%r1], %r7;
    {barrier}
    xor.b32 %r2, %r1, {distance};
    ld.shared.b32 %r0, [%r2];
    st.global.b32 [%rd4], %r0;"""


def test_shared_memory_carries_values_between_warps():
    got = run(EXCHANGE.format(barrier="bar.sync 0;", distance=128))
    assert (got == np.arange(THREADS) ^ 32).all()


def test_addresses_in_shared_memory_wrap_around_at_32_bits():
    body = EXCHANGE.replace("[%r2]", "[%r2 + 4096]").format(
        barrier="bar.sync 0;", distance="128; add.s32 %r2, %r2, -4096"
    )
    assert (run(body) == np.arange(THREADS) ^ 32).all()


def test_a_missing_barrier_between_warps_is_a_race():
    with pytest.raises(EmulationError, match=r"ld\.shared.*race: threads load what others stored"):
        run(EXCHANGE.format(barrier="", distance=128))
    run(EXCHANGE.format(barrier="bar.warp.sync -1;", distance=64))


def test_a_missing_barrier_within_a_warp_is_a_race():
    with pytest.raises(EmulationError, match=r"ld\.shared.*load what others of their warp stored"):
        run(EXCHANGE.format(barrier="", distance=64))
    run(EXCHANGE.format(barrier="", distance=0))
    again = EXCHANGE.format(barrier="bar.sync 0;", distance=64) + "{} st.shared.b32 [%r1], %r8;"
    with pytest.raises(EmulationError, match="store where others of their warp load"):
        run(again.replace("{}", ""), scalar=1000)
    run(again.replace("{}", "bar.warp.sync -1;"), scalar=1000)


def test_storing_where_another_warp_still_loads_is_a_race():
    body = EXCHANGE.format(barrier="bar.sync 0;", distance=128) + "{} st.shared.b32 [%r1], %r8;"
    with pytest.raises(EmulationError, match="race: threads store where others load"):
        run(body.replace("{}", ""), scalar=1000)
    run(body.replace("{}", "bar.sync 0;"), scalar=1000)


def test_threads_that_store_different_values_at_once_race():
    with pytest.raises(EmulationError, match="store different values at once"):
        run("st.global.b32 [%rd1], %r7;")
    run("st.global.b32 [%rd1], %r8;", scalar=5)


def test_threads_that_may_store_different_values_at_once_leave_one_of_them():
    body = "mov.u32 %r1, global_smem; setp.lt.u32 %p1, %r7, 32; @%p1 st.shared.b32 [%r1], %r7;"
    body += "bar.sync 0; ld.shared.b32 %r2, [%r1]; st.global.b32 [%rd4], %r2;"
    with pytest.raises(EmulationError, match="store different values at once"):
        run(body)

    got = run(body, may_stores_differ=True)

    assert (got == got[0]).all()
    assert got[0] < 32


def test_a_program_may_not_depend_on_another(monkeypatch):
    monkeypatch.setattr(launches, "MAX_LANES", THREADS)
    own = """
    mov.u32 %r1, %ctaid.x;
    mul.wide.u32 %rd6, %r1, 256;
    add.s64 %rd6, %rd4, %rd6;
    st.global.b32 [%rd6], %r7;"""
    run(own, num_programs=2, result_bytes=512)
    with pytest.raises(EmulationError, match="load what another program stores"):
        run(own + "ld.global.b32 %r0, [%rd4];", num_programs=2, result_bytes=512)
    with pytest.raises(EmulationError, match="of two programs store"):
        run("mov.u32 %r1, %ctaid.x;\nst.global.b32 [%rd4], %r1;", num_programs=3)


MOVE = """
    ld.global.b32 %r0, [%rd5];
    {barrier}
    xor.b32 %r1, %r7, {distance};
    mul.wide.u32 %rd6, %r1, 4;
    add.s64 %rd6, %rd2, %rd6;
    st.global.b32 [%rd6], %r0;"""


def test_a_warp_may_not_store_in_a_tensor_what_another_loads_without_a_barrier():
    for barrier, distance in (("bar.sync 0;", 32), ("", 1)):
        inputs = torch.arange(THREADS, dtype=torch.int32)
        run(MOVE.format(barrier=barrier, distance=distance), inputs)
        assert inputs.tolist() == [thread ^ distance for thread in range(THREADS)]
    with pytest.raises(EmulationError, match="of two warps access a place of a tensor"):
        run(MOVE.format(barrier="", distance=32))


COPY = """
    shl.b32 %r1, %r7, 2;
    cp.async.ca.shared.global [%r1 + 0], [%rd5 + 0], 0x4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r1 + 512], [%rd5 + 0], 0x4;
    cp.async.commit_group;
    cp.async.wait_group {groups};
    ld.shared.b32 %r0, [%r1 + {offset}];
    st.global.b32 [%rd4], %r0;"""


@pytest.mark.parametrize(
    ("groups", "offset", "has_landed"), [(1, 0, True), (1, 512, False), (0, 512, True)]
)
def test_an_asynchronous_copy_lands_when_it_is_waited_for(groups, offset, has_landed):
    got = run(COPY.format(groups=groups, offset=offset))
    assert (got == (np.arange(THREADS) if has_landed else 0xFFFFFFFF)).all()


def test_an_asynchronous_copy_of_no_bytes_gives_zeros():
    body = COPY.replace("[%rd5 + 0], 0x4;", "[%rd5 + 0], 0x4, %r8;")
    assert (run(body.format(groups=0, offset=0), scalar=0) == 0).all()
    assert (run(body.format(groups=0, offset=0), scalar=4) == np.arange(THREADS)).all()


def test_what_a_copy_under_way_reads_may_not_be_stored():
    body = """
    shl.b32 %r1, %r7, 2;
    cp.async.ca.shared.global [%r1 + 0], [%rd5 + 0], 0x4;
    {}
    st.global.b32 [%rd5], %r8;
    cp.async.wait_all;"""
    run(body.format("cp.async.wait_all;"), scalar=100)
    with pytest.raises(EmulationError, match="a copy under way reads what is stored meanwhile"):
        run(body.format(""), scalar=100)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r0, [%rd5 + 256];", "load of 4 bytes at 0x[0-9a-f]+, in no tensor"),
        ("st.global.b32 [%rd4 + -256], %r0;", "store of 4 bytes at 0x[0-9a-f]+, in no tensor"),
        ("ld.global.b32 %r0, [%rd5 + 2];", "which is no multiple of them"),
        ("ld.shared.b32 %r0, [%r7 + 1024];", "of 1024 bytes of shared memory"),
        ("setp.lt.s32 %p1, %r7, 3; @%p1 bar.sync 0;", "a barrier by 3 of 64 threads"),
        ("setp.lt.s32 %p1, %r7, 3; @%p1 bar.warp.sync -1;", "a barrier of a warp by 3 of 32"),
        ("setp.lt.s32 %p1, %r7, 3; @%p1 shfl.sync.bfly.b32 %r0, %r7, 1, 31, -1;", "3 of 32"),
        ("teleport.b32 %r0, %r1;", "no such instruction is known: teleport.b32"),
    ],
)
def test_what_a_gpu_leaves_undefined_is_refused(body, message):
    with pytest.raises(EmulationError, match=message):
        run(body)


@pytest.mark.parametrize(
    ("mode", "operands", "source"),
    [
        ("bfly", "1, 31", lambda lane: lane ^ 1),
        ("up", "2, 0", lambda lane: np.where(lane % 32 >= 2, lane - 2, lane)),
        ("down", "2, 31", lambda lane: np.where(lane % 32 < 30, lane + 2, lane)),
        ("idx", "5, 31", lambda lane: lane // 32 * 32 + 5),
        ("idx", "5, 0x181F", lambda lane: lane // 8 * 8 + 5),
    ],
)
def test_threads_of_a_warp_exchange_values(mode, operands, source):
    got = run(f"shfl.sync.{mode}.b32 %r0, %r7, {operands}, -1;\nst.global.b32 [%rd4], %r0;")
    assert (got == source(np.arange(THREADS))).all()


def test_a_warp_reduces_its_values():
    got = run("redux.sync.max.s32 %r0, %r7, -1;\nst.global.b32 [%rd4], %r0;")
    assert (got == np.repeat([31, 63], 32)).all()


def test_matrices_in_shared_memory_are_read_by_rows_or_columns():
    body = """
    shl.b32 %r1, %r7, 2;
    ld.global.b32 %r2, [%rd5];
    st.shared.b32 [%r1], %r2;
    bar.sync 0;
    and.b32 %r3, %r7, 7;
    shl.b32 %r3, %r3, 4;
    ldmatrix.sync.aligned.m8n8.x1.{}shared.b16 {{%r0}}, [%r3];
    st.global.b32 [%rd4], %r0;"""
    matrix = torch.arange(128, dtype=torch.int16)
    rows, columns = (run(body.format(way), matrix)[:32].view(np.uint16) for way in ("", "trans."))
    expected = matrix[:64].reshape(8, 8).numpy()
    assert (rows == expected.reshape(-1)).all()
    assert (columns == expected.T.reshape(-1)).all()


# A warp group adds the product of 64 x 16 and 16 x 8 ones to ones.
PRODUCT = """
    .reg .f32 %f<4>;
    mov.b32 %r1, 0x3F803F80;
    shl.b32 %r2, %r7, 4;
    {write}
    mov.b32 %r3, 0x3F800000;
    mov.b32 %f0, %r3;
    mov.b32 %f1, %r3;
    mov.b32 %f2, %r3;
    mov.b32 %f3, %r3;
    mov.pred %p1, -1;
    {proxy_fence}
    bar.sync 0;
    mov.b64 %rd6, 0x0000000800080000; // eight rows of 16 bytes, and then the next eight columns
    {fence}
    {before}
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
        {{%f0, %f1, %f2, %f3}}, %rd6, %rd6, %p1, 1, 1, 0, 0;
    {between}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    mov.b32 %r0, %f3;
    st.global.b32 [%rd4], %r0;"""
PRODUCT_PARTS = {
    "write": "st.shared.v4.b32 [%r2], {%r1, %r1, %r1, %r1};",
    "proxy_fence": "fence.proxy.async.shared::cta;",
    "fence": "wgmma.fence.sync.aligned;",
    "before": "",
    "between": "",
}


COPY_ONES = """
    shl.b64 %rd7, %rd3, 2;
    add.s64 %rd7, %rd2, %rd7;
    cp.async.cg.shared.global [%r2], [%rd7], 0x10;
    cp.async.wait_all;"""


def multiply(*, are_copies_fenced=True, **parts):
    body = PRODUCT.format(**(PRODUCT_PARTS | parts))
    result, inputs = torch.zeros(4 * GROUP, dtype=torch.uint8), torch.ones(8 * GROUP).bfloat16()
    text = HEAD.replace("reqntid 64", f"reqntid {GROUP}") + body + TAIL
    kernel = EmulatedKernel(text, are_copies_fenced=are_copies_fenced)
    kernel.launch((1, 1, 1), [result, inputs, 0], 4096)
    return result.numpy().view(np.float32)


def test_a_warp_group_multiplies_matrices_in_shared_memory():
    assert (multiply() == 17).all()
    assert (multiply(write=COPY_ONES) == 17).all()


def test_compilers_may_do_without_a_fence_behind_copies():
    assert (multiply(write=COPY_ONES, proxy_fence="", are_copies_fenced=False) == 17).all()
    with pytest.raises(EmulationError, match="since the last proxy fence"):
        multiply(write=COPY_ONES, proxy_fence="")
    with pytest.raises(EmulationError, match="since the last proxy fence"):
        multiply(proxy_fence="", are_copies_fenced=False)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"proxy_fence": ""}, "written to shared memory since the last proxy fence"),
        ({"fence": ""}, r"no wgmma\.fence before the first product"),
        ({"before": "mov.b32 %f2, %r3;"}, r"written since the last wgmma\.fence"),
        ({"between": "mov.b32 %r0, %f2;"}, "a register of a product that nobody has waited for"),
        ({"between": "mov.b32 %f2, %r0;"}, "a register of a product that nobody has waited for"),
    ],
)
def test_what_a_product_takes_is_fenced_and_left_alone(parts, message):
    with pytest.raises(EmulationError, match=message):
        multiply(**parts)
