import pytest
import torch

from jenga_kernels.attention.attention_merge import attention_merge
from jenga_kernels.reference.attention import attention_merge as reference
from tests.kernels.support import DEVICE, check_close, generator, randn


def parts(shape, dtype):
    rng = generator(3)
    lses = [10 * randn(shape[:2], torch.float32, rng) for _ in range(2)]
    lses[0][0] = float("-inf")
    lses[1][:2] = float("-inf")
    outs = [randn(shape, dtype, rng) for _ in range(2)]
    outs[0][0] = float("nan")
    outs[1][:2] = float("nan")
    return {
        "first_out": outs[0],
        "first_lse": lses[0],
        "second_out": outs[1],
        "second_lse": lses[1],
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(3, 2, 64), (37, 5, 80), (300, 8, 128)], ids=str)
def test_attention_merge_agrees_with_its_reference(shape, dtype):
    arguments = parts(shape, dtype)
    exact_arguments = {name: tensor.double() for name, tensor in arguments.items()}
    exact_lse = torch.empty(shape[:2], dtype=torch.float64, device=DEVICE)
    naive_lse, lse = (torch.empty(shape[:2], device=DEVICE) for _ in range(2))
    exact = reference.attention_merge(**exact_arguments, lse=exact_lse)
    naive = reference.attention_merge(**arguments, lse=naive_lse)

    out = attention_merge(**arguments, lse=lse)

    check_close(out, exact, naive)
    is_empty = torch.isinf(exact_lse)
    assert is_empty.any()
    assert torch.equal(torch.isinf(lse), is_empty)
    assert (out[is_empty] == 0).all()
    check_close(*(tensor.masked_fill(is_empty, 0) for tensor in (lse, exact_lse, naive_lse)))


def test_attention_merge_may_write_onto_its_first_argument():
    arguments = parts((20, 4, 64), torch.float32)
    apart = attention_merge(**arguments)

    onto = attention_merge(**arguments, out=arguments["first_out"])

    assert onto is arguments["first_out"]
    assert torch.equal(onto, apart)


@pytest.mark.parametrize("name", ["first_lse", "second_lse"])
@pytest.mark.parametrize("shape", [(20, 4, 64), (2, 4, 64), (5, 3, 576)], ids=str)
def test_attention_merge_may_write_onto_a_log_sum_exp(shape, name):
    arguments = parts(shape, torch.float32)
    lse = torch.empty_like(arguments[name])
    apart = attention_merge(**arguments, lse=lse)

    onto = attention_merge(**arguments, lse=arguments[name])

    assert torch.equal(onto, apart)
    assert torch.equal(arguments[name], lse)


def test_attention_merge_of_no_rows_is_empty():
    arguments = {name: tensor[:0] for name, tensor in parts((3, 2, 64), torch.float32).items()}

    assert attention_merge(**arguments).shape == (0, 2, 64)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("second_out", lambda a: a["second_out"][:2]),
        ("second_lse", lambda a: a["second_lse"].double()),
        ("first_lse", lambda a: a["first_lse"].T.contiguous().T),
        ("second_out", lambda a: a["second_out"].half()),
        ("first_out", lambda a: a["first_out"].clone().requires_grad_()),
    ],
    ids=["fewer_tokens", "a_64_bit_sum", "scattered_sums", "another_dtype", "gradients"],
)
def test_attention_merge_refuses(name, change):
    arguments = parts((3, 2, 64), torch.float32)
    arguments[name] = change(arguments)

    with pytest.raises(ValueError, match=f"^{name} "):
        attention_merge(**arguments)
