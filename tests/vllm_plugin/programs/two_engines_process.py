"""Run real engines in one process: one alone, two in turns, one after these have ended.

Usage: two_engines_process.py JOB RESULT. The job has `models`, the folders of two models whose
layers have the same names. The first one's last step fails, between its orders and its layers.
"""

import gc
import json
import os
import sys
from pathlib import Path

from tests.vllm_plugin.programs.engine_process import prompts_of, runner_of, scheduler_of


def enqueue(llm, prompts, sampling):
    """Let requests wait in an engine."""
    llm.enqueue(prompts, sampling, use_tqdm=False)


def step(llm, answers):
    """Run a step of an engine; answers that are complete are added, by number of request."""
    for output in llm.llm_engine.step():
        if output.finished:
            number = int(output.request_id.split("-")[0])
            answers[number] = list(output.outputs[0].token_ids)


def generate(engines, prompts, sampling):
    """Get the answers of each of the engines, which run their steps in turns."""
    answers = [{} for _ in engines]
    for llm in engines:
        enqueue(llm, prompts, sampling)
    while any(llm.llm_engine.has_unfinished_requests() for llm in engines):
        for llm, of_engine in zip(engines, answers, strict=True):
            if llm.llm_engine.has_unfinished_requests():
                step(llm, of_engine)
    return [[of_engine[number] for number in sorted(of_engine)] for of_engine in answers]


def fail_between_orders_and_layers(llm, prompts, sampling):
    """Let a step of an engine fail once it has its orders; whether it did."""
    from jenga.vllm_plugin.layers.recurrent.mamba_builder import JengaMambaMetadataBuilder
    from jenga.vllm_plugin.worker.step_mailbox import builders_of, mailbox_of

    def fail(*_, **__):
        msg = "the builder fails"
        raise RuntimeError(msg)

    runner = runner_of(llm)
    for builder in builders_of(runner):
        if isinstance(builder, JengaMambaMetadataBuilder):
            builder.build = fail
    enqueue(llm, prompts, sampling)
    try:
        step(llm, {})
    except RuntimeError:
        return bool(mailbox_of(runner)._checkpoints)
    return False


def num_mailboxes():
    """Count the mailboxes of model runners, and the host memory, that are alive."""
    from jenga.vllm_plugin.worker.host_memory import HostMemory
    from jenga.vllm_plugin.worker.step_mailbox import StepMailbox

    gc.unfreeze()  # vLLM freezes what is there once an engine has started
    gc.collect()
    found = [type(each) for each in gc.get_objects()]
    return found.count(StepMailbox), found.count(HostMemory)


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(job.get("environment", {}))
    from vllm import LLM, SamplingParams

    options = {key: value for key, value in job["options"].items() if key != "model"}
    sampling = SamplingParams(
        temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False
    )
    prompts = prompts_of(job)
    path, other_path = job["models"]
    first = LLM(model=path, **options)
    alone = generate([first], prompts, sampling)
    second = LLM(model=other_path, **options)
    names = [
        set(runner_of(llm).compilation_config.static_forward_context) for llm in (first, second)
    ]
    together = generate([first, second], prompts, sampling)
    both = num_mailboxes()
    again = generate([second, first], prompts[::-1], sampling)
    unseen = {"prompt_token_ids": prompts[-1]["prompt_token_ids"][::-1]}
    has_failed = fail_between_orders_and_layers(first, [unseen], sampling)
    survived = generate([second], prompts, sampling)
    del first, second  # vLLM's groups of processes end with the first one to go
    gone = num_mailboxes()
    third = LLM(model=other_path, **options)
    last = generate([third], prompts, sampling)
    manager = scheduler_of(third).kv_cache_manager.manager
    manager.check()
    result = {
        "have_equal_names": names[0] == names[1],
        "alone": alone[0],
        "together": together,
        "again": [answers[::-1] for answers in again],
        "has_failed": has_failed,
        "second": [survived[0], last[0]],
        "mailboxes": [both, gone, num_mailboxes()],
        "hits": manager.cache_report().hit_tokens,
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
