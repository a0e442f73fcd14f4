"""Requests longer than the model reads are refused as an engine refuses them."""

import pytest

from jenga.cli import main
from jenga.sim.arenas.by_name import make_arena
from jenga.sim.replays.replay import Replay, constant_clock
from jenga.sim.results.rows import RequestRow, SummaryRow, read_rows
from jenga.sim.workload.requests import Piece, Request
from jenga.spec import FullAttention, Layer, ModelSpec

MODEL = ModelSpec(
    name="one-type",
    layer_types=(FullAttention(name="full", layers=(Layer(name="0", slot_bytes=64),)),),
)
LENGTHS = "prompt_tokens,output_tokens\n8000,200\n4000,100\n9000,1\n"
REPLAY = ["replay", "--model", "gemma-2-2b", "--arena", "1GiB", "--step-seconds", "0.1", "--quiet"]


def test_they_are_refused_as_they_arrive_and_the_others_run():
    requests = [
        Request(name="long", prompt=(Piece("a", 100),), output_tokens=29),
        Request(name="longest", prompt=(Piece("b", 100),), output_tokens=28),
        Request(name="late", prompt=(Piece("c", 200),), output_tokens=1, arrival_s=1e6),
        Request(name="last", prompt=(Piece("d", 20),), output_tokens=1, arrival_s=2e6),
    ]
    ended = {}
    arena = make_arena("jenga", MODEL, 1 << 20, prefix_caching=True)

    run = Replay(
        requests,
        arena,
        clock=constant_clock(0.5),
        max_model_tokens=128,
        on_end=lambda active: ended.update({active.name: active}),
    )
    for _ in run:
        pass

    assert (run.num_finished, run.num_refused) == (2, 2)
    assert {name for name, active in ended.items() if active.refusal} == {"long", "late"}
    assert ended["long"].refusal == "longer than the 128 tokens that the model reads"
    assert run.prompt_tokens == 420
    assert run.output_tokens == 29


def test_jenga_replay_takes_the_length_from_the_configuration(tmp_path, capsys):
    trace, rows = tmp_path / "lengths.csv", tmp_path / "rows.jsonl"
    trace.write_text(LENGTHS)

    assert main([*REPLAY, "--trace", str(trace), "--out", str(rows), "--request-rows"]) == 0

    written = list(read_rows(rows))
    reasons = [each.refused for each in written if isinstance(each, RequestRow)]
    # Gemma 2 reads 8,192 tokens.
    too_long = "longer than the 8,192 tokens that the model reads"
    assert sorted(reasons) == ["", too_long, too_long]
    (summary,) = [each for each in written if isinstance(each, SummaryRow)]
    assert (summary.num_requests, summary.num_refused) == (1, 2)
    assert capsys.readouterr().out


def test_jenga_replay_takes_another_length(tmp_path, capsys):
    trace = tmp_path / "lengths.csv"
    trace.write_text(LENGTHS)

    assert main([*REPLAY, "--trace", str(trace), "--max-model-len", "8300"]) == 0
    assert capsys.readouterr().out.splitlines()[-1]
    assert main([*REPLAY, "--trace", str(trace), "--max-model-len", "0"]) == 2
    assert "--max-model-len must be a positive integer, got 0" in capsys.readouterr().err


def test_a_trace_of_which_the_model_reads_nothing_says_so(tmp_path, capsys):
    trace = tmp_path / "lengths.csv"
    trace.write_text("prompt_tokens,output_tokens\n9000,5\n")

    assert main([*REPLAY, "--trace", str(trace)]) == 2

    assert "the model reads 8192 tokens with an answer, and not any of the 1 of" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_a_length_that_is_none_is_refused(num_tokens):
    arena = make_arena("jenga", MODEL, 1 << 20, prefix_caching=True)

    with pytest.raises(ValueError, match="max_model_tokens must be a positive integer"):
        Replay([], arena, clock=constant_clock(0.5), max_model_tokens=num_tokens)
