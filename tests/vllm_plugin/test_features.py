"""Every option of vLLM is honoured, refused or warned about; the page on features says the same."""

import ast
import dataclasses
import json
from math import prod
from pathlib import Path

import pytest

from jenga.vllm_plugin.settings.options import UNUSED_OPTIONS, options_without_effect
from tests.vllm_plugin.conftest import engine_environment, run_with_children
from tests.vllm_plugin.engine.test_engine_numbers import OPTIONS as COMPARED_OPTIONS
from tests.vllm_plugin.features import (
    PAGE,
    REFUSED_OPTIONS,
    SERVED,
    SERVED_OPTIONS,
    SET_BY_VLLM,
    VLLMS_OPTIONS,
    page,
)

HERE = Path(__file__).parent

SECTIONS = {
    "cache_config": "CacheConfig",
    "scheduler_config": "SchedulerConfig",
    "attention_config": "AttentionConfig",
    "mamba_config": "MambaConfig",
}

NEWER_FIELDS = {
    "attention_config": {
        "trtllm_ragged_backend",
        "indexer_tp_shard_min_rows",
        "minimax_m3_indexer_cp",
    }
}
"""Fields that vLLM 0.33 has and 0.32 has not."""


def fields_of(section):
    """Get the names of a configuration's fields that its maker is given."""
    import vllm.config

    fields = dataclasses.fields(getattr(vllm.config, SECTIONS[section]))
    return {field.name for field in fields if field.init}


def places_of(section):
    """List the fields of a configuration that are placed, as often as they are."""
    unused = [option.field for option in UNUSED_OPTIONS if option.section == section]
    tables = SERVED_OPTIONS, REFUSED_OPTIONS, VLLMS_OPTIONS, SET_BY_VLLM
    return unused + [field for table in tables for field in table[section]]


@pytest.mark.vllm
@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_of_vllms_configurations_has_one_place(section):
    import vllm

    fields, places = fields_of(section), places_of(section)
    if vllm.__version__.startswith("0.32."):
        fields |= NEWER_FIELDS.get(section, set())

    assert sorted(places) == sorted(fields)


@pytest.mark.vllm
def test_fields_that_vllm_sets_are_no_options():
    from vllm.engine.arg_utils import EngineArgs

    options = {field.name for field in dataclasses.fields(EngineArgs)}

    assert not options & {field for fields in SET_BY_VLLM.values() for field in fields}


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("field", "module"),
    [each for options in VLLMS_OPTIONS.values() for each in options.items()],
)
def test_options_that_are_left_to_vllm_are_read_where_nothing_is_replaced(field, module):
    import vllm

    from jenga.vllm_plugin.patches.all_patches import REPLACEMENTS

    newer = {each for fields in NEWER_FIELDS.values() for each in fields}
    if not (vllm.__version__.startswith("0.32.") and field in newer):
        path = Path(vllm.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
        assert field in path.read_text(encoding="utf-8")
    assert module not in {replacement.module for replacement in REPLACEMENTS}


def test_options_that_are_said_to_be_compared_with_stock_vllm_are():
    compared = {
        field
        for options in SERVED_OPTIONS.values()
        for field, test in options.items()
        if test.startswith("engine/test_engine_numbers.py::")
    }

    assert compared <= COMPARED_OPTIONS.keys()


@pytest.mark.vllm
@pytest.mark.parametrize("option", UNUSED_OPTIONS, ids=lambda option: option.field)
def test_an_option_without_effect_is_found_where_it_is_in_use(option):
    import vllm.config

    sections = {name: getattr(vllm.config, SECTIONS[name]) for name in SECTIONS}
    del sections["scheduler_config"]  # it has none, and no defaults
    config = type("Config", (), {name: make() for name, make in sections.items()})
    assert options_without_effect(config) == []

    section = getattr(config, option.section)
    if not hasattr(section, option.field):
        assert option.field in NEWER_FIELDS[option.section]
        return
    object.__setattr__(section, option.field, "another value")
    assert options_without_effect(config) == [option]


CONFIGURE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
for options in json.loads(sys.argv[1]):
    common = dict(dtype="float32", enforce_eager=True, max_model_len=256,
                  skip_tokenizer_init=True, attention_backend="JENGA_TRITON")
    print("CONFIGURED", flush=True)
    EngineArgs(**(common | options)).create_engine_config()
"""


@pytest.mark.vllm
def test_options_without_effect_are_warned_of_by_name_where_they_are_in_use(tiny_model):
    import vllm

    plain, hybrid = (
        {"model": str(tiny_model(name)), "max_model_len": 256}
        for name in ("llama", "granite_hybrid")
    )
    configured = [
        plain,
        hybrid,
        plain
        | {"prefix_cache_retention_interval": 64, "attention_config": {"flex_attn_block_m": 8}},
        hybrid | {"enable_mamba_shared_prefix_checkpoint": True, "mamba_cache_mode": "align"},
        hybrid | {"mamba_block_size": 32, "mamba_backend": "flashinfer"},
        plain | {"num_gpu_blocks_override": 100},
    ]
    is_done, output = run_with_children(
        ["-c", CONFIGURE, json.dumps(configured)], engine_environment()
    )

    assert is_done, output[-4000:]
    _, *found = output.split("CONFIGURED")
    # vLLM 0.33 warns of the mode in its own words, and keeps it out of the configuration.
    assert "--mamba-cache-mode" in found[3]
    mode = {"--mamba-cache-mode"} if vllm.__version__.startswith("0.32.") else set()
    flags = [option.flag for option in UNUSED_OPTIONS]
    named = [{flag for flag in flags if f"{flag} has no effect (" in part} for part in found]
    assert named == [
        set(),
        set(),
        {"--prefix-cache-retention-interval", "--attention-config.flex_attn_block_m"},
        {"--enable-mamba-shared-prefix-checkpoint"} | mode,
        {"--mamba-block-size", "--mamba-backend"},
        set(),
    ]
    assert ["counts large pages" in part for part in found] == [False] * 5 + [True]
    assert "--num-gpu-blocks-override 100 counts large pages" in found[-1]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("options", "dtypes"),
    [
        ({"mamba_cache_dtype": "float16"}, ("float16", "float16")),
        ({"mamba_cache_dtype": "bfloat16"}, ("bfloat16", "bfloat16")),
        (
            {"mamba_cache_dtype": "float16", "mamba_ssm_cache_dtype": "float32"},
            ("float16", "float32"),
        ),
    ],
    ids=["one_for_both", "another", "one_for_each"],
)
def test_states_have_the_dtypes_that_are_asked_for(options, dtypes, tiny_model):
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.granitemoehybrid import GraniteMoeHybridForCausalLM as Granite
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    from jenga.vllm_plugin.specs.layer_types import model_spec

    config = EngineArgs(
        model=str(tiny_model("granite_hybrid")),
        dtype="float32",
        max_model_len=256,
        skip_tokenizer_init=True,
        attention_backend="JENGA_TRITON",
        **options,
    ).create_engine_config()
    chosen = Granite.get_mamba_state_dtype_from_config(config)
    # A CPU with instructions for bfloat16 has vLLM choose float32 for the second.
    is_reset = config.cache_config.mamba_ssm_cache_dtype == "float32"
    expected = [dtypes[0], "float32" if is_reset else dtypes[1]]
    assert chosen == tuple(getattr(torch, name) for name in expected)

    shapes = Granite.get_mamba_state_shape_from_config(config)
    layer = MambaSpec(
        block_size=256,
        shapes=shapes,
        dtypes=chosen,
        mamba_type=MambaAttentionBackendEnum.MAMBA2,
    )
    (states,) = model_spec({"mixer": layer}).layer_types

    state_bytes = [
        prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, chosen, strict=True)
    ]
    assert states.layers[0].slot_bytes == sum(state_bytes)


def named_tests():
    """Get every test that a row names."""
    served = [test for features in SERVED.values() for test in features.values()]
    return served + [test for options in SERVED_OPTIONS.values() for test in options.values()]


@pytest.mark.parametrize("test", sorted(set(named_tests())))
def test_a_test_that_a_row_names_exists(test):
    file, name = test.split("::")
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))

    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_page_on_features_says_what_is_served_and_refused():
    written = PAGE.read_text(encoding="utf-8")

    assert written == page(), "write it anew: python -m tests.vllm_plugin.features"
