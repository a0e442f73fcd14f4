"""Images that layers of cross attention read: which rows read which, what is found and encoded."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from jenga.policies.base import Image, RequestFacts
from jenga.spec import CrossAttention, FullAttention
from jenga.tables.request import MISSING, PrefixHit

pytestmark = pytest.mark.vllm


def image_feature(identifier, start_token, num_tokens, **data):
    """Describe an image as vLLM does: one token of the prompt, without an embedding of its own."""
    import torch
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    place = PlaceholderRange(offset=start_token, length=1, is_embed=torch.zeros(1).bool())
    data = {"image_tokens": SimpleNamespace(data=torch.tensor(num_tokens))} | data
    return MultiModalFeatureSpec(
        data=data, modality="image", identifier=identifier, mm_position=place
    )


def request(*features, name="a", num_tokens=200, salt=None):
    return SimpleNamespace(
        request_id=name, mm_features=list(features), num_tokens=num_tokens, cache_salt=salt
    )


@pytest.fixture
def hits():
    """Hits of a model with two page tables of cross attention, of 16 and of 32 slots a page."""
    from jenga.vllm_plugin.scheduler.image_hits import ImageHits

    kinds = [(FullAttention, 16), (CrossAttention, 16), (CrossAttention, 32)]
    tables = [
        SimpleNamespace(layer_type=object.__new__(kind), tokens_per_page=page_tokens)
        for kind, page_tokens in kinds
    ]
    return ImageHits(SimpleNamespace(page_tables=tables))


def hit_of(images, *pages, host_pages=({}, {}, {})):
    return PrefixHit(
        num_tokens=16,
        asked_tokens=16,
        branch_tokens=16,
        limit=-1,
        pages=pages,
        host_pages=host_pages,
        has_missing=tuple(MISSING in each for each in pages),
        facts=RequestFacts(prompt_tokens=200, images=images),
        prefix_hashes=(),
        version=(0, 0, 0),
    )


def test_images_have_the_tokens_of_their_tiles_and_names_of_their_content(hits):
    first, second = image_feature("one", 5, 17), image_feature("two", 9, 34)

    images = hits.images(request(first, second))

    assert [(each.start_token, each.num_tokens) for each in images] == [(5, 17), (9, 34)]
    (moved,) = hits.images(request(image_feature("one", 100, 17)))
    assert moved.content == images[0].content != images[1].content
    (salted,) = hits.images(request(first, salt="mine"))
    assert salted.content != images[0].content


def test_an_image_without_its_number_of_tokens_is_refused(hits):
    with pytest.raises(ValueError, match=r"'one' must come with its field 'image_tokens'"):
        hits.images(request(replace(image_feature("one", 5, 17), data=None)))


def test_an_image_is_found_if_all_layers_have_all_of_it(hits):
    images = (Image(start_token=5, num_tokens=17), Image(start_token=9, num_tokens=34))
    asked = request(image_feature("one", 5, 17), image_feature("two", 9, 34))

    whole = hit_of(images, [7], [1, 2, 3, 4, 5], [6, 8, 9])
    assert hits.settle(asked, whole) == whole
    assert hits.found(asked) == {0, 1}
    assert hits.found(request(name="b")) == frozenset()

    partly = hits.settle(asked, hit_of(images, [7], [1, 2, 3, 4, 5], [6]))
    assert hits.found(asked) == {0}
    assert partly.pages == ([7], [1, 2, MISSING, MISSING, MISSING], [6])
    assert partly.has_missing == (False, True, False)

    hits.settle(asked, hit_of(images, [7], [MISSING, MISSING, 3, 4, 5], [MISSING, 8, 9]))
    assert hits.found(asked) == {1}

    loaded = hit_of(
        images,
        [7],
        [1, MISSING, 3, MISSING, 5],
        [MISSING, 8, 9],
        host_pages=({}, {1: 11, 3: 12}, {}),
    )
    settled = hits.settle(asked, loaded)
    assert hits.found(asked) == {1}
    assert settled.pages == ([7], [MISSING, MISSING, 3, MISSING, 5], [MISSING, 8, 9])
    assert settled.host_pages == ({}, {3: 12}, {})


@pytest.mark.parametrize(
    ("found", "computed", "new", "budget", "is_admitted", "expected"),
    [
        pytest.param([], 0, 100, 100, True, ([0, 1], 100, 49), id="both_begin_in_the_step"),
        pytest.param([0], 0, 100, 100, True, ([1], 100, 66), id="one_is_found"),
        pytest.param([], 0, 8, 100, True, ([0], 8, 83), id="the_step_ends_before_the_second"),
        pytest.param([], 6, 50, 100, False, ([1], 50, 66), id="the_first_was_in_an_earlier_step"),
        pytest.param([], 60, 50, 5, True, ([0, 1], 50, 5), id="text_is_hit_and_images_are_not"),
        pytest.param([1], 60, 50, 5, True, ([0], 50, 5), id="text_is_hit_and_one_image_is_not"),
        pytest.param([], 60, 50, 5, False, ([], 50, 5), id="behind_all_images"),
        pytest.param([], 0, 100, 40, True, ([0], 9, 23), id="the_second_is_beyond_the_budget"),
        pytest.param([], 9, 100, 20, False, ([], 0, 20), id="the_step_begins_beyond_the_budget"),
    ],
)
def test_a_step_encodes_images_that_begin_in_it_and_lost_ones_before_it(
    found, computed, new, budget, is_admitted, expected
):
    from jenga.vllm_plugin.scheduler.image_hits import images_to_encode

    asked = request(image_feature("one", 5, 17), image_feature("two", 9, 34))

    chosen = images_to_encode(
        asked, frozenset(found), computed, new, budget, is_admitted=is_admitted
    )

    assert chosen == expected


def test_workers_are_sent_images_whose_text_is_hit():
    from vllm.multimodal.inputs import PlaceholderRange

    from jenga.vllm_plugin.patches.engine import _strip_covered_mm_data

    crossed = image_feature("one", 5, 17)
    embedded = replace(crossed, mm_position=PlaceholderRange(offset=5, length=4))

    def strip(features, _num_computed_tokens, _uses_mrope):
        return [replace(each, data=None) for each in features]

    sent = _strip_covered_mm_data(strip)([crossed, embedded], 100)

    assert sent == [crossed, embedded]


def test_a_request_that_the_arena_can_never_hold_ends_with_an_error():
    from vllm.v1.request import RequestStatus

    from jenga.vllm_plugin.patches.engine import _schedule_images

    fits = {"a": False, "b": True}
    manager = SimpleNamespace(
        can_ever_fit=lambda asked: fits[asked.request_id], found_images=lambda _: frozenset()
    )
    scheduler = SimpleNamespace(kv_cache_manager=manager, encoder_cache_mismatch_reqs=set())
    asked = [request(image_feature("one", 5, 17), name=name) for name in fits]
    for each in asked:
        each.status = RequestStatus.WAITING

    answers = [_schedule_images(scheduler, each, 0, 50, 100) for each in asked]

    assert answers == [([], 0, 100, [], []), ([0], 50, 83, [], [])]
    assert scheduler.encoder_cache_mismatch_reqs == {"a"}


def test_a_running_request_finds_images_that_are_cached_when_it_reaches_them(hits):
    from jenga.vllm_plugin.scheduler.cache_manager import JengaKVCacheManager

    pages, cached = {0: [4, 5], 1: [], 2: []}, {5, 9}
    manager = object.__new__(JengaKVCacheManager)
    manager._encoders = hits
    manager.manager = SimpleNamespace(
        is_running=lambda _: True,
        image_pages=lambda _name, _index, number: pages[number],
        is_image_cached=lambda image: image.start_token in cached,
    )
    asked = request(*(image_feature(str(at), at, 17) for at in (5, 9, 12)))

    # The first one has pages already, and the last one is not cached.
    assert manager.found_images(asked) == {1}


def test_a_session_with_images_starts_again_at_its_next_turn(monkeypatch):
    from jenga.vllm_plugin.scheduler.cache_manager import JengaKVCacheManager

    freed = []
    manager = object.__new__(JengaKVCacheManager)
    manager.attends_to_images, manager._images, manager._has_states = True, None, False
    manager.has_token_budgets = False
    manager.manager = SimpleNamespace(is_running=lambda _: True)
    monkeypatch.setattr(JengaKVCacheManager, "free", lambda _, session: freed.append(session))
    with_image, of_text = request(image_feature("one", 5, 17)), request()

    assert [manager.give_up_spoilt(each) for each in (with_image, of_text)] == [True, False]
    assert freed == [with_image]


# Rows of a step


@pytest.mark.parametrize(
    ("first_position", "num_rows", "expected"),
    [
        pytest.param(0, 20, [(5, ()), (4, (0,)), (1, (1,)), (10, (1, 2))], id="whole"),
        pytest.param(0, 5, [(5, ())], id="before_any_image"),
        pytest.param(7, 2, [(2, (0,))], id="within_the_first_image"),
        pytest.param(9, 1, [(1, (1,))], id="first_token_of_a_group"),
        pytest.param(30, 1, [(1, (1, 2))], id="decoded"),
    ],
)
def test_rows_read_the_last_group_of_consecutive_images_up_to_themselves(
    first_position, num_rows, expected
):
    from jenga.vllm_plugin.layers.attention.image_attention import segments_of, stored_images

    features = [image_feature(str(at), at, 17) for at in (5, 9, 10)]
    images = stored_images(features, 16)

    segments = segments_of(images, row=3, first_position=first_position, num_rows=num_rows)

    assert [each.first_page for each in images] == [0, 2, 4]
    assert {each.row for each in segments} == {3}
    assert [
        (each.num_rows, tuple(images.index(image) for image in each.images)) for each in segments
    ] == expected


def test_rows_agree_with_the_mask_of_the_models_processor():
    from transformers.models.mllama.processing_mllama import (
        convert_sparse_cross_attention_mask_to_dense,
        get_cross_attention_token_mask,
    )

    from jenga.vllm_plugin.layers.attention.image_attention import segments_of, stored_images

    places = [3, 4, 5, 11, 20, 21]
    tokens = [1 if at in places else 0 for at in range(30)]
    mask = convert_sparse_cross_attention_mask_to_dense(
        [get_cross_attention_token_mask(tokens, 1)], [[1] * len(places)], 1, len(tokens)
    )[0, :, :, 0]
    images = stored_images([image_feature(str(at), at, 17) for at in places], 16)

    segments = segments_of(images, row=0, first_position=0, num_rows=len(tokens))

    rows = [
        [int(image in segment.images) for image in images]
        for segment in segments
        for _ in range(segment.num_rows)
    ]
    assert rows == mask.tolist()


def test_page_tables_are_wide_enough_for_the_most_images_and_the_longest_text():
    import torch

    from jenga.vllm_plugin.specs.image_features import ImageAttentionSpec

    spec = ImageAttentionSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.float32,
        most_image_tokens=6404,
        most_images=3,
    )

    assert spec.max_num_blocks_per_req(None, 4096) == 3 * 401
    assert spec.max_num_blocks_per_req(None, 131_072) == 8192
    assert spec.max_memory_usage_bytes(None) == 401 * spec.page_size_bytes


def test_the_mask_of_prompt_tokens_has_a_bit_for_the_token_of_an_image():
    import torch

    from jenga.vllm_plugin.models.mllama_state import MllamaState

    vocab_size, num_requests = 64, 2
    state = MllamaState.__new__(MllamaState)
    state.model_config = SimpleNamespace(hf_config=SimpleNamespace(image_token_index=vocab_size))
    mask = torch.zeros(num_requests, vocab_size // 32, dtype=torch.int32)
    sampler = SimpleNamespace(penalties_state=SimpleNamespace(prompt_bin_mask=mask))

    assert state.custom_sampler(sampler) is None

    widened = sampler.penalties_state.prompt_bin_mask
    assert (widened.shape, widened.dtype) == ((num_requests, 3), torch.int32)
