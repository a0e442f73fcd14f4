"""Image embeddings in slots of keys and values: the book, the workers' slots, and the layout.

Step by step, every row is checked, and every slot that a step computes is overwritten.
"""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jenga.errors import InvariantError
from jenga.manager import Manager
from jenga.spec import FullAttention
from tests.machines.geometries import full, geometry, sliding
from tests.vllm_plugin.arena.test_layout import MIB, engine_config
from tests.vllm_plugin.images.test_encoder_cache import (
    WIDTH,
    Engine,
    feature,
    random_request,
    read_overlapping,
    request,
    rows_of,
    schedule_running,
)

pytestmark = pytest.mark.vllm

HOSTED = geometry(
    "hosted",
    sliding(slot_bytes=24, per_large=4),
    full(slot_bytes=12, tokens=8, per_large=4, holds_images=True),
)
TABLE, PAGE_TOKENS = 1, 8


class HostedEngine(Engine):
    """A scheduler and a worker whose layers overwrite the slots of the tokens of each step."""

    def __init__(self, num_large_pages=24, num_host_large_pages=0):
        from jenga.vllm_plugin.scheduler.encoder_cache import ArenaEncoderCache
        from jenga.vllm_plugin.scheduler.hosted_images import HostedBook
        from jenga.vllm_plugin.worker.hosted_rows import HostedEmbeddings, TokenSlots

        self.manager = Manager(
            HOSTED,
            num_large_pages=num_large_pages,
            prefix_caching=True,
            hash_tokens=8,
            num_host_large_pages=num_host_large_pages,
        )
        self.book = HostedBook(self.manager, TABLE)
        self.cache = ArenaEncoderCache(cache_size=1)
        self.cache.open(self.manager, self.book)
        num_pages = 4 * num_large_pages
        # A row of 3 elements takes a slot of the first layer, of 2 elements, and half of the next.
        shape = (num_pages, 1, PAGE_TOKENS, 2)
        self.layers = [torch.full(shape, float("nan")) for _ in range(3)]
        self.embeddings = HostedEmbeddings(
            TokenSlots(self.layers, width=WIDTH, dtype=torch.float32)
        )
        self.running, self.encoded = [], []

    def execute(self):
        super().execute()
        for each, start, end in self.batch.values():
            if not self.manager.is_running(each.request_id):
                continue
            pages = self.manager.page_table(each.request_id, TABLE)
            for token in range(start, end):
                for layer in self.layers:
                    layer[pages[token // PAGE_TOKENS], :, token % PAGE_TOKENS] = -token


# Step by step


@pytest.mark.parametrize("chunk", [1, 3, 5, 30])
def test_an_image_is_encoded_once_for_all_chunks_whose_layers_overwrite_it(chunk):
    engine = HostedEngine()
    engine.start_step()
    assert engine.admit(request("a", 30, feature("cat", 2, 19, breaks=(0, 3, 4))), chunk)
    engine.execute()
    while engine.running[0].computed < 30:
        engine.step(chunk)

    assert engine.encoded == ["cat"]


def test_a_request_takes_the_slots_of_a_whole_image_and_no_more_in_other_types():
    engine = HostedEngine()
    engine.start_step()
    assert engine.admit(request("a", 60, feature("cat", 5, 40)), 6)

    windows, tokens = engine.manager.page_tables("a")
    assert (len(windows), len(tokens)) == (-(-6 // 4), -(-45 // 8))


def test_requests_with_one_image_encode_it_each_in_a_step_of_its_own():
    engine = HostedEngine()
    engine.start_step()
    for name, offset in (("a", 6), ("b", 8)):
        assert engine.admit(request(name, 30, feature("cat", offset, 11)), 5)
    engine.execute()
    engine.start_step()
    first, second = engine.running
    assert engine.schedule(first, 6)
    assert engine.schedule(second, 10)
    assert engine.batch["b"][1:] == (5, 8)  # up to the image
    engine.execute()
    engine.step(4, 10)  # both read it, each from a row of its own on
    engine.step(15, 12)

    assert engine.encoded == ["cat", "cat"]


def test_an_image_twice_in_a_step_is_encoded_once_for_both_places():
    engine = HostedEngine()
    engine.start_step()
    each = request("a", 40, feature("cat", 2, 6), feature("cat", 9, 6), feature("cat", 20, 6))
    assert engine.admit(each, 10)
    engine.execute()
    engine.step(5)
    assert engine.encoded == ["cat"]
    engine.step(25)

    assert engine.encoded == ["cat", "cat"]


def test_an_input_that_a_step_ends_before_is_encoded_again():
    engine = HostedEngine()
    read_overlapping(engine)

    assert engine.encoded == ["sound", "sight", "sight", "sound"]


def test_a_preempted_request_encodes_its_image_again():
    engine = HostedEngine()
    each = request("a", 30, feature("cat", 2, 11))
    engine.start_step()
    assert engine.admit(each, 8)
    engine.execute()
    engine.start_step()
    engine.drop(each)
    each.computed = 0
    assert engine.admit(each, 8)
    engine.execute()
    engine.step(22)

    assert engine.encoded == ["cat", "cat"]


@pytest.mark.parametrize("num_large_pages", [7, 16, 40])
@pytest.mark.parametrize("seed", range(8))
def test_every_row_is_read_as_the_encoder_made_it_whatever_happens(seed, num_large_pages):
    source, engine = random.Random(seed), HostedEngine(num_large_pages)
    waiting, finished = [], 0
    for number in range(150):
        if source.random() < 0.5:
            waiting.append(random_request(source, f"r{number}"))
        engine.start_step()
        schedule_running(engine, source, waiting)
        while waiting and source.random() < 0.8:
            if not engine.admit(waiting[0], source.choice([2, 9])):
                break
            waiting.pop(0)
        if not engine.batch and source.random() < 0.3:
            engine.cache.reset()
        engine.execute()
        for each in list(engine.running):
            if each.computed == each.num_tokens or source.random() < 0.03:
                finished += each.computed == each.num_tokens
                engine.drop(each)
    assert finished > 10
    for each in list(engine.running):
        engine.drop(each)
    engine.manager.check()


def test_a_worker_refuses_rows_that_nobody_awaits_and_rows_that_are_overwritten():
    from jenga.vllm_plugin.orders.step_images import HostedStepImages, RowSlots

    engine = HostedEngine()
    engine.start_step()
    assert engine.admit(request("a", 30, feature("cat", 2, 6)), 10)
    engine.embeddings.begin_step(engine.cache.get_manager_metadata())

    for name, shape in (("dog", (6, WIDTH)), ("cat", (4, WIDTH)), ("cat", (6, WIDTH + 1))):
        with pytest.raises(InvariantError, match=f"rows of image '{name}'"):
            engine.embeddings[name] = torch.zeros(shape)
    engine.embeddings.update([("cat", rows_of("cat", 30))])
    assert torch.equal(engine.embeddings.get("cat")[1:6], rows_of("cat", 6)[1:])
    place = RowSlots(first_row=4, slots=np.arange(12, 20))
    engine.embeddings.begin_step(HostedStepImages(reads={"cat": place}))
    with pytest.raises(InvariantError, match=r"rows 3 to 5 of an image .* 4 are replaced"):
        engine.embeddings.get("cat")[3:5]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])  # heads or tokens come first
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_takes_the_bytes_of_its_token_alone_in_as_many_layers_as_it_needs(order, dtype):
    from jenga.vllm_plugin.worker.hosted_rows import TokenSlots

    shape = [5, 2, PAGE_TOKENS, 16]  # pages, heads, tokens, elements of a key and a value
    caches = [
        torch.zeros([shape[place] for place in order], dtype=torch.bfloat16).permute(order)
        for _ in range(4)
    ]
    width = 80 // (dtype.itemsize // 2)  # of 160 bytes, where a slot of a layer has 64
    rows = torch.randn(2, width).to(dtype)
    slots = np.array([3 * PAGE_TOKENS + 7, 2 * PAGE_TOKENS])

    memory = TokenSlots(caches, width=width, dtype=dtype)
    memory.write(slots, rows)

    assert torch.equal(memory.read(slots), rows)
    written = [
        {(page, token) for page, _, token, _ in cache.nonzero().tolist()} for cache in caches
    ]
    assert written == [{(3, 7), (2, 0)}] * 3 + [set()]
    with pytest.raises(
        InvariantError, match="a row of 1028 bytes is larger than a slot of 4 layers"
    ):
        TokenSlots(caches, width=1028 // dtype.itemsize, dtype=dtype)


# The layout


def groups_with(rows_width, *, window=None):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    from jenga.vllm_plugin.arena.layout import get_kv_cache_groups
    from jenga.vllm_plugin.arena.ranks import planned_for
    from jenga.vllm_plugin.specs.image_rows import IMAGE_LAYER

    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    attention = FullAttentionSpec(**shape)
    if window is not None:
        attention = SlidingWindowSpec(**shape, sliding_window=window)
    layers = {"attention": attention}
    rows = MLAAttentionSpec(
        block_size=55, num_kv_heads=1, head_size=rows_width, dtype=torch.float32
    )
    options = engine_config(enable_prefix_caching=True)
    options.ec_manager_config = SimpleNamespace(encoder_cache_manager_cls=None)
    with planned_for([layers | {IMAGE_LAYER: rows}]):
        groups = get_kv_cache_groups(options, layers)
    return options, groups


@pytest.mark.parametrize("window", [None, 2048])  # of which no request has more tokens
def test_images_have_no_page_table_where_they_live_in_slots_of_tokens(monkeypatch, window):
    from jenga.vllm_plugin.arena.layout import get_kv_cache_config_from_groups, host_table_index
    from jenga.vllm_plugin.specs.image_rows import ENCODER_CACHE_PATH

    monkeypatch.setenv("JENGA_EMBEDDINGS_IN_KV_PAGES", "1")
    options, groups = groups_with(256, window=window)
    config = get_kv_cache_config_from_groups(options, groups, 8 * MIB)

    (table,) = config.geometry.page_tables
    assert isinstance(table.layer_type, FullAttention)
    assert table.layer_type.holds_images
    assert host_table_index(config.geometry) == 0
    assert groups[0].image_row.slot_bytes == 4 * 256
    assert options.ec_manager_config.encoder_cache_manager_cls == ENCODER_CACHE_PATH


def test_a_slot_that_is_smaller_than_an_embedding_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("JENGA_EMBEDDINGS_IN_KV_PAGES", "1")

    with pytest.raises(ValueError, match=r"JENGA_EMBEDDINGS_IN_KV_PAGES.*1028 bytes .*it has 1024"):
        groups_with(257)


def test_a_window_that_requests_outgrow_holds_no_embeddings(monkeypatch):
    monkeypatch.setenv("JENGA_EMBEDDINGS_IN_KV_PAGES", "1")

    with pytest.raises(ValueError, match=r"JENGA_EMBEDDINGS_IN_KV_PAGES.*a full-attention layer"):
        groups_with(256, window=2047)
