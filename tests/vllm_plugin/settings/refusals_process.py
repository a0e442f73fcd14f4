"""Configure engines that the plugin refuses, all in one process: cases as JSON in, messages out.

Usage: refusals_process.py CASES MESSAGES. A case has the arguments of an engine, and may have
variables of the environment, a platform of vLLM's by name, fields of the configuration to set once
it is made, or specs of layers to plan an arena for.
"""

import json
import os
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch


def specs_of(kinds):
    """Make vLLM's specs of two layers of attention, and of one layer of each recurrent kind."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    shape = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    specs = {f"layers.{i}.attn": FullAttentionSpec(block_size=16, **shape) for i in range(2)}
    for kind in kinds:
        specs[f"layers.{len(specs)}.mixer"] = MambaSpec(
            block_size=256,
            shapes=((4, 16), (16, 16)),
            dtypes=(torch.float32, torch.float32),
            mamba_type=MambaAttentionBackendEnum[kind],
            mamba_cache_mode="none",
        )
    return specs


@contextmanager
def platform(name):
    """Have vLLM believe that it runs on a platform of this name, which is none that it knows."""
    from vllm.platforms import current_platform

    names = {"device_name": name, "is_cpu": lambda _: False, "is_cuda": lambda _: False}
    with patch.multiple(type(current_platform), **names):
        yield


def run(case):
    """Configure the engine of a case, as far as it comes."""
    from vllm.engine.arg_utils import EngineArgs

    from jenga.vllm_plugin.arena.layout import get_kv_cache_config_from_groups, get_kv_cache_groups
    from jenga.vllm_plugin.arena.starts import check_longest_request
    from jenga.vllm_plugin.config import prepare_config

    common = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "skip_tokenizer_init": True,
        "attention_backend": "JENGA_TRITON",
    }
    with platform(case["platform"]) if "platform" in case else nullcontext():
        config = EngineArgs(**common | case["options"]).create_engine_config()
    for path, value in case.get("fields", {}).items():
        *parents, name = path.split(".")
        owner = config
        for parent in parents:
            owner = getattr(owner, parent)
        object.__setattr__(owner, name, value)
    if "fields" in case:
        prepare_config(config)
    if "states" in case:
        specs = specs_of(case["states"])
        groups = get_kv_cache_groups(config, specs)
        check_longest_request(config, groups, [specs], [32 << 20])
        get_kv_cache_config_from_groups(config, groups, 32 << 20)


def main():
    messages = {}
    for name, case in json.loads(Path(sys.argv[1]).read_text()).items():
        os.environ.update(case.get("environment", {}))
        try:
            run(case)
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
        else:
            messages[name] = "accepted"
        for variable in case.get("environment", {}):
            del os.environ[variable]
    Path(sys.argv[2]).write_text(json.dumps(messages))


if __name__ == "__main__":
    main()
