"""Where requests leave checkpoints for others: in which order, of which kind, and at what cost."""

from jenga.eviction.points import Kind
from jenga.manager import Manager
from jenga.policies import RequestFacts
from tests.machines.geometries import full, geometry, state
from tests.test_manager import hashes

HYBRID = geometry("hybrid", full(tokens=16, slot_bytes=16, per_large=2), state(slot_bytes=512))


def manager_of(cut, num_large_pages=200, **options):
    return Manager(cut, num_large_pages=num_large_pages, prefix_caching=True, **options)


def come(manager, name, num_tokens, *, keys=None, prompt_tokens=None):
    """Let a request come in with what is cached, and compute so many tokens in a step."""
    keys = keys or hashes(num_tokens)
    facts = RequestFacts(prompt_tokens=prompt_tokens or num_tokens)
    manager.new_step()
    hit = manager.lookup(keys, max_tokens=facts.prompt_tokens - 1, facts=facts)
    manager.allocate(name, num_tokens=num_tokens, hit=hit)
    manager.check()
    return hit.num_tokens


def keep_states(manager, name, keys):
    """Keep all states that a request's prompt is to leave, as an engine does at a step's end."""
    for num_tokens in manager.checkpoint_tokens(name):
        assert manager.keep_state(name, keys[num_tokens // 16 - 1], num_tokens)
    manager.take_copies()
    manager.check()


def test_states_are_kept_though_the_tokens_were_committed_before_they_were_asked_for():
    # As where a second request of the same step looks for what the first one computes.
    manager = manager_of(HYBRID)
    keys = hashes(640)
    come(manager, "a", 640)

    manager.commit("a", keys, 640)
    keep_states(manager, "a", keys)

    kinds = {end: manager._tree.at(keys, end).point.kind for end in (112, 624)}
    assert kinds == {112: Kind.BEFORE_END, 624: Kind.PROMPT_END}
    manager.free("a")
    assert manager.lookup(keys, max_tokens=639).num_tokens == 624
    manager.check()
