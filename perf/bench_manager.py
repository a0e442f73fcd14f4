"""Host time of the memory manager, side by side with vLLM's own KVCacheManager.

    python perf/bench_manager.py [model ...] [--arena-gb 40] [--arena-factors 1 10 100] [--memory]

One process, both managers by turns, on the same layers. Hashes are made beforehand in both.
Columns, in microseconds unless said: a decode step of 256 running requests (ms) and one allocation
of it; a 2,048-token chunk of a prefill; the lookup of a 32,768-token prefix that is cached, and its
admission; the end of a request of 32,768 tokens. p50 of the repetitions; x is ours over vLLM's.

Stock is run as it runs by default: prefix caching on, hybrids in `align` mode with the attention
page it chooses.
"""

import argparse
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from jenga.errors import OutOfPagesError
from jenga.geometry import Geometry
from jenga.manager import Manager
from jenga.models import known_model
from jenga.planner import plan
from jenga.request import PrefixHit
from jenga.spec import ChunkedLocal, FullAttention, ModelSpec, SlidingWindow, State

MODELS = (
    "llama-3.1-8b",
    "ministral-8b-2410",
    "gpt-oss-20b",
    "gemma-3-27b",
    "jamba-1.5-mini",
    "nemotron-h-8b",
    "qwen3-next-80b-a3b",
)
"""One homogeneous model, three with windows, three with states."""

NUM_RUNNING = 256
DECODE_STEPS = 48
CHUNK_TOKENS = 2048
PREFIX_TOKENS = 32768
PROMPT_TOKENS = 1024
HASH_TOKENS = 16
REPETITIONS = 9


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What one manager takes, in microseconds; None where the arena is too small for the case."""

    decode_step: float | None
    chunk: float | None
    lookup: float | None
    admission: float | None
    finish: float | None


def median_us(durations: Sequence[float]) -> float:
    return statistics.median(durations) * 1e6


def timed(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[float, T]:
    """Seconds of this thread's CPU time, so that other programs do not count, and the result."""
    start = time.thread_time()
    result = call(*args, **kwargs)
    return time.thread_time() - start, result


def hashes_of(seed: int, num_tokens: int) -> list[bytes]:
    return [f"{seed:08}{i:024}".encode() for i in range(num_tokens // HASH_TOKENS)]


class Ours:
    """`jenga.manager.Manager`, called as the vLLM plugin calls it."""

    def __init__(self, geometry: Geometry, arena_bytes: int) -> None:
        self.manager = Manager(
            geometry,
            num_large_pages=geometry.num_large_pages(arena_bytes),
            prefix_caching=True,
            hash_tokens=HASH_TOKENS,
        )
        self.hashes: dict[str, list[bytes]] = {}
        self.tokens: dict[str, int] = {}

    def begin(self, name: str, seed: int, num_tokens: int) -> None:
        """Make a request of so many tokens; the seed names its content."""
        self.hashes[name] = hashes_of(seed, num_tokens + 4096)
        self.tokens[name] = 0

    def lookup(self, name: str, num_tokens: int) -> PrefixHit:
        """Look its cached prefix up."""
        return self.manager.lookup(self.hashes[name], max_tokens=num_tokens - 1)

    def advance(self, name: str, num_tokens: int, hit: PrefixHit | None = None) -> None:
        """Give it slots for so many tokens more and commit them."""
        processed = hit.num_tokens if hit is not None else self.tokens[name]
        num_tokens += processed
        self.manager.allocate(name, num_tokens=num_tokens, num_processed_tokens=processed, hit=hit)
        self.manager.commit(name, self.hashes[name], num_tokens)
        self.tokens[name] = num_tokens

    def keep_states(self, name: str) -> None:
        """Keep its states, where they stand at a hash."""
        if self.tokens[name] % HASH_TOKENS == 0:
            prefix_hash = self.hashes[name][self.tokens[name] // HASH_TOKENS - 1]
            self.manager.keep_state(name, prefix_hash, self.tokens[name])
            self.manager.take_copies()

    def new_step(self) -> None:
        """Begin a step."""
        self.manager.new_step()

    def finish(self, name: str) -> None:
        """End a request."""
        self.manager.free(name)


class Stock:
    """vLLM's KVCacheManager, called as vLLM's scheduler calls it."""

    def __init__(self, model: ModelSpec, arena_bytes: int) -> None:
        from vllm.config import VllmConfig
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
        from vllm.v1.kv_cache_interface import KVCacheConfig

        specs, self.block_tokens = stock_specs(model)
        vllm_config = VllmConfig()
        vllm_config.cache_config.kv_cache_layout = "LBNHC"
        groups = get_kv_cache_groups(vllm_config, specs)
        block_bytes = max(
            sum(specs[name].page_size_bytes for name in group.layer_names) for group in groups
        )
        config = KVCacheConfig(
            num_blocks=arena_bytes // block_bytes, kv_cache_tensors=[], kv_cache_groups=groups
        )
        self.num_groups = len(groups)
        self.manager = KVCacheManager(
            config,
            max_model_len=PREFIX_TOKENS + 8192,
            scheduler_block_size=self.block_tokens,
            hash_block_size=HASH_TOKENS if self.block_tokens == HASH_TOKENS else self.block_tokens,
            enable_caching=True,
        )
        self.requests: dict[str, Any] = {}

    def begin(self, name: str, seed: int, num_tokens: int) -> None:
        """Make a request of so many tokens; the seed names its content."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = Request(name, [seed] * num_tokens, SamplingParams(max_tokens=4096), None)
        hashes = hashes_of(seed, num_tokens + 4096)
        ratio = self.block_tokens // HASH_TOKENS
        request.block_hashes = hashes[ratio - 1 :: ratio]
        self.requests[name] = request

    def lookup(self, name: str, _num_tokens: int) -> tuple[Any, ...]:
        """Look its cached prefix up."""
        return self.manager.get_computed_blocks(self.requests[name])

    def advance(self, name: str, num_tokens: int, hit: tuple[Any, ...] | None = None) -> None:
        """Give it slots for so many tokens more and commit them."""
        request = self.requests[name]
        blocks, num_hit = (None, 0) if hit is None else hit[:2]
        allocated = self.manager.allocate_slots(request, num_tokens, num_hit, blocks)
        if allocated is None:
            raise MemoryError
        request.num_computed_tokens += num_hit + num_tokens
        while request.num_tokens <= request.num_computed_tokens:
            request.append_output_token_ids(1)

    def keep_states(self, name: str) -> None:
        """Nothing: stock keeps states by itself."""

    def new_step(self) -> None:
        """Begin a step."""
        self.manager.new_step_starts()

    def finish(self, name: str) -> None:
        """End a request."""
        self.manager.free(self.requests.pop(name))


def stock_specs(model: ModelSpec) -> tuple[dict[str, Any], int]:
    """Make vLLM's spec of each layer, and the tokens of an attention page it would choose."""
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    attention = [
        layer_type
        for layer_type in model.layer_types
        if isinstance(layer_type, FullAttention | SlidingWindow | ChunkedLocal)
    ]
    states = [layer_type for layer_type in model.layer_types if isinstance(layer_type, State)]
    slot_bytes = max(layer.slot_bytes for each in attention for layer in each.layers)
    state_bytes = max((layer.slot_bytes for each in states for layer in each.layers), default=0)
    # As vLLM's platforms do: an attention page no smaller than a state.
    block_tokens = HASH_TOKENS * max(1, -(-state_bytes // (HASH_TOKENS * slot_bytes)))
    specs: dict[str, Any] = {}
    for layer_type in attention:
        for layer in layer_type.layers:
            shape = {
                "block_size": block_tokens,
                "num_kv_heads": 1,
                "head_size": layer.slot_bytes // 4,
                "dtype": torch.bfloat16,
            }
            name = f"{layer_type.name}.{layer.name}"
            match layer_type:
                case SlidingWindow(window_tokens=window_tokens):
                    specs[name] = SlidingWindowSpec(**shape, sliding_window=window_tokens)
                case ChunkedLocal(chunk_tokens=chunk_tokens):
                    specs[name] = ChunkedLocalAttentionSpec(
                        **shape, attention_chunk_size=chunk_tokens
                    )
                case _:
                    specs[name] = FullAttentionSpec(**shape)
    for layer_type in states:
        for layer in layer_type.layers:
            specs[f"{layer_type.name}.{layer.name}"] = MambaSpec(
                block_size=block_tokens,
                shapes=((layer.slot_bytes,),),
                dtypes=(torch.int8,),
                page_size_padded=block_tokens * slot_bytes,
                mamba_cache_mode="align",
            )
    return specs, block_tokens


def decode_step_us(side: Ours | Stock) -> float:
    for number in range(NUM_RUNNING):
        name = f"d{number}"
        # Lengths differ, so that page boundaries fall on all steps alike.
        prompt_tokens = PROMPT_TOKENS + 37 * number % 512
        side.begin(name, 1000 + number, prompt_tokens)
        side.advance(name, prompt_tokens)
    durations = []
    for _ in range(DECODE_STEPS):
        start = time.thread_time()
        side.new_step()
        for number in range(NUM_RUNNING):
            side.advance(f"d{number}", 1)
        durations.append(time.thread_time() - start)
    for number in range(NUM_RUNNING):
        side.finish(f"d{number}")
    return median_us(durations)


def chunk_us(side: Ours | Stock) -> float:
    durations = []
    for repetition in range(REPETITIONS):
        name = f"c{repetition}"
        side.begin(name, 5000 + repetition, 4 * CHUNK_TOKENS)
        for chunk in range(4):
            side.new_step()
            duration, _ = timed(side.advance, name, CHUNK_TOKENS)
            if chunk:
                durations.append(duration)
        side.finish(name)
    return median_us(durations)


def long_request_us(side: Ours | Stock) -> tuple[float, float, float]:
    """Lookup, admission and end of a request whose first 32k tokens are cached."""
    side.begin("long", 9000, PREFIX_TOKENS)
    for _ in range(PREFIX_TOKENS // CHUNK_TOKENS):
        side.new_step()
        side.advance("long", CHUNK_TOKENS)
        side.keep_states("long")
    side.finish("long")
    lookups, admissions, ends = [], [], []
    for repetition in range(REPETITIONS):
        name = f"l{repetition}"
        side.begin(name, 9000, PREFIX_TOKENS + 64)
        side.new_step()
        duration, hit = timed(side.lookup, name, PREFIX_TOKENS + 64)
        lookups.append(duration)
        admissions.append(timed(side.advance, name, 64, hit)[0])
        side.new_step()
        ends.append(timed(side.finish, name)[0])
    return median_us(lookups), median_us(admissions), median_us(ends)


def unless_too_small(measure_case: Callable[[Ours | Stock], T], side: Ours | Stock) -> T | None:
    """None where the arena is too small for the case."""
    try:
        return measure_case(side)
    except (MemoryError, OutOfPagesError):
        return None


def measure(side: Ours | Stock) -> Times:
    long = unless_too_small(long_request_us, side) or (None, None, None)
    return Times(
        decode_step=unless_too_small(decode_step_us, side),
        chunk=unless_too_small(chunk_us, side),
        lookup=long[0],
        admission=long[1],
        finish=long[2],
    )


def cell(ours: float | None, stock: float | None) -> str:
    if ours is None or stock is None:
        return f"{'-' if ours is None else f'{ours:.0f}':>7} {'-':>7} {'-':>5}"
    return f"{ours:7.0f} {stock:7.0f} {ours / stock:4.2f}x"


def print_models(names: Sequence[str], arena_bytes: int) -> None:
    cases = ("decode_step", "chunk", "lookup", "admission", "finish")
    print(f"arena {arena_bytes / 1e9:.0f} GB; ours, stock, ratio; us; {NUM_RUNNING} decoding")
    header = " | ".join(f"{case:^21}" for case in cases)
    print(f"{'model':20} {'tab':>3} {'grp':>3} | {header} | vs llama")
    homogeneous = None
    for name in names:
        model = known_model(name).spec()
        geometry = plan(model, arena_bytes=arena_bytes)
        stock_side = Stock(model, arena_bytes)
        ours, stock = measure(Ours(geometry, arena_bytes)), measure(stock_side)
        homogeneous = homogeneous or ours.decode_step
        cells = " | ".join(cell(getattr(ours, case), getattr(stock, case)) for case in cases)
        ratio = (ours.decode_step or 0) / (homogeneous or 1)
        print(
            f"{name:20} {len(geometry.page_tables):3} {stock_side.num_groups:3} | {cells} | "
            f"{ratio:.2f}x"
        )


def print_arenas(names: Sequence[str], arena_bytes: int, factors: Sequence[int]) -> None:
    print("\nsame geometry, larger arenas: decode step, chunk, lookup, admission, finish (us)")
    for name in names:
        geometry = plan(known_model(name).spec(), arena_bytes=arena_bytes)
        for factor in factors:
            times = measure(Ours(geometry, arena_bytes * factor))
            columns = (times.decode_step, times.chunk, times.lookup, times.admission, times.finish)
            cells = " ".join(f"{value or 0:8.0f}" for value in columns)
            print(f"{name:20} {factor:4}x {cells}")


def print_memory(names: Sequence[str], arena_bytes: int) -> None:
    print("\nmemory of the manager, bytes per small page: empty arena, and all pages cached")
    for name in names:
        geometry = plan(known_model(name).spec(), arena_bytes=arena_bytes)
        tracemalloc.start()
        side = Ours(geometry, arena_bytes)
        num_small_pages = sum(
            side.manager.num_large_pages * table.small_pages_per_large_page
            for table in geometry.page_tables
        )
        empty, _ = tracemalloc.get_traced_memory()
        number = 0
        while side.manager.cache_report().evictions[0].own_large == 0 and number < 2000:
            side.begin(f"m{number}", number, CHUNK_TOKENS)
            side.advance(f"m{number}", CHUNK_TOKENS)
            side.keep_states(f"m{number}")
            side.finish(f"m{number}")
            # The hashes belong to the engine.
            side.hashes.clear()
            number += 1
        full, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        print(
            f"{name:20} {num_small_pages:9} small pages  {empty / num_small_pages:6.1f} "
            f"{full / num_small_pages:6.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--arena-gb", type=float, default=400)
    parser.add_argument("--arena-factors", type=int, nargs="*", default=[])
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    arena_bytes = int(arguments.arena_gb * 1e9)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print_models(arguments.models, arena_bytes)
    if arguments.arena_factors:
        print_arenas(arguments.models, arena_bytes, arguments.arena_factors)
    if arguments.memory:
        print_memory(arguments.models, arena_bytes)


if __name__ == "__main__":
    main()
