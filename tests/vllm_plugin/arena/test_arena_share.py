"""The share of an engine in a shared arena: what is refused, and where its layers' views lie."""

import os
import select
import signal
from types import SimpleNamespace

import pytest
import torch

from jenga.broker.folder import ArenaFolder
from jenga.broker.memory import MemoryLostError
from jenga.errors import InvariantError
from jenga.vllm_plugin.arena import joined
from jenga.vllm_plugin.arena.layout import JengaKVCacheConfig
from jenga.vllm_plugin.settings.environment import read_settings
from jenga.vllm_plugin.settings.shared_arena import Membership, arena_share, share_arena
from tests.broker import fake_cuda

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
            "kernel_config": SimpleNamespace(enable_jit_warmup=True),
            "additional_config": {},
            "ec_transfer_config": None,
            "speculative_config": None,
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
    assert own.kernel_config.enable_jit_warmup


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
        (
            {"speculative_config": SimpleNamespace(enable_adaptive_verification=True)},
            "enable_adaptive_verification",
        ),
    ],
    ids=["ranks", "blocks", "host_memory", "sleep", "timed_drafts"],
)
def test_what_a_shared_arena_does_not_serve_is_refused_by_name(folder, changes, met):
    with pytest.raises(ValueError, match=f"JENGA_SHARED_ARENA.*got {met}.*one rank"):
        share_arena(config(**changes), settings(folder, 4096))


@pytest.fixture
def gpu_folder(tmp_path, monkeypatch):
    """An arena on a GPU. Its driver has none."""
    fake_cuda.install(tmp_path, monkeypatch)
    folder = ArenaFolder(tmp_path / "arena_on_gpu")
    folder.create(large_page_bytes=LARGE_PAGE_BYTES, num_pages=NUM_PAGES, device="cuda:0")
    memory = folder.memory
    yield folder
    memory.remove()


def on(monkeypatch, device):
    """Let engines of this process run on a device."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "device_type", device)


def test_memory_on_another_device_than_the_engine_is_refused_with_both(
    folder, gpu_folder, monkeypatch
):
    on(monkeypatch, "cuda")
    with pytest.raises(
        ValueError, match=r"is on cpu, and this engine runs on cuda; .*--device cuda"
    ):
        share_arena(config(), settings(folder, 4096))
    with pytest.raises(ValueError, match="no broker listens"):
        share_arena(config(), settings(gpu_folder, 4096))
    on(monkeypatch, "cpu")
    with pytest.raises(ValueError, match="is on cuda:0, and this engine runs on cpu"):
        share_arena(config(), settings(gpu_folder, 4096))


def test_an_engine_does_not_start_with_memory_that_is_lost(gpu_folder, monkeypatch):
    on(monkeypatch, "cuda")
    kill_holder(gpu_folder)
    with pytest.raises(ValueError, match=r"JENGA_SHARED_ARENA=.*is lost: process \d+, which held"):
        share_arena(config(), settings(gpu_folder, 4096))


def kill_holder(folder):
    holder = folder.memory.holder
    descriptor = os.pidfd_open(holder.pid)
    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    select.select([descriptor], [], [])
    os.close(descriptor)


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
    assert not asked.kernel_config.enable_jit_warmup
    assert [each["guarantee_pages"] for each in checked] == [2]
    # A second look at the same configuration takes the override for ours.
    share_arena(asked, settings(folder, 4097, 3 * 4096 + 1))
    assert len(checked) == 1


def membership_in(folder):
    return Membership(folder=str(folder.path), name="engine", steps_in_flight=1)


def views_of(buffer):
    return {
        "rows": buffer.view(torch.float32).as_strided((5, 16), (1024, 1), 32),
        "bytes": buffer.as_strided((4, 8), (4096, 2), 1),
    }


@pytest.fixture
def over_gpu(monkeypatch):
    """Let torch make tensors over memory of the driver that has no GPU."""
    monkeypatch.setattr(joined, "attach", lambda _, name: name)

    def as_tensor(array, *, device):
        assert device == torch.device("cuda:0")
        interface = array.__cuda_array_interface__
        assert interface["shape"] == (array.num_bytes,)
        assert (interface["typestr"], interface["data"]) == ("|i1", (array.address, False))
        return fake_cuda.tensor_over(array)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)


def test_views_of_a_shared_arena_lie_where_those_of_a_buffer_do(folder, monkeypatch):
    monkeypatch.setattr(joined, "attach", lambda _, name: name)
    written = check_views(folder, torch.device("cpu"))
    assert folder.arena.read_bytes() == written


@pytest.mark.usefixtures("over_gpu")
def test_views_of_an_arena_on_a_gpu_lie_there_too(gpu_folder):
    check_views(gpu_folder, torch.device("cuda:0"))


def check_views(folder, device):
    buffer = torch.zeros(NUM_PAGES * LARGE_PAGE_BYTES, dtype=torch.int8)
    views = views_of(buffer)
    membership = membership_in(folder)

    shared = joined.views_of_shared_arena(membership, views_of(buffer.to("meta")), device)
    for name, view in shared.items():
        number = 3 if name == "rows" else 5
        view[2] = views[name][2] = number

    written = buffer.numpy().tobytes()
    assert bytes(shared["rows"].untyped_storage().tolist()) == written
    assert [view.stride() for view in shared.values()] == [(1024, 1), (4096, 2)]
    # Nothing is cleared when another engine maps it.
    again = joined.views_of_shared_arena(membership, views, device)
    assert again["rows"][2].tolist() == [3] * 16
    return written


@pytest.mark.usefixtures("over_gpu")
def test_views_reach_beyond_what_32_bits_can_count(tmp_path, monkeypatch):
    fake_cuda.install(tmp_path, monkeypatch)
    folder = ArenaFolder(tmp_path / "long")
    num_pages, large_page_bytes = 3, 1 << 30
    folder.create(large_page_bytes=large_page_bytes, num_pages=num_pages, device="cuda:0")
    memory = folder.memory
    try:
        buffer = torch.empty(num_pages * large_page_bytes, dtype=torch.int8, device="meta")
        view = buffer.as_strided((3, 8), (large_page_bytes, 1), 16)
        shared = joined.views_of_shared_arena(
            membership_in(folder), {"last": view}, torch.device("cuda:0")
        )
        shared["last"][2] = 7
        start = 2 * large_page_bytes + 16
        content = fake_cuda.bytes_of(memory.map(0))[start : start + 24]
        assert content == [7] * 8 + [0] * 16
    finally:
        folder.remove()


@pytest.mark.usefixtures("over_gpu")
def test_a_tensor_that_is_a_copy_of_the_arena_is_a_bug(gpu_folder, monkeypatch):
    monkeypatch.setattr(torch, "as_tensor", lambda array, **_: torch.zeros(array.num_bytes))
    with pytest.raises(InvariantError, match="torch copied the arena"):
        joined.views_of_shared_arena(membership_in(gpu_folder), {}, torch.device("cuda:0"))


@pytest.mark.usefixtures("over_gpu")
def test_the_next_step_of_an_engine_fails_once_its_memory_is_lost(gpu_folder):
    membership = membership_in(gpu_folder)
    own = JengaKVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    shared = JengaKVCacheConfig(
        num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[], shared_arena=membership
    )
    joined.views_of_shared_arena(membership, {}, torch.device("cuda:0"))
    joined.check_memory(shared)
    kill_holder(gpu_folder)
    joined.check_memory(own)
    with pytest.raises(MemoryLostError, match="end the engines that share it"):
        joined.check_memory(shared)
