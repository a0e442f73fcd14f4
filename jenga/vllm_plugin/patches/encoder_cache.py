"""Replaced names of vLLM's workers that tell them in which pages a step's images are."""

import functools
from typing import Any

from jenga.vllm_plugin.patches.patch import Function, Replacement


def _begins_step(original: Function) -> Function:
    @functools.wraps(original)
    def begin_step(self: Any, scheduler_output: Any) -> Any:  # noqa: ANN401
        embeddings = getattr(self, "jenga_embeddings", None)
        if embeddings is not None:
            embeddings.begin_step(scheduler_output.ec_manager_metadata)
        return original(self, scheduler_output)

    return begin_step


ENCODER_CACHE = tuple(
    Replacement(
        module=module,
        name=f"GPUModelRunner.{name}",
        reason="frees encoder outputs before a step; ours are where the scheduler says",
        parameters=("self", "scheduler_output"),
        make=_begins_step,
    )
    for module, name in (
        ("vllm.v1.worker.gpu_model_runner", "_process_encoder_cache_scheduler_output"),
        ("vllm.v1.worker.gpu.model_runner", "free_states"),
    )
)
"""Replacements in vLLM's model runners, applied with those of `workers`."""
