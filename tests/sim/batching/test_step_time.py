"""A step takes what its arithmetic or its traffic takes at the GPU's peaks."""

from types import SimpleNamespace

import pytest

from jenga.admission.reserve import STEP_TOKENS
from jenga.models import known_model
from jenga.sim.batching.arena import ActiveRequest, Chunk, MovedBytes
from jenga.sim.batching.step_time import (
    SHARES,
    Achieved,
    DraftedTime,
    HostedTime,
    StepTime,
    Weights,
    step_tokens_of,
    weights_of,
)
from jenga.sim.hardware.gpus import GPUS, Gpu
from jenga.sim.workload.requests import Piece, Request
from jenga.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    Layer,
    ModelSpec,
    SlidingWindow,
    State,
)

GPU = Gpu(name="test", memory_bytes=1, bytes_per_s=1e9, flops_16_bit=1e12)
WEIGHTS = Weights(num_bytes=2000, total=1000, active=1000, query_elements=8)


def layers(count, slot_bytes):
    return tuple(Layer(name=str(i), slot_bytes=slot_bytes) for i in range(count))


def model_of(*layer_types):
    return ModelSpec(name="m", layer_types=layer_types)


def chunk_of(start, num_tokens):
    request = Request(name="a", prompt=(Piece("a", 10_000),), output_tokens=1)
    return Chunk(ActiveRequest(request), start, num_tokens)


def test_a_decode_step_reads_the_weights_and_every_token_before():
    model = model_of(FullAttention(name="full", layers=layers(3, 10)))
    clock = StepTime(model, WEIGHTS, GPU)

    work = clock.work([chunk_of(99, 1), chunk_of(199, 1)])

    assert work.traffic_bytes == 2000 + (100 + 200) * 3 * 10
    assert work.operations == 2 * 1000 * 2 + 4 * 8 * 3 * (99.5 + 199.5)


def test_windows_chunks_and_states_read_no_more_than_they_keep():
    model = model_of(
        SlidingWindow(name="sliding", layers=layers(2, 10), window_tokens=50),
        ChunkedLocal(name="chunked", layers=layers(1, 10), chunk_tokens=80),
        State(name="state", layers=layers(2, 1000)),
        CrossAttention(name="cross", layers=layers(1, 4), typical_tokens=100),
    )
    clock = StepTime(model, WEIGHTS, GPU)

    work = clock.work([chunk_of(999, 1)])

    assert work.traffic_bytes == 2000 + 50 * 20 + 80 * 10 + 2000 + 400
    assert work.operations == 2 * 1000 + 4 * 8 * (2 * 50 + 80)


def test_a_prompt_pairs_every_token_with_those_before_it():
    model = model_of(FullAttention(name="full", layers=layers(1, 10)))
    whole = StepTime(model, WEIGHTS, GPU).work([chunk_of(0, 1000)])
    chunks = [StepTime(model, WEIGHTS, GPU).work([chunk_of(s, 100)]) for s in range(0, 1000, 100)]

    assert sum(chunk.operations for chunk in chunks) == pytest.approx(whole.operations)


def test_the_slower_of_arithmetic_and_traffic_is_the_time():
    model = model_of(FullAttention(name="full", layers=layers(1, 10)))
    decode, prefill = [chunk_of(99, 1)], [chunk_of(0, 8000)]
    clock = StepTime(model, WEIGHTS, GPU)

    assert clock(decode) == clock.work(decode).traffic_bytes / 1e9
    assert clock(prefill) == clock.work(prefill).operations / 1e12
    halves = dict.fromkeys(SHARES, 0.5)
    half = StepTime(model, WEIGHTS, GPU, achieved=Achieved(**halves, overhead_s=2.0))
    assert half(decode) == pytest.approx(2.0 + 2 * clock(decode))
    assert half(prefill) == pytest.approx(2.0 + 2 * clock(prefill))


def test_a_step_costs_the_tokens_that_are_multiplied_while_all_weights_are_read():
    model = model_of(FullAttention(name="full", layers=layers(1, 10)))
    weights = Weights(num_bytes=16_000, total=8_000, active=1_000)

    clock = StepTime(model, weights, GPU)

    # 16 us to read them, 2 ns for a token.
    assert clock.step_tokens == step_tokens_of(clock) == pytest.approx(8_000)
    late = StepTime(model, weights, GPU, achieved=Achieved(arithmetic_share=0.5, overhead_s=4e-6))
    assert late.step_tokens == pytest.approx((16 + 4) / 0.004)
    drafted = DraftedTime(clock, StepTime(model, WEIGHTS, GPU), draft_tokens=2)
    assert step_tokens_of(drafted) == clock.step_tokens
    assert step_tokens_of(lambda _: 1.0) == STEP_TOKENS


def test_experts_are_read_as_tokens_choose_them():
    weights = Weights(num_bytes=1600, total=800, active=100)

    assert weights.touched_bytes(1) == pytest.approx(200)
    assert weights.touched_bytes(2) == pytest.approx(1600 * (1 - (7 / 8) ** 2))
    assert weights.touched_bytes(1000) == pytest.approx(1600)


def test_weights_are_divided_over_ranks():
    facts = known_model("gpt-oss-120b")

    one, four = weights_of(facts), weights_of(facts, ranks=4)

    assert one.active < one.total
    assert (four.num_bytes, four.active) == (one.num_bytes / 4, one.active / 4)
    assert one.query_elements == 64 * 64


@pytest.mark.parametrize("name", ["gemma-3-27b", "whisper-large-v3", "falcon-h1-7b", "mamba-130m"])
def test_every_kind_of_model_has_a_time(name):
    facts = known_model(name)

    clock = StepTime(facts.spec(), weights_of(facts), GPUS["H200"])

    assert 0 < clock([chunk_of(99, 1)]) < clock([chunk_of(0, 8000)])


def test_a_gpu_known_by_its_size_has_no_time():
    model = model_of(FullAttention(name="full", layers=layers(1, 10)))

    with pytest.raises(ValueError, match="gpu must be known by name where time is modelled"):
        StepTime(model, WEIGHTS, Gpu(name="24GiB", memory_bytes=24 << 30))


def test_attention_and_weights_have_shares_of_their_own():
    model = model_of(FullAttention(name="full", layers=layers(1, 10)))
    decode, prefill = [chunk_of(9_999, 1)], [chunk_of(0, 8000)]
    peaks = StepTime(model, WEIGHTS, GPU)
    slow = StepTime(
        model,
        WEIGHTS,
        GPU,
        achieved=Achieved(attention_bandwidth_share=0.25, attention_arithmetic_share=0.5),
    )

    assert slow(decode) - peaks(decode) == pytest.approx(3 * peaks.work(decode).cache_bytes / 1e9)
    further = peaks.work(prefill).attention_operations / 1e12
    assert slow(prefill) - peaks(prefill) == pytest.approx(further)


def test_shares_are_of_a_peak():
    with pytest.raises(ValueError, match=r"attention_bandwidth_share must be in \(0, 1\], got 1.5"):
        Achieved(attention_bandwidth_share=1.5)
    with pytest.raises(ValueError, match="overhead_s must be finite and not negative, got -1"):
        Achieved(overhead_s=-1)


def test_what_is_copied_ahead_takes_time_only_where_the_step_is_shorter():
    arena = SimpleNamespace(moved_bytes=MovedBytes(stored=100, ahead=40, loaded=7))
    clock = HostedTime(lambda _scheduled: 3.0, arena, 10.0, moved_bytes=arena.moved_bytes)

    arena.moved_bytes = MovedBytes(stored=150, ahead=60, loaded=27)  # 30 waited for, 20 ahead
    assert clock([]) == pytest.approx((30 + 20) / 10 + 3)
    arena.moved_bytes = MovedBytes(stored=250, ahead=160, loaded=27)  # 100 ahead alone
    assert clock([]) == pytest.approx(10)
    assert clock([]) == pytest.approx(3)
