"""The paper's worked examples, by section and figure (Jenga paper; 84 and 1344: test_geometry)."""

import pytest

from docs.examples.paper_window import PaperWindowPolicy
from jenga.arena.allocator import Allocator
from jenga.geometry import exact_lcm
from jenga.manager import Manager
from jenga.policies import Grain, Image, RequestFacts
from jenga.policies.full_attention import FullAttentionPolicy
from jenga.policies.image_embedding import ImageEmbeddingPolicy
from jenga.policies.sliding_window import SlidingWindowPolicy
from jenga.spec import CrossAttention, FullAttention, Layer, ModelSpec, SlidingWindow
from tests.machines.geometries import full, geometry, paper_window, sliding

WINDOWS = [SlidingWindowPolicy, PaperWindowPolicy]
"""The window of the package, and the one that docs/extending.md adds from outside."""

ONE_TOKEN = Grain(page_slots=1, hash_tokens=1)


def layers(count, slot_bytes):
    return tuple(Layer(name=str(index), slot_bytes=slot_bytes) for index in range(count))


def hashes(text):
    return [text[: end + 1].encode() for end in range(len(text))]


def run(manager, name, text, num_tokens):
    """Compute a request's first tokens in one step, from what is cached."""
    manager.new_step()
    hit = manager.lookup(hashes(text), max_tokens=num_tokens - 1)
    manager.allocate(name, num_tokens=num_tokens, hit=hit)
    manager.commit(name, hashes(text), num_tokens)
    return hit


def test_section_4_1_large_pages_of_llama_vision_and_what_one_request_takes():
    model = ModelSpec(
        name="vision",
        layer_types=(
            CrossAttention(name="image", layers=layers(2, 128)),
            FullAttention(name="text", layers=layers(3, 128)),
        ),
    )
    manager = Manager(exact_lcm(model, tokens_per_page=1), num_large_pages=8)

    # <IMG><IMG><IMG><IMG>Hello World: four image tokens, two text tokens.
    facts = RequestFacts(
        prompt_tokens=2, images=(Image(start_token=0, num_tokens=4, content=b"img"),)
    )
    image_pages, text_pages = manager.allocate("r", num_tokens=2, facts=facts)

    assert manager.geometry.large_page_bytes == 768
    assert (len(image_pages), len(text_pages)) == (4, 2)
    assert len({page // 3 for page in image_pages}) == 2
    assert len({page // 2 for page in text_pages}) == 1
    manager.check()


@pytest.mark.parametrize(("request_aware", "empty_after"), [(True, 2), (False, 0)])
def test_section_4_3_two_requests_interleave_and_one_ends(request_aware, empty_after):
    # Figure "internal fragmentation": A and B take eight small pages each, one by one; four per
    # large page. Known lengths give A large pages of its own.
    allocator = Allocator([4], 5)
    pages = {1: [], 2: []}
    for taken in range(8):
        for owner in (1, 2):
            expected = 8 - taken if request_aware else 1
            pages[owner] += allocator.take([1], [expected], owner=owner)[0]

    allocator.tables[0].release(pages[1])

    assert allocator.large_pages.num_empty == empty_after
    allocator.check()


@pytest.mark.parametrize(
    ("waste", "ideal", "homogeneous"),
    [
        # Llama 3.2 11B Vision on MMMU-pro: 43 text and 6193 image tokens, 32 + 8 layers.
        (0.796, 43 * 32 + 6193 * 8, (43 + 6193) * 40),
        # Gemma-2: half of the layers see 4096 tokens; at the model's 8192.
        (0.25, 8192 + 4096, 2 * 8192),
        # Ministral: 27 of 36 layers see 32768 tokens; at the model's 131072.
        (0.5625, 9 * 131072 + 27 * 32768, 36 * 131072),
    ],
)
def test_section_3_2_waste_of_paged_attention(waste, ideal, homogeneous):
    assert 1 - ideal / homogeneous == pytest.approx(waste, abs=5e-4)


@pytest.mark.parametrize(
    ("name", "facts", "num_tokens", "layer_types", "waste"),
    [
        (
            "llama-vision",
            RequestFacts(prompt_tokens=43, images=(Image(start_token=0, num_tokens=6193),)),
            43,
            (
                FullAttention(name="text", layers=layers(32, 1)),
                CrossAttention(name="image", layers=layers(8, 1)),
            ),
            0.796,
        ),
        (
            "gemma-2",
            RequestFacts(prompt_tokens=8192),
            8192,
            (
                FullAttention(name="full", layers=layers(21, 1)),
                SlidingWindow(name="sliding", layers=layers(21, 1), window_tokens=4096),
            ),
            0.25,
        ),
        (
            "ministral",
            RequestFacts(prompt_tokens=131072),
            131072,
            (
                FullAttention(name="full", layers=layers(9, 1)),
                SlidingWindow(name="sliding", layers=layers(27, 1), window_tokens=32768),
            ),
            0.5625,
        ),
    ],
)
def test_section_3_2_is_what_the_manager_needs_less(name, facts, num_tokens, layer_types, waste):
    cut = exact_lcm(
        ModelSpec(name=name, layer_types=layer_types), tokens_per_page=16, alignment_bytes=1
    )
    manager = Manager(cut, num_large_pages=80_000)

    # In two steps: the last token reads what its window holds.
    manager.allocate("r", num_tokens=num_tokens - 1, facts=facts)
    manager.allocate("r", num_tokens=num_tokens, num_processed_tokens=num_tokens - 1)

    num_layers = sum(len(layer_type.layers) for layer_type in layer_types)
    all_tokens = num_tokens + sum(image.num_tokens for image in facts.images)
    used_bytes = manager.memory().used_bytes
    assert 1 - used_bytes / (all_tokens * num_layers) == pytest.approx(waste, abs=5e-4)
    manager.check()


@pytest.mark.parametrize("policy", WINDOWS)
def test_figure_9_last_access_of_two_requests(policy):
    # A window of two tokens: the query and the one before it.
    window = policy(2)
    everything = FullAttentionPolicy()
    facts = RequestFacts(prompt_tokens=4)

    # Step 1 computes ABCD, step 2 computes E and reads DE.
    assert everything.update_last_access(facts, 0, 4) == range(4)
    assert window.update_last_access(facts, 0, 4) == range(4)
    assert everything.update_last_access(facts, 4, 5) == range(5)
    assert window.update_last_access(facts, 4, 5) == range(3, 5)


@pytest.mark.parametrize("window", [sliding, paper_window])
def test_figure_9_what_only_request_1_has_goes_first_in_both_layer_types(window):
    cut = geometry("figure 9", full(tokens=1), window(tokens=1, window=2))
    manager = Manager(cut, num_large_pages=20, prefix_caching=True, hash_tokens=1)
    run(manager, "1", "ABCDE", 4)
    manager.new_step()
    manager.allocate("1", num_tokens=5, num_processed_tokens=4)
    manager.commit("1", hashes("ABCDE"), 5)
    manager.free("1")
    hit = run(manager, "2", "ABCDG", 5)
    manager.free("2")
    assert hit.num_tokens == 4

    # Tokens of the sliding layer out of the window, of step 1, go before E, of step 2.
    lost = []
    for filler in range(1, 12):
        manager.new_step()
        manager.allocate("filler", num_tokens=filler, num_processed_tokens=filler - 1)
        lost.append(
            (
                manager.lookup(hashes("ABCDE"), max_tokens=5).num_tokens,
                manager.lookup(hashes("ABCDG"), max_tokens=5).num_tokens,
            )
        )

    assert (5, 5) in lost
    first_loss = next(pair for pair in lost if pair != (5, 5))
    assert first_loss == (4, 5)
    manager.check()


@pytest.mark.parametrize("policy", WINDOWS)
def test_section_5_2_prefix_lengths_of_abcdg_are_equal_in_both_layer_types(policy):
    facts = RequestFacts(prompt_tokens=5)

    lengths = [
        list(each.set_prefix_length(facts, range(5), ONE_TOKEN))
        for each in (policy(2), FullAttentionPolicy())
    ]

    assert lengths == [[1, 2, 3, 4, 5]] * 2


@pytest.mark.parametrize("policy", WINDOWS)
def test_figure_10_possible_prefixes_of_abcdefghij(policy):
    # The paper's window of 2 counts the tokens before the query, ours counts the query too.
    window = policy(3)
    everything = FullAttentionPolicy()
    facts = RequestFacts(prompt_tokens=10)
    cached_full = [1] * 9 + [None]
    cached_window = [1 if token in "CDHIJ" else None for token in "ABCDEFGHIJ"]

    def possible(policy, is_hit):
        prefixes, at_most = [], 10
        while at_most >= 0:
            prefix = policy.get_possible_prefix(facts, is_hit, ONE_TOKEN, at_most)
            prefixes.append("ABCDEFGHIJ"[:prefix])
            at_most = prefix - 1
        return [prefix for prefix in reversed(prefixes) if prefix]

    assert possible(everything, cached_full) == ["ABCDEFGHI"[:end] for end in range(1, 10)]
    assert possible(window, cached_window) == ["ABCD", "ABCDEFGHI", "ABCDEFGHIJ"]


def test_section_6_2_embeddings_are_freed_as_chunks_consume_them():
    # [t0 i0 i1 i2 i3 t1]: encoder, chunk of three, chunk of three, decode.
    policy = ImageEmbeddingPolicy(1)
    facts = RequestFacts(
        prompt_tokens=6, images=(Image(start_token=1, num_tokens=4, content=b"i"),)
    )

    assert policy.update_last_access(facts, 0, 3) == range(4)
    assert policy.update_last_access(facts, 3, 6) == range(2, 4)
    assert len(policy.update_last_access(facts, 6, 7)) == 0
