"""Mamba layers of vLLM on our kernels: numerics, cuts anywhere, states kept on the way."""

import inspect
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from jenga_kernels.reference.recurrent.causal_conv import causal_conv as reference_conv
from jenga_kernels.reference.recurrent.state_scan import state_scan as reference_scan
from tests.kernels.support import check_close, generator
from tests.vllm_plugin.trials.test_tried_kernels import NOT_PASSED, set_kernels, settle_kernels

pytestmark = pytest.mark.vllm

NUM_HEADS, HEAD_DIM, D_STATE, WIDTH = 8, 32, 32, 4
INNER = NUM_HEADS * HEAD_DIM
CONV_DIM = INNER + 2 * D_STATE
DIM, D_STATE_1, RANK = 96, 16, 8
NAME = "layer"
# Requests as (page of the running state, prompt tokens, tokens in all).
REQUESTS = {"a": (5, 50, 53), "b": (2, 7, 12), "c": (9, 90, 91), "d": (4, 33, 33)}
# Steps as tokens per request: prompts begin, go on and end anywhere, beside decoding ones. The last
# step of "d" is a prompt's single last token, which vLLM counts among the decoding.
STEPS = (
    {"b": 7, "a": 30},
    {"b": 1, "a": 19, "c": 2},
    {"b": 1, "a": 1, "c": 40, "d": 32},
    {"b": 1, "a": 1, "d": 1, "c": 47},
    {"b": 1, "a": 1, "c": 1},
    {"b": 1, "a": 1, "c": 1},
)


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
    )
    return options.create_engine_config()


def state_spec(shapes):
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=256, shapes=shapes, dtypes=(torch.float32,) * len(shapes))


def state_pages(shapes, num_pages=12):
    """States of one layer as views of pages that hold more than them; every byte a NaN's."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    arena = torch.full((num_pages, 64 + sum(sizes) + 32), float("nan"))
    states, first = [], 64
    for shape, size in zip(shapes, sizes, strict=True):
        states.append(arena[:, first : first + size].unflatten(1, shape))
        first += size
    return tuple(states)


def rows_of(done, step):
    """Rows of a step, the decoding first: (page, tokens done before, tokens of the step)."""
    rows = []
    for name, count in step.items():
        page, prompt_tokens, _ = REQUESTS[name]
        is_decode = count == 1 and done[name] > 0
        rows.append((not is_decode, page, done[name], count, prompt_tokens, name))
    return sorted(rows, key=lambda row: row[0])


def common_metadata(rows):
    from vllm.v1.attention.backend import CommonAttentionMetadata

    counts = torch.tensor([row[3] for row in rows], dtype=torch.int32)
    done = torch.tensor([row[2] for row in rows], dtype=torch.int32)
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
        block_table_tensor=torch.tensor([[row[1]] for row in rows], dtype=torch.int32),
        slot_mapping=torch.zeros(int(counts.sum()), dtype=torch.int64),
        is_prefilling=torch.tensor([row[2] < row[4] for row in rows]),
        seq_lens_cpu_upper_bound=done + counts,
    )


def run_in_steps(forward, builder, inputs, out_size, *, before_step=None):
    """Run all steps; the outputs of each request, in the order of its tokens."""
    done = dict.fromkeys(REQUESTS, 0)
    outputs = {name: [] for name in REQUESTS}
    for step in STEPS:
        rows = rows_of(done, step)
        if before_step is not None:
            before_step(rows)
        metadata = builder.build(0, common_metadata(rows))
        x = torch.cat([inputs[row[5]][row[2] : row[2] + row[3]] for row in rows])
        # Rows past the step's tokens are padding: their output is nobody's.
        out = torch.full((len(x) + 3, out_size), float("nan"))
        forward(torch.cat([x, torch.zeros(3, x.shape[1])]), out, metadata)
        first = 0
        for _, _, _, count, _, name in rows:
            outputs[name].append(out[first : first + count])
            done[name] += count
            first += count
    return {name: torch.cat(parts) for name, parts in outputs.items()}


def mamba2_layer(states, dtype=torch.float32):
    rng = generator(3)

    def uniform(low, high, *shape):
        return (low + (high - low) * torch.rand(shape, generator=rng)).to(dtype)

    weight = torch.randn(CONV_DIM, WIDTH, generator=rng).to(dtype)
    layer = SimpleNamespace(
        prefix=NAME,
        kv_cache=states,
        activation="silu",
        conv_weights=weight,
        conv1d=SimpleNamespace(weight=weight.unsqueeze(1), bias=uniform(-1, 1, CONV_DIM)),
        A=-uniform(0.1, 2, NUM_HEADS),
        D=uniform(-1, 1, NUM_HEADS),
        dt_bias=uniform(-2, 0, NUM_HEADS),
        ssm_state_size=D_STATE,
        num_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        n_groups=1,
        tp_size=1,
        conv_kernel_size=WIDTH,
        tped_intermediate_size=INNER,
        tped_conv_size=CONV_DIM,
        tped_dt_size=NUM_HEADS,
        num_spec=0,
        use_replayssm=False,
        is_blackwell=False,
        cache_config=SimpleNamespace(),
    )
    layer.split_hidden_states_B_C_fn = partial(
        torch.split, split_size_or_sections=[INNER, D_STATE, D_STATE], dim=-1
    )
    return layer


MAMBA2_SHAPES = ((WIDTH - 1, CONV_DIM), (NUM_HEADS, HEAD_DIM, D_STATE))


def prompts(size, seed=4):
    rng = generator(seed)
    return {name: torch.randn(row[2], size, generator=rng) for name, row in REQUESTS.items()}


def exact_mamba2(projected, after_tokens=()):
    """One request in float64: its outputs, and its states after some of its tokens and all."""
    layer = mamba2_layer(None, torch.float64)
    conv_states = torch.zeros(1, CONV_DIM, WIDTH - 1, dtype=torch.float64)
    states = torch.zeros(1, NUM_HEADS, HEAD_DIM, D_STATE, dtype=torch.float64)
    num_tokens = len(projected)
    outputs, kept, first = [], [], 0
    for end in (*after_tokens, num_tokens):
        # Each part goes on from the states that the one before has left in slot 1.
        conv_states = torch.cat([conv_states[-1:], conv_states[-1:]])
        states = torch.cat([states[-1:], states[-1:]])
        x = projected[first:end, INNER : INNER + CONV_DIM].double()
        convolved, one = torch.empty_like(x), torch.tensor([1], dtype=torch.int32)
        starts = torch.tensor([0, end - first], dtype=torch.int32)
        reference_conv(
            convolved,
            conv_states,
            x,
            layer.conv_weights,
            starts,
            one,
            one,
            bias=layer.conv1d.bias,
        )
        x, B, C = layer.split_hidden_states_B_C_fn(convolved)
        out = torch.empty(end - first, NUM_HEADS, HEAD_DIM, dtype=torch.float64)
        reference_scan(
            out,
            states,
            x.unflatten(1, (NUM_HEADS, HEAD_DIM)),
            projected[first:end, -NUM_HEADS:].double(),
            layer.A,
            B.unsqueeze(1),
            C.unsqueeze(1),
            starts,
            one,
            one,
            D=layer.D,
            dt_bias=layer.dt_bias,
        )
        outputs.append(out.flatten(1))
        kept.append((conv_states[1].T, states[1]))
        first = end
    return torch.cat(outputs), kept


def stock_mamba2(config, inputs, monkeypatch):
    """What vLLM's own layer gives, with its own operations."""
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops.ssu_dispatch import initialize_mamba_ssu_backend
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder

    spec = state_spec(MAMBA2_SHAPES)
    groups = [SimpleNamespace(kv_cache_spec=spec)]
    initialize_mamba_ssu_backend(config.mamba_config, SimpleNamespace(kv_cache_groups=groups))
    states = tuple(torch.zeros(12, *shape) for shape in MAMBA2_SHAPES)
    layer = mamba2_layer(states)
    original = inspect.unwrap(mamba_mixer2.MambaMixer2.conv_ssm_forward)

    def forward(projected, out, metadata):
        context = SimpleNamespace(attn_metadata={NAME: metadata})
        monkeypatch.setattr(mamba_mixer2, "get_forward_context", lambda: context)
        original(layer, projected, out)

    builder = Mamba2AttentionMetadataBuilder(spec, [NAME], config, torch.device("cpu"))
    return run_in_steps(forward, builder, inputs, INNER), states


def our_builder(config, shapes, kind):
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    mamba_type = MambaAttentionBackendEnum[kind]
    spec = replace(state_spec(shapes), mamba_type=mamba_type)
    return mamba_type.get_class().get_builder_cls()(spec, [NAME], config, torch.device("cpu"))


def test_mamba2_layer_cut_anywhere_errs_no_more_than_vllms_own(config, monkeypatch):
    from jenga.vllm_plugin.layers.recurrent.mamba import forward_mamba2

    inputs = prompts(INNER + CONV_DIM + NUM_HEADS)
    stock, stock_states = stock_mamba2(config, inputs, monkeypatch)
    layer = mamba2_layer(state_pages(MAMBA2_SHAPES))

    ours = run_in_steps(
        partial(forward_mamba2, layer), our_builder(config, MAMBA2_SHAPES, "MAMBA2"), inputs, INNER
    )

    for name, (page, _, _) in REQUESTS.items():
        exact, (exact_states,) = exact_mamba2(inputs[name])
        check_close(ours[name], exact, stock[name])
        for index, exact_state in enumerate(exact_states):
            check_close(layer.kv_cache[index][page], exact_state, stock_states[index][page])


def scan_options(kind_of_inputs, run, monkeypatch):
    """What a run asks of the scan of one kind of layers, call by call."""
    operations, asked = kind_of_inputs.operations, []

    def remember(*args, **options):
        asked.append(options)
        operations.scan(*args, **options)

    monkeypatch.setattr(kind_of_inputs, "operations", replace(operations, scan=remember))
    run()
    return asked


@pytest.mark.parametrize("setting", ["1", "0", "", NOT_PASSED])
def test_prompts_are_scanned_by_the_kernels_that_are_asked_for(setting, config, monkeypatch):
    from jenga.vllm_plugin.layers.recurrent import mamba

    set_kernels(monkeypatch, "JENGA_SPECIALIZED_SCANS", setting)
    inputs = prompts(INNER + CONV_DIM + NUM_HEADS)
    forward = partial(mamba.forward_mamba2, mamba2_layer(state_pages(MAMBA2_SHAPES)))
    builder = our_builder(config, MAMBA2_SHAPES, "MAMBA2")
    settle_kernels(builder, setting)

    asked = scan_options(
        mamba.Recurrence,
        partial(run_in_steps, forward, builder, inputs, INNER),
        monkeypatch,
    )

    # The longest prompts of the steps that read some; one's last token decodes.
    assert [options["longest_tokens"] for options in asked] == [30, 19, 40, 47]
    assert {options["is_portable"] for options in asked} == {setting in {"0", NOT_PASSED}}


def test_states_kept_on_the_way_are_those_of_a_prompt_that_ends_there(config):
    from jenga.vllm_plugin.layers.recurrent.mamba import forward_mamba2
    from jenga.vllm_plugin.orders.step_orders import CheckpointWrite, StepOrders

    inputs = prompts(INNER + CONV_DIM + NUM_HEADS)
    layer = mamba2_layer(state_pages(MAMBA2_SHAPES))
    # (request, tokens, page): in a first chunk, two in one, at the end of one.
    wanted = [("a", 16, 1), ("c", 16, 3), ("c", 32, 6), ("d", 32, 7), ("c", 80, 8), ("c", 89, 10)]

    def order(rows):
        writes = tuple(
            CheckpointWrite(running_page=row[1], after_tokens=tokens - row[2], page=page)
            for name, tokens, page in wanted
            for row in rows
            if row[5] == name and row[2] < tokens <= row[2] + row[3]
        )
        if writes:
            builder.mailbox.deliver([], 1, StepOrders(copies=(), checkpoints={NAME: writes}))

    builder = our_builder(config, MAMBA2_SHAPES, "MAMBA2")
    run_in_steps(partial(forward_mamba2, layer), builder, inputs, INNER, before_step=order)

    for name, tokens, page in wanted:
        _, (exact, _) = exact_mamba2(inputs[name], (tokens,))
        alone = mamba2_layer(state_pages(MAMBA2_SHAPES))
        metadata = our_builder(config, MAMBA2_SHAPES, "MAMBA2").build(
            0, common_metadata([(True, 1, 0, tokens, tokens, name)])
        )
        forward_mamba2(alone, inputs[name][:tokens], torch.empty(tokens, INNER), metadata)
        for index, exact_state in enumerate(exact):
            kept, ended = layer.kv_cache[index][page], alone.kv_cache[index][1]
            check_close(kept, exact_state, ended)
    # Nothing else was written but the running states and what was to be kept.
    untouched = set(range(12)) - {page for page, _, _ in REQUESTS.values()}
    for page in untouched - {page for _, _, page in wanted}:
        assert all(state[page].isnan().all() for state in layer.kv_cache)


MAMBA1_SHAPES = ((WIDTH - 1, DIM), (DIM, D_STATE_1))


def mamba1_layer(states, dtype=torch.float32):
    from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer

    rng = generator(5)

    def randn(*shape):
        return torch.randn(shape, generator=rng).to(dtype)

    def linear(rows, columns):
        weight = randn(rows, columns) / columns**0.5
        return lambda x: (x @ weight.T, None)

    layer = SimpleNamespace(
        prefix=NAME,
        kv_cache=states,
        activation="silu",
        is_lora_enabled=False,
        use_rms_norm=False,
        time_step_rank=RANK,
        ssm_state_size=D_STATE_1,
        conv1d=SimpleNamespace(weight=randn(DIM, 1, WIDTH), bias=randn(DIM)),
        A=-randn(DIM, D_STATE_1).abs() - 0.1,
        D=randn(DIM),
        in_proj=linear(2 * DIM, 64),
        x_proj=linear(RANK + 2 * D_STATE_1, DIM),
        out_proj=linear(64, DIM),
    )
    dt_proj = linear(DIM, RANK)
    layer.dt_proj = type("Projection", (), {"__call__": lambda _, x: dt_proj(x)})()
    layer.dt_proj.bias = randn(DIM) - 1
    layer._ssm_transform = partial(MambaMixer._ssm_transform, layer)
    return layer


def plain_mamba1(hidden, dtype):
    """One request by the references, in one piece: outputs and last states."""
    layer = mamba1_layer(None, dtype)
    num_tokens = len(hidden)
    x, gate = layer.in_proj(hidden.to(dtype))[0].chunk(2, dim=-1)
    conv_states = torch.zeros(2, DIM, WIDTH - 1, dtype=dtype)
    states = torch.zeros(2, 1, DIM, D_STATE_1, dtype=dtype)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32)
    null, one = torch.tensor([[0], [1]], dtype=torch.int32)
    convolved = torch.empty_like(x)
    weight = layer.conv1d.weight[:, 0]
    reference_conv(convolved, conv_states, x, weight, starts, null, one, bias=layer.conv1d.bias)
    dt, B, C = layer._ssm_transform(convolved)
    out = torch.empty_like(convolved)
    reference_scan(
        out.unsqueeze(1),
        states,
        convolved.unsqueeze(1),
        dt.T.unsqueeze(1),
        layer.A.unsqueeze(0),
        B.unsqueeze(1),
        C.unsqueeze(1),
        starts,
        null,
        one,
        D=layer.D.unsqueeze(0),
        z=gate.unsqueeze(1),
        dt_bias=layer.dt_proj.bias.unsqueeze(0),
    )
    return layer.out_proj(out)[0], (conv_states[1].T, states[1, 0])


def test_mamba1_layer_cut_anywhere_errs_no_more_than_plain_pytorch(config):
    from jenga.vllm_plugin.layers.recurrent.mamba import forward_mamba1

    inputs = prompts(64)
    layer = mamba1_layer(state_pages(MAMBA1_SHAPES))

    ours = run_in_steps(
        partial(forward_mamba1, layer), our_builder(config, MAMBA1_SHAPES, "MAMBA1"), inputs, 64
    )

    for name, (page, _, _) in REQUESTS.items():
        exact, exact_states = plain_mamba1(inputs[name], torch.float64)
        naive, naive_states = plain_mamba1(inputs[name], torch.float32)
        check_close(ours[name], exact, naive)
        for index in range(2):
            check_close(layer.kv_cache[index][page], exact_states[index], naive_states[index])


def test_a_builder_serves_vllms_own_layers_where_the_backend_is_not_selected(config):
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder

    from jenga.vllm_plugin.layers.recurrent.mamba_builder import JengaMambaMetadataBuilder

    ours = our_builder(config, MAMBA2_SHAPES, "MAMBA2")
    selected = config.attention_config.backend
    config.attention_config.backend = None
    try:
        stock = our_builder(config, MAMBA2_SHAPES, "MAMBA2")
    finally:
        config.attention_config.backend = selected

    assert isinstance(ours, JengaMambaMetadataBuilder)
    assert isinstance(stock, Mamba2AttentionMetadataBuilder)


def test_orders_that_no_layer_took_are_a_bug_and_said_so(config):
    from jenga.errors import InvariantError
    from jenga.vllm_plugin.orders.step_orders import CheckpointWrite, StepOrders

    write = CheckpointWrite(running_page=5, after_tokens=16, page=1)
    orders = StepOrders(copies=(), checkpoints={NAME: (write,), "of another rank": (write,)})
    builder = our_builder(config, MAMBA2_SHAPES, "MAMBA2")
    mailbox = builder.mailbox
    mailbox.deliver([], 1, orders)
    with pytest.raises(InvariantError, match=NAME):
        mailbox.deliver([], 1, orders)
    assert mailbox.take_checkpoints([NAME]) == (write,)

    mailbox.deliver([], 1, orders)
    with pytest.raises(InvariantError, match="the step computes"):
        builder.build(0, common_metadata([(True, 2, 0, 20, 20, "b")]))


def test_orders_of_one_engine_do_not_wait_for_the_layers_of_another(config):
    """Also where a step of the first one failed before its layers could take them."""
    from jenga.vllm_plugin.orders.step_orders import CheckpointWrite, StepOrders
    from jenga.vllm_plugin.worker.step_mailbox import open_mailbox

    def engine():
        builder = our_builder(config, MAMBA2_SHAPES, "MAMBA2")
        group = SimpleNamespace(metadata_builders=[builder, object()])
        return builder, open_mailbox(SimpleNamespace(attn_groups=[[group]]))

    (first, of_first), (second, of_second) = engine(), engine()
    write = CheckpointWrite(running_page=5, after_tokens=16, page=1)
    of_first.deliver([], 1, StepOrders(checkpoints={NAME: (write,)}))
    of_second.deliver([], 1, StepOrders())

    metadata = second.build(0, common_metadata([(True, 2, 0, 20, 20, "b")]))

    assert metadata.checkpoints is None
    kept = first.build(0, common_metadata([(True, 5, 0, 20, 20, "a")])).checkpoints
    assert kept is not None
    assert kept.slots.tolist() == [1]
