"""Run one real vLLM engine in a process of its own: a job as JSON in, a result as JSON out.

An engine keeps state for the life of its process (selected backends, distributed groups, patched
names), so every engine of the tests has its own. Usage: engine_process.py JOB RESULT.
"""

import json
import os
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path

NAN_BYTE = 0xFF
"""Four, or two, of these are a NaN in every floating-point type used here."""

HOPPER_SCANS = (
    "jenga_kernels.triton.mamba.hopper.scan_specialized",
    "jenga_kernels.triton.delta.hopper.scan",
)
"""Kernels for prompts of recurrent layers, by module."""


def prompts_of_lengths(lengths, *, seed, vocab_size=500, shared_tokens=0):
    """Make prompts of random token ids; the first `shared_tokens` are the same in all."""
    source = random.Random(seed)
    shared = [1] + [source.randrange(3, vocab_size) for _ in range(max(0, shared_tokens - 1))]
    prompts = []
    for length in lengths:
        own = [source.randrange(3, vocab_size) for _ in range(length - len(shared))]
        prompts.append((shared + own)[:length])
    return prompts


def audio_of_seed(seed):
    """Make a second of noise: samples, and how many a second has.

    Other numbers of seconds are given with the seed.
    """
    import numpy as np

    seed, seconds = seed if isinstance(seed, list) else (seed, 1)
    noise = np.random.default_rng(seed).normal(size=16000 * seconds)
    return noise.astype(np.float32), 16000


def image_of_seed(seed):
    """Make an image of noise, 40 by 40 pixels; other sizes are given with the seed."""
    import numpy as np
    from PIL import Image

    seed, width, height = seed if isinstance(seed, list) else (seed, 40, 40)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def adapter_request(folder):
    """Name a low-rank adapter to an engine; None for none."""
    from vllm.lora.request import LoRARequest

    return folder and LoRARequest(Path(folder).name, 1 + int(Path(folder).name), folder)


def runner_of(llm):
    """Get the model runner of an engine that lives in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def scheduler_of(llm):
    """Get the scheduler of an engine that lives in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def count_preemptions(llm):
    """Get a list that grows by a request's id whenever the scheduler preempts one."""
    scheduler, preempted = scheduler_of(llm), []
    original = scheduler._preempt_request

    def preempt_request(request, *args, **kwargs):
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = preempt_request
    return preempted


def count_encoded(llm):
    """Get a list that grows by the number of encoder inputs whenever the encoder runs."""
    model, encoded = runner_of(llm).model, []
    original = model.embed_multimodal

    def embed_multimodal(**inputs):
        outputs = original(**inputs)
        encoded.append(len(outputs))
        return outputs

    model.embed_multimodal = embed_multimodal
    return encoded


def count_scheduled_to_encode(llm):
    """Get a list that grows by the number of encoder inputs of each step."""
    scheduler, scheduled = scheduler_of(llm), []
    original = scheduler.schedule

    def schedule(*args, **kwargs):
        output = original(*args, **kwargs)
        scheduled.append(sum(map(len, output.scheduled_encoder_inputs.values())))
        return output

    scheduler.schedule = schedule
    return scheduled


def count_encoder_inputs(llm, job):
    """Get a list of numbers of encoder inputs that grows as they are encoded.

    The model of several ranks is out of reach, so there it grows as steps are scheduled.
    """
    has_ranks = job["options"].get("tensor_parallel_size", 1) > 1
    return count_scheduled_to_encode(llm) if has_ranks else count_encoded(llm)


def forget_cached(manager, name):
    """Evict what is cached of images in one page table, and nothing else."""
    for table in manager._tables:
        if table.spec.name == name:
            for content in {key[0] for key in table.cache.keys if key is not None}:
                manager.prefix_cache.tree.evict(manager.prefix_cache.tree.image(table, content))


def load_all_ahead(llm):
    """Let admissions load nothing while others run; get a list of the pages loaded before them."""
    manager, loaded = scheduler_of(llm).kv_cache_manager.manager, []
    manager.prefix_cache.prefetch._at_once_bytes = 0
    original = manager.prefetch_pages

    def prefetch_pages(num_tokens):
        copies = original(num_tokens)
        loaded.extend(copy.target for copy in copies)
        return copies

    manager.prefetch_pages = prefetch_pages
    return loaded


def count_drafts(llm):
    """Get a mapping that grows with what is drafted: request -> tokens drafted, and accepted."""
    scheduler, drafts = scheduler_of(llm), {}
    original = scheduler.make_spec_decoding_stats

    def make_spec_decoding_stats(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs):
        number = int(kwargs["request_id"].split("-")[0])
        drafted, accepted = drafts.get(number, (0, 0))
        drafts[number] = (drafted + num_draft_tokens, accepted + num_accepted_tokens)
        return original(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    scheduler.make_spec_decoding_stats = make_spec_decoding_stats
    return drafts


def check_each_step(llm):
    """Check the manager's books after every step."""
    scheduler = scheduler_of(llm)
    original = scheduler.update_from_output

    def update_from_output(*args, **kwargs):
        outputs = original(*args, **kwargs)
        scheduler.kv_cache_manager.manager.check()
        return outputs

    scheduler.update_from_output = update_from_output


def follow_events(endpoint):
    """Get what an engine tells of its cache over ZeroMQ; grows until it says no more."""
    import msgspec
    import zmq
    from vllm.distributed.kv_events import KVEventBatch

    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(endpoint)
    socket.subscribe("")
    decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def received(quiet_ms=2000):
        events = []
        while socket.poll(quiet_ms):
            events += decoder.decode(socket.recv_multipart()[-1]).events
        return [msgspec.to_builtins(event) for event in events]

    return received


def divide_decoding(num_programs):
    """Let the interpreter divide decode work among programs, as a GPU does, and join the parts.

    By itself it gives all to one program, in tiles as long as the requests of most tests.
    """
    from jenga_kernels.plans import attention_plan, latent_plan

    def divided(tiles_of):
        def tiles(*args, **kwargs):
            chosen = tiles_of(*args, **kwargs)
            short = replace(chosen.decode, block_n=64)
            return replace(chosen, num_programs=num_programs, decode=short)

        return tiles

    attention_plan.attention_tiles = divided(attention_plan.attention_tiles)
    latent_plan.latent_tiles = divided(latent_plan.latent_tiles)


def count_graphs(llm):
    """Get how often each number of tokens is replayed from a CUDA graph; grows as that happens."""
    manager, replays = runner_of(llm).cudagraph_manager, {}
    original = manager.run_fullgraph

    def run_fullgraph(desc):
        replays[desc.num_tokens] = replays.get(desc.num_tokens, 0) + 1
        return original(desc)

    manager.run_fullgraph = run_fullgraph
    return replays


def arena_of(llm):
    """Get the bytes of the one buffer that all layers of an engine's model view."""
    import torch

    def tensors(value):
        return [value] if isinstance(value, torch.Tensor) else list(value)

    caches = [tensor for cache in runner_of(llm).kv_caches for tensor in tensors(cache)]
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in caches}
    assert len(storages) == 1
    (storage,) = storages.values()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def fill_arenas(llm, options):
    """Fill what all layers view with NaN, on every rank; get the bytes of each."""
    if "worker_extension_cls" in options:
        return llm.collective_rpc("fill_arena", args=(NAN_BYTE,))
    arena = arena_of(llm)
    arena.fill_(NAN_BYTE)
    return [arena.numel()]


def _result(outputs):
    return [
        {
            "prompt": list(output.prompt_token_ids),
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                {str(token): entry.logprob for token, entry in position.items()}
                for position in output.outputs[0].logprobs or ()
            ],
            # Of the tokens that the prompt has, but its first one.
            "prompt_logprobs": [
                entries[token].logprob
                for token, entries in zip(
                    output.prompt_token_ids, output.prompt_logprobs or (), strict=False
                )
                if entries is not None
            ],
            "finish_reason": output.outputs[0].finish_reason,
            "cached_tokens": output.num_cached_tokens or 0,
        }
        for output in outputs
    ]


def run_empty_steps(llm, number):
    """Run steps without requests, as a data-parallel rank does while others work."""
    for _ in range(number):
        llm.llm_engine.engine_core.execute_dummy_batch()


def round_what_layers_store(dtype_name):
    """Let all attention layers store what another element type holds exactly."""
    import torch
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    attend, attend_latents = Attention.forward, MLAAttention.forward

    def rounded(rows):
        return rows.to(getattr(torch, dtype_name)).to(rows.dtype)

    def round_and_attend(self, query, key, value, *args, **kwargs):
        return attend(self, query, rounded(key), rounded(value), *args, **kwargs)

    def round_and_attend_latents(self, q, kv_c_normed, k_pe, *args, **kwargs):
        return attend_latents(self, q, rounded(kv_c_normed), rounded(k_pe), *args, **kwargs)

    Attention.forward, MLAAttention.forward = round_and_attend, round_and_attend_latents


def scale_latents(scales, *, rounds):
    """Give layers of latent attention these scales, one each, the last to all further ones.

    vLLM takes those of a checkpoint from one format, which has no models in float32.

    Args:
        scales: Of the layers.
        rounds: Whether layers get what float8_e4m3fn with their scale holds exactly. Then it does
            not matter which tokens a query reads from the cache, which chunks of prompts decide.
    """
    import torch
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.models.utils import extract_layer_index

    finish, attend = MLAAttention.process_weights_after_loading, MLAAttention.forward

    def finish_and_scale(self, *args, **kwargs):
        finish(self, *args, **kwargs)
        index = extract_layer_index(self.layer_name)
        self._k_scale.fill_(scales[min(index, len(scales) - 1)])

    def rounded(rows, scale):
        return (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(rows.dtype) * scale

    def round_and_attend(self, q, kv_c_normed, k_pe, *args, **kwargs):
        latents, rotary = rounded(kv_c_normed, self._k_scale), rounded(k_pe, self._k_scale)
        return attend(self, q, latents, rotary, *args, **kwargs)

    MLAAttention.process_weights_after_loading = finish_and_scale
    if rounds:
        MLAAttention.forward = round_and_attend


def estimate_graphs(num_bytes):
    """Let a worker take CUDA graphs to need so many bytes, as one on a GPU measures them."""
    import vllm.envs
    from vllm.v1.worker.cpu_worker import CPUWorker

    original = CPUWorker.determine_available_memory

    def determine_available_memory(self):
        self.cudagraph_memory_estimate = num_bytes
        return original(self) - num_bytes * vllm.envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS

    CPUWorker.determine_available_memory = determine_available_memory


def prompts_of(job):
    """Get a job's prompts as an engine takes them, with what they hear and see."""
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    for prompt, seeds in zip(prompts, job.get("audio_seeds", ()), strict=False):
        heard = seeds if isinstance(seeds, list) else [seeds]
        if heard:
            prompt["multi_modal_data"] = {"audio": [audio_of_seed(seed) for seed in heard]}
    for prompt, seeds in zip(prompts, job.get("image_seeds", ()), strict=False):
        if seeds:
            prompt["multi_modal_data"] = {"image": [image_of_seed(seed) for seed in seeds]}
    return prompts


def answers_of_turns(llm, sampling, outputs, turns):
    """Let every prompt go on with its answer and the tokens of a turn, turn by turn."""
    answers, last = [], outputs
    for turn in turns:
        tokens = [[*o.prompt_token_ids, *o.outputs[0].token_ids, *turn] for o in last]
        again = [{"prompt_token_ids": prompt} for prompt in tokens]
        last = llm.generate(again, sampling, use_tqdm=False)
        answers += last
    return answers


def change_what_layers_store(job):
    """Change what vLLM's layers store as a job says."""
    if job.get("stores_rounded_to"):
        round_what_layers_store(job["stores_rounded_to"])
    if job.get("latent_scales"):
        scale_latents(job["latent_scales"], rounds=job["rounds_latents"])


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(job.get("environment", {}))
    from vllm import LLM, SamplingParams

    from tests.vllm_plugin.engine.emulated_graphs import emulate_graphs, start_as_on_a_gpu

    change_what_layers_store(job)
    if job.get("graph_bytes"):
        estimate_graphs(job["graph_bytes"])
    is_emulating = job.get("captures") and os.environ.get("TRITON_INTERPRET") == "1"
    if is_emulating:
        emulate_graphs()
        divide_decoding(5)
    llm = LLM(**job["options"])
    warm_up = start_as_on_a_gpu(llm) if is_emulating else []
    replays = count_graphs(llm) if job.get("captures") else {}
    events = job["options"].get("kv_events_config")
    received = follow_events(events["endpoint"]) if events else None
    is_pipeline = job["options"].get("pipeline_parallel_size", 1) > 1
    if is_pipeline:
        llm.collective_rpc("make_intermediate_tensors")
    arena_bytes = fill_arenas(llm, job["options"]) if job.get("fill_arena") else None
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job["max_tokens"],
        logprobs=5,
        prompt_logprobs=job.get("prompt_logprobs"),
        ignore_eos=True,
        detokenize=False,
    )
    prompts = prompts_of(job)
    preemptions = count_preemptions(llm) if job.get("report_manager") else None
    # The scheduler and runner of an engine in a process of its own are out of reach.
    is_near = hasattr(llm.llm_engine.engine_core, "engine_core")
    has_encoder = bool({"audio_seeds", "image_seeds"} & job.keys())
    encoded = count_encoder_inputs(llm, job) if has_encoder and is_near else []
    loaded_ahead = load_all_ahead(llm) if job.get("loads_ahead") else []
    speculates = "speculative_config" in job["options"]
    drafts = count_drafts(llm) if speculates and is_near else {}
    if (speculates or is_pipeline or has_encoder) and preemptions is not None:
        check_each_step(llm)
    size = -(-len(prompts) // job.get("rounds", 1))
    outputs = []
    adapters = job.get("adapters")  # of each prompt: a folder, or None for the model itself
    for start in range(0, len(prompts), size):  # later rounds find what earlier ones left
        some = slice(start, start + size)
        run_empty_steps(llm, job.get("empty_steps", 0))
        requests = adapters and [adapter_request(each) for each in adapters[some]]
        outputs += llm.generate(prompts[some], sampling, use_tqdm=False, lora_request=requests)
        for name in job.get("forget", ()):
            forget_cached(scheduler_of(llm).kv_cache_manager.manager, name)
    outputs += answers_of_turns(llm, sampling, outputs, job.get("turns", []))
    result = {
        "outputs": _result(outputs),
        "drafts": [drafts[number] for number in sorted(drafts)],
        "encoded": encoded,
        "loaded_ahead": loaded_ahead,
        "replays": replays,
        "arena_bytes": arena_bytes,
        "warm_up": warm_up,
        # They are imported where they are launched.
        "has_specialized_prefill": "jenga_kernels.triton.attention.hopper.prefill" in sys.modules,
        "has_specialized_latents": "jenga_kernels.triton.latent.hopper.decode" in sys.modules,
        "has_hopper_scans": [name for name in HOPPER_SCANS if name in sys.modules],
        "scheduler": type(scheduler_of(llm)).__name__ if job.get("captures") else None,
    }
    if received is not None:
        result["events"] = received()
    if preemptions is not None:
        manager = scheduler_of(llm).kv_cache_manager.manager
        manager.check()
        result["request_tokens"] = manager.request_tokens()
        result["preemptions"] = len(preemptions)
        result |= {
            "cache": asdict(manager.cache_report()),
            "host": asdict(host) if (host := manager.host_report()) is not None else None,
        }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    if os.environ.get("EMULATED_GPU"):
        from tests import conftest  # noqa: F401 - kernels run there from here on
    main()
