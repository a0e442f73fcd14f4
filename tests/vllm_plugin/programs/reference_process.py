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
    AutoModelForImageTextToText,
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from jenga_kernels.attention.rotation import hadamard_rotation
from jenga_kernels.checks.tensors import INT4_DTYPE
from jenga_kernels.reference.attention.kv_store import quantised, quantised_int4
from jenga_kernels.reference.attention.paged_attention import from_int4
from tests.vllm_plugin.programs.engine_process import audio_of_seed, image_of_seed


def generate(model, prompt, max_tokens, *, name="input_ids", token_types=None, **inputs):
    """Choose the likeliest token again and again, each time from the whole sequence.

    Args:
        model: Of transformers.
        prompt: Its tokens.
        max_tokens: How many to choose.
        name: What the model calls them.
        token_types: Name of what says which tokens of the prompt are an image's, and this. The last
            one is that of tokens which the model chooses.
        inputs: What else it reads.
    """
    tokens, logprobs = list(prompt), []
    for _ in range(max_tokens):
        given = {name: torch.tensor([tokens])} | inputs
        for type_name, types in (token_types or {}).items():
            given[type_name] = torch.tensor([types + types[-1:] * (len(tokens) - len(types))])
        with torch.no_grad():
            logits = model(**given, use_cache=False).logits[0, -1]
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
    return {"input_features": features.input_features, "name": "decoder_input_ids"}


def with_images(processor, prompt, seeds):
    """Put the tokens of images where a prompt has a placeholder for each.

    PaliGemma has one image, before the prompt. By its published processor, all tokens of a prompt
    read each other. vLLM lets only those of the image do so, and so does this.

    Returns:
        The longer prompt, and what the model reads of the images.
    """
    if not seeds:
        return prompt, {}
    placeholder = processor.image_token  # Gemma 3's is that of an image's start
    (number,) = processor.tokenizer.convert_tokens_to_ids([placeholder])
    images = [image_of_seed(seed) for seed in seeds]
    read = processor(text=placeholder * len(images), images=images, return_tensors="pt")
    one = processor(text=placeholder, images=images[:1])
    inputs = {name: read[name] for name in ("pixel_values", "image_position_ids") if name in read}
    if type(processor).__name__ == "PaliGemmaProcessor":
        tokens = [*one["input_ids"][0][:-1], *prompt]  # without its line feed
        types = [int(token != number) for token in tokens]  # 0 for those that read each other
        return tokens, inputs | {"token_types": {"token_type_ids": types}}
    (type_name,) = [name for name in read if name.endswith("token_type_ids")]
    tokens, types = [], []
    for token in prompt:
        is_image = token == number
        tokens += one["input_ids"][0] if is_image else [token]
        types += one[type_name][0] if is_image else [0]
    return tokens, inputs | {"token_types": {type_name: types}}


def stored_in_fp8(rows, scale, dtype=torch.float8_e4m3fn):
    """Round to what a float8 cache with this scale holds."""
    most = torch.finfo(dtype).max
    return (rows / scale).clamp(-most, most).to(dtype).float() * scale


def stored_with_slot_scales(rows, dtype):
    """Round to what a cache of `dtype` with a scale for each slot and head holds."""
    heads = rows.reshape(-1, rows.shape[-1])
    if dtype == INT4_DTYPE:
        rotation = hadamard_rotation(rows.shape[-1], rows.dtype, rows.device)
        heads = from_int4(*quantised_int4(heads @ rotation.forward), rows.dtype) @ rotation.back
    else:
        stored, scales = quantised(heads, dtype)
        heads = stored.float() * scales[:, None]
    return heads.reshape(rows.shape)


def store_with_slot_scales(dtype, kept_layers=()):
    """Make attention see keys and values as such a cache returns them, but in `kept_layers`."""
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend_to_stored(module, query, key, value, *args, **kwargs):
        # Encoders store nothing.
        if getattr(module, "is_decoder", True) and module.layer_idx not in kept_layers:
            key, value = (stored_with_slot_scales(rows, dtype) for rows in (key, value))
        return attend(module, query, key, value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("sdpa", attend_to_stored)


def store_in_fp8(path, dtype):
    """Make attention see keys and values as a float8 cache returns them.

    Args:
        path: The model's directory; scales are taken from its checkpoint, where it has some.
        dtype: Of the cache.
    """
    tensors = load_file(path / "model.safetensors")
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend_to_stored(module, query, key, value, *args, **kwargs):
        prefix = f"model.layers.{module.layer_idx}.self_attn"
        k_scale = tensors.get(f"{prefix}.k_scale", torch.ones(1, 1, 1))
        v_scale = tensors.get(f"{prefix}.v_scale", torch.ones(1, 1, 1))
        key, value = stored_in_fp8(key, k_scale, dtype), stored_in_fp8(value, v_scale, dtype)
        return attend(module, query, key, value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("sdpa", attend_to_stored)


def store_latents_in_fp8(scales):
    """Make latent attention see latents and rotary keys as a float8_e4m3fn cache returns them.

    Args:
        scales: Of each layer.
    """
    expand = DeepseekV3Attention.expand_kv

    def expand_stored(self, latents, rotary_keys):
        scale = scales[self.layer_idx]
        return expand(self, *(stored_in_fp8(rows, scale) for rows in (latents, rotary_keys)))

    DeepseekV3Attention.expand_kv = expand_stored


def main():
    torch.set_num_threads(1)  # its loops over tokens do too little at a time for more
    job = json.loads(Path(sys.argv[1]).read_text())
    path = Path(job["options"]["model"])
    config = AutoConfig.from_pretrained(path)
    if job.get("fp8_cache"):
        store_in_fp8(path, getattr(torch, job["fp8_cache"]))
        config.quantization_config = None  # of the cache alone
    if job.get("slot_scales"):
        store_with_slot_scales(getattr(torch, job["slot_scales"]), job.get("kept_layers", ()))
    if job.get("latent_scales"):
        store_latents_in_fp8(job["latent_scales"])
    audio_seeds, image_seeds = job.get("audio_seeds"), job.get("image_seeds")
    make = AutoModelForCausalLM
    if audio_seeds or image_seeds:
        make = AutoModelForSpeechSeq2Seq if audio_seeds else AutoModelForImageTextToText
    # By default, transformers attends in PyTorch's kernel, which leaves out Gemma 2's soft cap.
    attention = {"attn_implementation": "eager"} if config.model_type == "paligemma" else {}
    model = make.from_pretrained(path, config=config, dtype=torch.float32, **attention).eval()
    prompts, outputs = job["prompts"], []
    inputs = [inputs_of_audio(path, seed) for seed in audio_seeds or ()] or [{}] * len(prompts)
    if image_seeds:
        processor = AutoProcessor.from_pretrained(path)
        pairs = zip(prompts, image_seeds, strict=True)
        prompts, inputs = zip(*[with_images(processor, *pair) for pair in pairs], strict=True)
    for turn in [[], *job.get("turns", [])]:
        if outputs:
            answers = [output["tokens"] for output in outputs[-len(prompts) :]]
            prompts = [
                [*prompt, *answer, *turn] for prompt, answer in zip(prompts, answers, strict=True)
            ]
        outputs += [
            generate(model, prompt, job["max_tokens"], **its_inputs)
            for prompt, its_inputs in zip(prompts, inputs, strict=True)
        ]
    Path(sys.argv[2]).write_text(json.dumps({"outputs": outputs}))


if __name__ == "__main__":
    main()
