"""The benchmark of engines: the same requests for each, and rows that say how they went."""

import json
from pathlib import Path

import pytest

from jenga.policies import Image
from jenga.sim.sources import open_source
from jenga.sim.workload import Piece, Request
from perf import bench_engine
from perf.engine_cases import CASES, DRY_CASES, FIRST_TOKEN, prompts_of, save_config
from perf.engine_run import Run

RUN = {name: 1.0 for name, _, _ in bench_engine.COLUMNS}


def test_prompts_share_what_those_of_the_trace_share():
    requests = list(open_source("articles:n=2,questions=2,tokens=50,question=4,order=cyclic"))

    prompts = prompts_of(requests, vocab_size=1000)

    assert [len(prompt) for prompt in prompts] == [54] * 4
    assert prompts[0][:50] == prompts[2][:50] != prompts[1][:50]
    assert len({tuple(prompt[50:]) for prompt in prompts}) == 4
    assert all(FIRST_TOKEN <= token < 1000 for prompt in prompts for token in prompt)
    assert prompts_of(requests, vocab_size=1000) == prompts


def test_the_beginning_of_a_content_is_that_of_all_of_it():
    long, short = (
        Request(name=str(count), prompt=(Piece("text", count),), output_tokens=1)
        for count in (40, 7)
    )

    all_of_it, beginning = prompts_of([long, short], vocab_size=200)

    assert all_of_it[:7] == beginning


def test_images_are_refused():
    image = Image(start_token=0, num_tokens=4, content=b"cat")
    shown = Request(name="seen", prompt=(Piece("text", 9),), output_tokens=1, images=(image,))

    with pytest.raises(ValueError, match="request 'seen' shows images"):
        prompts_of([shown], vocab_size=100)


def test_a_run_says_how_many_ran_for_how_long():
    run = Run(seconds=4.0, running=[(1.0, 2), (3.0, 6)], prompt_tokens=80, found_tokens=20)
    run.output_tokens, run.token_s = 12, [0.1, 0.3, 0.2]

    summary = run.summary()

    assert summary["mean_running"] == 5.0
    assert summary["most_running"] == 6
    assert summary["found_share"] == 0.25
    assert summary["output_tokens_per_s"] == 3.0
    assert summary["token_p50_ms"] == pytest.approx(200)
    assert Run(seconds=1.0).summary()["mean_running"] == 0


def test_a_row_has_the_median_of_its_runs_and_the_table_our_ratio():
    case = DRY_CASES[0]
    ours = {"start_s": 3.0, "runs": [RUN | {"seconds": each} for each in (2.0, 9.0, 4.0)]}
    theirs = {"start_s": 3.0, "runs": [RUN | {"seconds": 6.0}]}

    rows = [
        bench_engine.row_of(case, "jenga", ours),
        bench_engine.row_of(case, "FLASH_ATTN", theirs),
    ]

    assert rows[0]["seconds"] == 4.0
    assert rows[0]["seconds_of_runs"] == [2.0, 9.0, 4.0]
    title, _, our_line, their_line = bench_engine.table(rows).splitlines()
    assert title == case.name
    assert "x" not in our_line
    assert their_line.endswith("1.50x")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "."], "--model needs --trace and --cache too"),
        (["--model", ".", "--trace", "articles", "--cache", "1GiB"], "a folder with a config.json"),
        (["--model", "MODEL", "--trace", "articles", "--cache", "much"], "--cache: size must be"),
        (["--model", "MODEL", "--trace", "nothing", "--cache", "1GiB"], "--trace: trace must be"),
    ],
)
def test_a_case_of_ones_own_says_what_it_lacks(arguments, said, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    arguments = [str(tmp_path) if each == "MODEL" else each for each in arguments]

    with pytest.raises(SystemExit):
        bench_engine.main(["--dry-run", *arguments])

    assert said in capsys.readouterr().err


@pytest.mark.vllm
def test_models_are_written_as_vllm_reads_them(tmp_path):
    from transformers import AutoConfig

    for case in (*CASES, *DRY_CASES):
        folder = save_config(case, tmp_path / case.model)
        written = json.loads((folder / "config.json").read_text())
        read = AutoConfig.from_pretrained(folder)

        assert written["architectures"][0].removesuffix("ForCausalLM") in ("NemotronH", "Gemma3")
        requests = list(open_source(case.trace))
        longest = max(each.prompt_tokens + each.output_tokens for each in requests)
        assert longest <= case.options["max_model_len"] <= read.max_position_embeddings


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_that_fails_is_named_and_its_last_words_kept(capsys):
    arguments = ["--dry-run", "--only", "nemotron", "--peers", "NO_SUCH_BACKEND"]

    assert bench_engine.main([*arguments]) == 1

    said = capsys.readouterr().out
    assert "on NO_SUCH_BACKEND ended with 1:" in said
    assert "  jenga " in said


@pytest.mark.vllm
@pytest.mark.slow
def test_engines_serve_a_trace_on_both_backends(tmp_path, capsys):
    from tests.vllm_plugin import tiny_checkpoints

    folder = tiny_checkpoints.save("granite_hybrid", tmp_path)
    arguments = ["--dry-run", "--model", str(folder), "--cache", "4MiB", "--runs", "1"]
    arguments += ["--trace", "articles:n=2,questions=2,tokens=70,question=5,output=3"]
    engine = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8}

    assert bench_engine.main([*arguments, "--engine", json.dumps(engine)]) == 0

    rows = Path(capsys.readouterr().out.split("rows: ")[-1].strip())
    ours, stock = map(json.loads, rows.read_text().splitlines())
    assert (ours["implementation"], stock["implementation"]) == ("jenga", "CPU_ATTN")
    for row in (ours, stock):
        assert row["requests"] == 4
        assert row["prompt_tokens"] == 4 * 75
        assert row["output_tokens"] == 12
    assert ours["found_share"] >= 2 * 64 / 300


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_that_takes_too_long_is_ended_and_says_where_it_was(tmp_path, capsys):
    arguments = ["--dry-run", "--only", "gemma", "--peers", "none", "--patience", "2"]

    assert bench_engine.main([*arguments, "--logs", str(tmp_path)]) == 1
    assert "took longer than 2 s, and was ended with -6" in capsys.readouterr().out
    assert "most recent call first" in (tmp_path / "tiny-gemma-3-JENGA_TRITON.log").read_text()
