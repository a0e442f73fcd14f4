"""A real engine that takes orders: `shared_engine_process.py OPTIONS`, as JSON.

A line of JSON on the standard input is a list of prompts and a number of tokens. The answer is a
line with the tokens of all of them. vLLM's engine core runs in a process of its own.
"""

import json
import os
import sys


def main():
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own output

    def answer(value):
        print(json.dumps(value), file=answers, flush=True)

    from vllm import LLM, SamplingParams

    llm = LLM(**options)
    answer("ready")
    for line in sys.stdin:
        prompts, num_tokens = json.loads(line)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        answer([list(output.outputs[0].token_ids) for output in outputs])


if __name__ == "__main__":
    main()
