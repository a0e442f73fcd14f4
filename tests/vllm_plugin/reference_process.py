"""Generate greedily with transformers, for a model that stock vLLM cannot run on this machine.

Takes the job of engine_process.py and gives its result. Usage: reference_process.py JOB RESULT.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.vllm_plugin.engine_process import audio_of_seed


def generate(model, prompt, max_tokens, **encoder_inputs):
    """Choose the likeliest token again and again, each time from the whole sequence."""
    tokens, logprobs = list(prompt), []
    name = "decoder_input_ids" if encoder_inputs else "input_ids"
    for _ in range(max_tokens):
        inputs = {name: torch.tensor([tokens])} | encoder_inputs
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits[0, -1]
        top = logits.float().log_softmax(-1).topk(5)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        logprobs.append({str(token): value for token, value in pairs})
        tokens.append(int(top.indices[0]))
    return {"tokens": tokens[len(prompt) :], "logprobs": logprobs}


def inputs_of_audio(path, seed):
    """Make what an encoder reads of one second of audio."""
    samples, rate = audio_of_seed(seed)
    extractor = AutoProcessor.from_pretrained(path).feature_extractor
    features = extractor(samples, sampling_rate=rate, return_tensors="pt")
    return {"input_features": features.input_features}


def store_in_fp8(path):
    """Make attention see keys and values as a float8_e4m3fn cache returns them.

    Args:
        path: The model's directory; scales are taken from its checkpoint, where it has some.
    """
    tensors = load_file(path / "model.safetensors")
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def stored(states, scale):
        return (states / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    def attend_to_stored(module, query, key, value, *args, **kwargs):
        prefix = f"model.layers.{module.layer_idx}.self_attn"
        k_scale = tensors.get(f"{prefix}.k_scale", torch.ones(1, 1, 1))
        v_scale = tensors.get(f"{prefix}.v_scale", torch.ones(1, 1, 1))
        key, value = stored(key, k_scale), stored(value, v_scale)
        return attend(module, query, key, value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("sdpa", attend_to_stored)


def main():
    torch.set_num_threads(1)  # its loops over tokens do too little at a time for more
    job = json.loads(Path(sys.argv[1]).read_text())
    path = Path(job["options"]["model"])
    config = AutoConfig.from_pretrained(path)
    if job.get("fp8_cache"):
        store_in_fp8(path)
        config.quantization_config = None  # of the cache alone
    seeds = job.get("audio_seeds")
    make = AutoModelForSpeechSeq2Seq if seeds else AutoModelForCausalLM
    model = make.from_pretrained(path, config=config, dtype=torch.float32).eval()
    inputs = [inputs_of_audio(path, seed) for seed in seeds or ()] or [{}] * len(job["prompts"])
    prompts, outputs = job["prompts"], []
    for turn in [[], *job.get("turns", [])]:
        if outputs:
            answers = [output["tokens"] for output in outputs[-len(prompts) :]]
            prompts = [
                [*prompt, *answer, *turn] for prompt, answer in zip(prompts, answers, strict=True)
            ]
        outputs += [
            generate(model, prompt, job["max_tokens"], **encoder_inputs)
            for prompt, encoder_inputs in zip(prompts, inputs, strict=True)
        ]
    Path(sys.argv[2]).write_text(json.dumps({"outputs": outputs}))


if __name__ == "__main__":
    main()
