"""Recurrent layers where tokens are drafted: what is rejected leaves no trace, in any batch."""

import random
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from tests.kernels.support import check_close, generator
from tests.vllm_plugin.states.test_mamba import (
    CONV_DIM,
    INNER,
    MAMBA2_SHAPES,
    NAME,
    NUM_HEADS,
    exact_mamba2,
    mamba2_layer,
    our_builder,
    state_pages,
)
from tests.vllm_plugin.states.test_replayed_states import layer_with_histories

pytestmark = pytest.mark.vllm

DRAFTS = 3
SLOTS = 1 + DRAFTS
SIZE = INNER + CONV_DIM + NUM_HEADS
KEPT_PAGE = 3


@pytest.fixture(scope="module")
def config(tiny_model):
    from vllm.engine.arg_utils import EngineArgs

    options = EngineArgs(
        model=str(tiny_model("granite_hybrid")),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=8,
        attention_backend="JENGA_TRITON",
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": DRAFTS,
            "prompt_lookup_max": 3,
        },
    )
    return options.create_engine_config()


@dataclass
class Drafting:
    """A request: its pages, its tokens, and how far it is."""

    name: str
    pages: list
    prompt: int
    inputs: torch.Tensor
    done: int = 0
    outputs: list = field(default_factory=list)


@dataclass
class Row:
    """What a step computes of a request: real tokens, then such as will be rejected."""

    request: Drafting
    num_real: int
    num_rejected: int

    @property
    def num_tokens(self):
        return self.num_real + self.num_rejected


def in_order_of_first_runner(row):
    """Decoding rows, short extensions, long ones, beginnings."""
    request = row.request
    if not request.done:
        return 3
    if row.num_tokens > SLOTS:
        return 2
    return int(request.done < request.prompt)


def in_order_of_second_runner(row):
    """Rows with drafts, then by tokens but for those of a full draft's, which come first."""
    return (row.num_rejected == 0, row.num_tokens != SLOTS, row.num_tokens)


def common_metadata(rows):
    from vllm.v1.attention.backend import CommonAttentionMetadata

    counts = torch.tensor([row.num_tokens for row in rows], dtype=torch.int32)
    done = torch.tensor([row.request.done for row in rows], dtype=torch.int32)
    starts = torch.zeros(len(rows) + 1, dtype=torch.int32)
    starts[1:] = counts.cumsum(0)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=done + counts,
        num_reqs=len(rows),
        num_actual_tokens=int(counts.sum()),
        max_query_len=int(counts.max()),
        max_seq_len=int((done + counts).max()),
        block_table_tensor=torch.tensor([row.request.pages for row in rows], dtype=torch.int32),
        slot_mapping=torch.zeros(int(counts.sum()), dtype=torch.int64),
        is_prefilling=torch.tensor([row.request.done < row.request.prompt for row in rows]),
        seq_lens_cpu_upper_bound=done + counts,
    )


def requests_of(lengths, size=SIZE):
    """Requests of (prompt, all tokens), with pages in no order and rows of so many inputs."""
    pages = list(range(KEPT_PAGE + 1, KEPT_PAGE + 1 + SLOTS * len(lengths)))
    random.Random(1).shuffle(pages)
    rng = generator(7)
    return [
        Drafting(
            name=f"r{number}",
            pages=pages[number * SLOTS : (number + 1) * SLOTS],
            prompt=prompt,
            inputs=torch.randn(total, size, generator=rng),
        )
        for number, (prompt, total) in enumerate(lengths)
    ]


def row_of(request, source):
    """Choose what a step computes of a request."""
    left = len(request.inputs) - request.done
    in_prompt = request.prompt - request.done
    if in_prompt > 1:
        return Row(request, min(in_prompt, source.choice([1, 2, SLOTS, SLOTS + 1, 7, 99])), 0)
    # A token known, and drafts: all of them, some or none are right. The last token of a prompt
    # may come with placeholders; a preempted request reads its own tokens again.
    num_real = min(left, source.choice([1, 1, 2, 3, SLOTS, SLOTS + 2]))
    num_rejected = source.choice([0, max(0, SLOTS - num_real)])
    return Row(request, num_real, num_rejected)


def run_step(forward, builder, rows, out_size=INNER):
    """Compute a step of some requests and keep the outputs of what is not rejected."""
    noise = generator(sum(row.request.done for row in rows))
    parts = []
    for row in rows:
        request = row.request
        parts.append(request.inputs[request.done : request.done + row.num_real])
        parts.append(torch.randn(row.num_rejected, request.inputs.shape[1], generator=noise))
    x = torch.cat(parts)
    out = torch.full((len(x), out_size), float("nan"))
    metadata = builder.build(0, common_metadata(rows))
    forward(x, out, metadata)
    first = 0
    for row in rows:
        row.request.outputs.append(out[first : first + row.num_real])
        row.request.done += row.num_real
        first += row.num_tokens
    return metadata


def undrafted(request, config):
    """A request alone, prompt and then token by token: its outputs and last states."""
    from jenga.vllm_plugin.layers.recurrent.mamba import forward_mamba2

    layer = mamba2_layer(state_pages(MAMBA2_SHAPES, num_pages=6))
    alone = Drafting(request.name, [1, 2, 3, 4], request.prompt, request.inputs)
    builder = our_builder(config, MAMBA2_SHAPES, "MAMBA2")
    forward = partial(forward_mamba2, layer)
    run_step(forward, builder, [Row(alone, alone.prompt, 0)])
    while alone.done < len(alone.inputs):
        run_step(forward, builder, [Row(alone, 1, 0)])
    page = alone.pages[alone.done % SLOTS]
    return torch.cat(alone.outputs), [states[page] for states in layer.kv_cache]


LENGTHS = [(1, 14), (9, 25), (30, 41), (2, 9), (4, 4), (17, 33)]


@pytest.fixture(scope="module")
def expected(config):
    """Of each request: outputs and last states, exact, and without drafts."""
    found = {}
    for request in requests_of(LENGTHS):
        exact, (exact_states,) = exact_mamba2(request.inputs)
        found[request.name] = exact, exact_states, *undrafted(request, config)
    return found


@pytest.mark.parametrize("order", [in_order_of_first_runner, in_order_of_second_runner])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_random_drafts_in_random_batches_leave_no_trace(order, seed, config, expected):
    from jenga.vllm_plugin.layers.recurrent.mamba import forward_mamba2

    source = random.Random(seed)
    requests = requests_of(LENGTHS)
    num_pages = KEPT_PAGE + 1 + SLOTS * len(LENGTHS)
    layer = mamba2_layer(state_pages(MAMBA2_SHAPES, num_pages=num_pages))
    builder = our_builder(config, MAMBA2_SHAPES, "MAMBA2")
    forward = partial(forward_mamba2, layer)

    while running := [each for each in requests if each.done < len(each.inputs)]:
        rows = [row_of(each, source) for each in running if source.random() < 0.8]
        if rows:
            run_step(forward, builder, sorted(rows, key=order))

    for request in requests:
        exact, exact_states, plain, plain_states = expected[request.name]
        check_close(torch.cat(request.outputs), exact, plain)
        page = request.pages[request.done % SLOTS]
        for states, exact_state, plain_state in zip(
            layer.kv_cache, exact_states, plain_states, strict=True
        ):
            check_close(states[page], exact_state, plain_state)


@pytest.mark.slow
@pytest.mark.parametrize("order", [in_order_of_first_runner, in_order_of_second_runner])
@pytest.mark.parametrize("history_tokens", [2 * SLOTS, pytest.param(16, marks=pytest.mark.slow)])
def test_random_drafts_in_one_slot_leave_no_trace(history_tokens, order, config, expected):
    from jenga.vllm_plugin.layers.recurrent.mamba import forward_mamba2

    source = random.Random(history_tokens)
    requests = requests_of(LENGTHS)
    for request in requests:
        request.pages = request.pages[:1]
    layer, builder = layer_with_histories(
        config,
        history_tokens,
        num_drafts=DRAFTS,
        num_pages=KEPT_PAGE + 1 + SLOTS * len(LENGTHS),
    )
    forward = partial(forward_mamba2, layer)

    while running := [each for each in requests if each.done < len(each.inputs)]:
        rows = [row_of(each, source) for each in running if source.random() < 0.8]
        if rows:
            run_step(forward, builder, sorted(rows, key=order))

    for request in requests:
        exact, _, plain, _ = expected[request.name]
        check_close(torch.cat(request.outputs), exact, plain)


@pytest.mark.parametrize("ahead", range(DRAFTS + 1))
def test_a_copied_page_has_the_state_after_any_token_of_its_last_step(ahead, config, expected):
    from jenga.vllm_plugin.layers.recurrent.mamba import forward_mamba2

    exact, _, plain, _ = expected["r2"]
    for history_tokens in (2 * SLOTS, 2 * SLOTS + 1, 2 * SLOTS + 3):  # at other tokens written
        request = requests_of(LENGTHS)[2]
        request.pages, copied = [5], 7
        layer, builder = layer_with_histories(config, history_tokens, num_drafts=DRAFTS)
        forward = partial(forward_mamba2, layer)
        run_step(forward, builder, [Row(request, request.prompt, 0)])
        run_step(forward, builder, [Row(request, SLOTS, 0)])
        run_step(forward, builder, [Row(request, 1, DRAFTS)])
        before = request.done
        run_step(forward, builder, [Row(request, 1 + ahead, DRAFTS - ahead)])
        for done in range(before + 1, request.done + 1):
            other = Drafting("other", [copied], 0, request.inputs, done=done)
            for part in layer.pages:
                part[copied] = part[5]
            run_step(forward, builder, [Row(other, 1, DRAFTS)])
            check_close(other.outputs[0], exact[done : done + 1], plain[done : done + 1])


def test_a_beginning_of_one_token_with_placeholders_after_a_long_prompt(config):
    from jenga.vllm_plugin.layers.recurrent.mamba import forward_mamba2
    from jenga.vllm_plugin.orders.step_orders import CheckpointWrite, StepOrders

    short, long = requests_of([(1, 5), (20, 20)])
    layer = mamba2_layer(state_pages(MAMBA2_SHAPES, num_pages=KEPT_PAGE + 1 + SLOTS * 2))
    builder = our_builder(config, MAMBA2_SHAPES, "MAMBA2")
    forward = partial(forward_mamba2, layer)
    # Any of a request's pages names it.
    write = CheckpointWrite(running_page=long.pages[2], after_tokens=16, page=KEPT_PAGE)
    builder.mailbox.deliver([], 1, StepOrders(copies=(), checkpoints={NAME: (write,)}))

    metadata = run_step(forward, builder, [Row(long, 20, 0), Row(short, 1, DRAFTS)])
    assert metadata.num_decodes == 0
    run_step(forward, builder, [Row(short, 4, 0)])

    exact, (exact_states,) = exact_mamba2(short.inputs)
    plain, plain_states = undrafted(short, config)
    check_close(torch.cat(short.outputs), exact, plain)
    for index, exact_state in enumerate(exact_states):
        check_close(layer.kv_cache[index][short.pages[5 % SLOTS]], exact_state, plain_states[index])
    _, (kept, _) = exact_mamba2(long.inputs, (16,))
    for index, exact_state in enumerate(kept):
        naive = exact_state.float()
        check_close(layer.kv_cache[index][KEPT_PAGE], exact_state, naive, slack=1e-4)


def test_whatever_a_graph_of_decode_steps_may_replay_is_decoded(config):
    builder = our_builder(config, MAMBA2_SHAPES, "MAMBA2")
    (tail,), (first,) = requests_of([(6, 9)]), requests_of([(4, 9)])
    tail.done = 5  # its last token, padded with placeholders

    metadata = builder.build(0, common_metadata([Row(tail, 1, DRAFTS)]))
    assert (metadata.num_decodes, metadata.num_prefills) == (1, 0)

    # The state after token n is in slot n % SLOTS; the step goes on from the last one.
    order = [tail.pages[number % SLOTS] for number in range(6, 10)]
    assert metadata.state_indices_tensor_d.tolist() == [order]

    metadata = builder.build(0, common_metadata([Row(tail, 1, DRAFTS), Row(first, 4, 0)]))
    assert (metadata.num_decodes, metadata.num_prefills) == (1, 1)
    assert metadata.initial_slots_p.tolist() == [0]
