"""`jenga replay` prints what was counted, goes on where it was, and says what it refuses."""

import json
import re

import pytest

from jenga.cli import main
from jenga.sim.results.rows import (
    EvictionRow,
    MissRow,
    RequestRow,
    RunRow,
    StepRow,
    SummaryRow,
    read_rows,
)

SMALL = ["--model", "llama-3.2-1b", "--arena", "40MB", "--quiet"]
TRACE = ["--trace", "articles:n=3,questions=2,tokens=160,output=4"]


def replay(capsys, *arguments):
    code = main(["replay", *map(str, arguments)])
    return code, capsys.readouterr()


def test_replay_compares_managers_in_a_table(capsys):
    arguments = ["--manager", "jenga", "paged", "--bounds", "--check", 2, "--gpu", "A100-80G"]
    code, printed = replay(capsys, *SMALL, *TRACE, *arguments)

    lines = printed.out.splitlines()
    assert code == 0
    assert lines[0].startswith("6 requests of articles:n=3,")
    assert lines[1].split()[:3] == ["model", "manager", "arena"]
    assert [line.split()[:2] for line in lines[2:4]] == [
        ["llama-3.2-1b", "jenga"],
        ["llama-3.2-1b", "paged"],
    ]
    assert any("at the peaks of A100-80G, of which no rows were" in line for line in lines)
    assert lines[5].split()[:2] == ["model", "manager"]
    assert [line.split()[1] for line in lines[6:8]] == ["jenga", "paged"]
    assert printed.err == ""


def test_seconds_follow_the_rows_measured_on_the_gpu(capsys, tmp_path):
    folder = tmp_path / "h100-80gb-hbm3"
    folder.mkdir()
    row = {"implementation": "roofline", "shape": "read", "num_flops": 0}
    # Half of 3.35 TB/s.
    row |= {"num_bytes": 1.675e9, "p50_us": 1000.0}
    (folder / "roofline.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")

    _, peaks = replay(capsys, *SMALL, *TRACE, "--measured", folder)
    _, halves = replay(capsys, *SMALL, *TRACE, "--measured", tmp_path)
    _, given = replay(
        capsys, *SMALL, *TRACE, "--measured", tmp_path, "--bandwidth-share", 0.25, "--quiet"
    )

    tpot_s = [float(each.out.splitlines()[5].split()[-1]) for each in (peaks, halves, given)]
    assert tpot_s[1] == pytest.approx(2 * tpot_s[0], rel=0.02)
    assert tpot_s[2] == pytest.approx(4 * tpot_s[0], rel=0.02)
    assert "at shares of its peaks: products 100%, weights 50%" in halves.out


def test_a_manager_that_refuses_does_not_keep_the_others_from_the_table(capsys):
    code, printed = replay(capsys, *SMALL, *TRACE, "--manager", "gcd", "jenga")

    assert code == 2
    assert printed.out.splitlines()[2].split()[:2] == ["llama-3.2-1b", "jenga"]
    assert printed.err.startswith("jenga: error: manager 'gcd' does not start")
    assert "prefix_caching must be off" in printed.err


def test_too_few_steps_to_look_at_are_said_to_be(capsys):
    _, short = replay(capsys, *SMALL, *TRACE)
    _, every = replay(capsys, *SMALL, *TRACE, "--every", 1)

    assert "give --every 1" in short.out
    assert "give --every 1" not in every.out


def test_rows_are_written_once_and_read_where_a_replay_is_asked_again(capsys, tmp_path):
    path = tmp_path / "rows.jsonl"
    arguments = [*SMALL, *TRACE, "--out", path, "--every", 1, "--request-rows"]

    _, first = replay(capsys, *arguments)
    written = path.read_text(encoding="utf-8")
    _, second = replay(capsys, *arguments)
    _, third = replay(capsys, *arguments, "--manager", "jenga", "max")

    rows = list(read_rows(path))
    assert path.read_text(encoding="utf-8").startswith(written)
    assert first.out == second.out
    assert third.out.splitlines()[2].split() == first.out.splitlines()[2].split()
    assert [type(row) for row in rows if isinstance(row, RunRow | SummaryRow)] == [
        RunRow,
        SummaryRow,
    ] * 2
    assert sum(isinstance(row, RequestRow) for row in rows) == 2 * 6
    steps = [row for row in rows if isinstance(row, StepRow)]
    assert steps[0].run != steps[-1].run


def test_eviction_rows_say_whose_checkpoints_were_lost_for_whom_and_why(capsys, tmp_path):
    path = tmp_path / "rows.jsonl"
    trace = "articles:n=6,questions=2,tokens=2000,rate=1"
    machine = [*SMALL, "--arena", "128MiB", "--trace", trace, "--out", path]

    _, plain = replay(capsys, *machine)
    without = [row for row in read_rows(path) if isinstance(row, EvictionRow)]
    _, told = replay(capsys, *machine, "--eviction-rows", "--request-rows")

    rows = list(read_rows(path))
    names = {row.request for row in rows if isinstance(row, RequestRow)}
    evictions = [row for row in rows if isinstance(row, EvictionRow)]
    plain_lines, told_lines = plain.out.splitlines(), told.out.splitlines()
    assert told_lines[:6] == plain_lines[:6]
    assert not any("tokens not found" in line for line in plain_lines)
    assert not without
    assert evictions
    for row in evictions:
        assert {row.left_by, row.for_request} <= names
        assert row.cause in {"checkpoint", "end"}
        assert row.kept_tokens < row.num_tokens
    assert [row.step for row in evictions] == sorted(row.step for row in evictions)
    misses = [row for row in rows if isinstance(row, MissRow)]
    assert [row.request for row in misses] == [str(number) for number in range(12)]
    rows_of = {(row.step, row.cause, row.left_by, row.for_request) for row in evictions}
    for row in misses:
        missing = row.never_tokens + row.evicted_tokens + row.bare_tokens
        assert missing == row.asked_tokens - row.found_tokens
        assert (row.table, row.layer_type) == ("full", "full")
        assert {(each.step, each.cause, each.left_by, each.for_request) for each in row.losses} <= (
            rows_of
        )
    evicted = [line.split() for line in told_lines if "evicted: end" in line]
    assert sum(row.evicted_tokens for row in misses) > 0
    assert evicted[0][:4] == ["llama-3.2-1b", "jenga", "evicted:", "end"]
    found = sum(row.found_tokens for row in misses)
    of_last = rows[-1].missed_tokens
    assert sum(of_last.values()) == sum(row.asked_tokens for row in misses) - found


def test_progress_is_on_standard_error_and_leaves_nothing(capsys):
    code, printed = replay(capsys, *SMALL[:-1], *TRACE)

    assert code == 0
    assert re.search(r"llama-3.2-1b jenga \w+: 0/6 requests \(0%\)", printed.err)
    assert printed.err.endswith(" \r")


def test_a_draft_model_shares_the_arena(capsys):
    code, printed = replay(
        capsys, "--model", "llama-3.1-8b", "--draft", "llama-3.2-1b", "--quiet", *TRACE
    )

    assert code == 0
    assert "llama-3.1-8b+llama-3.2-1b" in printed.out


def test_with_drafts_states_have_histories_as_in_engines_and_not_with_vllms_manager(
    capsys, tmp_path
):
    path = tmp_path / "rows.jsonl"
    code, _ = replay(
        capsys,
        *("--model", "nemotron-h-8b", "--gpu", "H100-80G", "--arena", "2GB", "--quiet"),
        *("--manager", "jenga", "vllm", "--out", path),
        *("--trace", "articles:n=30,questions=1,tokens=200,output=60"),
        *("--draft-tokens", 3, "--acceptance", 0.7),
    )

    assert code == 0
    ours, stock = [row for row in read_rows(path) if isinstance(row, SummaryRow)]
    # A state of 111 MB, and four of 104 MB.
    assert ours.mean_decode_batch > 2 * stock.mean_decode_batch


def test_drafted_tokens_that_are_right_shorten_the_run(capsys, tmp_path):
    path = tmp_path / "rows.jsonl"
    models = ["--model", "llama-3.1-8b", "--draft", "llama-3.2-1b", "--quiet", "--out", path]
    trace = ["--trace", "articles:n=3,questions=2,tokens=160,output=80"]
    drafts = ["--draft-tokens", 4, "--acceptance"]

    for acceptance in (0, 0.9):
        code, _ = replay(capsys, *models, *trace, *drafts, acceptance)
        assert code == 0

    rows = list(read_rows(path))
    none_right, most_right = [row for row in rows if isinstance(row, SummaryRow)]
    assert most_right.num_steps < 0.5 * none_right.num_steps
    assert most_right.seconds < 0.6 * none_right.seconds
    options = [row.options for row in rows if isinstance(row, RunRow)]
    assert [each["acceptance"] for each in options] == [0, 0.9]
    assert {each["draft_tokens"] for each in options} == {4}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--acceptance", "0.5"], "draft_tokens must be at least 1 with an acceptance, got 0"),
        (["--draft-tokens", "2", "--acceptance", "2"], "acceptance must be a probability, got 2"),
        (["--model", "llama-9"], "model must be a local"),
        (["--trace", "nowhere"], "trace must be a file or one of"),
        (["--arena", "20MB"], "arena_bytes must hold a request, got 20000000"),
        (["--arena", "10B"], "does not start for 'llama-3.2-1b' in an arena of 10 bytes"),
        (["--gpu", "24GiB"], "or give --step-seconds"),
        (["--every", "0"], "--every must be a positive number, got 0"),
        (["--requests", "0"], "--requests must be a positive number, got 0"),
        (["--speed", "0"], "speed must be positive"),
        (["--check", "-1"], "--check must be at least 0, got -1"),
        (["--step-seconds", "-1"], "--step-seconds must be a positive number, got -1.0"),
        (["--step-seconds", "nan"], "--step-seconds must be a positive number, got nan"),
        (["--overhead-seconds", "inf"], "overhead_s must be finite and not negative, got inf"),
        (["--arena", "99999999TiB"], "not enough memory on this machine"),
        (["--host", "1KiB"], "host_bytes must be 0 or hold a large page of "),
        (["--measured", "nowhere"], "--measured must be a folder with one for each GPU, got"),
        (
            ["--trace", "articles:n=2,rate=-1"],
            "arrivals_per_s must be at least 0 and finite, got -1",
        ),
        (
            ["--trace", "agentic:sessions=2,rate=-1"],
            "arrivals_per_s must be at least 0 and finite, got -1",
        ),
    ],
)
def test_what_cannot_be_replayed_is_one_line_of_error(capsys, arguments, words):
    trace = ["--trace", "articles:n=3,questions=2,tokens=1600,output=4"]

    code, printed = replay(capsys, *SMALL, *trace, *arguments)

    assert code == 2
    assert printed.err.startswith("jenga: error: ")
    assert printed.err.count("\n") == 1
    assert words in printed.err


def test_a_folder_that_names_no_parameters_has_as_many_as_its_weights(capsys, tmp_path):
    config = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["--model", tmp_path, "--trace", "articles:n=3,questions=2,tokens=1600,output=4"]
    arguments += ["--arena", "1GB"]

    code, printed = replay(capsys, *arguments)
    assert code == 2
    assert "give --weights BYTES or --step-seconds" in printed.err

    seconds = []
    for weights in ("1GB", "8GB"):
        path = tmp_path / f"{weights}.jsonl"
        assert replay(capsys, *arguments, "--weights", weights, "--out", path)[0] == 0
        (found,) = (row for row in read_rows(path) if isinstance(row, SummaryRow))
        seconds.append(found.seconds)
    assert seconds[1] > 4 * seconds[0]


@pytest.mark.parametrize(("output_tokens", "is_left"), [(4, True), (40, False)])
def test_what_admissions_leave_to_others_is_found_again(capsys, tmp_path, output_tokens, is_left):
    # Where outputs are most of the work nothing is left, whatever may be.
    trace = ["--trace", f"articles:n=6,questions=8,tokens=320,output={output_tokens},seed=3"]
    found = {}
    for share in (0.0, 0.9):
        path = tmp_path / f"{share}.jsonl"
        replay(capsys, *SMALL, *trace, "--arena", "60MB", "--left-share", share, "--out", path)
        rows = list(read_rows(path))
        (run,) = (row for row in rows if isinstance(row, RunRow))
        (found[share],) = (row for row in rows if isinstance(row, SummaryRow))
        assert run.options["left_share"] == share

    assert (found[0.9].hit_tokens > found[0.0].hit_tokens) == is_left
    # Questions take little beside their article, so as many requests run.
    assert (found[0.9].seconds < found[0.0].seconds) == is_left


@pytest.mark.parametrize("share", ["1", "-0.1", "half"])
def test_a_share_to_leave_that_is_none_is_refused(capsys, share):
    with pytest.raises(SystemExit):
        replay(capsys, *SMALL, *TRACE, f"--left-share={share}")
    assert "--left-share: must be in [0, 1)" in capsys.readouterr().err


MANY = ["--trace", "articles:n=6,questions=3,tokens=160,output=4"]
CRAMPED = ["--model", "llama-3.2-1b", "--arena", "12MB", "--quiet"]


def summaries(path):
    return [row for row in read_rows(path) if isinstance(row, SummaryRow)]


def test_host_memory_finds_again_what_the_arena_lost(capsys, tmp_path):
    out = ("--out", tmp_path / "rows.jsonl", "--check", 1)

    _, alone = replay(capsys, *CRAMPED, *MANY, *out)
    code, hosted = replay(capsys, *CRAMPED, *MANY, *out, "--host", "64MB", "--manager", "jenga")

    assert code == 0
    assert "loaded" not in alone.out
    assert hosted.out.splitlines()[1].split()[-4:] == ["stored", "loaded", "preempted", "refused"]
    first, second = summaries(tmp_path / "rows.jsonl")
    assert (first.stored_bytes, first.loaded_bytes) == (0, 0)
    assert second.stored_bytes > 0
    assert second.loaded_bytes > 0
    # Each article is read once.
    assert first.hit_tokens < second.hit_tokens == 12 * 160


def test_managers_without_host_memory_are_compared_as_they_are(capsys, tmp_path):
    out = ("--out", tmp_path / "rows.jsonl")
    arguments = (*CRAMPED, *MANY, *out, "--manager", "jenga", "static", "paged")

    code, printed = replay(capsys, *arguments, "--host", "64MB")

    assert code == 0
    rows = [row for row in read_rows(tmp_path / "rows.jsonl") if isinstance(row, RunRow)]
    assert ["host_bytes" in row.options for row in rows] == [True, False, True]
    assert [each.loaded_bytes > 0 for each in summaries(tmp_path / "rows.jsonl")] == [
        True,
        False,
        True,
    ]
    assert printed.out.splitlines()[3].split()[-6:-2] == ["0", "B", "0", "B"]


def test_what_is_copied_to_host_memory_and_back_takes_its_time(capsys, tmp_path):
    out = ("--out", tmp_path / "rows.jsonl", "--step-seconds", 100, "--max-requests", 1)
    for rate in ("1MB", "2MB"):
        arguments = ("--host", "64MB", "--host-bandwidth", rate)
        assert replay(capsys, *CRAMPED, *MANY, *out, *arguments)[0] == 0

    slow, fast = summaries(tmp_path / "rows.jsonl")
    assert 0 < slow.ahead_bytes < slow.stored_bytes
    # What is copied ahead is copied beside a step, which takes longer here.
    waited_bytes = slow.stored_bytes - slow.ahead_bytes + slow.loaded_bytes
    assert waited_bytes == fast.stored_bytes - fast.ahead_bytes + fast.loaded_bytes
    assert slow.seconds - 100 * slow.num_steps == pytest.approx(waited_bytes / 1e6)
    assert fast.seconds - 100 * fast.num_steps == pytest.approx(waited_bytes / 2e6)


def test_host_memory_without_prefix_caching_is_refused(capsys):
    code, printed = replay(capsys, *CRAMPED, *MANY, "--host", "1GiB", "--no-prefix-caching")

    assert code != 0
    assert "--host has no effect with --no-prefix-caching" in printed.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--manager", "vllm", "--host", "1GiB"], "--host has no effect with --manager vllm"),
        (["--manager", "static", "vllm", "--host", "1GiB"], "it is for jenga, paged, max, lcm"),
        (["--manager", "vllm", "--left-share", "0"], "--left-share has no effect with --manager"),
        (["--manager", "vllm", "--eviction", "lru"], "--eviction has no effect with --manager"),
        (["--manager", "gcd", "--eviction-rows"], "--eviction-rows has no effect with --manager"),
        (["--vllm", "default"], "--vllm has no effect with --manager jenga: it is for vllm"),
        (["--no-prefix-caching", "--left-share", "0.3"], "--left-share has no effect with --no-"),
        (["--step-seconds", "1", "--bandwidth-share", "0.5"], "--bandwidth-share has no effect"),
        (["--host-bandwidth", "1GB"], "--host-bandwidth has no effect without --host"),
        (["--request-rows"], "--request-rows has no effect without --out"),
    ],
)
def test_an_option_without_any_effect_is_refused_by_name(capsys, arguments, words):
    code, printed = replay(capsys, *SMALL, *TRACE, *arguments)

    assert code == 2
    assert printed.out == ""
    assert words in printed.err


def test_a_note_names_the_managers_to_which_an_option_does_not_apply(capsys):
    managers = ("--manager", "jenga", "static")

    _, plain = replay(capsys, *CRAMPED, *MANY, *managers)
    code, hosted = replay(capsys, *CRAMPED, *MANY, *managers, "--host", "64MB")

    assert code == 0
    assert hosted.out.splitlines()[-1] == "--host does not apply to static."
    assert "does not apply" not in plain.out


def test_the_legend_says_why_requests_were_refused(capsys, tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n20,4\n140000,4\n150000,4\n2000,4\n")
    trace = ("--trace", path, "--out", tmp_path / "rows.jsonl")

    code, printed = replay(capsys, *SMALL, *trace)
    _, again = replay(capsys, *SMALL, *trace)
    _, none = replay(capsys, *SMALL, *TRACE)

    legend = " ".join(printed.out.split())
    assert code == 0
    assert printed.out.splitlines()[2].split()[-1] == "3"
    assert "longer than the 131,072 tokens that the model reads (2)" in legend
    assert "does not fit the arena alone (1)." in legend
    assert again.out == printed.out
    assert '"refused"' not in none.out


def test_the_legend_explains_the_columns(capsys):
    _, printed = replay(capsys, *SMALL, *TRACE, "--bounds")

    columns = printed.out.splitlines()[1]
    legend = " ".join(printed.out.split())
    assert "unlimited %  at most %" in columns
    assert "best" not in printed.out
    assert '"at most %" an upper bound' in legend
    assert "TTFT is the time to first token" in legend
    assert "TPOT is the time per output token" in legend


def test_a_malformed_line_of_a_trace_is_named(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    good = {"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [0]}
    lines = [json.dumps(good), json.dumps(good | {"output_length": -1})]
    path.write_text("\n".join(lines), encoding="utf-8")

    code, printed = replay(capsys, *SMALL, "--trace", path)

    assert code == 2
    assert "trace.jsonl:2: output_length must be an integer of at least 1, got -1" in printed.err


def test_a_gpu_of_any_size_will_do_with_seconds_given(capsys):
    code, printed = replay(
        capsys, "--model", "llama-3.2-1b", "--gpu", "8GiB", "--step-seconds", 0.5, "--quiet", *TRACE
    )

    assert code == 0
    # All prompts in one step, three further tokens.
    assert " 2.0 " in printed.out.splitlines()[5]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: --model, --trace"),
        ([*SMALL, *TRACE, "--left-share=2"], "argument --left-share: must be in [0, 1), got '2'"),
    ],
)
def test_a_usage_error_is_two_lines(capsys, arguments, words):
    with pytest.raises(SystemExit):
        main(["replay", *arguments])

    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: jenga replay --model MODEL [MODEL ...] --trace TRACE [option ...]"
    assert error == f"jenga replay: error: {words}"
