"""Let a real engine sleep between its requests and amid them, in a process of its own.

A GPU gives back what the cache lies in and gets other memory of unknown content for it. A CPU's
worker ignores the call, so the content is changed here. Usage: sleep_process.py JOB RESULT.
"""

import json
import os
import sys
from pathlib import Path

from tests.vllm_plugin.programs.engine_process import (
    NAN_BYTE,
    _result,
    count_graphs,
    count_preemptions,
    divide_decoding,
    fill_arenas,
    prompts_of,
    runner_of,
    scheduler_of,
)


def fill_host_memory(llm):
    """Fill what was evicted with NaN, if there is host memory."""
    from jenga.vllm_plugin.worker.step_mailbox import mailbox_of

    if scheduler_of(llm).kv_cache_manager.manager.host_report() is not None:
        mailbox_of(runner_of(llm)).host_memory.memory.fill_(NAN_BYTE - 256)


def sleep_once(llm, options, *, level, mode):
    """Sleep, lose what the cache held, wake up part by part."""
    llm.sleep(level=level, mode=mode)
    manager = scheduler_of(llm).kv_cache_manager.manager
    manager.check()
    assert manager.request_tokens() == {}
    fill_arenas(llm, options)
    fill_host_memory(llm)
    assert not llm.wake_up(tags=["weights"])
    llm.wake_up()


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(job.get("environment", {}))
    from vllm import LLM, SamplingParams

    from tests.vllm_plugin.engine.emulated_graphs import emulate_graphs, start_as_on_a_gpu

    is_emulating = job.get("captures") and os.environ.get("TRITON_INTERPRET") == "1"
    if is_emulating:
        emulate_graphs()
        divide_decoding(5)
    llm = LLM(**job["options"])
    if is_emulating:
        start_as_on_a_gpu(llm)
    replays = count_graphs(llm) if job.get("captures") else {}
    preemptions = count_preemptions(llm)
    fill_arenas(llm, job["options"])
    sampling = SamplingParams(
        temperature=0.0, max_tokens=job["max_tokens"], logprobs=5, ignore_eos=True, detokenize=False
    )
    prompts, outputs, asleep_with = prompts_of(job), [], []
    for sleep in job["sleeps"]:
        llm.enqueue(prompts, sampling, use_tqdm=False)
        done = []
        for _ in range(sleep.get("after_steps", 0)):
            done += llm.llm_engine.step()
        if sleep["mode"] == "keep":
            asleep_with.append(len(scheduler_of(llm).running))
            sleep_once(llm, job["options"], **{name: sleep[name] for name in ("level", "mode")})
        done = [output for output in done if output.finished]
        done += llm.wait_for_completion(use_tqdm=False)
        outputs += sorted(done, key=lambda output: int(output.request_id.split("-")[0]))
        if sleep["mode"] == "abort":
            sleep_once(llm, job["options"], **{name: sleep[name] for name in ("level", "mode")})
    manager = scheduler_of(llm).kv_cache_manager.manager
    manager.check()
    result = {
        "outputs": _result(outputs),
        "replays": replays,
        "asleep_with": asleep_with,
        "preemptions": len(preemptions),
        "num_host_bytes": host.stored_bytes if (host := manager.host_report()) else 0,
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
