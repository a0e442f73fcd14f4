import ast
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from jenga_kernels.launches import Call, Launch, launch, taken_by
from jenga_kernels.triton.lib.groups import Pointer, groups_of, with_groups
from tests.kernels.support import DEVICE

KERNELS = Path(__file__).parents[3] / "jenga_kernels" / "triton"

MAX_PARAMETERS = 34
"""Most parameters of a kernel. Triton makes no group of strides, which are always `tl.int64`."""


class Rows(NamedTuple):
    out_ptr: Pointer
    x_ptr: Pointer
    bias_ptr: Pointer


class Tiles(NamedTuple):
    BLOCK: int
    IS_DOUBLED: bool


@with_groups(rows=Rows, tiles=Tiles)
@triton.jit
def add_kernel(rows, size, tiles: tl.constexpr):
    offsets = tl.arange(0, tiles.BLOCK)
    mask = offsets < size
    x = tl.load(rows.x_ptr + offsets, mask=mask)
    if rows.bias_ptr is not None:
        x += tl.load(rows.bias_ptr + offsets, mask=mask)
    if tiles.IS_DOUBLED:
        x *= 2
    tl.store(rows.out_ptr + offsets, x, mask=mask)


def parameters_of_kernels():
    """Number of parameters of each function that a module passes to `triton.jit` or `gluon.jit`."""
    found = {}
    for path in KERNELS.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                found[f"{path.relative_to(KERNELS)}: {node.name}"] = len(node.args.args)
    return found


def test_no_kernel_has_more_parameters_than_can_be_read():
    found = parameters_of_kernels()

    assert len(found) > 30
    assert {name: n for name, n in found.items() if n > MAX_PARAMETERS} == {}


@pytest.mark.parametrize(("bias", "is_doubled"), [(None, True), (3.0, False)])
def test_a_launch_fills_groups_by_the_names_of_their_fields(bias, is_doubled):
    x, out = torch.arange(5.0, device=DEVICE), torch.zeros(5, device=DEVICE)
    biases = None if bias is None else torch.full_like(x, bias)
    arguments = {"out_ptr": out, "x_ptr": x, "bias_ptr": biases, "size": 5, "unused": 1}

    launch(add_kernel, (1,), x.device, **arguments, BLOCK=8, IS_DOUBLED=is_doubled)

    assert torch.equal(out, 2 * x if bias is None else x + bias)


def test_a_launch_fills_groups_of_constants_once():
    constants = {"BLOCK": 8, "IS_DOUBLED": True, "size": 5}
    made = Launch(kernel=add_kernel, grid=(1,), constants=constants)
    tensors = dict.fromkeys(("out_ptr", "x_ptr", "bias_ptr"))

    first, second = made.arguments(tensors), made.arguments(tensors)

    assert first["tiles"] is second["tiles"]
    assert first["tiles"] == Tiles(BLOCK=8, IS_DOUBLED=True)
    assert "rows" not in first
    assert taken_by(add_kernel, first)["rows"] == Rows(None, None, None)


class Compiled:
    """Notes what it is launched with."""

    module = object()

    def __init__(self):
        self.seen = []

    def __getitem__(self, grid):
        return lambda *given: self.seen.append((grid, given))


class LoadedKernel:
    """A kernel that has been compiled and loaded."""

    arg_names = ("rows", "size", "tiles")
    groups: ClassVar = {"rows": Rows, "tiles": Tiles}

    def __init__(self):
        self.compiled = Compiled()

    def __getitem__(self, grid):
        return lambda **_: self.compiled


@pytest.mark.parametrize("constants", [{"size": 5}, {"size": 5, "bias_ptr": None}])
def test_later_launches_fill_groups_with_the_tensors_of_their_call(constants):
    kernel, call = LoadedKernel(), Call()
    constants = constants | {"BLOCK": 8, "IS_DOUBLED": True}
    call.launches = [Launch(kernel=kernel, grid=(3,), constants=constants)]
    for out in (torch.zeros(1), torch.zeros(2)):
        tensors = {"out_ptr": out, "x_ptr": out, "bias_ptr": None}
        call.run({name: tensors[name] for name in tensors.keys() - constants.keys()})

    ((grid, given),) = kernel.compiled.seen
    assert grid[:1] == (3,)
    assert given == ((out, out, None), 5, Tiles(BLOCK=8, IS_DOUBLED=True))


def test_a_field_that_a_launch_lacks_is_named():
    with pytest.raises(KeyError, match="bias_ptr"):
        taken_by(add_kernel, {"out_ptr": None, "x_ptr": None, "BLOCK": 8, "IS_DOUBLED": True})


def test_groups_are_parameters_of_their_kernel():
    assert groups_of(add_kernel) == {"rows": Rows, "tiles": Tiles}
    with pytest.raises(ValueError, match="columns"):
        with_groups(columns=Rows)(add_kernel)
