"""Generate greedily with transformers, for a model that stock vLLM cannot run on this machine.

Takes the job of engine_process.py and gives its result. Usage: reference_process.py JOB RESULT.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def generate(model, prompt, max_tokens):
    """Choose the likeliest token again and again, each time from the whole sequence."""
    tokens, logprobs = list(prompt), []
    for _ in range(max_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        top = logits.float().log_softmax(-1).topk(5)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        logprobs.append({str(token): value for token, value in pairs})
        tokens.append(int(top.indices[0]))
    return {"tokens": tokens[len(prompt) :], "logprobs": logprobs}


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    model = AutoModelForCausalLM.from_pretrained(job["options"]["model"], dtype=torch.float32)
    outputs = [generate(model.eval(), prompt, job["max_tokens"]) for prompt in job["prompts"]]
    Path(sys.argv[2]).write_text(json.dumps({"outputs": outputs}))


if __name__ == "__main__":
    main()
