"""Real engines that take orders: `shared_engine_process.py OPTIONS FOLDER GUARANTEE`.

The options are JSON. A line of JSON on the standard input is [what to do, prompts, tokens], and the
answer is a line of JSON. "alone" asks an engine with an arena of its own. "generate" asks one that
shares the arena in the folder, which the first such order starts. "rest" lets it do what an engine
does while it has no work, and tells how many large pages it has.
"""

import gc
import json
import os
import sys

from tests.broker import fake_cuda


def generate(llm, prompts, num_tokens):
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def share_memory_of_no_gpu():
    """Let engines on a CPU share an arena of the CUDA driver without a GPU."""
    from jenga.vllm_plugin.arena import joined
    from jenga.vllm_plugin.settings import shared_arena

    shared_arena._check_memory = lambda _: None
    joined._tensor_over = lambda mapped, _: fake_cuda.tensor_over(mapped)


def main():
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own output

    def answer(value):
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    from vllm import LLM

    if fake_cuda.FOLDER_VARIABLE in os.environ:
        share_memory_of_no_gpu()
    llm = LLM(**options)
    is_shared = False
    for line in sys.stdin:
        action, prompts, num_tokens = json.loads(line)
        if action == "generate" and not is_shared:
            is_shared = True
            del llm
            gc.collect()
            os.environ["JENGA_SHARED_ARENA"] = sys.argv[2]
            os.environ["JENGA_SHARED_ARENA_GUARANTEE"] = sys.argv[3]
            llm = LLM(**options)
        if action == "rest":
            cache_manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
            cache_manager.rest()
            cache_manager.manager.check()
            answer(cache_manager.manager.num_large_pages - 1)
        else:
            answer(generate(llm, prompts, num_tokens))


if __name__ == "__main__":
    main()
