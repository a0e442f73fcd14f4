"""The scratch to which a step's prompts restore quantised keys and values, one for each process.

Before vLLM lays out the arena, it profiles memory with a step of the longest prompts. Layers
allocate the scratch in that step, so that it counts as memory that the arena does not get.
"""

import functools
from typing import TYPE_CHECKING

import torch

from jenga_kernels.plans.attention_plan import AttentionPlan
from jenga_kernels.plans.scratch_plan import ScratchPlan, plan_scratch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


def scratch_on(device: torch.device, num_bytes: int) -> torch.Tensor:
    """Get the scratch of this process, u8[num_bytes]. The first call allocates it.

    Layers run one after another, and each overwrites what the one before has left. So all layers
    share it.

    Args:
        device: Device of the layers.
        num_bytes: Value of `JENGA_PROMPT_SCRATCH_BYTES`, above 0.
    """
    # A device without an index is the current one.
    return _allocated(torch.empty(0, device=device).device, num_bytes)


@functools.lru_cache(maxsize=1)
def _allocated(device: torch.device, num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def plan_of_step(
    plan: AttentionPlan,
    common: "CommonAttentionMetadata",
    *,
    scratch_bytes: int,
    is_warp_specialized: bool | None,
) -> ScratchPlan | None:
    """Plan the prompts of a step through the scratch. None if they read the arena's pages.

    Args:
        plan: Plan of the step over the arena's pages, which are quantised.
        common: vLLM's metadata of the step.
        scratch_bytes: Bytes of the scratch.
        is_warp_specialized: As in `plan_attention`, for the prompts.
    """
    bounds = common.seq_lens_cpu_upper_bound
    if bounds is None or not plan.max_row_tiles:
        return None
    counts = common.query_start_loc_cpu.diff().tolist()
    return plan_scratch(
        plan,
        common.query_start_loc,
        common.seq_lens,
        requests=list(zip(counts, bounds[: len(counts)].tolist(), strict=True)),
        scratch_bytes=scratch_bytes,
        is_warp_specialized=is_warp_specialized,
    )
