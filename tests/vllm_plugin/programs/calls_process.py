"""Note what layers of real engines are to have tried, and the calls they then make.

Usage: calls_process.py JOB RESULT. The job has `models`, folders, each served by an engine of its
own, one after the other.
"""

import gc
import inspect
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from tests.vllm_plugin.programs.engine_process import prompts_of, runner_of

NOT_GIVEN = ("decode_query_tokens", "reads_spans")
"""Of a described call, what the operation is told by its plan."""


def measure_as_on_a_gpu():
    """Let a worker measure memory with the model's layers, as it does on a GPU."""
    import vllm.v1.worker.cpu.shm  # noqa: F401  first, because it replaces names of torch.cuda
    from vllm.v1.worker.cpu_worker import CPUWorker

    original = CPUWorker.determine_available_memory

    def determine_available_memory(self):
        self.model_runner.profile_run()
        return original(self)

    CPUWorker.determine_available_memory = determine_available_memory


def note_calls(names):
    """Get a mapping that grows: operation -> descriptions of the calls that layers make.

    Args:
        names: Operation -> arguments to describe.
    """
    from jenga.vllm_plugin.layers.attention import backend as attention
    from jenga.vllm_plugin.layers.attention import latent
    from jenga.vllm_plugin.layers.recurrent import gated_delta, mamba
    from jenga_kernels.trial_calls import Call

    modules = {"paged_attention": attention, "latent_attention": latent}
    steps = {"state_scan": mamba.Recurrence, "delta_scan": gated_delta.DeltaRule}
    made = {}
    for operation in [*modules, *steps]:
        if operation in modules:
            original = getattr(modules[operation], operation)
        else:
            original = steps[operation].operations.scan
        original = inspect.unwrap(original)
        signature = inspect.signature(original)

        def noted(*args, operation=operation, original=original, signature=signature, **kwargs):
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            wanted = [name for name in names.get(operation, ()) if name in given.arguments]
            call = Call.of(operation, **{name: given.arguments[name] for name in wanted})
            made.setdefault(operation, {})[call.key] = call.to_json()
            return original(*args, **kwargs)

        noted.__wrapped__ = original
        if operation in modules:
            setattr(modules[operation], operation, noted)
        else:
            step = steps[operation]
            step.operations = replace(step.operations, scan=noted)
    return made


def described(llm):
    """Get the calls that builders of an engine's layers would have tried, and their arguments."""
    from jenga.vllm_plugin.trials.tried_kernels import TriesKernels
    from jenga.vllm_plugin.worker.step_mailbox import builders_of
    from jenga_kernels.trial_calls import Call

    calls, names = {}, {}
    for builder in builders_of(runner_of(llm)):
        if isinstance(builder, TriesKernels):
            for call in builder.calls():
                given = {
                    name: value for name, value in call.arguments.items() if name not in NOT_GIVEN
                }
                told = Call(operation=call.operation, arguments=given)
                calls.setdefault(call.operation, {})[told.key] = told.to_json()
                names[call.operation] = list(given)
    return calls, names


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(job.get("environment", {}))
    measure_as_on_a_gpu()
    from vllm import LLM, SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
    results = {}
    for model in job["models"]:
        llm = LLM(**job["options"] | {"model": model})
        told, names = described(llm)
        made = note_calls(names)
        llm.generate(prompts_of(job), sampling, use_tqdm=False)
        results[Path(model).name] = {"told": told, "made": made}
        del llm
        gc.unfreeze()
        gc.collect()
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
