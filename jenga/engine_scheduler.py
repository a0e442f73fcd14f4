"""vLLM's own scheduler for replays, used instead of the simulator's.

The scheduler, its memory manager and the layout of the arena are those of an engine. With manager
"jenga" they are the plugin's, and with manager "vllm" they are vLLM's. The model is simulated, and
so are the duration of a step and the tokens that it generates. A replay under this scheduler shows
the steps that an engine would schedule. `jenga.sim.batching.scheduler` predicts them without vLLM.
"""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.engine import core
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from jenga.prefix.eviction_log import Eviction
from jenga.prefix.miss_log import Miss
from jenga.sim.arenas.jenga_arena import ManagedMemory
from jenga.sim.arenas.vllm_arena import StockMemory
from jenga.sim.arenas.vllm_plan import NEVER, attention_specs, plan_stock
from jenga.sim.batching.arena import ActiveRequest, ArenaBytes, Chunk, Memory, MovedBytes
from jenga.sim.batching.scheduler import Batch
from jenga.sim.batching.step_time import step_tokens_of
from jenga.sim.replays.session import Machine, Settings
from jenga.vllm_plugin.arena.layout import get_kv_cache_config_from_groups, get_kv_cache_groups
from jenga.vllm_plugin.config import TOKENS_PER_PAGE
from jenga.vllm_plugin.patches.all_patches import apply_replacements

MANAGERS = ("jenga", "vllm")
"""Managers that vLLM's scheduler can be given."""

_LEFT_SHARE = "JENGA_LEFT_SHARE"


class _Config:
    """A configuration of vLLM with some fields replaced. The others are those of a base."""

    def __init__(self, base: Any, **fields: Any) -> None:  # noqa: ANN401
        self._base = base
        for name, value in fields.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name == "_base":
            raise AttributeError(name)
        return getattr(self._base, name)


class EngineScheduler:
    """vLLM's scheduler, with the interface of `jenga.sim.batching.scheduler.StepScheduler`.

    Attributes:
        scheduler: vLLM's scheduler.
        num_preemptions: Number of preemptions so far.
    """

    def __init__(self, scheduler: Any, settings: Settings) -> None:  # noqa: ANN401
        """Start without requests.

        Args:
            scheduler: vLLM's scheduler, without requests.
            settings: Settings that the scheduler was made with.
        """
        self.scheduler = scheduler
        self._hash_tokens: int = scheduler.hash_block_size
        self._speculation = settings.speculation
        self._is_asynchronous = settings.is_asynchronous
        self._requests: dict[str, tuple[Any, ActiveRequest]] = {}
        self.num_preemptions = 0

    def __reduce__(self) -> str:
        """Refuse to pickle: vLLM's scheduler has objects that cannot be stored in a file.

        Raises:
            ValueError: Always.
        """
        msg = "vLLM's scheduler cannot be kept"
        raise ValueError(msg)

    @property
    def running(self) -> list[ActiveRequest]:
        """See `StepScheduler`."""
        return [self._requests[each.request_id][1] for each in self.scheduler.running]

    @property
    def num_waiting(self) -> int:
        """See `StepScheduler`."""
        return self.scheduler.get_request_counts()[1]

    @property
    def next_waiting(self) -> ActiveRequest:
        """See `StepScheduler`."""
        stock, active = self._requests[self.scheduler.waiting.peek_request().request_id]
        active.num_tokens = stock.num_tokens
        return active

    @property
    def has_requests(self) -> bool:
        """See `StepScheduler`."""
        return self.scheduler.has_requests()

    def arrive(self, active: ActiveRequest) -> None:
        """See `StepScheduler`."""
        hashes, hash_tokens = active.hashes(self._hash_tokens), self._hash_tokens
        output_tokens = active.total_tokens - active.prompt_tokens

        def further_hashes(request: Request) -> list[Any]:
            return hashes[len(request.block_hashes) : request.num_tokens // hash_tokens]

        stock = Request(
            request_id=active.name,
            # Token ids are never read. Content is identified by its hashes alone.
            prompt_token_ids=[0] * active.prompt_tokens,
            sampling_params=SamplingParams(max_tokens=output_tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=active.arrival_s,
            block_hasher=further_hashes,
        )
        self._requests[active.name] = stock, active
        self.scheduler.add_request(stock)

    def schedule(self) -> Batch:
        """See `StepScheduler`."""
        return self.batch_of(self.scheduler.schedule())

    def batch_of(self, output: Any) -> Batch:  # noqa: ANN401
        """Convert the output of vLLM's scheduler to a batch.

        It must be called once for each output, in order.
        """
        self.num_preemptions += len(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            active = self._requests[new.req_id][1]
            if active.hit_tokens is None:
                active.hit_tokens = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        came_in = {new.req_id for new in output.scheduled_new_reqs} | set(cached.resumed_req_ids)
        drafted: Mapping[str, list[int]] = output.scheduled_spec_decode_tokens
        chunks: list[Chunk] = []
        for name, num_tokens in output.num_scheduled_tokens.items():
            stock, active = self._requests[name]
            chunks.append(
                Chunk(
                    active,
                    stock.num_computed_tokens - num_tokens,
                    num_tokens,
                    len(drafted.get(name, ())),
                    is_padded=name in came_in,
                    generates=not stock.is_prefill_chunk,
                )
            )
        return Batch(chunks, output)

    def finish(self, batch: Batch, time_s: float) -> list[ActiveRequest]:
        """See `StepScheduler`."""
        self.scheduler.update_from_output(batch.source, self.output_of(batch))
        if self._speculation is not None and not self._is_asynchronous:
            names = [chunk.active.name for chunk in batch.chunks]
            drafts = [[0] * self._speculation.draft_tokens for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        return self.ended(batch, time_s)

    def output_of(self, batch: Batch) -> ModelRunnerOutput:
        """Make the output that workers would return to vLLM's scheduler after a step."""
        names = [chunk.active.name for chunk in batch.chunks]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[0] * self._num_generated(chunk) for chunk in batch.chunks],
        )

    def ended(self, batch: Batch, time_s: float) -> list[ActiveRequest]:
        """Get the requests that ended with a step, and record its time in them.

        Args:
            batch: The step. vLLM's scheduler must already have its output.
            time_s: Time in seconds at which the step ended.
        """
        ended: list[ActiveRequest] = []
        for chunk in batch.chunks:
            active = chunk.active
            if not chunk.generates or active.name not in self._requests:
                continue
            stock = self._requests[active.name][0]
            active.num_tokens = stock.num_tokens
            if active.first_token_s < 0:
                active.first_token_s = time_s
            if stock.is_finished():
                active.finished_s = time_s
                active.num_preemptions = stock.num_preemptions
                del self._requests[active.name]
                ended.append(active)
        return ended

    def _num_generated(self, chunk: Chunk) -> int:
        """Get the number of tokens that a step generates for a request. It is 0 if it has ended."""
        if not chunk.generates or chunk.active.name not in self._requests:
            return 0
        if self._speculation is None or not chunk.num_drafted:
            return 1
        chunk.active.num_tokens = self._requests[chunk.active.name][0].num_tokens
        return 1 + self._speculation.num_right(chunk)

    def refuse_next(self) -> ActiveRequest:
        """See `StepScheduler`."""
        name = self.scheduler.waiting.peek_request().request_id
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        stock, active = self._requests.pop(name)
        active.num_tokens, active.num_preemptions = stock.num_tokens, stock.num_preemptions
        return active

    def look(self, active: ActiveRequest) -> None:
        """Copy the progress of a running request from vLLM."""
        stock = self._requests[active.name][0]
        active.num_tokens = stock.num_tokens
        active.num_computed = stock.num_computed_tokens
        active.num_in_flight = stock.num_in_flight_tokens
        active.num_stale = stock.num_stale_output_tokens
        active.num_preemptions = stock.num_preemptions


class _SeenMemory:
    """An arena whose bytes are counted after the progress of requests is copied from vLLM."""

    def __init__(self, memory: Memory, scheduler: EngineScheduler) -> None:
        self._memory = memory
        self._scheduler = scheduler

    @property
    def num_evicted(self) -> int:
        return self._memory.num_evicted

    def record_evictions(self) -> None:
        self._memory.record_evictions()

    def take_evictions(self) -> list[Eviction]:
        return self._memory.take_evictions()

    def take_misses(self) -> list[Miss]:
        return self._memory.take_misses()

    @property
    def moved_bytes(self) -> MovedBytes:
        return self._memory.moved_bytes

    def memory(self, running: list[ActiveRequest]) -> ArenaBytes:
        for active in running:
            self._scheduler.look(active)
        return self._memory.memory(running)

    def check(self) -> None:
        self._memory.check()


def make_engine(
    manager: str, machine: Machine, settings: Settings
) -> tuple[EngineScheduler, Memory]:
    """Make vLLM's scheduler, with a manager and an arena.

    Args:
        manager: One of `MANAGERS`.
        machine: The model, and the size of the arena in bytes.
        settings: How the engine is run. `eviction` must be the default, because an engine has no
            such option.

    Returns:
        The scheduler, and the memory that counts the bytes of its arena.

    Raises:
        ValueError: The manager is unknown, or refuses the model, the arena or a setting.
    """
    model, arena_bytes = machine.model_of(manager), machine.arena_bytes
    if manager not in MANAGERS:
        msg = (
            f"manager must be {' or '.join(MANAGERS)} under vLLM's scheduler, which knows no "
            f"other, got {manager!r}"
        )
        raise ValueError(msg)
    if settings.eviction != (default := Settings().eviction):
        msg = (
            f"eviction must be {default!r} under vLLM's scheduler, the default of engines, got "
            f"{settings.eviction!r}"
        )
        raise ValueError(msg)
    if any(each.keeps_encoder_tokens for each in model.layer_types):
        msg = f"model {model.name!r} reads what an encoder makes, and replays make nothing of it"
        raise ValueError(msg)
    if manager == "vllm":
        plan = plan_stock(
            model, arena_bytes, prefix_caching=settings.prefix_caching, options=settings.stock
        )
        config = _configured(plan.vllm_config, settings)
        scheduler = _scheduler(
            config, plan.kv_cache_config, plan.scheduler_tokens, plan.hash_tokens
        )
        memory: Memory = StockMemory(model, plan, scheduler.kv_cache_manager)
    else:
        config = _configured(VllmConfig(), settings)
        with _left_share(settings.left_share):
            scheduler = _jenga_scheduler(config, machine, settings)
        memory = ManagedMemory(scheduler.kv_cache_manager.manager)
    engine = EngineScheduler(scheduler, settings)
    return engine, _SeenMemory(memory, engine)


def _configured(base: Any, settings: Settings) -> _Config:  # noqa: ANN401
    """Make a configuration of vLLM for a simulated model."""
    scheduling, cache = base.scheduler_config, base.cache_config
    scheduling.max_num_batched_tokens = settings.chunk_tokens
    scheduling.max_num_seqs = settings.max_requests
    scheduling.async_scheduling = settings.is_asynchronous
    cache.enable_prefix_caching = settings.prefix_caching
    drafts = settings.speculation
    num_batches = 2 if settings.is_asynchronous else 1
    return _Config(
        base,
        model_config=SimpleNamespace(
            architecture=None,
            get_num_experts=lambda: 0,
            get_num_experts_per_tok=lambda: 0,
            hf_text_config=SimpleNamespace(),
            is_diffusion=False,
            is_encoder_decoder=False,
            is_mm_prefix_lm=False,
            max_model_len=NEVER,
            return_sampling_mask=False,
            runner_type="generate",
            skip_tokenizer_init=True,
            supports_multimodal_inputs=False,
            uses_mrope=False,
        ),
        speculative_config=None
        if drafts is None
        else SimpleNamespace(
            max_num_new_slots_for_drafting=drafts.draft_queries,
            num_speculative_tokens_per_batch_size=None,
            use_eagle=lambda: False,
            use_eagle_block_drop=lambda: False,
            needs_eagle_block_drop=lambda: False,  # vLLM 0.33 asks for it
            uses_draft_kv_cache=lambda: False,
        ),
        num_speculative_tokens=drafts.draft_tokens if drafts is not None else 0,
        num_lookahead_tokens=drafts.lookahead_tokens if drafts is not None else 0,
        num_prefill_lookahead_tokens=0,
        max_concurrent_batches=num_batches,
        max_in_flight_tokens=num_batches * settings.chunk_tokens,
        use_v2_model_runner=False,
    )


def _scheduler(config: Any, kv_cache_config: Any, scheduler_tokens: int, hash_tokens: int) -> Any:  # noqa: ANN401
    config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=scheduler_tokens,
        hash_block_size=hash_tokens,
    )


def _jenga_scheduler(
    config: Any,  # noqa: ANN401
    machine: Machine,
    settings: Settings,
) -> Any:  # noqa: ANN401
    """Make a scheduler with the plugin's manager, and the arena that the plugin would cut."""
    apply_replacements()
    config.cache_config.block_size = TOKENS_PER_PAGE
    groups = get_kv_cache_groups(config, attention_specs(machine.model))
    planned: Any = get_kv_cache_config_from_groups(config, groups, machine.arena_bytes)
    num_host_large_pages = settings.host_bytes // planned.geometry.large_page_bytes
    planned = replace(planned, num_host_large_pages=num_host_large_pages)
    planned = replace(planned, step_tokens=step_tokens_of(machine.clock))
    return _scheduler(config, planned, *_block_tokens(planned, config))


def _block_tokens(planned: Any, config: Any) -> tuple[int, int]:  # noqa: ANN401
    """Get the tokens in a block of the scheduler and of a hash, as vLLM's engine core does."""
    resolve: Any = getattr(core, "resolve_kv_cache_block_sizes")  # noqa: B009  replaced there
    return resolve(planned, config)


@contextmanager
def _left_share(share: float | None) -> Generator[None]:
    """Set the environment variable for the share that admissions leave to cached content.

    Args:
        share: The share, 0 to 1. None leaves the variable as it is.
    """
    if share is None:
        yield
        return
    before = os.environ.get(_LEFT_SHARE)
    os.environ[_LEFT_SHARE] = repr(share)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LEFT_SHARE]
        else:
            os.environ[_LEFT_SHARE] = before
