"""Stands in for `perf.engine.runs.child`: replies as told, hangs or crashes, and starts no engine.

    python engine_child.py MODES.json JOB.json --replies FD

The modes are how each side behaves, by whether it is ours: "serves", "hangs at start", "crashes at
start", "hangs in a run", "crashes in a run", "ignores signals".
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

COUNTS = {"num_compiled": 0, "compile_s": 0.0, "num_loaded": 0, "num_tuned": 0}
COUNTS |= {"num_graphs": 0, "num_captured": 0}


def run_of(tokens):
    """Get what a run says of itself."""
    return {
        "seconds": 2.0,
        "num_requests": 2,
        "prompt_tokens": 20,
        "output_tokens": 4,
        "requests_per_s": 1.0,
        "output_tokens_per_s": 2.0,
        "tokens_per_s": 12.0,
        "found_share": 0.5,
        "ttft_p50_s": 0.1,
        "ttft_p99_s": 0.2,
        "tpot_p50_ms": 10.0,
        "tpot_p99_ms": 20.0,
        "output_hash": str(tokens),
        "num_steps": 3,
        "mean_running": 1.5,
        "most_running": 2,
        "mean_usage": 0.3,
        "num_preemptions": 0,
        "accepted_share": None,
        "compilations": COUNTS,
        "is_disturbed": False,
        "memory": {"used_bytes": 1 << 30},
    }


def hang_forever():
    while True:
        time.sleep(0.1)


def main():
    modes, job, replies = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[4])
    options = json.loads(job.read_text())["options"]
    side = "ours" if "attention_backend" in options else "stock"
    mode = json.loads(modes.read_text()).get(side, "serves")
    with modes.with_name("started.txt").open("a") as file:
        file.write(f"{job.stem}\n")
    names = sorted(name for name in os.environ if name.startswith(("JENGA_", "TRITON_", "VLLM_")))
    sys.stderr.write(f"{names}\ncaches {os.environ.get('TRITON_CACHE_DIR')}\n")
    threading.Thread(target=hang_forever, daemon=True, name="helper").start()
    out = os.fdopen(replies, "w")

    def reply(**values):
        out.write(json.dumps(values) + "\n")
        out.flush()

    if mode == "ignores signals":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        hang_forever()
    if mode == "hangs at start":
        hang_forever()
    if mode == "crashes at start":
        msg = "no such backend"
        raise SystemExit(msg)
    reply(start_s=1.5, start_compilations=COUNTS, versions={"vllm": "0"}, backend="NONE", memory={})
    for line in sys.stdin:
        order = json.loads(line)
        if mode == "hangs in a run":
            hang_forever()
        if mode == "crashes in a run":
            os.kill(os.getpid(), signal.SIGSEGV)
        if order["do"] == "serve":
            tokens = [3, 4] if side == "stock" else [3, 5]
            served = [{"prompt": "a", "tokens": tokens}, {"prompt": "b", "tokens": [1, 2]}]
            Path(order["outputs"]).write_text(json.dumps(served))
            reply(**run_of(tokens))
        elif order["do"] == "judge":
            reply(gaps=[0.001 for _ in order["partings"]])
        else:
            reply(compilations=COUNTS)


if __name__ == "__main__":
    main()
