"""Groups, strides and views that the plugin gives vLLM's workers, without an engine."""

from types import SimpleNamespace

import pytest
import torch

from jenga.admission.reserve import STEP_TOKENS

pytestmark = pytest.mark.vllm

MIB = 1 << 20


def attention(**changes):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    window = changes.pop("window", None)
    options = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    options |= changes
    if window is None:
        return FullAttentionSpec(**options)
    return SlidingWindowSpec(**options, sliding_window=window)


def mamba(**changes):
    from vllm.v1.kv_cache_interface import MambaSpec

    options = {
        "block_size": 2048,
        "shapes": ((3, 160), (4, 32, 16)),
        "dtypes": (torch.float32, torch.float32),
    }
    return MambaSpec(**(options | changes))


def engine_config(
    architecture="LlamaForCausalLM", num_experts=0, original_max_model_len=2048, **cache
):
    options = {
        "block_size": 16,
        "num_gpu_blocks_override": None,
        "prefix_cache_retention_interval": None,
        "mamba_cache_mode": "none",
        "enable_prefix_caching": False,
    }
    return SimpleNamespace(
        cache_config=SimpleNamespace(**(options | cache)),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False, max_num_seqs=8),
        speculative_config=None,
        model_config=SimpleNamespace(
            max_model_len=2048,
            original_max_model_len=original_max_model_len,
            is_mm_prefix_lm=False,
            architecture=architecture,
            hf_text_config=SimpleNamespace(
                hidden_size=64, intermediate_size=256, num_hidden_layers=2, vocab_size=100
            ),
            get_num_experts=lambda: num_experts,
            get_num_experts_per_tok=lambda: 1,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, tensor_parallel_size=1, data_parallel_index=0
        ),
        observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        additional_config={},
        max_in_flight_tokens=64,
        num_lookahead_tokens=0,
    )


HYBRID = {
    "full.0": attention(),
    "sliding.0": attention(window=32),
    "sliding.1": attention(window=32),
    "wide.0": attention(head_size=128),
    "mamba.0": mamba(),
    "mamba.1": mamba(),
    "mamba.2": mamba(),
}


def config_of(specs, available_memory, **cache):
    from jenga.vllm_plugin.arena.layout import get_kv_cache_config_from_groups, get_kv_cache_groups

    config = engine_config(**cache)
    groups = get_kv_cache_groups(config, specs)
    return get_kv_cache_config_from_groups(config, groups, available_memory)


def test_layers_of_one_kind_share_a_group_whatever_their_width():
    config = config_of(HYBRID, 8 * MIB)

    groups = [group.layer_names for group in config.kv_cache_groups]
    assert ["full.0", "wide.0"] in groups
    assert ["sliding.0", "sliding.1"] in groups
    assert sorted(name for group in groups for name in group) == sorted(HYBRID)


def test_a_step_of_a_model_of_experts_is_known_to_cost_more():
    dense, sparse = (config_of(HYBRID, 8 * MIB, num_experts=number) for number in (0, 8))

    assert dense.step_tokens == STEP_TOKENS
    common, expert = 64 * 100 + 2 * 4 * 64 * 64, 3 * 64 * 256
    assert sparse.step_tokens == pytest.approx(
        STEP_TOKENS * (common + 2 * 8 * expert) / (common + 2 * expert)
    )


def test_views_of_all_layers_tile_the_arena_without_overlap():
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    from jenga.vllm_plugin.arena.layout import geometry_of

    config = config_of(HYBRID | {"narrow.0": attention(head_size=96, head_size_v=64)}, 8 * MIB)
    geometry = geometry_of(config)
    views = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.BLHNC)

    # Each large page is held by one page table at a time: mark those of one table after another.
    for table in geometry.page_tables:
        names = [layer.name for layer in table.layer_type.layers]
        names = names[table.layer_start : table.layer_end]
        storage = views[names[0]].untyped_storage()
        arena = torch.empty(0, dtype=torch.uint8).set_(storage)
        arena.zero_()
        written = 0
        for mark, name in enumerate(names, start=1):
            view = views[name]
            assert view.untyped_storage().data_ptr() == storage.data_ptr()
            assert view.shape[0] == config.num_blocks * table.small_pages_per_large_page
            raw = view if view.dtype == torch.int8 else view.view(torch.int8)
            raw.fill_(mark)
            written += raw.numel()
        assert int((arena != 0).sum()) == written  # a byte written twice would be missing
        assert written == arena.numel() - table.padding_bytes * (
            config.num_blocks * table.small_pages_per_large_page
        )


def test_mamba_states_bind_to_the_strided_view():
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    config = config_of(HYBRID, 8 * MIB)
    views = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.BLHNC)
    layer = SimpleNamespace(
        get_state_shape=lambda: mamba().shapes, get_state_dtype=lambda: mamba().dtypes
    )
    MambaBase.bind_kv_cache(layer, views["mamba.1"])

    conv, ssm = layer.kv_cache
    assert conv.shape[1:] == (3, 160)
    assert ssm.shape[1:] == (4, 32, 16)
    ssm[3] = 7.0
    start = conv[3].numel() * 4
    assert views["mamba.1"][3].flatten()[start : start + 4].view(torch.float32).item() == 7.0


def test_memory_for_less_than_one_large_page_per_table_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="large page"):
        config_of(HYBRID, 1000)


def test_a_throw_away_arena_for_measuring_has_a_large_page_for_every_table():
    config = config_of(HYBRID, 0, num_gpu_blocks_override=512)

    assert config.num_blocks == 1 + len(config.kv_cache_groups)


def test_graphs_are_captured_for_more_requests_than_the_arena_has_large_pages():
    from vllm.config import CompilationConfig, CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport

    config = config_of(HYBRID, 8 * MIB)
    compilation = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)

    mode = compilation.resolve_cudagraph_mode_and_sizes(
        AttentionCGSupport.UNIFORM_BATCH,
        "JENGA_TRITON",
        kv_cache_config=config,
        max_num_reqs=config.num_blocks + 1,
    )

    assert mode is CUDAGraphMode.FULL_DECODE_ONLY


def test_a_number_of_large_pages_asked_for_is_kept():
    assert config_of(HYBRID, 8 * MIB, num_gpu_blocks_override=69).num_blocks == 69


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"num_head_slots": 1}, "packed head slots"),
        ({"head_size_v": 40}, "values of 40 elements"),
        ({"head_size_v": 1024}, "values of 1024 elements"),
        ({"page_size_padded": 1 << 20}, "padded pages"),
    ],
)
def test_a_cache_the_kernels_cannot_read_is_refused_by_layer_and_reason(spec, named):
    with pytest.raises(ValueError, match=rf"odd\.0.*{named}"):
        config_of({"odd.0": attention(**spec)}, 8 * MIB)


def test_a_cache_of_an_unknown_kind_is_refused_by_its_name():
    from vllm.v1.kv_cache_interface import SinkFullAttentionSpec

    spec = SinkFullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32, sink_len=4
    )
    with pytest.raises(ValueError, match="SinkFullAttentionSpec"):
        config_of({"sink.0": spec}, 8 * MIB)


def test_a_convolution_state_that_would_leave_the_next_unaligned_is_refused():
    with pytest.raises(ValueError, match=r"got 36 bytes in layer 'mamba\.0'"):
        config_of({"mamba.0": mamba(shapes=((3, 3), (4, 32, 16)))}, 8 * MIB)


@pytest.mark.parametrize(
    ("kind", "architecture", "is_kept"),
    [
        ("MAMBA1", "JambaForCausalLM", True),
        ("GDN_ATTN", "Qwen3NextForCausalLM", True),
        ("GDN_ATTN", "BailingMoeV3ForCausalLM", True),
        ("SHORT_CONV", "Lfm2ForCausalLM", True),
        ("LINEAR", "BailingMoeV2_5ForCausalLM", True),
        ("GDN_ATTN", "Qwen4ExpForCausalLM", False),
        ("SHORT_CONV", "Qwen4ExpForCausalLM", False),
    ],
)
def test_prefixes_are_cached_only_if_all_states_are_kept(kind, architecture, is_kept, monkeypatch):
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    from jenga.vllm_plugin.arena import layout

    # What vLLM's logger lets through depends on who set it up before.
    warnings = []
    monkeypatch.setattr(layout.logger, "warning", lambda *words: warnings.append(words))
    config = engine_config(architecture, enable_prefix_caching=True)
    specs = HYBRID | {"other": mamba(mamba_type=MambaAttentionBackendEnum[kind])}

    layout.get_kv_cache_groups(config, specs)

    assert config.cache_config.enable_prefix_caching == is_kept
    assert [kind in words for words in warnings] == ([] if is_kept else [True])


def drafting_config(architecture):
    config = engine_config(architecture)
    config.speculative_config = SimpleNamespace(
        uses_draft_kv_cache=lambda: False, num_speculative_tokens=3
    )
    return config


def test_states_of_drafted_tokens_have_slots_of_their_own():
    from jenga.vllm_plugin.arena.layout import (
        get_kv_cache_groups,
        max_memory_usage_bytes_from_groups,
    )

    config = drafting_config("GraniteMoeHybridForCausalLM")
    specs = {
        name: mamba(num_speculative_blocks=3) if name.startswith("mamba") else spec
        for name, spec in HYBRID.items()
    }

    groups = get_kv_cache_groups(config, specs)

    (table,) = [group for group in groups[0].geometry.page_tables if group.is_state]
    assert table.layer_type.slots_per_request == 4
    plain = get_kv_cache_groups(engine_config(), HYBRID)
    without = max_memory_usage_bytes_from_groups(config, plain)
    assert max_memory_usage_bytes_from_groups(config, groups) > without


def test_drafts_with_states_that_other_operations_keep_are_refused_by_kind():
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    from jenga.vllm_plugin.arena.layout import get_kv_cache_groups

    config = drafting_config("Qwen4ExpForCausalLM")
    specs = HYBRID | {"other": mamba(mamba_type=MambaAttentionBackendEnum.SHORT_CONV)}

    with pytest.raises(ValueError, match=r"speculative decoding .* SHORT_CONV"):
        get_kv_cache_groups(config, specs)


def test_prefixes_of_hybrids_are_hashed_by_pages_of_tokens():
    from vllm.v1.engine import core

    from jenga.vllm_plugin.patches.all_patches import apply_replacements

    apply_replacements()
    config = config_of(HYBRID, 8 * MIB, enable_prefix_caching=True)
    options = engine_config(enable_prefix_caching=True, prefix_match_unit=None)
    options.kv_transfer_config = None

    sizes = core.resolve_kv_cache_block_sizes(config, options)

    tokens_per_page = [t.tokens_per_page for t in config.geometry.page_tables if not t.is_state]
    assert sizes == (max(tokens_per_page), min(tokens_per_page))
    assert sizes[1] == 16


def test_the_longest_request_is_counted_in_large_pages_of_each_table():
    from jenga.vllm_plugin.arena.layout import (
        geometry_of,
        get_kv_cache_groups,
        max_concurrency,
        max_memory_usage_bytes_from_groups,
    )

    config = engine_config()
    groups = get_kv_cache_groups(config, HYBRID)
    kv_config = config_of(HYBRID, 8 * MIB)
    geometry = geometry_of(kv_config)
    pages = {"full": 2048 // 16, "sliding_32": -(-(31 + 64) // 16) + 1}

    needed = max_memory_usage_bytes_from_groups(config, groups)
    expected = sum(
        -(-pages.get(table.layer_type.name, 1) // table.small_pages_per_large_page)
        for table in geometry.page_tables
    )
    assert needed == expected * geometry.large_page_bytes
    assert max_concurrency(config, kv_config) >= (kv_config.num_blocks - 1) / expected
