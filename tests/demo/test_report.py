import dataclasses
import json

import pytest

from jenga.demo.memory import read_memory_log
from jenga.demo.report import as_json, as_text
from jenga.demo.run import Completion, DemoResult, default_prompts
from jenga.demo.stock import StockTimeline
from tests.demo.test_ending import CONFIG, make_ending
from tests.demo.timelines import write_log


def make_result(path, *, steps=2, **changes):
    timeline = read_memory_log(write_log(path, steps=steps))
    stock = StockTimeline(
        name="vLLM",
        block_tokens=128,
        block_bytes=2048,
        num_groups=3,
        held_bytes=tuple({"mamba2": 4096 * step, "full": 2048 * step} for step in range(steps)),
    )
    result = DemoResult(
        model="/models/tiny",
        dtype="float32",
        machine="2 CPU cores",
        computed_by="PyTorch references",
        arena_bytes=9000,
        completions=(
            Completion(prompt="One,\ntwo", num_prompt_tokens=4, text=" three\n", num_tokens=2),
        ),
        start_s=30.0,
        generate_s=4.0,
        timeline=timeline,
        stock=(stock,),
    )
    return dataclasses.replace(result, **changes)


def rows_after(text, heading):
    """Get the words of each line below a heading."""
    return [line.split() for line in text.split(heading)[1].splitlines()]


def test_report_shows_prompts_and_text_on_one_line_each(tmp_path):
    text = as_text(make_result(tmp_path / "log"))

    assert "[4 tokens] One,\\ntwo\n    ->  three\\n\n" in text


def test_report_shows_the_geometry_of_every_page_table(tmp_path):
    text = as_text(make_result(tmp_path / "log"))

    assert "arena 8.789 KiB = 4 large pages of 1.953 KiB, the null page included" in text
    rows = rows_after(text, "Geometry (planned)")
    assert ["mamba2[1:2]", "1", "a", "state", "1000", "bytes", "2", "0.00%"] in rows
    assert ["full", "2", "16", "320", "bytes", "2", "0.00%"] in rows


def test_report_adds_up_what_is_held_per_type_and_in_total(tmp_path):
    text = as_text(make_result(tmp_path / "log", steps=11))

    # Step 10: 1,000 needed and 1,270 held per page table, of which mamba2 has two.
    expected = "10 1 160 2 2 40 1 1 20 3 4 60".split()  # noqa: SIM905
    assert expected in rows_after(text, "Memory held over the run")
    assert ["[1]", "vLLM", "60", "KiB", "20.480"] in rows_after(text, "peak")
    assert ["jenga", "3.721", "KiB", "1.270"] in rows_after(text, "peak")


def test_report_of_a_long_run_keeps_its_first_and_last_step_and_its_peak(tmp_path):
    result = make_result(tmp_path / "log", steps=500)
    peaked = list(result.timeline.steps)
    peaked[123] = dataclasses.replace(peaked[123], held_bytes={"mamba2": 10**6, "full": 10**6})
    timeline = dataclasses.replace(result.timeline, steps=tuple(peaked))

    text = as_text(dataclasses.replace(result, timeline=timeline))

    table = text.split("Memory held over the run")[1].split("peak")[0]
    shown = [int(line.split()[0]) for line in table.splitlines() if line[:1].isdigit()]
    assert shown[0] == 0
    assert shown[-1] == 499
    assert 123 in shown
    assert len(shown) < 25


def test_report_names_what_computed_attention(tmp_path):
    on_cpu = as_text(make_result(tmp_path / "log"))
    result = make_result(tmp_path / "log", computed_by="compiled kernels", machine="H200")
    compiled = as_text(result)

    assert "on 2 CPU cores, attention by PyTorch references" in on_cpu
    assert "its speed is no measure" in on_cpu
    assert "on H200, attention by compiled kernels" in compiled
    assert "no measure" not in compiled
    assert "4 prompt tokens read, 2 generated in 4.0 s\n1.50 tokens/s" in compiled


@pytest.mark.parametrize("steps", [0, 1], ids=["no_step", "nothing_held"])
def test_report_of_a_run_that_held_nothing_compares_nothing(tmp_path, steps):
    text = as_text(make_result(tmp_path / "log", steps=steps))

    assert "held / needed" not in text


def test_report_ends_with_what_both_engines_found(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    ending = make_ending(tmp_path, tmp_path / "picture.svg")

    text = as_text(make_result(tmp_path / "log", ending=ending))

    last = text.split("Questions on documents, by two engines (counted)")[1]
    assert "1,800 found, 4,200 computed" in last
    assert "3,840 found, 2,160 computed" in last
    assert "The texts that both engines generated are equal." in last
    assert f"picture: {tmp_path}/picture.svg" in last
    assert "retention interval 512. Tokens found" in last
    assert "(modelled: H100-80G, assumed: no GPU is here)" in last
    assert "`jenga plan` for an H100-80G, assumed" in last


def test_report_says_why_the_ending_is_left_out(tmp_path):
    short = as_text(make_result(tmp_path / "log", ending_left_out="the model reads 300 tokens"))
    failed = as_text(make_result(tmp_path / "log", ending_failure="stock vLLM failed: cause"))

    assert short.endswith("Questions on documents are left out: the model reads 300 tokens")
    assert failed.endswith("Questions on documents are left out: stock vLLM failed: cause")


def test_json_holds_all_of_the_result(tmp_path):
    result = make_result(tmp_path / "log")

    document = json.loads(as_json(result))

    assert document["completions"][0]["text"] == " three\n"
    assert document["timeline"]["steps"][1]["held_bytes"] == {"mamba2": 254, "full": 127}
    assert document["stock"][0]["held_bytes"][1] == {"mamba2": 4096, "full": 2048}
    assert document.keys() == {field.name for field in dataclasses.fields(result)}


def test_default_prompts_are_distinct_and_the_last_is_long():
    prompts = default_prompts()

    assert len(set(prompts)) == len(prompts) == 4
    assert len(prompts[-1].split()) > 512
