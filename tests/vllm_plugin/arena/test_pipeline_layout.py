"""What vLLM's planner makes of the layers of several pipeline ranks, without an engine."""

import pickle
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from tests.vllm_plugin.arena.test_layout import HYBRID, MIB, attention, engine_config

pytestmark = pytest.mark.vllm

# The first rank has no layer with states, the second no full layer.
FIRST = {name: HYBRID[name] for name in ("full.0", "wide.0", "sliding.0")}
SECOND = {name: HYBRID[name] for name in HYBRID if name not in FIRST}


@pytest.fixture
def plan_for():
    """Get what vLLM plans for workers with these layers and memory: a configuration each."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
    from vllm.v1.engine import core

    from jenga.vllm_plugin.patches.all_patches import apply_replacements
    from jenga.vllm_plugin.settings.switch import backend_member

    apply_replacements()

    def plan(workers, memory, **changes):
        config = engine_config(**changes)
        config.attention_config = SimpleNamespace(backend=backend_member(), hisparse_config=None)
        config.num_prefill_lookahead_tokens = 0
        config.model_config.original_max_model_len = 2048
        config.parallel_config.tensor_parallel_size = 1
        groups = ()
        with suppress(AttributeError):  # 0.32 groups layers in the next call
            groups = (core.get_global_kv_cache_groups(config, workers),)
        configs = core.get_kv_cache_configs(config, workers, memory, *groups)
        return pickle.loads(pickle.dumps(configs)), generate_scheduler_kv_cache_config(configs)

    return plan


def test_all_ranks_have_the_same_page_tables_of_as_many_pages(plan_for):
    from jenga.vllm_plugin.arena.layout import geometry_of, stage_of

    (first, second), scheduler = plan_for([FIRST, SECOND], [32 * MIB, 12 * MIB])

    assert geometry_of(first) == geometry_of(second) == geometry_of(scheduler)
    stages = [stage_of(config.kv_cache_groups) for config in (first, second)]
    rooms = [32 * MIB // stages[0].large_page_bytes, 12 * MIB // stages[1].large_page_bytes]
    assert first.num_blocks == second.num_blocks == scheduler.num_blocks == min(rooms)
    for config, layers, stage in zip((first, second), (FIRST, SECOND), stages, strict=True):
        assert {tensor.size for tensor in config.kv_cache_tensors} == {
            config.num_blocks * stage.large_page_bytes
        }
        assert sorted(name for group in config.kv_cache_groups for name in group.layer_names) == (
            sorted(layers)
        )
    # A group without layers is there, as long, on every rank.
    sizes = [[g.kv_cache_spec.block_size for g in c.kv_cache_groups] for c in (first, second)]
    assert sizes[0] == sizes[1]


def test_views_of_each_rank_lie_apart_in_its_own_arena(plan_for):
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    from jenga.vllm_plugin.arena.layout import geometry_of, stage_of

    configs, _ = plan_for([FIRST, SECOND], [16 * MIB, 16 * MIB])

    for config in configs:
        stage = stage_of(config.kv_cache_groups)
        views = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.BLHNC)
        for table, share in zip(geometry_of(config).page_tables, stage.shares, strict=True):
            num_pages = config.num_blocks * table.small_pages_per_large_page
            for mark, layer in enumerate(share.layers, start=1):
                view = views[layer.name]
                assert view.shape[0] == num_pages
                arena = torch.empty(0, dtype=torch.int8).set_(view.untyped_storage())
                if mark == 1:
                    arena.zero_()
                (view if view.dtype == torch.int8 else view.view(torch.int8)).fill_(mark)
            if share.layers:
                counts = [int((arena == mark + 1).sum()) for mark in range(len(share.layers))]
                assert sum(counts) == num_pages * share.payload_bytes


def test_the_scheduler_knows_each_group_also_where_the_first_rank_has_no_layer_of_it(plan_for):
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    from jenga.vllm_plugin.arena.layout import first_layers, geometry_of

    for ranks in ([FIRST, SECOND], [SECOND, FIRST]):
        _, scheduler = plan_for(ranks, [32 * MIB, 32 * MIB])
        tables = geometry_of(scheduler).page_tables
        kinds = [get_kv_cache_spec_kind(g.kv_cache_spec).value for g in scheduler.kv_cache_groups]
        expected = {"full": "full_attention", "sliding_32": "sliding_window", "mamba2": "mamba"}

        assert kinds == [expected[table.layer_type.name] for table in tables]
        # Orders about states name a layer of every rank that has any.
        named = dict(zip([table.name for table in tables], first_layers(scheduler), strict=True))
        assert named["full"] in (("full.0",), ("wide.0",))
        assert named["sliding_32"] == tuple(
            name for rank in ranks for name in ("sliding.0", "sliding.1") if name in rank
        )


def test_tensor_parallel_workers_of_one_rank_count_as_one(plan_for):
    configs, _ = plan_for([FIRST, FIRST, SECOND, SECOND], [32 * MIB] * 3 + [20 * MIB])

    alone, _ = plan_for([FIRST, SECOND], [32 * MIB, 20 * MIB])

    assert configs[::2] == alone
    assert configs[0] == configs[1]
    assert configs[2] == configs[3]


def test_ranks_alike_waste_as_little_as_one(plan_for):
    from jenga.vllm_plugin.arena.layout import geometry_of

    layers = {f"{kind}.{i}": attention(**o) for kind, o in KINDS.items() for i in range(2)}
    halves = [{name: layers[name] for name in layers if name[-1] == half} for half in "01"]

    configs, _ = plan_for(halves, [8 * MIB] * 2)

    assert all(table.padding_bytes == 0 for table in geometry_of(configs[0]).page_tables)


KINDS = {"full": {}, "sliding": {"window": 32}}


def test_what_a_rank_wastes_and_has_left_is_logged(plan_for, monkeypatch):
    from jenga.vllm_plugin.arena import layout

    lines = []
    monkeypatch.setattr(layout.logger, "info", lambda text, *values: lines.append(text % values))

    plan_for([FIRST, SECOND], [16 * MIB, 30 * MIB])

    whole, *ranks = lines
    assert "planned geometry of 2 pipeline ranks together" in whole
    assert ["pipeline rank 0" in ranks[0], "pipeline rank 1" in ranks[1]] == [True, True]
    assert "mamba2 0, " in ranks[0]
    assert "full 0, " in ranks[1]
    assert int(ranks[1].split(";")[-1].split()[0]) > 4 * MIB


def test_a_rank_that_stores_nothing_is_refused_by_its_number(plan_for):
    with pytest.raises(ValueError, match="rank 1 of 2 has none"):
        plan_for([HYBRID, {}], [8 * MIB, 8 * MIB])


def test_a_rank_without_attention_layers_takes_the_layout_of_others(monkeypatch):
    from vllm.v1.engine import core

    from jenga.vllm_plugin.patches.all_patches import apply_replacements
    from jenga.vllm_plugin.settings.switch import backend_member

    apply_replacements()
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    config = SimpleNamespace(
        attention_config=SimpleNamespace(backend=backend_member()),
        cache_config=SimpleNamespace(kv_cache_layout=None),
        kv_transfer_config=None,
    )
    any_layout = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"]

    layout = core.resolve_kv_cache_layout(config, [any_layout, ["BLHNC", "BLNHC"]], [])

    assert layout.name == "BLHNC"
