"""Run vLLM's whole engine except its workers: jobs as JSON in, results as JSON out.

Usage: dry_process.py JOBS RESULTS. No model runs: the token of an answer follows from its position.
Scheduling, prefix hits, usage, events and metrics are the engine's own, on the plugin and on stock
vLLM alike. Both have blocks of as many tokens.
"""

import gc
import json
import os
import sys
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.abstract import Executor

LAYERS = {}
"""Specs of the engine that is made next, by layer name."""


def answer_token(position):
    """Get the token of an answer that follows so many tokens."""
    return 100 + 7 * position % 300


def specs_of(kind, block_size, *, is_stock):
    """Make vLLM's specs of a model's layers: all of one kind, or some of another.

    These have a window, chunks or states. Of "states_alone" all layers have states.
    """
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    shape = {"block_size": block_size, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    # What vLLM's model runner makes of a state: a block like any other, or one for a whole request.
    state_blocks = {"block_size": 512, "mamba_cache_mode": "none"}
    if is_stock:
        state_blocks = {"block_size": block_size, "mamba_cache_mode": "align"}
        if kind == "states":
            state_blocks["page_size_padded"] = FullAttentionSpec(**shape).page_size_bytes
    layers = {}
    if kind != "states_alone":
        layers = {f"layers.{i}.attn": FullAttentionSpec(**shape) for i in range(2)}
    if kind == "windows":
        layers |= {
            f"layers.{i}.attn": SlidingWindowSpec(**shape, sliding_window=48) for i in (2, 3)
        }
    if kind == "chunks":
        layers |= {
            f"layers.{i}.attn": ChunkedLocalAttentionSpec(**shape, attention_chunk_size=40)
            for i in (2, 3)
        }
    if kind.startswith("states"):
        layers |= {
            f"layers.{i}.mixer": MambaSpec(
                shapes=((4, 64), (2, 16, 64)),
                dtypes=(torch.float32, torch.float32),
                mamba_type=MambaAttentionBackendEnum.MAMBA2,
                **state_blocks,
            )
            for i in (2, 3)
        }
    return layers


class NamedScheduler(Scheduler):
    """A scheduler of a user's own."""


class DryExecutor(Executor):
    """An executor without workers, which answers in their place."""

    def _init_executor(self):
        self.known_tokens = {}  # request -> those of its prompt and its answer
        self.steps = []

    @classmethod
    def supports_async_scheduling(cls):
        """Say that steps may be scheduled ahead."""
        return True

    def check_health(self):
        """Have nothing to check."""

    def collective_rpc(self, method, *_, **__):
        """Answer what a method of the only worker would: None, except for a few."""
        from vllm.v1.worker.worker_base import CompilationTimes

        answers = {
            "get_kv_cache_spec": LAYERS,
            "get_supported_kv_cache_layouts": ["BLHNC", "LBHNC"],
            "determine_available_memory": self.cache_config.kv_cache_memory_bytes,
            "get_supported_tasks": ("generate",),
            "compile_or_warm_up_model": CompilationTimes(language_model=0.0, encoder=0.0),
        }
        return [answers.get(method) if isinstance(method, str) else None]

    def execute_model(self, scheduler_output, *, non_block=False):
        """Answer each request that has read all of its tokens."""
        from vllm.v1.outputs import ModelRunnerOutput

        step = scheduler_output
        cached = step.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in step.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            self.known_tokens[new.req_id] = len(new.prompt_token_ids)
        names, sampled = list(step.num_scheduled_tokens), []
        for name in names:
            end, known = starts[name] + step.num_scheduled_tokens[name], self.known_tokens[name]
            sampled.append([answer_token(known)] if end >= known else [])
            self.known_tokens[name] += len(sampled[-1])
        counts = {name.split("-")[0]: count for name, count in step.num_scheduled_tokens.items()}
        if counts:
            self.steps.append(counts)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        if not non_block:
            return output
        future = Future()
        future.set_result(output)
        return future


def metrics_of(llm):
    """Get vLLM's Prometheus metrics except times: name and labels -> value, or count and sum."""
    found = {}
    for metric in llm.get_metrics():
        if any(part in metric.name for part in ("seconds", "time", "estimated")):
            continue
        labels = {k: v for k, v in metric.labels.items() if k not in {"model_name", "engine"}}
        name = " ".join([metric.name, *(f"{k}={v}" for k, v in sorted(labels.items()))])
        if metric.name == "vllm:cache_config_info":
            continue  # its labels are the fields that `told` has
        found[name] = getattr(metric, "value", None)
        if found[name] is None:
            found[name] = [metric.count, metric.sum]
    return found


def told_events(batches):
    """Get cache events as plain values, hashes as hexadecimal."""
    import msgspec

    def plain(value):
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, (list, tuple)):
            return [plain(each) for each in value]
        return value

    events = []
    for batch in batches:
        for event in batch.events:
            fields = msgspec.structs.asdict(event)
            events.append({"type": type(event).__name__} | {k: plain(v) for k, v in fields.items()})
    return events


def run(job):
    """Run the engine of a job until all requests are answered; get what it told."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    LAYERS.clear()
    LAYERS.update(
        specs_of(
            job.get("layers", "full"),
            job["options"].get("block_size", 16),
            is_stock="attention_backend" not in job["options"],
        )
    )
    options = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 4 << 20,
        "block_size": 16,
        "disable_log_stats": False,
        "distributed_executor_backend": DryExecutor,
    } | job["options"]
    llm = LLM(**options)
    core = llm.llm_engine.engine_core.engine_core
    batches, publisher = [], getattr(core.scheduler, "kv_event_publisher", None)
    if publisher is not None:
        publisher.publish = batches.append
    results, usages = [], []
    update = core.scheduler.update_from_output

    def update_from_output(*args, **kwargs):
        answers = update(*args, **kwargs)
        usages.append(core.scheduler.kv_cache_manager.usage)
        return answers

    core.scheduler.update_from_output = update_from_output
    for requests in job["rounds"]:
        sampling = [
            SamplingParams(
                temperature=0.0, detokenize=False, ignore_eos=True, **each.get("sampling", {})
            )
            for each in requests
        ]
        prompts = [
            TokensPrompt(prompt_token_ids=each["prompt"], **each.get("inputs", {}))
            for each in requests
        ]
        priorities = [each.get("priority", 0) for each in requests]
        outputs = llm.generate(
            prompts, sampling, use_tqdm=False, priority=priorities if any(priorities) else None
        )
        results += [
            {
                "tokens": list(output.outputs[0].token_ids),
                "cached_tokens": output.num_cached_tokens,
                "cache_creation_tokens": output.num_cache_creation_tokens,
            }
            for output in outputs
        ]
        if job.get("resets"):
            results.append({"reset": llm.reset_prefix_cache()})
    cache = llm.llm_engine.vllm_config.cache_config
    info = cache.metrics_info()
    told = {
        "cache_config_info": {key: str(value) for key, value in info.items()},
        "requests": results,
        "steps": core.model_executor.steps,
        "usages": usages,
        "metrics": metrics_of(llm),
        "events": told_events(batches),
        "groups": core.get_kv_cache_group_metadata(),
        "block_size": cache.block_size,
        "max_model_len": llm.llm_engine.vllm_config.model_config.max_model_len,
        "num_blocks": cache.num_gpu_blocks,
        "hash_block_size": core.scheduler.hash_block_size,
        "manager": type(core.scheduler.kv_cache_manager).__name__,
        "scheduler": type(core.scheduler).__name__,
    }
    manager = getattr(core.scheduler.kv_cache_manager, "manager", None)
    if manager is not None:
        manager.check()
        told["held"] = manager.request_tokens()
        told["cache"] = asdict(manager.cache_report())
    llm.llm_engine.engine_core.shutdown()
    return told


def main():
    # vLLM collects garbage five times for an engine, among all that is imported. That would be most
    # of the time here, and the engines are small.
    gc.collect = lambda _generation=2: 0
    results = {}
    for name, job in json.loads(Path(sys.argv[1]).read_text()).items():
        os.environ.update(job.get("environment", {}))
        try:
            results[name] = run(job)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        for variable in job.get("environment", {}):
            del os.environ[variable]
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
