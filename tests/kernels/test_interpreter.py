"""What the tests change in Triton's interpreter.

Its matrix product has the same bits on every processor. What it throws away is not computed.
"""

import math
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emulation import only_where_interpreted

np = pytest.importorskip("numpy")

pytestmark = only_where_interpreted

DTYPES = ["float16", "float32", "float64", "int8", "int16", "int32", "int64"]
NAME_OF_PRODUCT = "import triton.runtime.interpreter as i; print(i.np.matmul.__module__)"


def product(a, b, dtype):
    """Multiply as the interpreter does."""
    from triton.runtime import interpreter

    return interpreter.np.matmul(a, b, dtype=dtype)


def matrices(dtype, shape_a, shape_b, *, seed=1):
    """Two arrays: integers of any size, or normal deviates."""
    rng = np.random.default_rng(seed)
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        return [rng.integers(limits.min, limits.max, shape, dtype) for shape in (shape_a, shape_b)]
    return [rng.standard_normal(shape).astype(dtype) for shape in (shape_a, shape_b)]


def laid_out(array, order):
    """Get an equal array that lies otherwise in memory."""
    if order == "transposed":
        return np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)
    if order == "strided":
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    return array


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30)
@given(data=st.data())
def test_elements_of_a_product_depend_on_their_row_and_column_alone(dtype, data):
    batches, k = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 16, 32, 64, 128]))
    m, n = (data.draw(st.integers(1, 70)) for _ in "mn")
    a, b = matrices(dtype, (batches, m, k), (batches, k, n), seed=data.draw(st.integers(0, 99)))
    whole = product(a, b, dtype)
    rows = data.draw(st.lists(st.integers(0, m - 1), min_size=1, max_size=m, unique=True))
    columns = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
    batch = data.draw(st.integers(0, batches - 1))
    orders = st.sampled_from(["as_made", "transposed", "strided"])
    left = laid_out(a[batch][rows], data.draw(orders))
    right = laid_out(b[batch][:, columns], data.draw(orders))

    part = product(left, right, dtype)

    assert part.dtype == dtype
    assert part.tobytes() == whole[batch][np.ix_(rows, columns)].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", [1, 16, 64, 1024])
def test_products_err_no_more_than_sums_in_pairs_may(dtype, k):
    a, b = matrices(dtype, (30, k), (k, 40))
    wide_a, wide_b = a.astype(np.longdouble), b.astype(np.longdouble)

    error = np.abs(product(a, b, dtype) - wide_a @ wide_b)

    # One rounding of each product, and one of each sum on the way to the whole.
    roundings = 1 + math.log2(k)
    allowed = roundings * np.finfo(dtype).eps / 2 * (np.abs(wide_a) @ np.abs(wide_b))
    assert (error <= 1.001 * allowed).all()


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_products_of_integers_are_exact_and_wrap_around(dtype):
    a, b = matrices(dtype, (4, 32), (32, 5))
    bits = 8 * np.dtype(dtype).itemsize
    exact = a.astype(object) @ b.astype(object)
    wrapped = (exact + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))

    assert (product(a, b, dtype) == wrapped.astype(dtype)).all()


@pytest.mark.parametrize("shapes", [((4, 24), (24, 4)), ((4, 16), (32, 4))])
def test_products_refuse_a_sum_that_no_dot_of_triton_has(shapes):
    a, b = (np.zeros(shape, np.float32) for shape in shapes)

    with pytest.raises(ValueError, match="must share a power of two as K"):
        product(a, b, np.float32)


@triton.jit
def dot_kernel(
    out_ptr,  # [..., M, N]
    a_ptr,  # [..., M, K]
    b_ptr,  # [..., K, N]
    c_ptr,  # [..., M, N]
    B: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """The program adds the product of a and b, in batches where B is not 0, to c."""
    rows = tl.arange(0, M)[:, None] * K + tl.arange(0, K)[None]
    columns = tl.arange(0, K)[:, None] * N + tl.arange(0, N)[None]
    places = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None]
    if B > 0:
        batches = tl.arange(0, B)[:, None, None]
        rows = batches * (M * K) + rows[None]
        columns = batches * (K * N) + columns[None]
        places = batches * (M * N) + places[None]
    a, b, c = tl.load(a_ptr + rows), tl.load(b_ptr + columns), tl.load(c_ptr + places)
    product = tl.dot(a, b, c, out_dtype=c.dtype, max_num_imprecise_acc=0)
    tl.store(out_ptr + places, product)


def dot(a, b, c):
    """Run the kernel: a [B, M, K], b [B, K, N] and c [B, M, N], or each without B."""
    out = torch.empty_like(c)
    num_batches = len(a) if a.ndim == 3 else 0
    m, k = a.shape[-2:]
    dot_kernel[(1,)](out, a, b, c, B=num_batches, M=m, N=b.shape[-1], K=k)
    return out


def numbers(dtype, *shape):
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-100, 100, shape, generator=generator, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "sums"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e5m2, torch.float32),
        (torch.float64, torch.float64),
        (torch.int8, torch.int32),
    ],
)
@pytest.mark.parametrize("batches", [(), (4,)], ids=["matrices", "batches"])
def test_rows_and_columns_of_a_dot_do_not_depend_on_how_many_there_are(dtype, sums, batches):
    a, b = numbers(dtype, *batches, 64, 64), numbers(dtype, *batches, 64, 128)
    c = numbers(sums, *batches, 64, 128)

    whole = dot(a, b, c)
    fewer_rows = dot(a[..., 16:32, :].contiguous(), b, c[..., 16:32, :].contiguous())
    one_row = dot(a[..., 3:4, :].contiguous(), b, c[..., 3:4, :].contiguous())
    fewer_columns = dot(a, b[..., 96:].contiguous(), c[..., 96:].contiguous())

    assert torch.equal(fewer_rows, whole[..., 16:32, :])
    assert torch.equal(one_row, whole[..., 3:4, :])
    assert torch.equal(fewer_columns, whole[..., 96:])
    if batches:
        assert torch.equal(dot(a[2], b[2], c[2]), whole[2])
    exact = a.double() @ b.double() + c.double()
    eps = torch.finfo(sums).eps if sums.is_floating_point else 0
    assert ((whole.double() - exact).abs() <= 64 * eps * 64).all()


def test_child_processes_interpret_with_the_same_product():
    done = subprocess.run(
        [sys.executable, "-c", NAME_OF_PRODUCT], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["interpreter_product"]


def test_engines_interpret_with_the_same_product():
    from tests.vllm_plugin.conftest import V2_RUNNER, engine_environment

    for runner in "01":
        done = subprocess.run(
            [sys.executable, "-c", NAME_OF_PRODUCT],
            env=engine_environment(**{V2_RUNNER: runner}),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == ["interpreter_product"]


@triton.jit
def doubled(x):
    """Get twice a tensor, by a sum."""
    return x + x


@triton.jit
def sums_kernel(
    out_ptr,  # [N]
    x_ptr,  # [N]
    N: tl.constexpr,
):
    """The program doubles each element twice, in functions that it calls, and adds 1."""
    places = tl.arange(0, N)
    x = tl.load(x_ptr + places)
    tl.store(out_ptr + places, doubled(doubled(x)) + tl.full([N], 1, x.dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_sums_of_integers_wrap_around_in_every_function_of_a_kernel(dtype):
    limits = torch.iinfo(dtype)
    x = torch.tensor([limits.min, limits.max, -3, limits.max // 4 + 1], dtype=dtype)
    out = torch.empty_like(x)

    for _ in range(2):  # the second finds the language as the first has left it
        sums_kernel[(1,)](out, x, N=4)

    assert out.tolist() == [1, -3, -11, limits.min + 1]
    with pytest.raises(ValueError, match="outside of JIT functions"):
        tl.arange(0, 4)


def test_no_assertion_is_computed_that_is_for_debugging():
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    assert (options.debug, options.sanitize_overflow) == (False, False)
    assert options == interpreter.InterpreterOptions(sanitize_overflow=False)


def test_types_of_tensors_are_those_of_numpy():
    from triton.runtime import interpreter

    for tt_dtype, dtype in (
        (tl.bfloat16, np.uint16),  # as it is stored
        (tl.int1, np.bool_),
        (tl.block_type(tl.int8, [4]), np.int8),
        (tl.pointer_type(tl.float32), np.uint64),
        (tl.block_type(tl.pointer_type(tl.float32), [4]), np.uint64),
    ):
        assert interpreter._get_np_dtype(tt_dtype) == dtype
