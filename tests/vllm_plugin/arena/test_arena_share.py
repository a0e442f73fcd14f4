"""The share of an engine in a shared arena: what is refused, and where its layers' views lie."""

from types import SimpleNamespace

import pytest
import torch

from jenga.broker.folder import ArenaFolder
from jenga.vllm_plugin.arena import joined
from jenga.vllm_plugin.settings.environment import read_settings
from jenga.vllm_plugin.settings.shared_arena import Membership, arena_share, share_arena

pytestmark = pytest.mark.vllm

LARGE_PAGE_BYTES, NUM_PAGES = 4096, 5


@pytest.fixture
def folder(tmp_path):
    folder = ArenaFolder(tmp_path / "arena")
    folder.create(large_page_bytes=LARGE_PAGE_BYTES, num_pages=NUM_PAGES)
    return folder


def config(**changes):
    """The fields of vLLM's configuration that are read here."""
    return SimpleNamespace(
        **{
            "parallel_config": SimpleNamespace(world_size=1, data_parallel_size=1),
            "model_config": None,
            "cache_config": SimpleNamespace(num_gpu_blocks_override=None),
            "additional_config": {},
            "ec_transfer_config": None,
        }
        | changes
    )


def settings(folder, guarantee_bytes, limit_bytes=0):
    return read_settings(
        {
            "JENGA_SHARED_ARENA": str(folder.path),
            "JENGA_SHARED_ARENA_GUARANTEE": str(guarantee_bytes),
            "JENGA_SHARED_ARENA_LIMIT": str(limit_bytes),
        }
    )


def test_an_engine_without_a_shared_arena_has_no_share():
    own = config()
    share_arena(own, read_settings({}))
    assert arena_share(own) is None
    assert own.cache_config.num_gpu_blocks_override is None


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({"parallel_config": SimpleNamespace(world_size=2, data_parallel_size=1)}, "2 ranks"),
        (
            {"cache_config": SimpleNamespace(num_gpu_blocks_override=9)},
            "--num-gpu-blocks-override",
        ),
        ({"additional_config": {"jenga_host_bytes": 1}}, "--kv-offloading-size"),
        ({"model_config": SimpleNamespace(enable_sleep_mode=True)}, "--enable-sleep-mode"),
    ],
    ids=["ranks", "blocks", "host_memory", "sleep"],
)
def test_what_a_shared_arena_does_not_serve_is_refused_by_name(folder, changes, met):
    with pytest.raises(ValueError, match=f"JENGA_SHARED_ARENA.*got {met}.*CPU only"):
        share_arena(config(**changes), settings(folder, 4096))


def test_a_gpu_is_refused_by_name(folder, monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "device_name", "cuda")
    with pytest.raises(ValueError, match=r"got cuda .*runs on the CPU only so far"):
        share_arena(config(), settings(folder, 4096))


@pytest.mark.parametrize(
    ("guarantee_bytes", "limit_bytes", "complaint"),
    [
        (5 * 4096, 0, "takes 5 large pages of 4096 bytes, but this engine may have 4"),
        (2 * 4096, 4096, "takes 2 large pages of 4096 bytes, but this engine may have 1"),
        (4096, 0, "no broker listens"),
    ],
    ids=["arena", "limit", "broker"],
)
def test_a_share_that_cannot_be_had_is_refused_and_changes_nothing(
    folder, guarantee_bytes, limit_bytes, complaint
):
    asked = config()
    with pytest.raises(ValueError, match=complaint):
        share_arena(asked, settings(folder, guarantee_bytes, limit_bytes))
    assert arena_share(asked) is None
    assert asked.cache_config.num_gpu_blocks_override is None


def test_a_share_is_in_whole_large_pages_and_comes_with_the_configuration(folder, monkeypatch):
    from jenga.vllm_plugin.settings import shared_arena

    checked = []
    monkeypatch.setattr(shared_arena, "check_join", lambda *_, **shares: checked.append(shares))
    asked = config()
    share_arena(asked, settings(folder, 4097, 3 * 4096 + 1))

    share = arena_share(asked)
    assert (share.guarantee_pages, share.limit_pages, share.num_pages) == (2, 3, 5)
    assert asked.cache_config.num_gpu_blocks_override == 5
    assert [each["guarantee_pages"] for each in checked] == [2]
    # A second look at the same configuration takes the override for ours.
    share_arena(asked, settings(folder, 4097, 3 * 4096 + 1))
    assert len(checked) == 1


def test_views_of_a_shared_arena_lie_where_those_of_a_buffer_do(folder, monkeypatch):
    monkeypatch.setattr(joined, "attach", lambda _, name: name)
    buffer = torch.zeros(NUM_PAGES * LARGE_PAGE_BYTES, dtype=torch.int8)
    views = {
        "rows": buffer.view(torch.float32).as_strided((5, 16), (1024, 1), 32),
        "bytes": buffer.as_strided((4, 8), (4096, 2), 1),
    }
    membership = Membership(folder=str(folder.path), name="engine", steps_in_flight=1)

    shared = joined.views_of_shared_arena(membership, views)
    for name, view in shared.items():
        number = 3 if name == "rows" else 5
        view[2] = views[name][2] = number

    assert folder.arena.read_bytes() == buffer.numpy().tobytes()
    assert [view.stride() for view in shared.values()] == [(1024, 1), (4096, 2)]
    # Nothing is cleared when another engine maps it.
    again = joined.views_of_shared_arena(membership, views)
    assert again["rows"][2].tolist() == [3] * 16
