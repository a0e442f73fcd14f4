"""Serve with kernels for Hopper that have passed trials on the engine's own calls, emulated.

Usage: tried_process.py JOB RESULT. The trials are held in this process, which notes what either
launches.
"""

import json
import os
import sys
from pathlib import Path

from tests.vllm_plugin.programs.calls_process import measure_as_on_a_gpu
from tests.vllm_plugin.programs.engine_process import _result, prompts_of

OF_A_STEP = ("stride_table_request", "stride_segment_states")
"""Strides of what is made for a step."""


def note_launches():
    """Get a list that grows by the kernels for Hopper that are launched, and by what they take."""
    from jenga_kernels.launches import Call

    launch, launched = Call._launch, []

    def noted(self, kernel, grid, arguments):
        name = kernel.fn.__name__
        if "hopper" in name or "special" in name:
            launched.append([name, sorted(map(str, facts_of(arguments)))])
        return launch(self, kernel, grid, arguments)

    Call._launch = noted
    return launched


def facts_of(arguments):
    """What of a launch does not follow from a step's numbers of requests and tokens."""
    import torch

    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield name, str(value.dtype)
        elif name.endswith("_descriptor") and value is not None:
            yield name, str(value.layout), list(value.block_shape), [int(x) for x in value.strides]
        elif name not in OF_A_STEP and (
            value is None or name.isupper() or name.startswith("stride_")
        ):
            yield name, value


def hold_trials_here(launched):
    """Let trials be held in this process, on its emulated GPU; get what was tried, and came of it.

    Args:
        launched: What grows as kernels are launched.
    """
    import torch

    from jenga.vllm_plugin.trials import tried_kernels
    from jenga_kernels.trials import Verdict, arena_for, hold_trial

    tried = []

    def hold(calls, device, *, limit_s):
        assert limit_s > 0
        arena, before = arena_for(calls, device), len(launched)
        for call in calls:
            hold_trial(call, arena, num_launches=1)
        tried.extend(launched[before:])
        del launched[:]
        return [Verdict(operation=call.operation, is_passed=True) for call in calls]

    tried_kernels.has_trials = lambda _: True
    tried_kernels.hold_trials_apart = hold
    torch.cuda.get_device_name = lambda _: "an emulated Hopper"
    return tried


def main():
    from tests import conftest  # noqa: F401 - kernels run in the emulated GPU from here on

    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ["JENGA_CACHE"] = str(Path(sys.argv[2]).parent)
    measure_as_on_a_gpu()
    from vllm import LLM, SamplingParams

    launched = note_launches()
    tried = hold_trials_here(launched)
    llm = LLM(**job["options"])
    sampling = SamplingParams(
        temperature=0.0, max_tokens=job["max_tokens"], logprobs=5, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(prompts_of(job), sampling, use_tqdm=False)
    Path(sys.argv[2]).write_text(
        json.dumps({"outputs": _result(outputs), "tried": tried, "launched": launched})
    )


if __name__ == "__main__":
    main()
