"""vLLM 0.33's hook for the layout of cache memory, also where vLLM has none."""

import inspect

import pytest

from tests.vllm_plugin.arena.test_layout import HYBRID, engine_config

pytest.importorskip("vllm")


@pytest.fixture
def builder():
    from jenga.vllm_plugin.arena.config_builder import JengaKVCacheConfigBuilder

    return JengaKVCacheConfigBuilder()


def test_a_block_is_a_large_page_and_there_are_as_many_as_asked_for(builder):
    from jenga.vllm_plugin.arena.layout import get_kv_cache_config_from_groups

    options = engine_config()
    groups = builder.get_kv_cache_groups(options, dict(HYBRID))
    block_bytes = builder._get_pool_bytes_per_block(options, groups)

    config = builder.get_kv_cache_config_from_groups(options, groups, 50)

    assert config.num_blocks == 50
    assert {tensor.size for tensor in config.kv_cache_tensors} == {50 * block_bytes}
    assert config == get_kv_cache_config_from_groups(options, groups, 50 * block_bytes + 1)


def test_blocks_asked_for_by_an_option_are_already_counted_in(builder):
    options = engine_config(num_gpu_blocks_override=100)
    groups = builder.get_kv_cache_groups(options, dict(HYBRID))

    assert builder.get_kv_cache_config_from_groups(options, groups, 40).num_blocks == 40


def test_less_than_one_large_page_per_table_is_refused_with_the_numbers(builder):
    options = engine_config()
    groups = builder.get_kv_cache_groups(options, dict(HYBRID))

    with pytest.raises(ValueError, match=f"{1 + len(groups)} large pages"):
        builder.get_kv_cache_config_from_groups(options, groups, len(groups))


def test_graphs_are_measured_in_an_arena_of_few_large_pages(builder):
    from jenga.vllm_plugin.arena.config_builder import thrown_away

    options = engine_config()
    groups = builder.get_kv_cache_groups(options, dict(HYBRID))

    with thrown_away():
        measured = builder.get_kv_cache_config_from_groups(options, groups, 512)

    assert measured.num_blocks == 1 + len(groups)
    assert builder.get_kv_cache_config_from_groups(options, groups, 512).num_blocks == 512


def test_a_model_without_a_cache_has_an_arena_all_the_same(builder):
    config = builder.get_kv_cache_config_from_groups(engine_config(), [], 1)

    assert (config.num_blocks, config.kv_cache_groups) == (1, [])


def test_every_method_that_vllm_asks_for_is_there_with_its_arguments(builder):
    interface = pytest.importorskip("vllm.v1.core.kv_cache_config_builder").KVCacheConfigBuilder

    for name, function in inspect.getmembers(interface, inspect.isfunction):
        ours = inspect.signature(getattr(type(builder), name))
        assert list(ours.parameters) == list(inspect.signature(function).parameters), name
