"""Switching the plugin on, and what it refuses, without starting an engine."""

import os
import re
import textwrap
import tomllib
from pathlib import Path

import pytest

from jenga.vllm_plugin.settings.environment import (
    KNOWN_VARIABLES,
    cache_directory,
    read_settings,
    selects_backend,
)
from jenga.vllm_plugin.settings.refusals import Refusal
from tests import warm
from tests.vllm_plugin.conftest import engine_environment

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JENGA_GEOMETRY", "best"),
        ("JENGA_GEOMETERY", "lcm"),
        ("JENGA_EVICTION", "fifo"),
        ("JENGA_EVICTION", "no_such_module:Policy"),
        ("JENGA_LEFT_SHARE", "some"),
        ("JENGA_LEFT_SHARE", "1"),
        ("JENGA_LEFT_SHARE", " nan"),
        ("JENGA_SPECIALIZED_PREFILL", "yes"),
        ("JENGA_SPECIALIZED_LATENTS", "2"),
        ("JENGA_SPECIALIZED_SCANS", "off"),
        ("JENGA_HISTORY_TOKENS", "some"),
        ("JENGA_HISTORY_TOKENS", "-16"),
        ("JENGA_IMAGE_EMBEDDINGS", "arena"),
        ("JENGA_MEMORY_LOG_BYTES", "1e6"),
        ("JENGA_EMBEDDINGS_IN_KV_PAGES", "images"),
        ("JENGA_PROMPT_SCRATCH_BYTES", "256MB"),
        ("JENGA_CACHE", "~no_such_user/cache"),
    ],
)
def test_settings_refuse_what_they_do_not_know_by_variable_and_value(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        read_settings({name: value})


@pytest.mark.parametrize(("value", "is_kept"), [("", True), ("1", True), ("0", False)])
def test_a_variable_keeps_image_embeddings_out_of_the_arena(value, is_kept):
    assert read_settings({"JENGA_IMAGE_EMBEDDINGS": value}).keeps_image_embeddings is is_kept


@pytest.mark.parametrize("value", ["JENGA_TRITN", " jenga"])
def test_a_backend_of_jenga_that_does_not_exist_is_refused_by_variable_and_value(value):
    with pytest.raises(ValueError, match=f"VLLM_ATTENTION_BACKEND={value!r}"):
        selects_backend({"VLLM_ATTENTION_BACKEND": value})


@pytest.mark.parametrize("text", ["", "  "])
@pytest.mark.parametrize("name", [*sorted(KNOWN_VARIABLES), "JENGA_GEOMETERY"])
def test_variables_that_are_empty_are_not_set(name, text):
    assert read_settings({name: text}) == read_settings({})
    assert cache_directory({name: text}) == cache_directory({})


def test_the_environment_selects_the_backend_by_its_name_in_any_case():
    assert not selects_backend({"VLLM_ATTENTION_BACKEND": "FLASH_ATTN"})
    assert not selects_backend({"VLLM_ATTENTION_BACKEND": " "})
    assert not selects_backend({})
    assert selects_backend({"VLLM_ATTENTION_BACKEND": " jenga_triton "})


def test_the_memory_log_has_a_limit_where_one_is_set():
    assert read_settings({"JENGA_MEMORY_LOG_BYTES": " 1000000 "}).memory_log_bytes == 1_000_000
    assert read_settings({}).memory_log_bytes == 0


def test_a_shared_arena_has_a_guarantee_and_neither_is_set_alone():
    shared = {"JENGA_SHARED_ARENA": " /dev/shm/x ", "JENGA_SHARED_ARENA_GUARANTEE": "4096"}
    settings = read_settings(shared)
    assert str(settings.shared_arena) == "/dev/shm/x"
    assert (settings.guarantee_bytes, settings.limit_bytes) == (4096, 0)
    limited = read_settings(shared | {"JENGA_SHARED_ARENA_LIMIT": "8192"})
    assert limited.limit_bytes == 8192
    for guarantee in ("", "0"):
        with pytest.raises(ValueError, match="expected a positive number of bytes"):
            read_settings(shared | {"JENGA_SHARED_ARENA_GUARANTEE": guarantee})
    for name in ("JENGA_SHARED_ARENA_GUARANTEE", "JENGA_SHARED_ARENA_LIMIT"):
        with pytest.raises(ValueError, match=f"{name}='1' has no effect without"):
            read_settings({name: "1"})


def test_the_share_left_to_others_is_a_number_or_the_default():
    assert read_settings({"JENGA_LEFT_SHARE": "0"}).left_share == 0
    assert read_settings({"JENGA_LEFT_SHARE": " 0.25 "}).left_share == 0.25
    assert read_settings({"JENGA_LEFT_SHARE": ""}).left_share is None
    assert read_settings({}).left_share is None


@pytest.mark.parametrize("kernel", ["prefill", "latents", "scans"])
def test_layers_have_the_specialized_kernel_where_that_is_asked_for(kernel):
    for text, expected in ((" 1 ", True), ("0", False), ("", None)):
        settings = read_settings({f"JENGA_SPECIALIZED_{kernel.upper()}": text})
        assert getattr(settings, f"has_specialized_{kernel}") is expected
    assert getattr(read_settings({}), f"has_specialized_{kernel}") is None


def test_histories_have_the_tokens_that_are_asked_for_or_none():
    assert read_settings({"JENGA_HISTORY_TOKENS": " 16 "}).history_tokens == 16
    assert read_settings({"JENGA_HISTORY_TOKENS": "0"}).history_tokens == 0
    assert read_settings({"JENGA_HISTORY_TOKENS": ""}).history_tokens is None
    assert read_settings({}).history_tokens is None


def run_python(code, **environment):
    ended = warm.run(["-c", textwrap.dedent(code)], engine_environment(**environment))
    return ended.returncode, ended.stdout + ended.stderr


CONFIGURE = """
    from vllm.engine.arg_utils import EngineArgs
    def configure(**options):
        common = dict(model={model!r}, dtype="float32", enforce_eager=True, max_model_len=256,
                      skip_tokenizer_init=True, attention_backend="JENGA_TRITON")
        return EngineArgs(**(common | options)).create_engine_config()
"""


LATENTS = {"head_size": 576, "use_mla": True}


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("layer", "cache_dtype"),
    [({"head_size": 64}, "fp8"), ({"head_size": 64}, "fp8_per_token_head"), (LATENTS, "fp8")],
    ids=["attention", "attention_with_scales_of_slots", "latents"],
)
def test_float8_caches_are_refused_on_gpus_without_float8(layer, cache_dtype, monkeypatch):
    import torch
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from jenga.vllm_plugin.config import checked_backend_path

    stored = {"dtype": torch.bfloat16, "kv_cache_dtype": cache_dtype, "block_size": 16}
    layer = AttentionSelectorConfig(**layer, **stored)

    def use_capability(major, minor):
        capability = DeviceCapability(major, minor)
        monkeypatch.setattr(current_platform, "get_device_capability", lambda: capability)

    use_capability(8, 9)
    assert checked_backend_path(layer).startswith("jenga.vllm_plugin.")

    use_capability(8, 6)
    with pytest.raises(ValueError, match=rf"-dtype {cache_dtype} needs compute capability 8\.9"):
        checked_backend_path(layer)
    if not layer.use_mla:
        for other in ("int8_per_token_head", "fp8_e5m2"):
            checked_backend_path(layer._replace(kv_cache_dtype=other))


@pytest.mark.vllm
def test_four_bits_an_element_are_refused_for_heads_whose_rows_would_not_be_aligned():
    import torch
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from jenga.vllm_plugin.config import checked_backend_path

    layer = AttentionSelectorConfig(
        head_size=96, dtype=torch.float32, kv_cache_dtype="int4_per_token_head", block_size=16
    )
    assert checked_backend_path(layer).endswith("JengaTritonBackend")

    with pytest.raises(ValueError, match="needs heads of a multiple of 32 elements, got 80"):
        checked_backend_path(layer._replace(head_size=80))


@pytest.mark.slow
@pytest.mark.vllm
def test_host_memory_is_asked_for_as_in_stock_vllm_and_takes_no_connector(tiny_model):
    code = (
        CONFIGURE.format(model=str(tiny_model("llama")))
        + """
    from jenga.vllm_plugin.config import host_bytes
    config = configure(kv_offloading_size=1.5)
    print("HOST", host_bytes(config), config.kv_transfer_config)
    print("LEAST", host_bytes(configure(kv_offloading_size=1e-12)))
    config.__post_init__()
    print("AGAIN", host_bytes(config), config.kv_transfer_config)
    shared = {}
    configure(kv_offloading_size=1.5, additional_config=shared)
    print("NONE", host_bytes(configure(additional_config=shared)))
    """
    )

    _, output = run_python(code)

    assert f"HOST {3 << 29} None" in output
    assert "LEAST 1\n" in output
    assert f"AGAIN {3 << 29} None" in output
    assert "NONE 0" in output


@pytest.mark.vllm
def test_vllm_is_untouched_unless_the_backend_is_selected(tiny_model):
    code = (
        CONFIGURE.format(model=str(tiny_model("llama")))
        + """
    from jenga.vllm_plugin.patches.patch import of_installed_vllm
    from jenga.vllm_plugin.patches.all_patches import IN_WORKERS, REPLACEMENTS
    needed, in_workers = of_installed_vllm(REPLACEMENTS), of_installed_vllm(IN_WORKERS)
    stock = configure(attention_backend=None)
    print("BEFORE", [r.name for r in needed if r.is_applied])
    print("CHOSEN", stock.cache_config.user_specified_block_size, stock.attention_config.backend)
    configure()
    print("AFTER", [r for r in needed if not r.is_applied] == in_workers)
    again = configure(attention_backend=None)
    print("AGAIN", again.cache_config.block_size == stock.cache_config.block_size,
          again.cache_config.user_specified_block_size, again.cache_config.enable_prefix_caching)
    """
    )
    returncode, output = run_python(code)

    assert returncode == 0, output[-4000:]
    watched = "VllmConfig.try_verify_and_update_config", "current_platform.check_and_update_config"
    assert f"BEFORE {list(watched)}" in output
    assert "CHOSEN False None" in output
    assert "AFTER True" in output
    assert "AGAIN True False True" in output


@pytest.mark.vllm
def test_the_environment_variable_selects_the_backend_where_a_model_would_set_another(tiny_model):
    code = (
        CONFIGURE.format(model=str(tiny_model("gemma4")))
        + """
    config = configure(attention_backend=None)
    print("BACKEND", config.attention_config.backend.name)
    """
    )
    returncode, output = run_python(code, VLLM_ATTENTION_BACKEND="JENGA_TRITON")

    assert returncode == 0, output[-4000:]
    assert "BACKEND JENGA_TRITON" in output


@pytest.fixture
def entry_points(tmp_path):
    """Get a folder whose metadata says what this package's does once it is installed anew."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, names in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.vllm
def test_a_mapping_of_attention_options_selects_the_backend_before_plugins_are_loaded(
    tiny_model, entry_points
):
    code = """
    from vllm import EngineArgs
    config = EngineArgs(
        model={model!r}, dtype="float32", max_model_len=256, skip_tokenizer_init=True,
        attention_config={{"backend": "jenga_triton"}},
    ).create_engine_config()
    from vllm.platforms import current_platform
    print("BACKEND", config.attention_config.backend.name, config.cache_config.block_size)
    print("PLATFORM", type(current_platform).__module__)
    """
    path = os.pathsep.join([str(entry_points), engine_environment()["PYTHONPATH"]])

    returncode, output = run_python(code.format(model=str(tiny_model("llama"))), PYTHONPATH=path)

    assert returncode == 0, output[-4000:]
    assert "BACKEND JENGA_TRITON 16" in output
    assert "PLATFORM vllm.platforms." in output


@pytest.fixture(scope="module")
def selected_by_environment(tiny_model):
    """Get what a process prints that the environment variable selects us in, in its steps.

    It is configured, as a process without a device is; then it has a worker with one.
    """
    code = (
        CONFIGURE.format(model=str(tiny_model("llama")))
        + """
    import pickle, sys
    from types import SimpleNamespace
    config = configure(attention_backend=None)
    print("BACKEND", config.attention_config.backend.name, config.cache_config.block_size)
    pickle.loads(pickle.dumps(config.attention_config))
    workers = ("vllm.third_party.flash_linear_attention", "vllm.v1.worker.gpu_model_runner")
    print("IMPORTED", [name for name in workers if name in sys.modules])
    from vllm.v1.worker.worker_base import WorkerWrapperBase
    from jenga.vllm_plugin.patches.patch import of_installed_vllm
    from jenga.vllm_plugin.patches.all_patches import IN_WORKERS
    print("EARLY", any(r.is_applied for r in of_installed_vllm(IN_WORKERS)))
    worker = WorkerWrapperBase(rpc_rank=0)
    worker.vllm_config = config
    worker.worker = SimpleNamespace(init_device=lambda: print("DEVICE"))
    worker.init_device()
    print("REPLACED", all(r.is_applied for r in of_installed_vllm(IN_WORKERS)))
    """
    )
    returncode, output = run_python(code, VLLM_ATTENTION_BACKEND="jenga_triton")

    assert returncode == 0, output[-4000:]
    return output


@pytest.mark.vllm
def test_the_environment_variable_selects_the_backend_in_any_case(selected_by_environment):
    assert "BACKEND JENGA_TRITON 16" in selected_by_environment
    assert "Unknown vLLM environment variable" not in selected_by_environment


@pytest.mark.vllm
def test_a_process_without_a_device_imports_nothing_that_asks_for_one(selected_by_environment):
    assert "IMPORTED []" in selected_by_environment


@pytest.mark.vllm
def test_names_of_workers_are_replaced_once_a_worker_has_its_device(selected_by_environment):
    assert "EARLY False" in selected_by_environment
    assert "DEVICE" in selected_by_environment
    assert "REPLACED True" in selected_by_environment


@pytest.mark.vllm
def test_another_vllm_is_refused_with_its_version_and_the_supported_ones(tiny_model):
    code = (
        CONFIGURE.format(model=str(tiny_model("llama")))
        + """
    import vllm
    vllm.__version__ = "0.31.0"
    configure()
    """
    )
    returncode, output = run_python(code)

    assert returncode != 0
    assert Refusal.VERSION.value.feature in output
    assert "0.31.0" in output


@pytest.mark.vllm
def test_stock_vllm_starts_beside_odd_variables_of_a_plugin_that_is_not_selected(tiny_model):
    code = (
        CONFIGURE.format(model=str(tiny_model("llama")))
        + """
    print("STOCK", configure(attention_backend=None).attention_config.backend)
    print("OTHER", configure(attention_backend="CPU_ATTN").attention_config.backend.name)
    try:
        configure()
    except Exception as error:
        print("OURS", error)
    """
    )
    odd = {"JENGA_GEOMETERY": "lcm", "JENGA_LEFT_SHARE": "some", "JENGA_MEMORY_LOG": "/no/such/log"}
    _, output = run_python(code, **odd)

    assert "STOCK None" in output
    assert "OTHER CPU_ATTN" in output
    assert re.search(r"OURS .*JENGA_GEOMETERY='lcm'", output, re.DOTALL)


@pytest.mark.vllm
def test_a_misspelt_backend_is_refused_unless_an_argument_selects_another(tiny_model):
    code = (
        CONFIGURE.format(model=str(tiny_model("llama")))
        + """
    print("OTHER", configure(attention_backend="CPU_ATTN").attention_config.backend.name)
    try:
        configure(attention_backend=None)
    except Exception as error:
        print("NONE", error)
    """
    )
    _, output = run_python(code, VLLM_ATTENTION_BACKEND="JENGA_TRITN")

    assert "OTHER CPU_ATTN" in output
    assert "VLLM_ATTENTION_BACKEND=JENGA_TRITN gives way to" in output
    assert re.search(r"NONE .*VLLM_ATTENTION_BACKEND='JENGA_TRITN'", output, re.DOTALL)


@pytest.mark.vllm
def test_a_memory_log_that_cannot_be_written_is_refused_as_the_engine_is_configured(
    tiny_model, tmp_path
):
    code = CONFIGURE.format(model=str(tiny_model("llama"))) + "    configure()"
    returncode, output = run_python(code, JENGA_MEMORY_LOG=str(tmp_path))

    assert returncode != 0
    assert f"JENGA_MEMORY_LOG='{tmp_path}' cannot be written: it is a folder" in output


WITHOUT_A_NAME = """
    import pickle
    from vllm.config import AttentionConfig
    from vllm.config.vllm import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from jenga.vllm_plugin import name_backend, register
    del VllmConfig.try_verify_and_update_config
    held = None
    if {is_known_early}:
        name_backend()  # as vLLM does where it finds the entry point of platforms
        held = AttentionConfig(backend="JENGA_TRITON")
    register()
"""
MISSING_NAME = "vLLM has no vllm.config.vllm.VllmConfig.try_verify_and_update_config"


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("is_known_early", [False, True])
def test_a_vllm_without_the_names_that_selecting_takes_is_left_as_it_is(is_known_early):
    code = (
        WITHOUT_A_NAME.format(is_known_early=is_known_early)
        + """
    from jenga.vllm_plugin.patches.all_patches import CONFIG_WATCH
    print("REPLACED", [watch.is_applied for watch in CONFIG_WATCH])
    print("KNOWN", "JENGA_TRITON" in AttentionBackendEnum.__members__)
    try:
        AttentionConfig(backend="jenga_triton")
    except ValueError as error:
        print("SELECTED", error)
    print("OTHER", AttentionConfig(backend="flash_attn").backend.name)
    register()  # as vLLM does once more
    """
    )
    returncode, output = run_python(code)
    _, refusal = run_python(code, VLLM_ATTENTION_BACKEND="JENGA_TRITON")

    assert returncode == 0, output[-4000:]
    assert "REPLACED [False, False]" in output
    assert "KNOWN False" in output
    assert re.search("SELECTED .*Unknown attention backend: 'JENGA_TRITON'", output, re.DOTALL)
    assert "OTHER FLASH_ATTN" in output
    assert f"JENGA_TRITON cannot be selected on this vLLM: {MISSING_NAME}" in output
    served = f"VLLM_ATTENTION_BACKEND=JENGA_TRITON cannot be served on this vLLM: {MISSING_NAME}"
    assert served in refusal


@pytest.mark.vllm
def test_what_selected_the_backend_before_a_name_was_missed_is_refused_with_the_reason():
    code = (
        WITHOUT_A_NAME.format(is_known_early=True)
        + """
    backend = held.backend.get_class()
    print("LAYER", backend.supports_combination(*[128, None, "auto"] + [None] * 6))
    try:
        pickle.loads(pickle.dumps(held))
    except ValueError as error:
        print("PROCESS", error)
    """
    )
    returncode, output = run_python(code)

    assert returncode == 0, output[-4000:]
    assert f"LAYER JENGA_TRITON cannot be selected on this vLLM: {MISSING_NAME}" in output
    assert f"PROCESS {MISSING_NAME}" in output
