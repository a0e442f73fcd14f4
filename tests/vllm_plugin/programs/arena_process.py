"""Generate with the real engine and compare its whole arena, byte by byte, with what must be in it.

The arena is filled with a byte pattern first. Every key and value that a layer is given to store is
recorded on its way in, with its request position and the page ids that the manager gave the
request. Where each must lie is then worked out from the geometry alone, in plain integers, and all
other bytes must be the pattern still.
"""

import json
import os
import sys
from pathlib import Path

import torch

from tests.vllm_plugin.programs.engine_process import arena_of, prompts_of_lengths

PATTERN = 0xA5


class Recorder:
    """Remembers what each layer stored: (layer, page id, slot in page) -> (key, value)."""

    def __init__(self):
        self.stored = {}
        self.num_stores = 0

    def __call__(self, original):
        def do_kv_cache_update(impl, layer, key, value, kv_cache, slot_mapping):
            page_tokens = kv_cache.shape[2]
            for index, slot in enumerate(slot_mapping.tolist()):
                place = (layer.layer_name, slot // page_tokens, slot % page_tokens)
                self.stored[place] = (key[index].clone(), value[index].clone())
                self.num_stores += 1
            original(impl, layer, key, value, kv_cache, slot_mapping)

        return do_kv_cache_update


def place_bytes(expected, geometry, stored):
    """Write every stored key and value to its address, heads outermost within a layer's part."""
    from jenga.vllm_plugin.specs.layer_types import layer_names

    tables = {
        name: (table, offset)
        for table in geometry.page_tables
        for name, offset in zip(layer_names(table), table.layer_offset_bytes, strict=True)
    }
    addresses = set()
    for (name, page_id, slot), (key, value) in stored.items():
        table, layer_offset = tables[name]
        page_start = page_id * table.small_page_bytes + layer_offset
        for head in range(key.shape[0]):
            row = torch.cat([key[head], value[head]]).contiguous().view(torch.uint8)
            address = page_start + (head * table.tokens_per_page + slot) * row.numel()
            expected[address : address + row.numel()] = row
            addresses.add(address)
    return addresses


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(job.get("environment", {}))
    from vllm import LLM, SamplingParams

    from jenga.vllm_plugin.layers.attention.backend import JengaTritonImpl

    llm = LLM(**job["options"])
    recorder = Recorder()
    JengaTritonImpl.do_kv_cache_update = recorder(JengaTritonImpl.do_kv_cache_update)
    arena = arena_of(llm)
    arena.fill_(PATTERN)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": p} for p in prompts_of_lengths((19, 70), seed=3)]
    llm.generate(prompts, sampling, use_tqdm=False)

    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.manager
    expected = torch.full_like(arena, PATTERN)
    addresses = place_bytes(expected, manager.geometry, recorder.stored)
    result = {
        "arena_bytes": arena.numel(),
        "stores": recorder.num_stores,
        "layers": len({name for name, _, _ in recorder.stored}),
        "lowest_address": min(addresses),
        "large_page_bytes": manager.geometry.large_page_bytes,
        "differing_bytes": int((arena != expected).sum()),
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
