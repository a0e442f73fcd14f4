"""Machine code is counted right, and the table of counts is made without a GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from perf.counts.prompt_counts import PROMPT_TOKENS, executed
from perf.harness.compiled_launches import Counted, named_integers
from perf.harness.machine_code import (
    MachineCode,
    _inner_loops,
    _product_loop,
    beside_products,
    count,
    loaded_bytes,
    num_lost_descriptors,
)

LISTING = (
    "MOV R1, c[0x0][0x28]",
    "LDG.E.128 R4, desc[UR4][R2.64]",
    "LDG.E.U16 R8, desc[UR4][R2.64]",
    "HMMA.16816.F32.BF16 R4, R8, R4, R4",
    "BRA `(.L_x_1)",
    "LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]",
    "F2F.BF16.F16 R4, R8",
    "BRA `(.L_x_0)",
    "BRA `(.L_x_2)",
)
LABELS = {".L_x_0": 1, ".L_x_1": 2, ".L_x_2": 8}


def test_inner_loops_are_those_that_hold_no_other():
    assert _inner_loops(list(LISTING), LABELS) == [(2, 5)]


def test_count_knows_what_instructions_do():
    counts = count(LISTING[:-1])

    assert counts["load_global"] == 2
    assert counts["load_ahead"] == counts["matrix"] == counts["special"] == counts["move"] == 1
    assert loaded_bytes(LISTING) == 16 + 2 + 16


def test_main_loop_is_the_shortest_with_matrix_products():
    loops = LISTING[1:3], LISTING[2:5], LISTING[1:5]

    code = MachineCode(registers=32, stack_bytes=0, instructions=LISTING, loops=loops)

    assert code.main_loop == LISTING[2:5]


def test_a_loop_with_matrix_products_is_found_around_loops_without():
    listing = [*LISTING[:3], "BRA `(.L_x_1)", "HMMA.16816.F32 R4, R8, R4, R4", *LISTING[7:]]

    assert _inner_loops(listing, LABELS) == [(2, 4)]
    around = _product_loop(listing, LABELS)
    assert around == (listing[1], *listing[4:6])
    code = MachineCode(
        registers=32,
        stack_bytes=0,
        instructions=tuple(listing),
        loops=(tuple(listing[2:4]),),
        product_loop=around,
    )
    assert code.main_loop == around
    assert _product_loop(listing[:4], LABELS) == ()


def test_what_runs_beside_products_is_between_their_start_and_the_wait_for_all():
    loop = (
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1",
        "MUFU.EX2 R1, R2",
        "FADD R3, R1, R3",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
        "MUFU.RCP R4, R4",
    )

    assert beside_products(loop) == loop[1:4]
    assert beside_products(loop[:4]) == beside_products(loop[4:]) == ()


def scan(*loops, name="delta_scan_kernel", product_loop=()):
    code = MachineCode(
        registers=32,
        stack_bytes=0,
        instructions=LISTING,
        loops=loops,
        product_loop=product_loop,
    )
    return Counted(
        name=name,
        num_warps=4,
        shared_bytes=0,
        code=code,
        num_programs=1,
        constants={"BLOCK_T": 64},
    )


class Sizes(NamedTuple):
    BLOCK_M: int
    BLOCK_N: int
    IS_CAUSAL: bool
    PRECISION: str


def test_constants_of_groups_are_found_by_their_names():
    constants = {(0, 1): None, (1,): None, (2,): Sizes(16, 64, True, "tf32"), (3,): 32}

    found = named_integers(constants, ["inputs", "sinks_ptr", "tiles", "BLOCK_SIZE_D"])

    assert found == {"BLOCK_M": 16, "BLOCK_N": 64, "IS_CAUSAL": True, "BLOCK_SIZE_D": 32}


def test_a_tile_is_said_by_the_sizes_of_its_blocks():
    kernel = replace(scan(), constants={"BLOCK_SIZE_M": 16, "BLOCK_N": 64, "HEAD_DIM": 128})

    assert kernel.tile == "M16 N64, 4 warps"
    assert replace(kernel, constants={}).tile == "4 warps"


def test_prompts_are_counted_turn_by_turn():
    padding, chunks = LISTING[1:3], LISTING[3:7]

    assert executed(scan(padding, chunks)) == len(LISTING) - 2 - 4 + 4 * PROMPT_TOKENS / 64


def test_turns_of_a_loop_around_others_are_counted_without_these():
    around, within = LISTING[3:7], LISTING[1:3]
    kernel = scan(within, name="state_scan_hopper_kernel", product_loop=around)

    assert executed(kernel) == len(LISTING) - 2 - 4 + 4 * PROMPT_TOKENS / 64


def test_a_kernel_with_other_loops_than_it_had_is_not_counted():
    with pytest.raises(ValueError, match="turns of delta_scan_kernel must be for 3 loops"):
        executed(scan(LISTING[1:3], LISTING[3:5], LISTING[5:7]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ("D13", "matrix 16"),
        ("R causal_conv nemotron", "causal_conv_kernel"),
        ("R state_scan nemotron", "state_scan_hopper_kernel"),
        ("R state_scan jamba", "state_scan_channels_kernel"),
        ("R delta_scan qwen3-next", "delta_chunks_heads_kernel"),
        ("R delta_scan kimi", "delta_scan_hopper_kernel"),
    ],
)
def test_static_counts_are_made_without_a_gpu(tmp_path, shape, text):
    command = [
        sys.executable,
        "-m",
        "perf.counts.static_counts",
        "--only",
        shape,
        "--peers",
        "none",
    ]
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[3]

    subprocess.run([*command, "--save", str(tmp_path)], cwd=root, env=environment, check=True)

    lines = (tmp_path / "static_counts.md").read_text().splitlines()
    assert any(text in line for line in lines if line.startswith(shape))


def test_descriptors_made_of_what_a_register_happens_to_hold_are_found():
    kept = ("MOV R22, RZ", "IADD3 R26, P0, R21, 0x40, RZ", "IADD3.X R22, R22, -0x7fffffe0, RZ, P0")
    lost = ("LDS.128 R20, [R5]", "IADD3 R26, P0, R26, 0x40, RZ", kept[2])

    assert num_lost_descriptors(kept) == 0
    assert num_lost_descriptors(lost) == num_lost_descriptors(kept + lost) == 1

    kept = ("UMOV UR8, URZ", "UIADD3.X UR8, UR8, 0x40000040, URZ, UP2, !UPT")
    lost = ("ULDC.64 UR10, c[0x0][0x260]", "UIADD3.X UR10, UR10, -0x7fffffe0, URZ, UP0, !UPT")
    product = ("UIADD3.X UR7, UR8, URZ, URZ, UP2, !UPT",)

    assert num_lost_descriptors(kept + product) == 0
    assert num_lost_descriptors(kept + lost + product) == 1
