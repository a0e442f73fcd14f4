"""A model built by vLLM's own classes without weights, a GPU or an engine.

The model is built on torch's meta device, where tensors have shapes and no memory. This permanently
changes vLLM's platform, the distributed groups and settings of the process.
"""

import functools
import json
import os
import tempfile
from collections.abc import Generator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jenga.models.options import KvFormat, ReadOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_CACHE_DTYPES = {KvFormat.MODEL: "auto", KvFormat.DS_MLA: "fp8_ds_mla"}
"""vLLM's names of the formats of keys and values that `KvFormat` names differently."""

_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_MODELSCOPE": "0",
    # Some classes ask for these GPU kernels when they are built.
    "VLLM_ENABLE_GEMM_RS": "0",
    "VLLM_KIMI_K3_GEMM_AR": "0",
}
"""Environment variables to set, so that nothing is downloaded and no GPU is touched.

An engine may be serving on the GPU.
"""

_DROPPED_FIELDS = frozenset({"auto_map", "compression_config", "quantization_config"})
"""Fields that are removed from a configuration, at every depth.

Quantisation of weights does not change a layer's cache, but needs GPU kernels. Code that comes with
a model is not run.
"""

_PLAIN_TYPES: set[str] = set()
"""Model types that only a model's own code knows. Each is registered once."""

_SMALL_ELEMENTS = 1 << 16
"""Largest number of elements of a tensor that gets memory.

It is used only for a class that reads the values of some tensors when it is built.
"""


def weightless_model(fields: Mapping[str, Any], options: ReadOptions) -> "VllmConfig":
    """Build a model, and get the configuration of an engine that would serve it.

    Its layers are in the configuration's `static_forward_context`. `have_no_device` must be called
    before vLLM is imported.

    Args:
        fields: Fields of the model's `config.json`.
        options: How the model is run.

    Raises:
        ValueError: The plugin does not serve the model with these options, or vLLM refuses it.
    """
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _prepare(fields, folder)
        try:
            return _built(folder, options, torch.device("meta"))
        except (NotImplementedError, RuntimeError) as error:
            if "meta tensor" not in str(error):
                raise
        # The model's class reads values of tensors when it is built.
        return _built(folder, options, _large_tensors_on_meta())


def _built(
    folder: Path, options: ReadOptions, device: AbstractContextManager[object]
) -> "VllmConfig":
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = _engine_config(folder, options)
    _be_one_of(options.tensor_parallel)
    with set_default_torch_dtype(config.model_config.dtype), device:
        initialize_model(config)
    return config


@contextmanager
def _large_tensors_on_meta() -> Generator[None]:
    """Give memory to small tensors only. Weights are large, and are not read here."""
    import torch
    from torch.overrides import TorchFunctionMode

    class LargeTensorsOnMeta(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Any,  # noqa: ANN401
            types: Any,  # noqa: ANN401
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:  # noqa: ANN401
            kwargs = kwargs or {}
            if func not in {torch.empty, torch.ones, torch.zeros}:
                return func(*args, **kwargs)
            without_memory = func(*args, **kwargs | {"device": "meta"})
            if without_memory.numel() > _SMALL_ELEMENTS:
                return without_memory
            return func(*args, **kwargs)

    with LargeTensorsOnMeta():
        yield


def _prepare(fields: Mapping[str, Any], folder: Path) -> None:
    """Write the configuration of a model without weights, and register its classes with vLLM.

    Raises:
        ValueError: The configuration names no architecture, and its model type has no usual one.
    """
    kept = _without(dict(fields), _DROPPED_FIELDS)
    model_type = kept.get("model_type")
    kept["architectures"] = kept.get("architectures") or _usual_architectures(model_type)
    if model_type is not None and not _is_known(model_type):
        _PLAIN_TYPES.add(model_type)
        _register_plain(model_type)
    if model_type in _PLAIN_TYPES and kept.get("use_sliding_window") is False:
        kept["sliding_window"] = None
    for architecture in kept["architectures"]:
        _import_class(architecture)
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")


def _without(value: object, names: Set[str]) -> Any:  # noqa: ANN401  JSON
    """Remove fields of some names, also from nested sections."""
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, object]", value)
    return {name: _without(each, names) for name, each in fields.items() if name not in names}


def _usual_architectures(model_type: str | None) -> list[str]:
    """Get the class in transformers that generates text with a model type.

    Raises:
        ValueError: There is none.
    """
    from transformers.models.auto import modeling_auto

    mappings = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    for names in cast("tuple[Mapping[str, Any], ...]", mappings):
        if model_type is not None and model_type in names:
            found = names[model_type]
            return [found if isinstance(found, str) else found[0]]
    msg = (
        "field 'architectures' must name a class that vLLM has, got nothing, and no class is usual "
        f"for model_type {model_type!r}"
    )
    raise ValueError(msg)


def _is_known(model_type: str) -> bool:
    """Whether vLLM or transformers has a configuration class of its own for a model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    return model_type in CONFIG_MAPPING or model_type in _CONFIG_REGISTRY


def _register_plain(model_type: str) -> None:
    """Register a plain configuration class for a model type that only a model's own code knows."""
    from transformers import AutoConfig

    AutoConfig.register(model_type, _plain_class(model_type))


def _plain_class(name: str) -> Any:  # noqa: ANN401  a class of transformers' configurations
    from transformers import AutoConfig, PreTrainedConfig

    class PlainConfig(PreTrainedConfig):
        model_type = name
        tie_word_embeddings = False  # often left out, and irrelevant to caches

        def __init__(self, **fields: Any) -> None:  # noqa: ANN401
            for field, value in fields.items():
                if field.endswith("_config") and isinstance(value, dict):
                    fields[field] = section(cast("dict[str, Any]", value))
                setattr(self, field, fields[field])
            super().__init__(**fields)

    def section(fields: dict[str, Any]) -> PreTrainedConfig:
        model_type = fields.get("model_type", "")
        known = AutoConfig.for_model if _is_known(model_type) else _plain_class(model_type)
        return known(**fields)

    return PlainConfig


def _import_class(architecture: str) -> None:
    """Import a model's class in this process. Otherwise vLLM starts another one to inspect it."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    fallbacks = [name for name in ModelRegistry.models if name.startswith("Transformers")]
    for name in [architecture] if architecture in ModelRegistry.models else fallbacks:
        model = ModelRegistry.models[name]
        if isinstance(model, _LazyRegisteredModel):
            ModelRegistry.register_model(name, model.load_model_cls())


def _engine_config(folder: Path, options: ReadOptions) -> "VllmConfig":
    """Get the configuration of an engine that serves the model.

    Raises:
        ValueError: See `weightless_model`.
    """
    from vllm.engine.arg_utils import EngineArgs

    from jenga.vllm_plugin.settings.environment import BACKEND_NAME, HISTORY_VARIABLE

    arguments: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enforce_eager": True,
        "language_model_only": True,
        "attention_backend": BACKEND_NAME,
        "dtype": options.model_dtype,
        "kv_cache_dtype": _CACHE_DTYPES.get(options.kv_format, options.kv_format.value),
        "mamba_ssm_cache_dtype": options.state_dtype or "auto",
        "tensor_parallel_size": options.tensor_parallel,
    }
    if options.draft_tokens:
        arguments["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": options.draft_tokens,
            "prompt_lookup_max": 2,
        }
    os.environ[HISTORY_VARIABLE] = str(options.history_tokens)
    return EngineArgs(**arguments).create_engine_config()


def have_no_device() -> None:
    """Give this process a platform without a GPU, and register the plugin.

    vLLM's CPU platform chooses the dtypes of states by the CPU's instructions. Here they stay as on
    a GPU.
    """
    os.environ.update(_ENVIRONMENT)
    for name in [each for each in os.environ if each.startswith("JENGA_")]:
        del os.environ[name]
    os.environ.pop("VLLM_ATTENTION_BACKEND", None)

    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    from jenga.vllm_plugin import register

    class NoDevicePlatform(CpuPlatform):
        @classmethod
        def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
            wanted = vllm_config.cache_config.mamba_ssm_cache_dtype
            super().check_and_update_config(vllm_config)
            vllm_config.cache_config.mamba_ssm_cache_dtype = wanted

    vllm.platforms.current_platform = NoDevicePlatform()
    register()


@functools.cache
def _be_alone() -> None:
    """Create vLLM's distributed groups, with this process as their only member."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{folder}/store",
            backend="gloo",
        )
        initialize_model_parallel()


def _be_one_of(num_ranks: int) -> None:
    """Act as the first of some tensor-parallel ranks. Layers only divide by the number of ranks."""
    from vllm.distributed.parallel_state import get_tp_group

    _be_alone()
    get_tp_group().world_size = num_ranks
