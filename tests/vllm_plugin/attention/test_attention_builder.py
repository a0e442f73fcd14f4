"""What the builder prepares for steps, and that a CUDA graph could go on reading it."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    SlidingWindowSpec,
)

from jenga.vllm_plugin.layers.attention import attention_builder
from jenga.vllm_plugin.layers.attention.attention_builder import (
    JengaTritonMetadataBuilder,
    attention_kind,
    image_reach,
    image_spans,
)
from jenga.vllm_plugin.layers.attention.captured_plans import CapturedPlans
from jenga_kernels.attention.paged_attention import paged_attention
from jenga_kernels.plans.attention_plan import AttentionPlan, plan_attention
from jenga_kernels.reference.attention.paged_attention import paged_attention as attend_plainly
from jenga_kernels.triton.lib import tiles
from tests.kernels.support import check_close
from tests.vllm_plugin.trials.test_tried_kernels import NOT_PASSED, set_kernels, settle_kernels

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_TOKENS = 4, 2, 64, 16
SHAPE = {
    "block_size": PAGE_TOKENS,
    "num_kv_heads": NUM_KV_HEADS,
    "head_size": HEAD_DIM,
    "dtype": torch.float32,
}
SPECS = {
    "full": FullAttentionSpec(**SHAPE),
    "sliding": SlidingWindowSpec(**SHAPE, sliding_window=20),
    "chunked": ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=32),
    "cross": CrossAttentionSpec(**SHAPE),
}


def make_config(num_drafted=0, draft_heads=NUM_HEADS):
    speculation = SimpleNamespace(
        num_speculative_tokens=num_drafted,
        max_num_new_slots_for_drafting=1,
        uses_draft_model=lambda: True,
        draft_model_config=SimpleNamespace(get_num_attention_heads=lambda _: draft_heads),
    )
    return SimpleNamespace(
        speculative_config=speculation if num_drafted else None,
        compilation_config=SimpleNamespace(static_forward_context={}),
        parallel_config=None,
        model_config=SimpleNamespace(
            dtype=torch.float32,
            is_mm_prefix_lm=False,
            max_model_len=96,
            get_num_attention_heads=lambda _: NUM_HEADS,
        ),
    )


def make_builder(spec, num_drafted=0):
    config = make_config(num_drafted)
    return JengaTritonMetadataBuilder(spec, [], config, torch.device("cpu"))


class Batches:
    """A runner's buffers, which stay where they are from step to step."""

    def __init__(self, max_requests=8, max_pages=6):
        self.starts = torch.zeros(max_requests + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(max_requests, dtype=torch.int32)
        pages = torch.randperm(max_requests * max_pages, generator=torch.Generator().manual_seed(0))
        self.page_table = pages.reshape(max_requests, max_pages).to(torch.int32)

    def decode(self, seq_lens, *, num_padded, causal=True):
        """Get the metadata of requests of one token each, padded as for a CUDA graph."""
        num_requests = len(seq_lens)
        self.starts[: num_requests + 1] = torch.arange(num_requests + 1)
        self.starts[num_requests + 1 :] = num_requests
        self.seq_lens.zero_()
        self.seq_lens[:num_requests] = torch.tensor(seq_lens)
        return self.common(num_padded, num_padded, 1, causal=causal)

    def drafted(self, seq_lens, *, num_padded):
        """Get the metadata of requests of four tokens each, padded as for a CUDA graph."""
        common = self.decode(seq_lens, num_padded=num_padded)
        self.starts *= 4
        return common.replace(
            query_start_loc_cpu=common.query_start_loc.clone(),
            num_actual_tokens=4 * num_padded,
            max_query_len=4,
        )

    def prefill(self, query_lens):
        self.starts[1 : len(query_lens) + 1] = torch.tensor(query_lens).cumsum(0)
        self.seq_lens[: len(query_lens)] = torch.tensor(query_lens)
        return self.common(len(query_lens), sum(query_lens), max(query_lens))

    def common(self, num_requests, num_tokens, max_query_tokens, *, causal=True):
        starts = self.starts[: num_requests + 1]
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.clone(),
            seq_lens=self.seq_lens[:num_requests],
            num_reqs=num_requests,
            num_actual_tokens=num_tokens,
            max_query_len=max_query_tokens,
            max_seq_len=96,
            block_table_tensor=self.page_table[:num_requests],
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
            causal=causal,
        )


def addresses(metadata):
    """Get where everything is that a launch would read."""
    plan = metadata.plan
    tensors = [getattr(plan, field.name) for field in fields(AttentionPlan)]
    tensors += [metadata.query_starts, metadata.seq_lens, metadata.page_table]
    return [tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)]


def attend(attend_with, metadata, q, pages, **plan):
    kind = metadata.plan.kind
    return attend_with(
        q,
        *pages,
        metadata.page_table,
        metadata.query_starts,
        metadata.seq_lens,
        scale=HEAD_DIM**-0.5,
        window_tokens=kind.window_tokens,
        chunk_tokens=kind.chunk_tokens,
        is_causal=kind.is_causal,
        out=torch.zeros_like(q),
        **plan,
    )


def announced(**speculation):
    config = make_config(**speculation)
    return JengaTritonMetadataBuilder.get_cudagraph_support(config, SPECS["full"])


def test_graphs_of_single_token_decode_are_announced():
    assert announced() is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


def test_graphs_of_drafted_tokens_are_announced_where_the_decode_kernel_takes_them_all():
    assert announced(num_drafted=7) is AttentionCGSupport.UNIFORM_BATCH
    assert announced(num_drafted=62) is AttentionCGSupport.UNIFORM_BATCH  # two heads, 128 rows
    too_many = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert announced(num_drafted=63) is too_many
    assert announced(num_drafted=7, draft_heads=64) is too_many


def test_graphs_of_drafted_tokens_are_not_announced_for_heads_too_wide_for_so_many_rows(
    monkeypatch,
):
    ampere = tiles.Machine(capability=80, num_processors=108)
    monkeypatch.setattr(tiles, "machine_of", lambda _: ampere)
    wide = FullAttentionSpec(**SHAPE | {"head_size": 512})

    def announced_for(num_drafted):
        config = make_config(num_drafted)
        return JengaTritonMetadataBuilder.get_cudagraph_support(config, wide)

    assert announced_for(6) is AttentionCGSupport.UNIFORM_BATCH  # two heads, 16 rows of float32
    assert announced_for(7) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


@pytest.mark.parametrize("setting", ["1", "0", "", NOT_PASSED])
def test_prompts_are_planned_for_the_specialized_kernel_where_that_is_asked_for(
    setting, monkeypatch
):
    set_kernels(monkeypatch, "JENGA_SPECIALIZED_PREFILL", setting)
    asked = []

    def remember(*arguments, **options):
        asked.append(options["is_warp_specialized"])
        return plan_attention(*arguments, **options)

    monkeypatch.setattr(attention_builder, "plan_attention", remember)

    builder = make_builder(SPECS["full"])
    settle_kernels(builder, setting)
    builder.build(0, Batches().prefill([40]))

    assert asked == [{"1": True, "": None}.get(setting, False)]


@pytest.mark.parametrize("name", [name for name in SPECS if name != "cross"])
def test_a_captured_plan_of_drafted_tokens_serves_later_batches_of_its_size(name):
    builder, batches = make_builder(SPECS[name], num_drafted=3), Batches()
    generator = torch.Generator().manual_seed(6)
    pages = torch.randn(2, 48, PAGE_TOKENS, NUM_KV_HEADS, HEAD_DIM, generator=generator)
    captured = builder.build_for_cudagraph_capture(batches.drafted([96] * 6, num_padded=6))
    places, results = addresses(captured), []

    for seq_lens in ([4, 96, 40, 80, 63], [33, 7, 64, 90, 4, 48]):
        common = batches.drafted(seq_lens, num_padded=6)
        q = torch.randn(24, NUM_HEADS, HEAD_DIM, generator=generator)
        metadata = builder.build(0, common)
        assert metadata.plan is captured.plan
        assert addresses(metadata) == places
        results.append(
            (
                attend(paged_attention, captured, q, pages, plan=captured.plan),
                attend(attend_plainly, metadata, q.double(), pages.double()),
                attend(attend_plainly, metadata, q, pages),
            )
        )

    check_close(*(torch.cat(step) for step in zip(*results, strict=True)))


def test_a_draft_model_writes_what_was_rejected_into_its_own_slots():
    builder, batches = make_builder(SPECS["full"], num_drafted=3), Batches()
    batches.starts[:4] = torch.tensor([0, 5, 10, 15])
    batches.seq_lens[:3] = torch.tensor([35, 99, 5])  # the second ends past the longest request
    common = batches.common(3, 15, 5)
    table = common.block_table_tensor
    kept = torch.tensor([[1, 2, -1, -1, -1], [3, 4, 5, -1, -1], [6, 7, 8, 9, 10]])
    common.slot_mapping = kept.flatten()

    builder.build_for_drafting(common, draft_index=0)

    first, second, third = common.slot_mapping.unflatten(0, (3, 5)).tolist()
    page = int(table[0, 2])
    assert first == [1, 2, 16 * page, 16 * page + 1, 16 * page + 2]
    assert second == [3, 4, 5, -1, -1]
    assert third == kept[2].tolist()


def test_what_a_draft_model_reads_first_is_decoded_too():
    builder, batches = make_builder(SPECS["full"], num_drafted=8), Batches()

    accepted = batches.prefill([10, 10])  # what was drafted and accepted, and one token more

    assert builder.build_for_drafting(accepted, draft_index=0).plan.max_row_tiles == 0


@pytest.mark.parametrize(
    ("query_lens", "is_decoded"), [([40, 0, 30], False), ([40, 1, 30], True), ([1, 1], True)]
)
def test_a_step_without_decoding_requests_launches_nothing_for_them(query_lens, is_decoded):
    builder = make_builder(SPECS["full"])

    plan = builder.build(0, Batches().prefill(query_lens)).plan

    assert (plan.max_decoded_tokens > 0) == is_decoded


@pytest.mark.parametrize("name", SPECS)
def test_a_captured_plan_stays_where_it_is_and_serves_later_batches_of_its_size(name):
    builder, batches = make_builder(SPECS[name]), Batches()
    causal = name != "cross"
    generator = torch.Generator().manual_seed(4)
    pages = torch.randn(2, 48, PAGE_TOKENS, NUM_KV_HEADS, HEAD_DIM, generator=generator)
    captured = builder.build_for_cudagraph_capture(
        batches.decode([96] * 8, num_padded=8, causal=causal)
    )
    places, results = addresses(captured), []

    for seq_lens in ([1, 96, 40, 80, 63], [33, 7, 64, 90, 2, 48, 55, 71], [17, 94]):
        common = batches.decode(seq_lens, num_padded=8, causal=causal)
        q = torch.randn(8, NUM_HEADS, HEAD_DIM, generator=generator)
        metadata = builder.build(0, common)
        # A graph replays the launches of the captured objects.
        results.append(
            (
                attend(paged_attention, captured, q, pages, plan=captured.plan),
                attend(attend_plainly, metadata, q.double(), pages.double()),
                attend(attend_plainly, metadata, q, pages),
            )
        )
        assert metadata.plan is captured.plan
        assert addresses(metadata) == places

    check_close(*(torch.cat(step) for step in zip(*results, strict=True)))


def test_an_updated_plan_gives_bit_for_bit_what_a_new_one_gives():
    builder, batches = make_builder(SPECS["full"]), Batches()
    generator = torch.Generator().manual_seed(2)
    pages = torch.randn(2, 48, PAGE_TOKENS, NUM_KV_HEADS, HEAD_DIM, generator=generator)
    q = torch.randn(4, NUM_HEADS, HEAD_DIM, generator=generator)
    builder.build_for_cudagraph_capture(batches.decode([96] * 4, num_padded=4))

    common = batches.decode([5, 70, 31, 16], num_padded=4)
    updated, fresh = builder.build(0, common), make_builder(SPECS["full"]).build(0, common)

    assert updated.plan is not fresh.plan
    results = [attend(paged_attention, m, q, pages, plan=m.plan) for m in (updated, fresh)]
    assert torch.equal(*results)


def test_captured_sizes_share_room_for_split_results_and_nothing_else(monkeypatch):
    from jenga_kernels.plans import attention_plan

    tiles_of = attention_plan.attention_tiles
    monkeypatch.setattr(  # as on a GPU of several processors
        attention_plan,
        "attention_tiles",
        lambda *args, **kwargs: replace(tiles_of(*args, **kwargs), num_programs=6),
    )
    builder, batches = make_builder(SPECS["full"]), Batches()
    large = builder.build_for_cudagraph_capture(batches.decode([96] * 8, num_padded=8)).plan
    small = builder.build_for_cudagraph_capture(batches.decode([96] * 2, num_padded=2)).plan

    assert small.partial_out.data_ptr() == large.partial_out.data_ptr()
    assert small.partial_lse.data_ptr() == large.partial_lse.data_ptr()
    assert 0 < small.partial_out.shape[0] < large.partial_out.shape[0]
    assert small.unit_starts.data_ptr() != large.unit_starts.data_ptr()
    assert builder.build_for_cudagraph_capture(batches.decode([3], num_padded=2)).plan is small


def test_a_prompt_of_a_captured_size_gets_a_plan_of_its_own():
    builder, batches = make_builder(SPECS["full"]), Batches()
    captured = builder.build_for_cudagraph_capture(batches.decode([96], num_padded=1))

    prompt = builder.build(0, batches.prefill([40]))

    assert prompt.plan is not captured.plan
    assert prompt.plan.max_row_tiles > 0


def image_step(images):
    """Get a step of a decoding request and a prompt's last 30 tokens, images in the prompt."""
    batches = Batches()
    batches.starts[:3] = torch.tensor([0, 1, 31])
    batches.seq_lens[:2] = torch.tensor([60, 50])
    common = batches.common(2, 31, 30)
    common.seq_lens_cpu_upper_bound = batches.seq_lens[:2].clone()
    common.mm_req_doc_ranges = images
    return common


def test_every_token_of_an_image_knows_where_the_image_begins_and_ends():
    # The prompt's step begins at its token 20, in the middle of its first image.
    spans = image_spans(image_step({0: [(3, 9)], 1: [(2, 5), (16, 23), (40, 49)]}))

    wanted = torch.zeros(31, 2, dtype=torch.int32)
    wanted[1:5] = torch.tensor([16, 24])
    wanted[21:31] = torch.tensor([40, 50])
    assert torch.equal(spans, wanted)


@pytest.mark.parametrize("images", [None, {}, {0: [], 1: [(2, 5)]}, {0: [(3, 9)]}])
def test_steps_without_a_token_of_an_image_have_no_spans(images):
    assert image_spans(image_step(images)) is None


def one_token_each(image):
    """Get a step of two decoding requests, of which the second's last token is of an image."""
    common = Batches().decode([30, 44], num_padded=2)
    common.seq_lens_cpu_upper_bound = common.seq_lens.clone()
    common.mm_req_doc_ranges = {1: [image]}
    return common


def test_a_last_token_of_an_image_reads_what_it_would_read_without():
    common = one_token_each((25, 50))

    assert image_spans(common) is None
    assert image_spans(common, 20) is None
    assert image_spans(common, 8, is_clamped=True) is None
    assert image_spans(common, 18).tolist() == [[0, 0], [25, 51]]


def test_a_graph_replayed_with_a_token_of_an_image_reads_this_steps_plan():
    builder, batches = make_builder(SPECS["sliding"]), Batches()
    graph = builder.build_for_cudagraph_capture(batches.decode([1, 1], num_padded=2))
    common = one_token_each((5, 50))

    own = builder.build(0, common)

    assert own.spans is not None
    assert own.plan is not graph.plan
    fresh = make_builder(SPECS["sliding"]).build(0, common.replace(mm_req_doc_ranges=None))
    for name in ("unit_starts", "first_requests"):
        kept, wanted = getattr(graph.plan, name), getattr(fresh.plan, name)
        assert torch.equal(kept, wanted)


@pytest.mark.parametrize("name", ["full", "sliding"])
def test_tokens_of_an_image_read_each_other_and_decoding_requests_their_own(name):
    common = image_step({0: [(3, 9)], 1: [(25, 40)]})
    generator = torch.Generator().manual_seed(3)
    pages = torch.randn(2, 48, PAGE_TOKENS, NUM_KV_HEADS, HEAD_DIM, generator=generator)
    q = torch.randn(31, NUM_HEADS, HEAD_DIM, generator=generator)

    metadata = make_builder(SPECS[name]).build(0, common)
    spans = metadata.spans
    got = attend(paged_attention, metadata, q, pages, plan=metadata.plan, spans=spans)

    exact = attend(attend_plainly, metadata, q.double(), pages.double(), spans=spans)
    check_close(got, exact, attend(attend_plainly, metadata, q, pages, spans=spans))
    causal = attend(attend_plainly, metadata, q, pages)
    differs = (got - causal).abs().amax((1, 2)) > 0.01
    assert differs.nonzero()[:, 0].tolist() == list(range(6, 21))  # all of it but its last token


def clamping_config():
    """Get a model whose layers with a window read images as far as that reaches."""
    config = make_config()
    config.compilation_config.static_forward_context |= {
        "layers.0.attn": SimpleNamespace(mm_prefix_clamp_sliding_window=True, sliding_window=20),
        "layers.1.attn": SimpleNamespace(mm_prefix_clamp_sliding_window=False, sliding_window=None),
    }
    return config


def test_images_are_read_as_far_as_windows_reach_where_layers_ask_for_it():
    # An image longer than the window of 20 tokens; the prompt's step begins at its token 20.
    common = image_step({0: [(3, 9)], 1: [(5, 44)]})
    generator = torch.Generator().manual_seed(3)
    pages = torch.randn(2, 48, PAGE_TOKENS, NUM_KV_HEADS, HEAD_DIM, generator=generator)
    q = torch.randn(31, NUM_HEADS, HEAD_DIM, generator=generator)

    builder = JengaTritonMetadataBuilder(
        SPECS["sliding"], ["layers.0.attn"], clamping_config(), torch.device("cpu")
    )
    metadata = builder.build(0, common)
    got = attend(paged_attention, metadata, q, pages, plan=metadata.plan, spans=metadata.spans)

    # (Before it, or of its image) and less than a window behind it: one range of keys a token.
    spans = torch.zeros(31, 2, dtype=torch.int32)
    for position in range(20, 45):
        spans[position - 19] = torch.tensor([max(5, position - 19), 45])
    exact = attend(attend_plainly, metadata, q.double(), pages.double(), spans=spans)
    check_close(got, exact, attend(attend_plainly, metadata, q, pages, spans=spans))
    whole = image_spans(common, 20)
    unclamped = attend(attend_plainly, metadata, q, pages, spans=whole)
    differs = (got - unclamped).abs().amax((1, 2)) > 0.01
    assert differs.nonzero()[:, 0].tolist() == list(range(6, 26))  # whose window begins within it


def test_layers_without_a_window_read_no_images_beside_those_that_clamp_them():
    common = image_step({0: [(3, 9)], 1: [(25, 40)]})
    builder = JengaTritonMetadataBuilder(
        SPECS["full"], ["layers.1.attn"], clamping_config(), torch.device("cpu")
    )

    assert builder.build(0, common).spans is None


def test_a_page_table_of_layers_that_differ_in_reading_images_is_refused_by_name():
    with pytest.raises(ValueError, match=r"layers\.0\.attn.*layers\.1\.attn"):
        image_reach(clamping_config(), ["layers.1.attn", "layers.0.attn"])


def test_a_graph_of_prompts_is_refused():
    builder, batches = make_builder(SPECS["full"]), Batches()

    with pytest.raises(NotImplementedError, match="40"):
        builder.build_for_cudagraph_capture(batches.prefill([40, 40]))


@pytest.mark.parametrize(("name", "causal"), [("full", False), ("cross", True)])
def test_a_mask_other_than_the_layers_own_is_refused(name, causal):
    common = Batches().decode([5], num_padded=1, causal=causal)

    with pytest.raises(NotImplementedError, match="causal"):
        make_builder(SPECS[name]).build(0, common)


def test_the_kind_of_layers_says_what_their_spec_says():
    spec = replace(SPECS["sliding"], kv_quant_mode=KVQuantMode.FP8_PER_TENSOR, dtype=torch.uint8)

    kinds = {name: attention_kind(each, NUM_HEADS, torch.float32) for name, each in SPECS.items()}

    assert attention_kind(spec, NUM_HEADS, torch.float32) == replace(
        kinds["sliding"], is_quantised=True
    )
    scaled = replace(spec, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD, dtype=torch.int8)
    scaled_kind = replace(kinds["sliding"], is_quantised=True, has_slot_scales=True)
    assert attention_kind(scaled, NUM_HEADS, torch.float32) == scaled_kind
    halved = replace(spec, kv_quant_mode=KVQuantMode.INT4_PER_TOKEN_HEAD)
    assert attention_kind(halved, NUM_HEADS, torch.float32) == replace(scaled_kind, is_int4=True)
    halves = replace(SPECS["sliding"], dtype=torch.float16)
    halves_kind = replace(kinds["sliding"], is_other_float=True)
    assert attention_kind(halves, NUM_HEADS, torch.float32) == halves_kind
    assert attention_kind(halves, NUM_HEADS, torch.float16) == kinds["sliding"]
    assert kinds["sliding"] == replace(kinds["full"], window_tokens=20)
    assert kinds["chunked"] == replace(kinds["full"], chunk_tokens=32)
    assert kinds["cross"] == replace(kinds["full"], is_causal=False)


def test_values_of_another_width_are_of_their_own_kind():
    narrow = replace(SPECS["full"], head_size_v=SHAPE["head_size"] // 2)
    metadata = make_builder(narrow).build(0, Batches().prefill([40]))

    assert metadata.plan.kind.value_dim == SHAPE["head_size"] // 2
    assert attention_kind(SPECS["full"], NUM_HEADS, torch.float32).value_dim is None


def test_a_plan_captured_for_one_token_each_serves_no_request_of_two():
    starts, later = torch.tensor([[0, 1, 2, 3], [0, 2, 3, 3]], dtype=torch.int32)
    seq_lens = torch.full((3,), 40, dtype=torch.int32)
    plan = plan_attention(
        starts,
        seq_lens,
        attention_kind(SPECS["full"], NUM_HEADS, torch.float32),
        num_tokens=3,
        dtype=torch.float32,
        max_query_tokens=1,
    )
    captured = CapturedPlans()
    captured.keep(plan, max_query_tokens=1)

    assert captured.updated(starts, seq_lens, num_tokens=3, max_query_tokens=1) is plan
    assert captured.updated(later, seq_lens, num_tokens=3, max_query_tokens=2) is None
