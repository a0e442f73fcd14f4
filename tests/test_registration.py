"""Layer types from outside the package: what is registered, refused and asked of them."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import jenga
from docs.examples.paper_window import PaperWindow, PaperWindowPolicy
from jenga import layer_type, registration
from jenga.errors import InvariantError
from jenga.manager import Manager
from jenga.models.exchange import layer_type_fields, layer_type_from
from jenga.planning.demand import held_pages, needed_tokens
from jenga.policies import RequestFacts
from jenga.sim.arenas.by_name import make_arena
from jenga.sim.batching.need import Need
from jenga.sim.batching.step_time import StepTime, Weights
from jenga.sim.hardware.gpus import Gpu
from jenga.sim.replays.bounds import best_eviction
from jenga.sim.replays.replay import Replay
from jenga.sim.workload.generators import articles
from jenga.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    ImageEmbedding,
    Layer,
    ModelSpec,
    SlidingWindow,
    State,
    TokenBudget,
    combine,
)

EXAMPLE = {"window_tokens": 5}
FACTS = RequestFacts(prompt_tokens=64)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(layer_type, "_layer_types", dict(layer_type._layer_types))
    monkeypatch.setattr(registration, "_cache_specs", dict(registration._cache_specs))


def one_layer(slot_bytes=64):
    return (Layer(name="layer", slot_bytes=slot_bytes),)


BUILT_IN = [
    FullAttention(name="t", layers=one_layer()),
    FullAttention(name="t", layers=one_layer(), tokens_per_slot=4),
    SlidingWindow(name="t", layers=one_layer(), window_tokens=1),
    SlidingWindow(name="t", layers=one_layer(), window_tokens=7),
    ChunkedLocal(name="t", layers=one_layer(), chunk_tokens=6),
    CrossAttention(name="t", layers=one_layer()),
    State(name="t", layers=one_layer()),
    State(name="t", layers=one_layer(), draft_tokens=2),
    TokenBudget(
        name="t",
        layers=one_layer(),
        mean_budget_tokens=12,
        recent_tokens=2,
        steepness=2,
        layer_index=1,
        num_layers=3,
    ),
    TokenBudget(
        name="t",
        layers=one_layer(),
        mean_budget_tokens=12,
        recent_tokens=2,
        steepness=1,
        layer_index=0,
        num_layers=1,
        output_tokens=5,
    ),
    ImageEmbedding(name="t", layers=one_layer()),
]


@pytest.mark.parametrize("built_in", BUILT_IN, ids=lambda each: f"{each.kind}, {each.keeps}")
def test_the_types_of_the_package_pass_the_trial_of_types_from_outside(built_in):
    registration.check_layer_type(built_in)


def test_a_model_of_a_type_that_nobody_registered_is_refused_by_its_name():
    own = PaperWindow(name="own", layers=one_layer(), window_tokens=5)

    with pytest.raises(ValueError, match=r"'PaperWindow' must be registered .*register_layer_type"):
        ModelSpec(name="model", layer_types=(own,))


def test_a_type_that_is_registered_twice_is_refused_by_its_name():
    jenga.register_layer_type(PaperWindow, example=EXAMPLE)

    with pytest.raises(ValueError, match="'PaperWindow' is registered twice"):
        jenga.register_layer_type(PaperWindow, example=EXAMPLE)


def test_a_type_with_the_name_of_one_of_the_package_is_refused():
    taken = type("SlidingWindow", (PaperWindow,), {})
    taken = dataclass(frozen=True, slots=True, kw_only=True)(taken)

    with pytest.raises(ValueError, match="'SlidingWindow' is registered twice"):
        jenga.register_layer_type(taken, example=EXAMPLE)


def test_another_class_of_a_registered_name_is_refused_in_a_model():
    jenga.register_layer_type(PaperWindow, example=EXAMPLE)
    other = dataclass(frozen=True, slots=True, kw_only=True)(
        type("PaperWindow", (PaperWindow,), {})
    )

    with pytest.raises(ValueError, match="layer type 'own' must be of the registered class"):
        ModelSpec(
            name="model",
            layer_types=(other(name="own", layers=one_layer(), window_tokens=5),),
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_type": int}, "'int' must inherit jenga.LayerType"),
        ({"layer_type": type("Plain", (PaperWindow,), {})}, "'Plain' must be a frozen dataclass"),
        ({"example": {"window": 5}}, r"example must give values of \['window_tokens'\], got"),
        ({"example": {}}, "example must make one of the type, got {}"),
        ({"cache_spec": dict}, "cache_spec and fields_of must be given together"),
    ],
)
def test_what_cannot_be_registered_is_refused_before_anything_changes(changes, words):
    arguments = {"layer_type": PaperWindow, "example": EXAMPLE} | changes
    before = dict(layer_type._layer_types)

    with pytest.raises(ValueError, match=words):
        jenga.register_layer_type(arguments.pop("layer_type"), **arguments)

    assert layer_type._layer_types == before
    assert not registration._cache_specs


def test_a_cache_spec_belongs_to_one_type():
    other = dataclass(frozen=True, slots=True, kw_only=True)(type("Other", (PaperWindow,), {}))
    engine = {"example": EXAMPLE, "cache_spec": dict, "fields_of": lambda spec: spec}
    jenga.register_layer_type(PaperWindow, **engine)

    with pytest.raises(ValueError, match="'Other': cache_spec 'dict' is registered for 'PaperWind"):
        jenga.register_layer_type(other, **engine)


class Forgetful(PaperWindowPolicy):
    """Gives up the window after each eighth token, and wants it back."""

    def update_last_access(self, facts, processed, num_tokens, /):
        own = super().update_last_access(facts, processed, num_tokens)
        return range(num_tokens - 1, num_tokens) if processed % 8 == 7 else own


class Late(PaperWindowPolicy):
    """Says that a page is released a token later than it is."""

    def next_release(self, facts, processed, page_slots, /):
        return super().next_release(facts, processed, page_slots) + 1


class Standing(PaperWindowPolicy):
    """Says that a page is released at once."""

    def next_release(self, _facts, processed, _page_slots, /):
        return processed


class Modest(PaperWindowPolicy):
    """Forgets the chunk where it counts the slots of a step."""

    def peak_slots(self, _facts, num_tokens, _chunk_tokens, /):
        return min(num_tokens, self.window_tokens)


class Roomy(PaperWindowPolicy):
    """Says that slots suffice for one token too many."""

    def max_tokens(self, _facts, _processed, num_slots, /):
        return num_slots + 1


class Narrow(PaperWindowPolicy):
    """Says that slots suffice for one token too few."""

    def max_tokens(self, _facts, _processed, num_slots, /):
        return num_slots - 1


class Hopeful(PaperWindowPolicy):
    """Finds any prefix, whatever is cached."""

    def get_possible_prefix(self, _facts, is_hit, grain, at_most_tokens, /):
        return min(len(is_hit), at_most_tokens // grain.page_slots) * grain.page_slots


class Boundless(PaperWindowPolicy):
    """Finds a longer prefix than it was asked for."""

    def get_possible_prefix(self, _facts, _is_hit, _grain, at_most_tokens, /):
        return at_most_tokens + 1


class Frugal(PaperWindowPolicy):
    """Takes only the last page of a prefix."""

    def reused_pages(self, _facts, _is_hit, grain, num_tokens, /):
        end = num_tokens // grain.page_slots
        return range(max(0, end - 1), end)


class Unkeyed(PaperWindowPolicy):
    """Names all its pages alike."""

    def content_keys(self, _facts, prefix_hashes, _grain, pages, /):
        return [b"page"] * len(range(len(prefix_hashes))[pages.start : pages.stop])


class Rushed(PaperWindowPolicy):
    """Calls a page final before it has all its tokens."""

    def final_pages(self, _facts, num_tokens, grain, /):
        return -(-num_tokens // grain.page_slots)


class Unplaced(PaperWindowPolicy):
    """Has a place in the order of eviction for one page alone."""

    def set_prefix_length(self, _facts, _pages, _grain, /):
        return [1]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Forgetful, "update_last_access gives up the slots before 39 at 7 .* at 8"),
        (Late, "next_release at 0 processed tokens is 6, but update_last_access gives up page 0"),
        (Standing, "next_release at 0 processed tokens must be later, got 0"),
        (Modest, "peak_slots of 9 tokens in steps of 7 is 5, but the step of tokens"),
        (Roomy, "max_tokens of 0 slots at 0 processed tokens is 1, for which"),
        (Narrow, "max_tokens of the 16 slots of a step must reach its end at 16 tokens, got 15"),
        (Hopeful, "reused_pages of a prefix of 5 tokens must be cached"),
        (Boundless, "get_possible_prefix must be between 0 and at_most_tokens"),
        (Frugal, r"update_last_access reads the pages .* but reused_pages are \[4\]"),
        (Unkeyed, "content_keys of the 2 final pages of 2 tokens must be as many different keys"),
        (Rushed, "content_keys of the 1 final pages of 1 tokens"),
        (Unplaced, "set_prefix_length of 0 pages must give as many, got"),
    ],
)
def test_a_policy_that_lies_is_refused_with_the_answers_that_contradict(policy, words):
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Lying(PaperWindow):
        def policy(self, _page_slots, /):
            return policy(self.window_tokens)

    with pytest.raises(ValueError, match=f"'Lying': its policy contradicts itself.*{words}"):
        jenga.register_layer_type(Lying, example=EXAMPLE)

    assert "Lying" not in layer_type._layer_types


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ({"is_state": True}, "is_state must be the policy's is_overwritten"),
        ({"is_state": True}, "must inherit jenga.spec.State"),
        ({"typical_tokens": 64}, "typical_tokens must be above 0 if and only if"),
        ({"kind": ""}, "kind must be a text"),
        ({"tokens_per_slot": 0}, "tokens_per_slot must be a positive integer, got 0"),
        ({"tokens_per_page": 0}, "tokens_per_page must be a positive integer, got 0"),
        ({"tokens_per_slot": 4, "tokens_per_page": 6}, "a multiple of tokens_per_slot, 4, got 6"),
    ],
)
def test_a_type_that_contradicts_its_policy_is_refused(claims, words):
    lying = dataclass(frozen=True, kw_only=True)(type("Lying", (PaperWindow,), claims))

    with pytest.raises(ValueError, match=words):
        jenga.register_layer_type(lying, example=EXAMPLE)


def test_a_type_without_a_policy_is_refused():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Unfinished(jenga.LayerType):
        name: str
        layers: tuple[Layer, ...]

    with pytest.raises(ValueError, match=r"'Unfinished': example must make one .*abstract"):
        jenga.register_layer_type(Unfinished, example={})


def models(window_tokens=600):
    """Get two models that differ only in whose window they have."""
    full = FullAttention(name="full", layers=one_layer(256))
    layers = tuple(Layer(name=f"{number}", slot_bytes=192) for number in range(5))
    shared = {"name": "window", "layers": layers, "window_tokens": window_tokens}
    return [
        ModelSpec(name="model", layer_types=(full, window(**shared)))
        for window in (PaperWindow, SlidingWindow)
    ]


def test_the_paper_window_is_planned_and_counted_as_the_window_of_the_package():
    jenga.register_layer_type(PaperWindow, example=EXAMPLE)

    own, built_in = models()

    ours, theirs = jenga.plan(own), jenga.plan(built_in)
    assert type(ours.page_tables[1].layer_type) is PaperWindow
    assert ours.large_page_bytes == theirs.large_page_bytes
    for our, their in zip(ours.page_tables, theirs.page_tables, strict=True):
        assert replace(our, layer_type=their.layer_type) == their
    for num_tokens in (1, 5, 599, 600, 601, 5000):
        for a, b in zip(own.layer_types, built_in.layer_types, strict=True):
            assert needed_tokens(a, num_tokens) == needed_tokens(b, num_tokens)
            assert held_pages(a, 16, num_tokens) == held_pages(b, 16, num_tokens)
            assert a.most_read_tokens == b.most_read_tokens
        assert Need(own).of_tokens(num_tokens) == Need(built_in).of_tokens(num_tokens)


def test_a_replay_counts_and_times_the_paper_window_as_the_window_of_the_package():
    jenga.register_layer_type(PaperWindow, example=EXAMPLE)

    def replayed(model):
        arena = make_arena("jenga", model, 2 << 20)
        weights = Weights(num_bytes=2000, total=1000, active=1000, query_elements=8)
        gpu = Gpu(name="test", memory_bytes=1, bytes_per_s=1e9, flops_16_bit=1e12)
        requests = list(articles(num_articles=4, num_questions=3, article_tokens=900))
        replay = Replay(requests, arena, clock=StepTime(model, weights, gpu))
        for _ in replay:
            pass
        arena.check()
        bound = best_eviction(requests, model, 1 << 20)
        return replay.time_s, replay.hit_tokens, replay.prompt_tokens, bound

    own, built_in = map(replayed, models())

    assert own == built_in
    assert 0 < own[1] < own[2]


@pytest.mark.parametrize("page_slots", [1, 4, 16])
@pytest.mark.parametrize("window_tokens", [1, 2, 5, 16, 33])
def test_what_follows_from_update_last_access_is_what_the_package_computes(
    page_slots, window_tokens
):
    own = PaperWindow(name="w", layers=one_layer(), window_tokens=window_tokens).policy(page_slots)
    built_in = SlidingWindow(name="w", layers=one_layer(), window_tokens=window_tokens).policy(1)

    for processed in range(120):
        assert own.next_release(FACTS, processed, page_slots) == built_in.next_release(
            FACTS, processed, page_slots
        )


def test_a_type_from_outside_can_be_combined_and_sent_to_another_process():
    jenga.register_layer_type(PaperWindow, example=EXAMPLE)
    own, _ = models()

    both = combine("both", [own, replace(own, name="draft")])
    sent = layer_type_from(layer_type_fields(own.layer_types[1]))

    assert [each.name for each in both.layer_types] == [
        "model/full",
        "model/window",
        "draft/full",
        "draft/window",
    ]
    assert sent == own.layer_types[1]
    with pytest.raises(ValueError, match="'Unknown' must be registered in this process"):
        layer_type_from(layer_type_fields(own.layer_types[1]) | {"type": "Unknown"})


def test_a_policy_that_lies_only_about_long_requests_is_found_by_the_managers_check():
    class LateLiar(PaperWindowPolicy):
        """Gives up the window of tokens after the hundredth, where no trial looks."""

        def update_last_access(self, facts, processed, num_tokens, /):
            own = super().update_last_access(facts, processed, num_tokens)
            return own if processed != 100 else range(90, num_tokens)

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Lying(PaperWindow):
        def policy(self, _page_slots, /):
            return LateLiar(self.window_tokens)

    jenga.register_layer_type(Lying, example=EXAMPLE)
    lying = Lying(name="w", layers=one_layer(), window_tokens=40)
    geometry = jenga.plan(ModelSpec(name="m", layer_types=(lying,)))
    manager = Manager(geometry, num_large_pages=60)

    manager.allocate("r", num_tokens=100)
    manager.allocate("r", num_tokens=101, num_processed_tokens=100)
    manager.check()
    manager.allocate("r", num_tokens=102, num_processed_tokens=101)
    with pytest.raises(InvariantError, match=r"'w' of owner 1: slots range\(62, 102\) are read"):
        manager.check()


def test_the_page_shows_what_can_be_run():
    page = (Path(__file__).parents[1] / "docs" / "layer-types.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)

    ran = {}
    exec(code, ran)

    ran["manager"].allocate("r", num_tokens=3000)
    ran["manager"].check()
    assert type(ran["geometry"].page_tables[0].layer_type) is PaperWindow


def test_the_example_is_short():
    folder = Path(__file__).parents[1] / "docs" / "examples"
    files = folder.glob("paper_window*.py")

    assert sum(len(file.read_text().splitlines()) for file in files) <= 60
