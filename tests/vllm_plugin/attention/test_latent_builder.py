"""What steps of latent attention share, and that a CUDA graph could go on reading it."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec

from jenga.vllm_plugin.layers.attention import latent_builder
from jenga.vllm_plugin.layers.attention.latent import gathered_latents
from jenga.vllm_plugin.layers.attention.latent_builder import (
    JengaLatentMetadataBuilder,
    absorbed_query_tokens,
    count_absorbed,
)
from jenga_kernels.latent.latent_attention import latent_attention
from jenga_kernels.plans.attention_plan import AttentionPlan
from jenga_kernels.plans.latent_plan import plan_latent_attention
from jenga_kernels.reference.latent.latent_attention import latent_attention as attend_plainly
from tests.kernels.support import check_close
from tests.vllm_plugin.attention.test_attention_builder import PAGE_TOKENS, Batches
from tests.vllm_plugin.trials.test_tried_kernels import NOT_PASSED, set_kernels, settle_kernels

pytestmark = pytest.mark.vllm

NUM_HEADS, LATENT_DIM, ROTARY_DIM = 4, 256, 64
WIDTH = LATENT_DIM + ROTARY_DIM


def make_speculation(num_drafted, *, is_draft_model=False):
    return SimpleNamespace(
        num_speculative_tokens=num_drafted,
        max_num_new_slots_for_drafting=int(is_draft_model),
        parallel_drafting=False,
    )


def make_builder(layer_name="attn", speculation=None, *, value_dim=48, **spec):
    """Make a builder with what it reads of an engine's configuration."""
    prefill_backend = SimpleNamespace(
        prepare_metadata=lambda _: None,
        get_name=lambda: "CPU_SDPA",  # asked for by 0.33
    )
    prefill_backend.clone = lambda: prefill_backend
    layer = SimpleNamespace(
        q_lora_rank=None,
        kv_lora_rank=LATENT_DIM,
        qk_nope_head_dim=32,
        qk_rope_head_dim=ROTARY_DIM,
        v_head_dim=value_dim,
        prefill_backend=prefill_backend,
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=torch.float32,
            max_model_len=256,
            get_num_attention_heads=lambda _: NUM_HEADS,
            get_head_size=lambda: WIDTH,
        ),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        compilation_config=SimpleNamespace(static_forward_context={layer_name: layer}),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=200),
        cache_config=SimpleNamespace(block_size=PAGE_TOKENS, cache_dtype="auto"),
        attention_config=SimpleNamespace(use_prefill_query_quantization=False),
        speculative_config=speculation,
    )
    spec = MLAAttentionSpec(
        block_size=PAGE_TOKENS,
        num_kv_heads=1,
        head_size=WIDTH,
        **({"dtype": torch.float32} | spec),
    )
    return JengaLatentMetadataBuilder(spec, [layer_name], config, torch.device("cpu"))


def prompts(batches, query_lens):
    """Get the metadata of requests that begin, with the lengths that vLLM knows on the host."""
    common = batches.prefill(query_lens)
    return common.replace(seq_lens_cpu_upper_bound=common.seq_lens.clone())


def addresses(decode):
    """Get where everything is that a launch would read."""
    tensors = [getattr(decode.plan, field.name) for field in fields(AttentionPlan)]
    tensors += [decode.query_starts, decode.seq_lens, decode.block_table]
    return [tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)]


def attend(attend_with, decode, q, pages, **plan):
    return attend_with(
        q,
        pages,
        decode.block_table,
        decode.query_starts,
        decode.seq_lens,
        scale=WIDTH**-0.5,
        latent_dim=LATENT_DIM,
        out=q.new_zeros(*q.shape[:2], LATENT_DIM),
        **plan,
    )


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        pytest.param((512, 128, 128), 170, id="deepseek_v3"),
        pytest.param((512, 192, 256), 398, id="wide_values"),
        pytest.param((16, 1, 1), 1, id="narrow_heads"),
    ],
)
def test_absorption_is_for_as_many_queries_as_it_costs_less(dims, expected):
    latent, nope, value = dims

    def extra_products(num_queries):
        """Count what absorbing multiplies more per head and token of context."""
        return num_queries * (2 * latent - nope - value) - latent * (nope + value)

    tokens = absorbed_query_tokens(latent_dim=latent, nope_dim=nope, value_dim=value)

    assert tokens == expected
    assert extra_products(tokens) <= 0 < extra_products(tokens + 1)


def test_latents_narrower_than_heads_are_refused():
    with pytest.raises(ValueError, match=r"latent_dim must exceed half of 128 \+ 64, got 96"):
        absorbed_query_tokens(latent_dim=96, nope_dim=128, value_dim=64)


def test_long_prompts_alone_are_left_to_vllms_prefill():
    builder, batches = make_builder(), Batches()
    limit = builder.reorder_batch_threshold

    metadata = builder.build(0, prompts(batches, [1, limit, limit + 1, 60]))

    assert (metadata.num_decodes, metadata.num_decode_tokens) == (2, 1 + limit)
    assert metadata.num_prefills == 2
    assert metadata.decode.plan.num_tokens == 1 + limit
    assert metadata.prefill.query_start_loc.tolist() == [0, limit + 1, limit + 61]


def test_a_captured_plan_stays_where_it_is_and_serves_later_batches_of_its_size():
    builder, batches = make_builder(), Batches()
    generator = torch.Generator().manual_seed(4)
    pages = torch.randn(48, PAGE_TOKENS, WIDTH, generator=generator)
    common = batches.decode([96] * 8, num_padded=8)
    captured = builder.build_for_cudagraph_capture(common).decode
    places, results = addresses(captured), []

    for seq_lens in ([1, 96, 40, 80, 63], [33, 7, 64, 90, 2, 48, 55, 71]):
        q = torch.randn(8, NUM_HEADS, WIDTH, generator=generator)
        decode = builder.build(0, batches.decode(seq_lens, num_padded=8)).decode
        # A graph replays the launches of the captured objects.
        results.append(
            (
                attend(latent_attention, captured, q, pages, plan=captured.plan),
                attend(attend_plainly, decode, q.double(), pages.double()),
                attend(attend_plainly, decode, q, pages),
            )
        )
        assert decode.plan is captured.plan
        assert addresses(decode) == places

    check_close(*(torch.cat(step) for step in zip(*results, strict=True)))


def test_a_plan_is_for_float8_latents_where_the_cache_is_quantised():
    stored = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
    common = Batches().decode([5], num_padded=1)

    kinds = [make_builder(**spec).build(0, common).decode.plan.kind for spec in ({}, stored)]

    assert [kind.is_quantised for kind in kinds] == [False, True]


def test_a_plan_is_for_latents_of_another_float_where_the_cache_is():
    common = Batches().decode([5], num_padded=1)
    dtypes = torch.float32, torch.bfloat16

    kinds = [make_builder(dtype=each).build(0, common).decode.plan.kind for each in dtypes]

    assert [kind.is_other_float for kind in kinds] == [False, True]


@pytest.mark.parametrize("query_len", [40, 90], ids=["absorbed", "not_absorbed"])
def test_a_graph_of_prompts_is_refused(query_len):
    builder, batches = make_builder(), Batches()

    with pytest.raises(NotImplementedError, match="a CUDA graph must have"):
        builder.build_for_cudagraph_capture(prompts(batches, [query_len] * 2))


def test_a_captured_plan_of_drafted_tokens_serves_later_batches_of_its_size():
    builder, batches = make_builder(speculation=make_speculation(3)), Batches()
    generator = torch.Generator().manual_seed(6)
    pages = torch.randn(48, PAGE_TOKENS, WIDTH, generator=generator)
    common = batches.drafted([96] * 6, num_padded=6)
    captured = builder.build_for_cudagraph_capture(common).decode
    places, results = addresses(captured), []

    for seq_lens in ([4, 96, 40, 80, 63], [33, 7, 64, 90, 4, 48]):
        q = torch.randn(24, NUM_HEADS, WIDTH, generator=generator)
        decode = builder.build(0, batches.drafted(seq_lens, num_padded=6)).decode
        assert decode.plan is captured.plan
        assert addresses(decode) == places
        results.append(
            (
                attend(latent_attention, captured, q, pages, plan=captured.plan),
                attend(attend_plainly, decode, q.double(), pages.double()),
                attend(attend_plainly, decode, q, pages),
            )
        )

    check_close(*(torch.cat(step) for step in zip(*results, strict=True)))


def test_drafted_tokens_are_decoded_and_no_more_than_the_kernel_has_rows_for():
    batches = Batches()

    for num_drafted, decoded in ((3, 4), (15, 16), (16, 4)):  # 4 cost no more than 1, of 4 heads
        builder = make_builder(speculation=make_speculation(num_drafted))
        decode = builder.build(0, batches.prefill([1 + num_drafted] * 2)).decode
        assert decode.plan.decode_query_tokens == decoded
        assert (decode.plan.max_row_tiles == 0) is (num_drafted < 16)


def test_drafted_tokens_are_absorbed_where_heads_are_too_narrow_for_prompts_to_be():
    speculation = make_speculation(30)
    wide, narrow = (make_builder(speculation=speculation, value_dim=dim) for dim in (48, 2))

    assert wide.reorder_batch_threshold == 47 > narrow_limit()
    assert narrow.reorder_batch_threshold == 31


def narrow_limit():
    return absorbed_query_tokens(latent_dim=LATENT_DIM, nope_dim=32, value_dim=2)


def test_a_draft_model_absorbs_prompts_whose_length_the_host_does_not_know():
    speculation = make_speculation(3, is_draft_model=True)
    builder = make_builder("draft_model.attn", speculation)
    common = prompts(Batches(), [5, 60, 90])

    metadata = builder.build_for_drafting(common, draft_index=0)

    assert (metadata.num_decodes, metadata.num_prefills) == (3, 0)
    assert metadata.decode.plan.decode_query_tokens == 5  # one more than its target


def test_a_draft_model_writes_what_was_rejected_into_its_own_slots():
    speculation = make_speculation(3, is_draft_model=True)
    kept = torch.tensor([[1, 2, -1, -1, -1], [6, 7, 8, 9, 10]])
    written = {}

    for name in ("attn", "draft_model.attn"):
        batches = Batches()
        batches.starts[:3] = torch.tensor([0, 5, 10])
        batches.seq_lens[:2] = torch.tensor([35, 5])
        common = batches.common(2, 10, 5)
        common.slot_mapping = kept.flatten().clone()
        page = int(common.block_table_tensor[0, 2])
        make_builder(name, speculation).build_for_drafting(common, draft_index=0)
        written[name] = common.slot_mapping.tolist()

    assert written["attn"] == kept.flatten().tolist()
    own = [1, 2, 16 * page, 16 * page + 1, 16 * page + 2]
    assert written["draft_model.attn"] == own + kept[1].tolist()


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        pytest.param(None, "UNIFORM_SINGLE_TOKEN_DECODE", id="none"),
        pytest.param(make_speculation(15), "UNIFORM_BATCH", id="as_many_as_rows"),
        pytest.param(make_speculation(16), "UNIFORM_SINGLE_TOKEN_DECODE", id="one_too_many"),
        pytest.param(
            make_speculation(15, is_draft_model=True),
            "UNIFORM_SINGLE_TOKEN_DECODE",
            id="one_too_many_of_the_draft",
        ),
    ],
)
def test_graphs_are_announced_of_what_the_decode_kernel_takes(speculation, expected):
    config = SimpleNamespace(speculative_config=speculation)

    support = JengaLatentMetadataBuilder.get_cudagraph_support(config, None)

    assert support is AttentionCGSupport[expected]


@pytest.mark.parametrize("stored", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_latents_of_earlier_tokens_are_gathered_from_strided_pages(stored):
    scale = torch.tensor([0.3]) if stored is torch.float8_e4m3fn else None
    pages = torch.full((6, 3, PAGE_TOKENS, WIDTH), torch.nan).to(stored)[:, 1]
    table = torch.tensor([[4, 2], [1, 5]], dtype=torch.int32)
    starts, lengths = (16, 0), (5, 20)
    rows = torch.randn(25, WIDTH, generator=torch.Generator().manual_seed(1)).to(stored)
    pages[2, :5] = rows[:5]
    pages[1], pages[5, :4] = rows[5:21], rows[21:]
    chunk = SimpleNamespace(
        num_context_tokens=25,
        token_to_seq=torch.tensor([0] * 5 + [1] * 20 + [7] * 3),  # vLLM may pad it
        cu_seq_lens=torch.tensor([0, 5, 25]),
        starts=torch.tensor(starts),
        seq_lens=torch.tensor(lengths),
    )
    expected = rows.float() if scale is None else rows.float() * scale

    gathered = gathered_latents(pages, chunk, table, dtype=torch.float16, latent_scale=scale)

    assert torch.equal(gathered, expected.half())


@pytest.mark.parametrize(
    ("name", "step_tokens", "is_invariant", "rows"),
    [
        ("layer", 512, False, 6000),  # as vLLM has it
        ("layer", 1600, False, 10_000),
        ("layer", 1 << 20, False, 10 * 170 * 1600 // 256),  # ten requests are not as many tokens
        ("draft_model.layer", 16_000, False, 100_000),
        ("layer", 16_000, True, 100_000),
    ],
)
def test_the_profile_counts_what_absorbed_requests_take(
    name, step_tokens, is_invariant, rows, monkeypatch
):
    from vllm.model_executor.layers.attention import MLAAttention

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(is_invariant)))
    layer = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(layer)
    layer.kv_lora_rank, layer.qk_rope_head_dim = 512, 64
    layer.qk_nope_head_dim, layer.v_head_dim = 128, 128
    layer._chunked_prefill_workspace_size = 6000
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=step_tokens, max_num_seqs=10),
        speculative_config=None,
        compilation_config=SimpleNamespace(static_forward_context={name: layer}),
    )

    count_absorbed(config)

    # Queries of 512 and 576 elements and results of 512, where rows are of 256.
    assert layer.chunked_prefill_workspace_size == rows


@pytest.mark.parametrize("setting", ["1", "0", "", NOT_PASSED])
def test_decoding_is_planned_for_the_specialized_kernel_where_that_is_asked_for(
    setting, monkeypatch
):
    set_kernels(monkeypatch, "JENGA_SPECIALIZED_LATENTS", setting)
    asked = []

    def remember(*arguments, **options):
        asked.append(options["is_warp_specialized"])
        return plan_latent_attention(*arguments, **options)

    monkeypatch.setattr(latent_builder, "plan_latent_attention", remember)

    builder = make_builder()
    settle_kernels(builder, setting)
    builder.build(0, Batches().decode([40], num_padded=1))

    assert asked == [{"1": True, "": None}.get(setting, False)]
