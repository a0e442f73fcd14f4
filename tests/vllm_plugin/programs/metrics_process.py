"""Serve prompts by an engine in this process, and keep what its registry shows between rounds.

metrics_process.py JOB.json RESULT.json
"""

import json
import sys
from pathlib import Path


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    from prometheus_client import REGISTRY, generate_latest
    from vllm import LLM, SamplingParams

    from jenga.vllm_plugin.metrics import readings

    readings.INTERVAL_S = 0.0  # after every step
    llm = LLM(**job["options"] | {"disable_log_stats": False})
    sampling = SamplingParams(
        temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False
    )
    scrapes = []
    record = llm.llm_engine.logger_manager.record

    def record_and_scrape(*args, **kwargs):
        record(*args, **kwargs)
        scrapes.append(generate_latest(REGISTRY).decode())

    llm.llm_engine.logger_manager.record = record_and_scrape
    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.manager
    for _ in range(job["rounds"]):
        llm.generate(
            [{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False
        )
    report = manager.cache_report()
    result = {
        "arena_bytes": manager.num_large_pages * manager.geometry.large_page_bytes,
        "tables": [[table.name, table.layer_type.name] for table in manager.geometry.page_tables],
        "asked_tokens": report.asked_tokens,
        "hit_tokens": report.hit_tokens,
        "evicted_bytes": sum(
            evictions.num_pages * table.small_page_bytes
            for evictions, table in zip(report.evictions, manager.geometry.page_tables, strict=True)
        ),
        "scrapes": list(scrapes),
    }
    if job["fails"]:
        manager.memory = lambda: 1 / 0
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False
        )
        result |= {"num_served": len(outputs), "text_after_failure": scrapes[-1]}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
