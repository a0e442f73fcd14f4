"""Generate greedily with transformers' Llama 3.2 Vision, corrected as Meta's code has it.

Takes the job of engine_process.py and gives its result. Usage: mllama_reference.py JOB RESULT.

In transformers, text before an image attends to the image (huggingface/transformers#39379). Here
these rows get nothing from layers of cross attention.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoProcessor, MllamaForConditionalGeneration
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from tests.vllm_plugin.programs.engine_process import image_of_seed


class Reference:
    """The model, whose layers of cross attention give nothing to rows that read no image."""

    def __init__(self, path):
        self.model = MllamaForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
        self.model.eval()
        self.processor = AutoProcessor.from_pretrained(path)
        self.image_token = self.model.config.image_token_index
        self.reads = None
        for layer in self.model.model.language_model.layers:
            if hasattr(layer, "cross_attn"):
                layer.cross_attn.register_forward_hook(self._only_rows_that_read)

    def _only_rows_that_read(self, _module, _inputs, output):
        attended, *others = output
        return (attended * self.reads, *others)

    @torch.no_grad()
    def encode(self, images):
        """Get the states that text attends to, and the number of tiles of each image."""
        read = dict(self.processor.image_processor([images], return_tensors="pt"))
        num_tiles = read.pop("num_tiles")
        inner = self.model.model
        states = inner.multi_modal_projector(inner.vision_model(**read).last_hidden_state)
        return states.flatten(0, 2), num_tiles

    @torch.no_grad()
    def logits(self, tokens, states=None, num_tiles=()):
        """Get the logits of the token after each one, [num_tokens, vocab_size]."""
        given = {"input_ids": torch.tensor([tokens])}
        if states is not None:
            mask = convert_sparse_cross_attention_mask_to_dense(
                [get_cross_attention_token_mask(tokens, self.image_token)],
                num_tiles=num_tiles,
                max_num_tiles=self.model.config.vision_config.max_num_tiles,
                length=len(tokens),
            )
            given |= {"cross_attention_states": states, "cross_attention_mask": torch.tensor(mask)}
            self.reads = torch.tensor(mask).flatten(2).any(2)[:, :, None]
        return self.model(**given, use_cache=False).logits[0]

    def generate(self, prompt, seeds, max_tokens):
        """Choose the likeliest token again and again, each time from the whole sequence."""
        encoded = self.encode([image_of_seed(seed) for seed in seeds]) if seeds else ()
        tokens, logprobs = list(prompt), []
        for _ in range(max_tokens):
            scores = self.logits(tokens, *encoded).log_softmax(-1)
            top = scores[-1].topk(5)
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            logprobs.append({str(token): value for token, value in pairs})
            tokens.append(int(top.indices[0]))
        return {
            "tokens": tokens[len(prompt) :],
            "logprobs": logprobs,
            "prompt_logprobs": self.scores_of(prompt[1:], scores),
        }

    def scores_of(self, tokens, scores):
        """Look up the log-probability of each of the tokens. That of an image is never chosen."""
        return [
            float("-inf") if token == self.image_token else float(row[token])
            for token, row in zip(tokens, scores, strict=False)
        ]


def main():
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    reference = Reference(job["options"]["model"])
    pairs = zip(job["prompts"], job["image_seeds"], strict=True)
    outputs = [reference.generate(*pair, job["max_tokens"]) for pair in pairs]
    Path(sys.argv[2]).write_text(json.dumps({"outputs": outputs}))


if __name__ == "__main__":
    main()
