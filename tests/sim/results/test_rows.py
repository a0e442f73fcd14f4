"""Rows are what was written, and a file that is none of them is refused by line and field."""

import json

import pytest

from jenga.sim.results.rows import (
    LossTokens,
    MissRow,
    RequestRow,
    RunRow,
    Spread,
    StepRow,
    SummaryRow,
    TableBytes,
    read_rows,
    write_rows,
)

ROWS = [
    RunRow(
        run="a",
        model="gemma-3-27b",
        arena_bytes=2**30,
        manager="jenga",
        trace="trace.jsonl",
        num_requests=2,
        options={"chunk_tokens": 8192, "names": ["x"]},
    ),
    StepRow(
        run="a",
        step=1,
        time_s=0.5,
        num_running=2,
        num_waiting=1,
        num_decoding=1,
        prefill_tokens=512,
        used_bytes=1,
        useless_bytes=2,
        cached_bytes=3,
        empty_bytes=4,
        unallocated_bytes=5,
        tables={"full": TableBytes(used_bytes=1, empty_bytes=4)},
    ),
    RequestRow(
        run="a",
        request="0",
        prompt_tokens=10,
        output_tokens=2,
        hit_tokens=0,
        arrival_s=0.0,
        first_token_s=0.25,
        finished_s=1.0,
        num_preemptions=0,
    ),
    MissRow(
        run="a",
        step=2,
        time_s=0.5,
        request="1",
        asked_tokens=64,
        found_tokens=16,
        table="full",
        layer_type="full",
        never_tokens=16,
        evicted_tokens=32,
        bare_tokens=0,
        losses=[
            LossTokens(
                cause="end",
                step=1,
                left_by="0",
                for_request="1",
                evicted_tokens=32,
                bare_tokens=0,
            )
        ],
    ),
    SummaryRow(
        run="a",
        num_steps=3,
        seconds=1.0,
        num_requests=1,
        prompt_tokens=10,
        output_tokens=2,
        hit_tokens=0,
        hit_rate=0.0,
        waste=0.25,
        mean_decode_batch=1.0,
        num_preemptions=0,
        evicted_pages=0,
        requests_per_s=1.0,
        tokens_per_s=2.0,
        ttft_s=Spread(p50=0.25, p90=0.25, p99=0.25, mean=0.25),
        refusals={"does not fit the arena alone": 1},
        missed_tokens={"never cached": 16, "evicted: end": 32},
    ),
]


def test_rows_read_are_the_rows_written_in_two_goes(tmp_path):
    path = tmp_path / "rows.jsonl"

    write_rows(path, ROWS[:1])
    write_rows(path, ROWS[1:])

    assert list(read_rows(path)) == ROWS


def test_every_line_names_its_kind_and_its_run(tmp_path):
    path = tmp_path / "rows.jsonl"

    write_rows(path, ROWS)

    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["kind"] for line in lines] == ["run", "step", "request", "miss", "summary"]
    assert {line["run"] for line in lines} == {"a"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "stride"}, "kind must be one of run, step, request, eviction, miss, summary"),
        ({"weight": 1}, "no field 'weight'"),
        ({"num_preemptions": "none"}, "num_preemptions must be of type"),
        ({"finished_s": None}, "finished_s must be of type"),
    ],
)
def test_a_line_that_is_no_row_is_named_with_its_field(tmp_path, change, words):
    path = tmp_path / "rows.jsonl"
    write_rows(path, [ROWS[2]])
    row = json.loads(path.read_text(encoding="utf-8"))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row | change) + "\n")

    with pytest.raises(ValueError, match=rf"rows.jsonl:2: .*{words}"):
        list(read_rows(path))


def test_a_row_that_lacks_a_field_or_is_cut_short_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"

    path.write_text('{"kind": "run", "run": "a"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: .*must have the fields model"):
        list(read_rows(path))
    path.write_bytes(b"PAR1\x15\xb5")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: a row must be one JSON object"):
        list(read_rows(path))
    path.write_text('{"kind": "run", "run"', encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: a row must be one JSON object"):
        list(read_rows(path))
