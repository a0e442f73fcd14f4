"""Layers whose values are of another width than keys attend through our backend."""

from types import SimpleNamespace

import pytest

from tests.vllm_plugin.conftest import assert_same_generation, tokens_lost_to_a_head
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths

pytestmark = pytest.mark.vllm


def chosen_backend(monkeypatch, backend, *, is_selected=True):
    """Make a layer as a model does that names a backend; get the one it is left with."""
    import vllm.config

    from jenga.vllm_plugin.patches.workers import WORKERS
    from jenga.vllm_plugin.settings.switch import backend_member

    selected = SimpleNamespace(backend=backend_member() if is_selected else None)
    config = SimpleNamespace(attention_config=selected, model_config=None)
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: config)
    (replacement,) = (each for each in WORKERS if each.name == "Attention.__init__")
    made = []

    def original(self, num_heads, head_size, *, attn_backend=None, head_size_v=None):
        made.append((self, num_heads, head_size, attn_backend, head_size_v))

    replacement.make(original)("layer", 4, 192, attn_backend=backend, head_size_v=128)
    ((*others, left, width),) = made
    assert (*others, width) == ("layer", 4, 192, 128)
    return left


def backends():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.triton_attn_diffkv import TritonAttentionDiffKVBackend

    return CPUAttentionBackend, TritonAttentionDiffKVBackend


def test_a_backend_named_for_its_widths_is_left_to_the_selection(monkeypatch):
    _, two_widths = backends()

    assert chosen_backend(monkeypatch, two_widths) is None


def test_a_backend_named_for_its_widths_is_kept_where_another_is_selected(monkeypatch):
    _, two_widths = backends()

    assert chosen_backend(monkeypatch, two_widths, is_selected=False) is two_widths


def test_other_backends_that_layers_name_are_kept_and_later_refused(monkeypatch):
    stock, _ = backends()

    assert chosen_backend(monkeypatch, stock) is stock
    assert chosen_backend(monkeypatch, None) is None


# Short, page-crossing, longer than one chunk of 64 tokens, longer than two; and one of one token
# over and over, of which n-grams find every next one.
PROMPTS = [*prompts_of_lengths((5, 33, 70, 150), seed=0), [7] * 40]
MAX_TOKENS = 20


def theirs_and_ours(model, run_engine, *, max_tokens=MAX_TOKENS, **options):
    """Generate with transformers and, over an arena full of NaN, every prompt twice with ours."""
    theirs = run_engine(model, PROMPTS, max_tokens=max_tokens, script="reference_process.py")
    ours = run_engine(
        model,
        PROMPTS + PROMPTS,
        max_tokens=max_tokens,
        rounds=2,
        options={"attention_backend": "JENGA_TRITON", "enable_prefix_caching": True} | options,
        fill_arena=True,
        report_manager=True,
    )
    assert "error" not in theirs, theirs["error"][-4000:]
    assert "error" not in ours, ours["error"][-4000:]
    return theirs | {"outputs": theirs["outputs"] * 2}, ours


@pytest.mark.slow
def test_values_narrower_than_keys_generate_what_transformers_generates(tiny_model, run_engine):
    theirs, ours = theirs_and_ours(tiny_model("mimo_v2"), run_engine)

    assert_same_generation(ours, theirs)
    hits = [output["cached_tokens"] for output in ours["outputs"]]
    assert hits == [0] * len(PROMPTS) + [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert ours["request_tokens"] == {}


@pytest.mark.slow
def test_drafts_change_no_token_where_values_are_narrower_than_keys(tiny_model, run_engine):
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    theirs, ours = theirs_and_ours(tiny_model("mimo_v2"), run_engine, speculative_config=drafts)

    assert_same_generation(ours, theirs)
    drafted, accepted = (sum(counts) for counts in zip(*ours["drafts"], strict=True))
    assert 0 < accepted < drafted


@pytest.mark.slow
def test_a_layer_that_predicts_further_tokens_drafts_from_a_window(tiny_model, run_engine):
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    theirs, ours = theirs_and_ours(tiny_model("mimo_v2_mtp"), run_engine, speculative_config=drafts)

    assert_same_generation(ours, theirs)
    drafted, accepted = (sum(counts) for counts in zip(*ours["drafts"], strict=True))
    assert 0 < accepted < drafted
    first, second = ours["outputs"][: len(PROMPTS)], ours["outputs"][len(PROMPTS) :]
    assert [output["cached_tokens"] for output in first] == [0] * len(PROMPTS)
    lost = tokens_lost_to_a_head()
    hits = [max(0, (len(prompt) - 1) // 16 * 16 - lost) for prompt in PROMPTS]
    assert [output["cached_tokens"] for output in second] == hits
