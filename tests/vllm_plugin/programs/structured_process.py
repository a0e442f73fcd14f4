"""Run one real vLLM engine whose answers must have given forms: a job as JSON in, a result out.

A job has the form of each prompt: a keyword of vLLM's `StructuredOutputsParams`, or none. Usage:
structured_process.py JOB RESULT.
"""

import json
import sys
from math import inf
from pathlib import Path

from tests.vllm_plugin.programs.engine_process import (
    _result,
    check_each_step,
    count_drafts,
    fill_arenas,
    scheduler_of,
)


def sampling_of(form, max_tokens):
    """Make the sampling parameters of a request: greedy, in a form."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        logprobs=5,
        structured_outputs=StructuredOutputsParams(**form) if form else None,
    )


def possible(logprobs):
    """Leave out the tokens that a form forbids, of each position of an answer."""
    return [{token: each for token, each in at.items() if each > -inf} for at in logprobs]


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM

    llm = LLM(**job["options"])
    drafts = count_drafts(llm)
    if job.get("fill_arena"):
        fill_arenas(llm, job["options"])
        check_each_step(llm)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    sampling = [sampling_of(form, job["max_tokens"]) for form in job["forms"]]
    outputs = []
    for _ in range(job["rounds"]):
        outputs += llm.generate(prompts, sampling, use_tqdm=False)
    answers = _result(outputs)
    for answer in answers:
        answer["logprobs"] = possible(answer["logprobs"])
    result = {
        "outputs": answers,
        "texts": [output.outputs[0].text for output in outputs],
        "drafts": [drafts.get(number, (0, 0)) for number in range(len(outputs))],
    }
    if job.get("fill_arena"):
        manager = scheduler_of(llm).kv_cache_manager.manager
        manager.check()
        result["request_tokens"] = manager.request_tokens()
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
