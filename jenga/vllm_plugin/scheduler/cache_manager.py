"""The memory manager behind the interface of vLLM's `KVCacheManager`.

The scheduler asks a `KVCacheManager` for blocks. This one passes each call on to
`jenga.manager.Manager`, and returns its answers as page ids. It does no accounting of its own.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from jenga.errors import NotLoadedError, OutOfPagesError
from jenga.eviction.known import policy_by_name
from jenga.manager import Manager
from jenga.page_ids import SmallPageId
from jenga.policies import RequestFacts
from jenga.policies.token_budget import next_choice
from jenga.spec import TokenBudget
from jenga.state_keeper import StateKeeper
from jenga.tables.request import PrefixHit
from jenga.vllm_plugin.arena.joined import lender_of
from jenga.vllm_plugin.arena.layout import (
    JengaKVCacheConfig,
    first_layers,
    geometry_of,
    group_tables,
    host_table_index,
    image_table_index,
)
from jenga.vllm_plugin.config import TOKENS_PER_PAGE
from jenga.vllm_plugin.metrics.memory_log import MemoryLog, open_memory_log
from jenga.vllm_plugin.metrics.readings import MetricReader
from jenga.vllm_plugin.metrics.spans import AdmissionSpans, open_spans
from jenga.vllm_plugin.orders.step_orders import StepOrders
from jenga.vllm_plugin.scheduler.cache_events import CacheEvents
from jenga.vllm_plugin.scheduler.encoder_cache import ArenaEncoderCache, ImageBook
from jenga.vllm_plugin.scheduler.encoder_hits import EncoderHits
from jenga.vllm_plugin.scheduler.hosted_images import HostedBook
from jenga.vllm_plugin.scheduler.image_hits import ImageHits
from jenga.vllm_plugin.scheduler.make_orders import make_orders
from jenga.vllm_plugin.settings.environment import read_settings
from jenga.vllm_plugin.specs.image_features import ImageAttentionSpec

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request


class PageTables(KVCacheBlocks):
    """Page ids per group, passed to vLLM's scheduler instead of blocks.

    Attributes:
        page_ids: Small page ids per group, in token order.
        hit: Prefix hit that a lookup returned. None for pages that do not come from a lookup.
    """

    def __init__(
        self, page_ids: tuple[list[SmallPageId], ...], hit: PrefixHit | None = None
    ) -> None:
        super().__init__(blocks=tuple(() for _ in page_ids))
        self.page_ids = page_ids
        self.hit = hit

    def get_block_ids(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Get the page ids per group.

        Args:
            allow_none: Whether to return None if no group has a page.
            group_ids: Groups to return, or None for all.
        """
        groups = self.page_ids if group_ids is None else [self.page_ids[g] for g in group_ids]
        if allow_none and not any(groups):
            return None
        return tuple(list(group) for group in groups)


@dataclass(frozen=True, slots=True)
class _GroupView:
    """The fields of vLLM's manager of one group that the scheduler reads."""

    kv_cache_group_id: int
    kv_cache_spec: "KVCacheSpec"
    block_size: int


class _Coordinator:
    """The fields of vLLM's coordinator that the scheduler and the engine core read."""

    enable_partial_hash_hits = False

    def __init__(self, config: JengaKVCacheConfig, *, state_tokens: int | None) -> None:
        """Describe the groups of a configuration.

        Args:
            config: Configuration of the manager.
            state_tokens: Block size of groups of states: tokens between two states that can be hit.
                None means that no state is kept.
        """
        self.single_type_managers = tuple(
            _GroupView(
                index,
                group.kv_cache_spec,
                state_tokens
                if table.is_state and state_tokens is not None
                else group.kv_cache_spec.block_size,
            )
            for index, (group, table) in enumerate(
                zip(config.kv_cache_groups, group_tables(geometry_of(config)), strict=True)
            )
        )


class _BlockPool:
    """The methods of vLLM's block pool that the scheduler calls."""

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Refuse to free blocks.

        Only KV connectors free blocks without the manager, and they are not supported.

        Raises:
            NotImplementedError: There is a block to free.
        """
        if any(True for _ in blocks):
            msg = "blocks must be freed through the cache manager"
            raise NotImplementedError(msg)


class JengaKVCacheManager:
    """The interface of vLLM's `KVCacheManager`, served by `jenga.manager.Manager`."""

    retained_hit_group_ids: tuple[int, ...] = ()
    mamba_shared_prefix_checkpoint = False

    def __init__(
        self,
        kv_cache_config: JengaKVCacheConfig,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: Any = None,  # noqa: ANN401
        watermark: float = 0.0,
        enable_mamba_shared_prefix_checkpoint: bool = False,
        num_hash_lookahead_tokens: int = 0,
    ) -> None:
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.log_stats = log_stats
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        hash_tokens = hash_block_size if enable_caching else TOKENS_PER_PAGE
        membership = kv_cache_config.shared_arena
        settings = read_settings(os.environ)
        self.manager = Manager(
            geometry_of(kv_cache_config),
            num_large_pages=kv_cache_config.num_blocks,
            prefix_caching=enable_caching,
            hash_tokens=hash_tokens,
            eviction_policy=policy_by_name(settings.eviction)(),
            left_share=settings.left_share,
            step_tokens=kv_cache_config.step_tokens,
            # The default is vLLM's. Its scheduler always passes a value.
            in_flight_tokens=max_in_flight_tokens or max_model_len,
            # Slots of a draft head depend on the token after theirs, if the head has slots at all.
            ahead_tokens=int(use_eagle and kv_cache_config.has_draft_layers),
            records_changes=enable_kv_cache_events,
            num_host_large_pages=kv_cache_config.num_host_large_pages,
            lender=None if membership is None else lender_of(membership),
            steps_in_flight=1 if membership is None else membership.steps_in_flight,
        )
        self._events: CacheEvents | None = None
        if enable_kv_cache_events and enable_caching:
            self._events = CacheEvents(
                self.manager,
                kv_cache_config,
                hash_tokens=hash_tokens,
                lookahead_tokens=num_hash_lookahead_tokens,
            )
        budgets = [
            table.layer_type
            for table in self.manager.geometry.page_tables
            if isinstance(table.layer_type, TokenBudget)
        ]
        self.has_token_budgets = bool(budgets)
        self._choosing_tokens = max((each.recent_tokens for each in budgets), default=0)
        # All layers of a model choose at the same tokens.
        self._output_tokens = next((each.output_tokens for each in budgets), None)
        self._has_states = any(table.is_state for table in self.manager.geometry.page_tables)
        self._first_layers = first_layers(kv_cache_config)
        self._states: StateKeeper | None = None
        if enable_caching and self._has_states:
            self._states = StateKeeper(
                self.manager,
                hash_tokens=hash_tokens,
                on_keep=self._events.note if self._events is not None else None,
                history_query_tokens=kv_cache_config.history_query_tokens,
            )
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.attends_to_images = any(isinstance(spec, ImageAttentionSpec) for spec in specs)
        make_hits = ImageHits if self.attends_to_images else EncoderHits
        self._encoders = make_hits(self.manager.geometry)
        self._images = _image_book(self.manager)
        self._most_chunk_tokens = max_in_flight_tokens or max_model_len
        self.coordinator = _Coordinator(
            kv_cache_config, state_tokens=hash_tokens if enable_caching else None
        )
        self.block_pool = _BlockPool()
        self.num_kv_cache_groups = len(kv_cache_config.kv_cache_groups)
        self.empty_kv_cache_blocks = PageTables(tuple([] for _ in kv_cache_config.kv_cache_groups))
        # Requests in the step that is being scheduled: name -> request, and its tokens after it.
        self._scheduled: dict[str, tuple[Request, int]] = {}
        self._step_tokens = 0  # number of tokens in that step
        # Request refused in that step because its hit must first be loaded from host memory.
        self._put_off: Request | None = None
        self._was_ahead = False  # whether the step before had copies beside its layers
        self._watermark_large_pages = int(watermark * kv_cache_config.num_blocks)
        self._memory_log: MemoryLog | None = open_memory_log(
            self.manager, data_parallel_index=kv_cache_config.data_parallel_index
        )
        log = self._memory_log
        self._spans: AdmissionSpans | None = open_spans(
            self.manager,
            kv_cache_config.traces_endpoint,
            pass_on=log.add_misses if log is not None else None,
        )
        self.metrics = MetricReader(self.manager)

    def open_encoder_cache(self, encoder_cache: object) -> None:
        """Let the scheduler's encoder cache answer for this manager, if it is ours."""
        if self._images is not None and isinstance(encoder_cache, ArenaEncoderCache):
            encoder_cache.open(self.manager, self._images)

    def why_never(self, request: "Request") -> str:
        """Get the reason why a request with images fits in no empty arena. It is empty if it fits.

        The start of the engine checks texts, and images of the largest size. Smaller images may
        take more pages together.
        """
        if self._images is None or not request.mm_features:
            return ""
        try:
            self.manager.capacity.require_fit(
                request.num_tokens,
                chunk_tokens=min(self._most_chunk_tokens, request.num_tokens),
                facts=self._facts(request),
            )
        except ValueError as error:
            return str(error)
        return ""

    def _facts(self, request: "Request") -> RequestFacts:
        """Get what the manager needs to know about a request: its length and encoder outputs."""
        images = self._encoders.images(request)
        # A preempted request computes its outputs again. Budgets of layers leave these alone.
        is_cut = self.has_token_budgets
        prompt_tokens = request.num_prompt_tokens if is_cut else request.num_tokens
        return RequestFacts(prompt_tokens=prompt_tokens, images=images)

    def cut_at_choice(
        self, request: "Request", num_new_tokens: int, num_found_tokens: int = 0
    ) -> int:
        """Shorten a step of a request for layers with a token budget.

        A step does not go past the end of the prompt, or past a later choice. The step that ends
        the prompt has all queries that choose which tokens are kept.

        Args:
            request: The request.
            num_new_tokens: Number of tokens that the step would compute.
            num_found_tokens: Number of tokens of a prefix hit.

        Returns:
            The number of tokens to compute. 0 if the request must wait for a step with more room.
        """
        prompt_tokens = request.num_prompt_tokens
        computed_tokens = request.num_computed_tokens + num_found_tokens
        left = next_choice(prompt_tokens, computed_tokens, self._output_tokens) - computed_tokens
        if num_new_tokens >= left:
            return left
        if computed_tokens >= prompt_tokens:
            return num_new_tokens
        return min(num_new_tokens, max(0, left - self._choosing_tokens))

    @property
    def usage(self) -> float:
        """Share of the arena's large pages, 0 to 1, that a request could not get right now."""
        return self.manager.usage

    def new_step_starts(self) -> None:
        """Record that the scheduler begins a step."""
        if self._states is not None:
            self._states.step_ends()
        self.manager.new_step()
        self._scheduled.clear()
        self._step_tokens = 0
        self._put_off = None
        if self._states is not None:
            self._states.step_starts()
        if self._images is not None:
            for request in self._images.step_starts():
                self.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens))
        if self._memory_log is not None:
            self._memory_log.step()
        if self._spans is not None:
            self._spans.step_starts()

    def rest(self) -> None:
        """Exchange large pages of a shared arena while the engine has no work."""
        if self.manager.borrowed is not None:
            self.manager.borrowed.rest()

    def prefix_cache_lookup_enabled(self, request: "Request") -> bool:
        """Whether the prefix cache may be read for a request."""
        return self._caches(request) and not request.skip_reading_prefix_cache

    def _caches(self, request: "Request") -> bool:
        """Whether a request's pages may be cached: its hashes must identify their content."""
        return self.enable_caching and self._encoders.can_name(request)

    def finds_encoder_output(self, request: "Request") -> bool:
        """Whether the last lookup was for this request and found all of its encoder outputs."""
        return self.prefix_cache_lookup_enabled(request) and self._encoders.are_found(request)

    def found_images(self, request: "Request") -> frozenset[int]:
        """Get the numbers of a request's images that need not be encoded.

        The last lookup found those of a request that waits. Those of a running request are cached
        now, and the request shares them in the step that begins them.
        """
        if not isinstance(self._encoders, ImageHits):
            return frozenset()
        if self.manager.is_running(request.request_id):
            tables = self._encoders.table_indices
            return frozenset(
                number
                for number, image in enumerate(self._encoders.images(request))
                if self.manager.is_image_cached(image)
                and not any(
                    self.manager.image_pages(request.request_id, index, number) for index in tables
                )
            )
        if not self.prefix_cache_lookup_enabled(request):
            return frozenset()
        return self._encoders.found(request)

    def can_ever_fit(self, request: "Request") -> bool:
        """Whether the arena can hold a request with all of its images, and nothing else."""
        most_tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        return self.manager.capacity.can_ever_fit(
            most_tokens, chunk_tokens=most_tokens, facts=self._facts(request)
        )

    def note_waiting(self, request: "Request") -> None:
        """Record for traces that a request is in the queue. A session waits once it has a turn."""
        if self._spans is not None and request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            self._spans.wait(request.request_id)

    def announce(self, request: "Request", *, first: bool) -> None:
        """Record that a request waits in the queue.

        Args:
            request: The request.
            first: Whether it waits at the head of the queue instead of its end.
        """
        request_id = request.request_id
        if self.prefix_cache_lookup_enabled(request) and not self.manager.is_running(request_id):
            # The next turn of a session has the request id of the turn before.
            self.manager.withdraw(request_id)
            self.manager.announce(
                request_id,
                request.block_hashes,
                num_tokens=request.num_tokens,
                facts=self._facts(request),
                first=first,
            )

    def get_computed_blocks(
        self, request: "Request", max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """Look up the longest cached prefix of a request.

        Args:
            request: The request.
            max_cache_hit_length: Largest number of tokens to hit, or None for no other limit.

        Returns:
            The pages, the number of tokens hit, and 0: vLLM need not keep a state at any boundary.
        """
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        # The scheduler looks hits up after it has served the running requests, and preempts none of
        # them from here on. Their pages can be committed: layers write them before they are read.
        for scheduled, num_tokens in self._scheduled.values():
            self.cache_blocks(scheduled, num_tokens)
        self._scheduled.clear()
        most_tokens = self._encoders.most_hit_tokens(request)
        if self.manager.starts_over(request.request_id):
            most_tokens = 0
        if max_cache_hit_length is not None:
            most_tokens = min(most_tokens, max_cache_hit_length)
        hit = self._encoders.settle(request, self._lookup(request, most_tokens))
        if self._images is not None and request.mm_features:
            self._images.record_hit(request, hit)
        if self._events is not None and _reports_hits(request):
            self._events.record_hit(request, hit)
        # A hit of 0 tokens is passed on too: it says where the request branches off from others.
        page_ids = tuple([] for _ in range(self.num_kv_cache_groups))
        return PageTables(page_ids, hit), hit.num_tokens, 0

    def _lookup(self, request: "Request", most_tokens: int) -> PrefixHit:
        """Look up the longest cached prefix that does not end within an image.

        Images only matter if `keeps_images_whole` of the configuration is true.
        """
        facts = self._facts(request)
        hit = self.manager.lookup(request.block_hashes, max_tokens=most_tokens, facts=facts)
        for image in reversed(
            request.mm_features if self.kv_cache_config.keeps_images_whole else ()
        ):
            start_token = image.mm_position.offset
            if start_token < hit.num_tokens < start_token + image.mm_position.length:
                hit = self.manager.lookup(request.block_hashes, max_tokens=start_token, facts=facts)
        return hit

    def rest_tokens(self, request: "Request") -> int | None:
        """Count the tokens that a waiting request would compute if it were admitted now.

        Returns:
            The number of tokens. None if a prompt should leave no room for the request in a step.
        """
        if not self.prefix_cache_lookup_enabled(request):
            refused = self.manager.was_refused(request.request_id)
            return None if refused else request.num_tokens
        return self.manager.rest_tokens(
            request.request_id,
            request.block_hashes,
            num_tokens=request.num_tokens,
            facts=self._facts(request),
        )

    def allocate_slots(
        self,
        request: "Request",
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> KVCacheBlocks | None:
        """Give a request slots for its next tokens.

        Returns:
            The new pages, or None if the request gets none and must wait or be preempted.

        Raises:
            ValueError: There are neither new nor newly hit tokens.
        """
        if num_new_tokens == 0 and num_new_computed_tokens == 0:
            msg = "allocate_slots: num_new_tokens must be positive where no computed tokens come in"
            raise ValueError(msg)
        computed_tokens = request.num_computed_tokens + num_new_computed_tokens
        num_tokens = computed_tokens + num_new_tokens
        is_waiting = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        reserve = self._watermark_large_pages if is_waiting and has_scheduled_reqs else 0
        if request.status == RequestStatus.PREEMPTED and has_scheduled_reqs:
            reserve = max(reserve, self.manager.growth_large_pages)
        hit = new_computed_blocks.hit if isinstance(new_computed_blocks, PageTables) else None
        facts = self._facts(request) if is_waiting else None
        full_tokens = min(request.num_tokens, self.max_model_len) if full_sequence_must_fit else 0
        # Stale steps write to pages that a preemption took from the request: they do not count.
        in_flight_tokens = request.num_in_flight_tokens - request.num_stale_output_tokens
        if self.enable_caching and self.manager.is_running(request.request_id):
            # Commit before allocating: a page that leaves a window in `allocate` is cached only if
            # it was committed before.
            self.cache_blocks(request, min(computed_tokens, request.num_tokens))
        try:
            new_pages = self.manager.allocate(
                request.request_id,
                num_tokens=min(num_tokens + num_lookahead_tokens, self.max_model_len),
                num_processed_tokens=max(0, computed_tokens - in_flight_tokens),
                hit=hit,
                facts=facts,
                full_tokens=full_tokens,
                reserve_large_pages=reserve,
            )
        except OutOfPagesError as error:
            if isinstance(error, NotLoadedError):
                self._put_off = request
            if is_waiting:
                self._note_refusal(request, error)
            return None
        if (
            self._images is not None
            and request.mm_features
            and not self._images.grant(request, computed_tokens, num_tokens)
        ):
            # A cached image was evicted after vLLM was told of it. It is encoded a step later.
            if is_waiting:
                self.free(request)
            return None
        if is_waiting:
            self._note_admission(request)
        self._step_tokens += num_new_tokens
        if self.enable_caching:
            self.cache_blocks(request, min(computed_tokens, request.num_tokens))
            # Tokens of this step are committed later: while the scheduler serves the running
            # requests, it may still preempt this one.
            self._scheduled[request.request_id] = (request, min(num_tokens, request.num_tokens))
        if self._states is not None:
            self._states.schedule(request, computed_tokens, num_tokens)
        new_pages = new_pages[: self.num_kv_cache_groups]
        return PageTables(new_pages) if any(new_pages) else self.empty_kv_cache_blocks

    def _note_refusal(self, request: "Request", error: OutOfPagesError) -> None:
        self.metrics.held_back.refuse(request.request_id, error)
        if self._spans is not None:
            self._spans.refuse(request.request_id, error)

    def _note_admission(self, request: "Request") -> None:
        self.metrics.held_back.end(request.request_id)
        if self._spans is not None:
            self._spans.admit(request)

    def cache_blocks(self, request: "Request", num_computed_tokens: int) -> None:
        """Commit the full pages of a request's first `num_computed_tokens` to the prefix cache."""
        if self._caches(request):
            self.manager.commit(request.request_id, request.block_hashes, num_computed_tokens)
            if self._events is not None:
                self._events.note(request)

    def free(self, request: "Request") -> None:
        """Free all pages of a request that finished, was aborted or is preempted.

        The scheduler also calls it for requests without pages, aborted while they waited.
        """
        self._scheduled.pop(request.request_id, None)
        if self._spans is not None and request.is_finished():
            self._spans.forget(request.request_id)
        if self._images is not None:
            self._images.forget(request.request_id)
        if self.manager.is_running(request.request_id):
            self.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens))
            self.manager.free(request.request_id)
            if self._events is not None:
                self._events.note(request)
            if self._states is not None:
                self._states.forget(request.request_id)
        else:
            self.manager.withdraw(request.request_id)
            self.metrics.held_back.end(request.request_id)

    def give_up_spoilt(self, session: "Request") -> bool:
        """Free the pages of a session at its next turn if it cannot go on with them.

        A step scheduled ahead may have processed a token that the next turn replaces. Slots of
        tokens are written again, but a state cannot go back. A turn may also bring images, for
        which a request is given pages only if they are known at its admission.

        Returns:
            Whether the pages were freed. If so, the session must be admitted again from the queue.
        """
        request_id = session.request_id
        if not self.manager.is_running(request_id):
            return False
        if self.has_token_budgets or (self.attends_to_images and session.mm_features):
            self.free(session)
            return True
        if self._images is not None and self._images.lacks(session):
            self.free(session)
            return True
        if not self._has_states:
            return False
        if self.manager.request_tokens()[request_id] <= session.num_computed_tokens:
            return False
        self.free(session)
        return True

    def pop_blocks_for_free(self, request: "Request") -> list[KVCacheBlock]:
        """Free a request's pages, and return no blocks to free later.

        vLLM defers frees only for KV connectors, which are refused at start-up.
        """
        self.free(request)
        return []

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free pages whose tokens no later token reads."""
        self.manager.release_passed(request_id, processed_computed_tokens)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Get all page tables of a request."""
        return PageTables(self.get_block_ids(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[SmallPageId], ...]:
        """Get a request's page ids per group. A waiting request has none."""
        if not self.manager.is_running(request_id):
            return tuple([] for _ in range(self.num_kv_cache_groups))
        return self.manager.page_tables(request_id)[: self.num_kv_cache_groups]

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Refuse to evict pages.

        A page id without its group does not identify a page. Only KV connectors call this.

        Raises:
            NotImplementedError: Always.
        """
        msg = "blocks must be named with their group to be evicted, got ids alone"
        raise NotImplementedError(msg)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. While requests run, do nothing and return False."""
        if not self.manager.reset_prefix_cache():
            return False
        if self._events is not None:
            self._events.cleared()
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    def estimate_cached_tokens(self, request: "Request") -> int:
        """Count how many of a request's computed tokens a later request could hit.

        vLLM calls it after the step that ends a prompt, before it schedules another step.
        """
        if not self._caches(request) or not self.manager.is_running(request.request_id):
            return 0
        # That step is over, so the states that it was to keep are written.
        self.manager.keep_written(request.request_id)
        computed_tokens = min(request.num_computed_tokens, request.num_tokens)
        self.cache_blocks(request, computed_tokens)
        return self._lookup(request, computed_tokens).num_tokens

    def record_prefix_cache_stats(self, request: "Request", num_hits: int) -> None:
        """Count a lookup whose request was admitted."""
        if self.prefix_cache_stats is None or not self.prefix_cache_lookup_enabled(request):
            return
        self.prefix_cache_stats.record(
            num_tokens=request.num_tokens,
            num_hits=num_hits,
            preempted=request.num_preemptions > 0,
        )

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Get the lookups counted since the last call."""
        stats = self.prefix_cache_stats
        self.prefix_cache_stats = PrefixCacheStats() if self.log_stats else None
        return stats

    def take_new_block_ids(self) -> list[int]:
        """Get pages to clear before use: none, since kernels read only slots that were written."""
        return []

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[KVCacheBlock]]:
        """Get copies of blocks: none, because a step's orders have the copies of its pages.

        Returns:
            No copies, and no blocks to free later: the manager does the accounting.
        """
        return [], []

    def take_orders(self) -> StepOrders | None:
        """Get the orders to the workers for a step. Call this once the step is fully scheduled.

        Returns:
            The orders, or None if the workers have nothing to do for them.
        """
        orders = make_orders(
            self.manager,
            self._states,
            num_tokens=self._step_tokens,
            first_layers=self._first_layers,
        )
        if self._events is not None and self._put_off is not None:
            self._events.note(self._put_off)
        # A worker waits for copies made ahead when it gets its next orders. So the step after them
        # needs orders even if these are empty.
        is_idle = orders == StepOrders() and not self._was_ahead
        self._was_ahead = bool(orders.ahead)
        return None if is_idle else orders

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Get states to pass to a KV connector: none, since connectors are refused at start-up."""
        return {}

    def take_events(self) -> list[KVCacheEvent]:
        """Get the cache events since the last call. There are none unless events are enabled."""
        return self._events.take() if self._events is not None else []


def _image_book(manager: Manager) -> ImageBook | None:
    """Make the book of the image embeddings in an arena. None if there are none."""
    table_index = image_table_index(manager.geometry)
    if table_index is not None:
        return ImageBook(manager, table_index)
    table_index = host_table_index(manager.geometry)
    return None if table_index is None else HostedBook(manager, table_index)


def _reports_hits(request: "Request") -> bool:
    """Whether cache events report the pages that a request hits; never for pooling requests."""
    return getattr(request, "kv_cache_report_mode", "incremental") == "full"
