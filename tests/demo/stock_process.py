"""Replay timelines on vLLM's manager, in a process of its own: vLLM's imports stay out of pytest's.

Usage: stock_process.py DIRECTORY, with a model's configuration in it; JSON on standard output.
"""

import json
import os
import sys
from dataclasses import asdict

from jenga.demo.stock import replay_on_stock
from tests.demo.timelines import table, timeline

# Both requests grow, `a` past its window; then `a` ends, `b` is preempted and begins again.
REQUEST_TOKENS = [
    {},
    {"a": 100},
    {"a": 150, "b": 16},
    {"a": 151, "b": 17},
    {"b": 18},
    {"b": 5},
    {},
]

TIMELINES = {
    "windows": timeline(
        [table("sliding", 5, window_tokens=40, first_layer=2), table("full", 2)], REQUEST_TOKENS
    ),
    "states": timeline(
        [table("mamba2", 3, state_bytes=36608, first_layer=2), table("full", 2)], REQUEST_TOKENS
    ),
}


def main(directory):
    options = {
        "model": directory,
        "attention_backend": "JENGA_TRITON",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": False,
    }
    # What vLLM prints goes elsewhere.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    results = {
        name: [asdict(run) for run in replay_on_stock(tl, options)]
        for name, tl in TIMELINES.items()
    }
    print(json.dumps(results), file=output)


if __name__ == "__main__":
    main(sys.argv[1])
