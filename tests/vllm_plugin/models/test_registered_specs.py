"""Cache specs of layer types from outside the package, mapped without an engine."""

from dataclasses import dataclass

import pytest

import jenga
from docs.examples.paper_window import PaperWindow
from jenga import layer_type, registration
from jenga.spec import FullAttention, SlidingWindow

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(layer_type, "_layer_types", dict(layer_type._layer_types))
    monkeypatch.setattr(registration, "_cache_specs", dict(registration._cache_specs))


def shape():
    import torch

    return {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}


def own_spec(window, **changes):
    from docs.examples.paper_window_vllm import PaperWindowSpec

    return PaperWindowSpec(**shape() | changes, sliding_window=window)


def model_of(specs, **options):
    from jenga.vllm_plugin.specs.layer_types import model_spec

    return model_spec(specs, **options)


def test_layers_with_equal_fields_are_one_type_beside_those_of_vllm():
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from docs.examples.paper_window_vllm import register

    register()
    model = model_of(
        {
            "full": FullAttentionSpec(**shape()),
            "own.0": own_spec(24),
            "stock": SlidingWindowSpec(**shape(), sliding_window=24),
            "own.1": own_spec(24),
            "own.2": own_spec(40),
            "draft": own_spec(24),
        },
        draft_layers={"draft"},
    )

    found = [
        (type(each), each.name, [layer.name for layer in each.layers]) for each in model.layer_types
    ]
    assert found == [
        (PaperWindow, "draft_paper_window_24", ["draft"]),
        (FullAttention, "full", ["full"]),
        (PaperWindow, "paper_window_24", ["own.0", "own.1"]),
        (SlidingWindow, "sliding_24", ["stock"]),
        (PaperWindow, "paper_window_40", ["own.2"]),
    ]
    assert model.layer_types[2].window_tokens == 24
    assert model.layer_types[2].slot_bytes == 2 * 2 * 2 * 64 * 4


def test_page_tables_of_registered_types_keep_their_spec():
    from docs.examples.paper_window_vllm import PaperWindowSpec, register
    from jenga.vllm_plugin.specs.layer_types import table_spec

    register()
    specs = {"own.0": own_spec(24), "own.1": own_spec(24)}
    geometry = jenga.plan(model_of(specs), tokens_per_page=32)

    spec = table_spec(geometry.page_tables[0], specs)

    assert type(spec) is PaperWindowSpec
    assert spec.block_size == 32
    assert spec.sliding_window == 24


def test_a_spec_that_is_not_registered_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"'own' with a PaperWindowSpec, .*register_layer_type"):
        model_of({"own": own_spec(24)})


def test_layouts_that_the_kernels_cannot_read_are_refused_of_registered_specs_too():
    from docs.examples.paper_window_vllm import register

    register()

    with pytest.raises(ValueError, match="'own' with padded pages"):
        model_of({"own": own_spec(24, page_size_padded=1 << 20)})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window_tokens": [24]}, "must return values that are hashable, got"),
        ({"window_tokens": 0}, "window_tokens must be a positive integer"),
        ({"window": 24}, "fields_of 'CheckedSpec' must return the fields of 'Checked'"),
    ],
)
def test_fields_that_make_no_layer_type_are_refused_by_name(fields, words):
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    from jenga.checks import check_positive

    class CheckedSpec(SlidingWindowSpec):
        pass

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Checked(PaperWindow):
        def check_fields(self):
            check_positive(self.name, "window_tokens", self.window_tokens)

    jenga.register_layer_type(
        Checked,
        example={"window_tokens": 5},
        cache_spec=CheckedSpec,
        fields_of=lambda _: fields,
    )

    with pytest.raises(ValueError, match=words):
        model_of({"own": CheckedSpec(**shape(), sliding_window=24)})


def test_a_spec_that_is_no_attention_spec_is_refused():
    from vllm.v1.kv_cache_interface import KVCacheSpec

    class OtherSpec(KVCacheSpec):
        pass

    jenga.register_layer_type(
        PaperWindow, example={"window_tokens": 5}, cache_spec=OtherSpec, fields_of=vars
    )

    with pytest.raises(ValueError, match="'own': OtherSpec must inherit one of vLLM's attention"):
        model_of({"own": OtherSpec(block_size=16)})
