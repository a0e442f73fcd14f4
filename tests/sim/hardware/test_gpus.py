"""GPUs by name and by size."""

import pytest

from jenga.sim.hardware.gpus import GPUS, find_gpu, parse_bytes, parse_memory


def test_gpu_is_found_in_any_case_and_under_its_usual_names():
    assert find_gpu("h100-80g") == find_gpu("H100") == find_gpu("H100-80GB") == GPUS["H100-80G"]
    assert find_gpu(" L4 ").memory_bytes == 23_034 * 2**20


def test_gpu_can_be_given_by_its_memory_alone():
    gpu = find_gpu("24GiB")

    assert (gpu.name, gpu.memory_bytes, gpu.bytes_per_s) == ("24GiB", 24 * 2**30, None)
    with pytest.raises(ValueError, match=r"one of T4, .*got '24GiB', of which only the memory"):
        gpu.flops("bfloat16")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GB", 80 * 10**9),
        ("80 gib", 80 * 2**30),
        ("23.7GiB", 25_447_681_228),
        ("143,771 MiB", 143_771 * 2**20),
        ("25_769_803_776", 25_769_803_776),
    ],
)
def test_sizes_are_read_to_the_byte(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-3GB", "3 parsecs", "12g4", "3Gi"])
def test_size_refuses_what_is_none(text):
    with pytest.raises(ValueError, match="size must be"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["24", "160", "999_999", "1.5"])
def test_a_small_number_for_memory_needs_a_unit(text):
    with pytest.raises(ValueError, match=rf"size needs a unit, such as {text}GB, .*got '{text}'"):
        parse_memory(text)
    assert parse_memory(f"{text}GB") == parse_bytes(f"{text}GB")


@pytest.mark.parametrize(("text", "num_bytes"), [("1_000_000", 10**6), ("64KiB", 2**16), ("0", 0)])
def test_other_memory_needs_none(text, num_bytes):
    assert parse_memory(text, least=0) == num_bytes


def test_size_refuses_zero():
    with pytest.raises(ValueError, match="at least 1 bytes"):
        parse_bytes("0.3")


@pytest.mark.parametrize("text", ["24", "25_769_803_776", " 80 "])
def test_memory_of_a_gpu_needs_a_unit(text):
    with pytest.raises(ValueError, match=rf"gpu memory needs a unit, such as .*got '{text}'"):
        find_gpu(text)


def test_unknown_gpu_is_refused_with_the_names():
    with pytest.raises(ValueError, match=r"H100-80G.*got 'H300'"):
        find_gpu("H300")


def test_8_bit_products_run_as_16_bit_ones_where_there_is_no_float8():
    a100, h100 = GPUS["A100-80G"], GPUS["H100-80G"]

    assert a100.flops("float8_e4m3fn") == a100.flops("bfloat16") == 312e12
    assert h100.flops("float8_e4m3fn") > h100.flops("bfloat16")
    with pytest.raises(ValueError, match="got 'float32'"):
        a100.flops("float32")
