"""Replaced names of vLLM's configuration and scheduler."""

import contextlib
import functools
import logging
from collections.abc import Generator
from typing import Any

from jenga.vllm_plugin.patches.patch import Function, Replacement

logger = logging.getLogger(f"vllm.{__name__}")


def _check_and_update_config(original: Function) -> Function:
    @functools.wraps(original)
    def check_and_update_config(vllm_config: Any) -> None:  # noqa: ANN401
        from jenga.vllm_plugin.config import finish_config, prepare_config, wanted_options

        if prepare_config(vllm_config):
            wanted = wanted_options(vllm_config)
            original(vllm_config)
            finish_config(vllm_config, wanted)
        else:
            original(vllm_config)

    return check_and_update_config


def _try_verify_and_update_config(original: Function) -> Function:
    @functools.wraps(original)
    def try_verify_and_update_config(self: Any) -> None:  # noqa: ANN401
        from jenga.vllm_plugin.config import (
            run_images_eagerly,
            select_by_environment,
            warn_of_options,
        )

        select_by_environment(self)
        warn_of_options(self)
        run_images_eagerly(self)
        original(self)

    return try_verify_and_update_config


def _get_attn_backend_cls(original: Function) -> Function:
    def get_attn_backend_cls(
        selected_backend: Any,  # noqa: ANN401
        attn_selector_config: Any,  # noqa: ANN401
        num_heads: int | None = None,
    ) -> str:
        from jenga.vllm_plugin.config import checked_backend_path
        from jenga.vllm_plugin.settings.switch import backend_member

        if selected_backend is backend_member():
            return checked_backend_path(attn_selector_config)
        return original(selected_backend, attn_selector_config, num_heads)

    return get_attn_backend_cls


def _update_block_size_for_backend(original: Function) -> Function:
    def update_block_size_for_backend(vllm_config: Any) -> None:  # noqa: ANN401
        from jenga.vllm_plugin.config import is_selected

        # Small pages of each layer type have their own size, so none is enlarged to match another.
        if not is_selected(vllm_config):
            original(vllm_config)

    return update_block_size_for_backend


def _kv_cache_manager(original: Function) -> Function:
    @functools.wraps(original, updated=())
    def make_kv_cache_manager(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.arena.layout import JengaKVCacheConfig
        from jenga.vllm_plugin.scheduler.cache_manager import JengaKVCacheManager

        if isinstance(kwargs.get("kv_cache_config"), JengaKVCacheConfig):
            return JengaKVCacheManager(*args, **kwargs)
        return original(*args, **kwargs)

    return make_kv_cache_manager


def _enqueue_waiting_request(original: Function) -> Function:
    @functools.wraps(original)
    def enqueue(self: Any, request: Any) -> None:  # noqa: ANN401
        original(self, request)
        _announce(self, request, first=False)

    return enqueue


def _preempt_request(original: Function) -> Function:
    @functools.wraps(original)
    def preempt(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        original(self, request, *args, **kwargs)
        _announce(self, request, first=True)

    return preempt


def _update_request_as_session(original: Function) -> Function:
    @functools.wraps(original)
    def update(self: Any, session: Any, update: Any) -> None:  # noqa: ANN401
        from jenga.vllm_plugin.scheduler.cache_manager import JengaKVCacheManager

        manager = self.kv_cache_manager
        if isinstance(manager, JengaKVCacheManager):
            # vLLM 0.32 also counts drafts as computed that were accepted after a turn's last token.
            computed_tokens = min(session.num_computed_tokens, session.num_tokens - 1)
            session.num_computed_tokens = computed_tokens
        original(self, session, update)
        if isinstance(manager, JengaKVCacheManager):
            manager.note_waiting(session)
            if manager.give_up_spoilt(session):
                session.num_computed_tokens = 0

    return update


def _schedule(original: Function) -> Function:
    @functools.wraps(original)
    def schedule(self: Any, throttle_prefills: bool = False) -> Any:  # noqa: ANN401
        from jenga.vllm_plugin.orders.step_orders import attach_orders
        from jenga.vllm_plugin.scheduler.cache_manager import JengaKVCacheManager

        manager = self.kv_cache_manager
        if isinstance(manager, JengaKVCacheManager):
            # Whether to ask the function below for every request of the step.
            self.need_mamba_block_aligned_split = (
                manager.has_token_budgets
                or bool(self.waiting)
                or any(request.is_prefill_chunk for request in self.running)
            )
        step = original(self, throttle_prefills)
        if isinstance(manager, JengaKVCacheManager):
            orders = manager.take_orders()
            if orders is not None:
                attach_orders(step, orders)
        return step

    return schedule


def _mamba_block_aligned_split(original: Function) -> Function:
    @functools.wraps(original)
    def split(
        self: Any,  # noqa: ANN401
        request: Any,  # noqa: ANN401
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        # Replays call this method without a scheduler. Only our manager has the attribute. It is
        # asked for instead of the class, because steps of many requests call this for each.
        manager = getattr(self, "kv_cache_manager", None)
        has_token_budgets = getattr(manager, "has_token_budgets", None)
        found = num_new_local_computed_tokens
        if manager is None or has_token_budgets is None:
            return original(self, request, num_new_tokens, found, num_external_computed_tokens)
        if has_token_budgets:
            return manager.cut_at_choice(request, num_new_tokens, found)
        if request.num_computed_tokens + found + num_new_tokens >= request.num_tokens:
            return num_new_tokens
        from jenga.vllm_plugin.scheduler.short_requests import beside_short

        return beside_short(self, request, num_new_tokens)

    return split


def _announce(scheduler: Any, request: Any, *, first: bool) -> None:  # noqa: ANN401
    """Tell the manager that a request waits, if the queue is first come, first served.

    The manager relies on the order of the queue, so requests with priorities are not announced.
    """
    from vllm.v1.core.sched.request_queue import SchedulingPolicy

    from jenga.vllm_plugin.scheduler.cache_manager import JengaKVCacheManager

    manager = scheduler.kv_cache_manager
    if isinstance(manager, JengaKVCacheManager):
        manager.note_waiting(request)
        if scheduler.policy == SchedulingPolicy.FCFS:
            manager.announce(request, first=first)


def _try_schedule_encoder_inputs(original: Function) -> Function:
    @functools.wraps(original)
    def try_schedule(
        self: Any,  # noqa: ANN401
        request: Any,  # noqa: ANN401
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int = 0,
    ) -> Any:  # noqa: ANN401
        from vllm.v1.request import RequestStatus

        from jenga.vllm_plugin.scheduler.cache_manager import JengaKVCacheManager

        manager = self.kv_cache_manager
        is_ours = isinstance(manager, JengaKVCacheManager)
        asked = (encoder_compute_budget, shift_computed_tokens)
        if is_ours and manager.attends_to_images:
            return _schedule_images(
                self, request, num_computed_tokens, num_new_tokens, encoder_compute_budget
            )
        if is_ours:
            manager.open_encoder_cache(self.encoder_cache_manager)
            is_waiting = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            if is_waiting and (reason := manager.why_never(request)):
                _refuse(self, request, reason)
                return [], 0, encoder_compute_budget, [], []
        if is_ours and manager.kv_cache_config.keeps_images_whole:
            cut_tokens = _cut_image_tokens(request, num_computed_tokens, num_new_tokens)
            if 0 < cut_tokens <= _most_step_tokens(self):
                return [], 0, encoder_compute_budget, [], []
            if cut_tokens:
                with _images_may_be_cut(self.scheduler_config):
                    return original(self, request, num_computed_tokens, num_new_tokens, *asked)
        if (
            is_ours
            and self.is_encoder_decoder
            and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        ):
            if manager.finds_encoder_output(request):
                return [], num_new_tokens, encoder_compute_budget, [], []
            # A prefix hit does not mean that the encoder outputs are cached too.
            num_computed_tokens = 0
        return original(self, request, num_computed_tokens, num_new_tokens, *asked)

    return try_schedule


def _schedule_images(
    scheduler: Any,  # noqa: ANN401
    request: Any,  # noqa: ANN401
    num_computed_tokens: int,
    num_new_tokens: int,
    budget_tokens: int,
) -> tuple[list[int], int, int, list[int], list[int]]:
    """Choose the images to encode for a model whose layers of cross attention read them.

    A request that the arena cannot hold with its images ends with an error, as it does in vLLM if
    an input contradicts one of the same name.
    """
    from vllm.v1.request import RequestStatus

    from jenga.vllm_plugin.scheduler.image_hits import images_to_encode

    if not num_new_tokens or not request.mm_features:
        return [], num_new_tokens, budget_tokens, [], []
    manager = scheduler.kv_cache_manager
    is_admitted = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
    if is_admitted and not manager.can_ever_fit(request):
        num_images = len(request.mm_features)
        reason = f"the arena cannot hold its {request.num_tokens} tokens and {num_images} images"
        _refuse(scheduler, request, f"{reason} at once")
        return [], 0, budget_tokens, [], []
    found = manager.found_images(request)
    chosen, num_new_tokens, budget_tokens = images_to_encode(
        request,
        found,
        num_computed_tokens,
        num_new_tokens,
        budget_tokens,
        is_admitted=is_admitted,
    )
    return chosen, num_new_tokens, budget_tokens, [], []


def _strip_covered_mm_data(original: Function) -> Function:
    @functools.wraps(original)
    def strip(mm_features: Any, num_computed_tokens: int, uses_mrope: bool = False) -> Any:  # noqa: ANN401, ARG001
        return mm_features

    return strip


def _refuse(scheduler: Any, request: Any, reason: str) -> None:  # noqa: ANN401
    """Let vLLM end a request with an error, as if the name of an image were used twice."""
    logger.error("Request %s is refused: %s", request.request_id, reason)
    scheduler.encoder_cache_mismatch_reqs.add(request.request_id)


def _cut_image_tokens(request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:  # noqa: ANN401
    """Get the number of tokens of an image that is at the start of a step and would be cut.

    It is 0 if there is no such image. vLLM ends a step before an image that it would cut. If the
    step begins with the image, vLLM 0.32 cuts it. vLLM 0.33 waits, forever if no step has room.
    """
    for image in request.mm_features:
        position = image.mm_position
        if position.offset == num_computed_tokens and num_new_tokens < position.length:
            return position.length
    return 0


def _most_step_tokens(scheduler: Any) -> int:  # noqa: ANN401
    """Get the largest number of tokens of one request in a step."""
    config, speculation = scheduler.scheduler_config, scheduler.vllm_config.speculative_config
    draft_slots = speculation.max_num_new_slots_for_drafting if speculation is not None else 0
    return min(
        scheduler.max_num_scheduled_tokens,
        config.max_num_batched_tokens - draft_slots,
        config.long_prefill_token_threshold or config.max_num_batched_tokens,
    )


@contextlib.contextmanager
def _images_may_be_cut(scheduler_config: Any) -> Generator[None]:  # noqa: ANN401
    """Temporarily allow vLLM's scheduler to cut an image between steps."""
    scheduler_config.disable_chunked_mm_input = False
    try:
        yield
    finally:
        scheduler_config.disable_chunked_mm_input = True


def _resolve_kv_cache_block_sizes(original: Function) -> Function:
    @functools.wraps(original)
    def resolve(kv_cache_config: Any, vllm_config: Any) -> tuple[int, int]:  # noqa: ANN401
        from jenga.vllm_plugin.arena.layout import JengaKVCacheConfig, groups_of_tokens

        if isinstance(kv_cache_config, JengaKVCacheConfig):
            cache, page_tokens = vllm_config.cache_config, kv_cache_config.page_tokens
            kv_cache_config = groups_of_tokens(kv_cache_config)
            if not kv_cache_config.kv_cache_groups:
                # vLLM has set it to that of states: the largest number of tokens of the model.
                cache.block_size = cache.prefix_match_unit or page_tokens
        return original(kv_cache_config, vllm_config)

    return resolve


def _notify_idle_state_callbacks(original: Function) -> Function:
    @functools.wraps(original)
    def notify(self: Any) -> None:  # noqa: ANN401
        from jenga.vllm_plugin.scheduler.resting import rest

        original(self)
        rest(self)

    return notify


def _init_device(original: Function) -> Function:
    @functools.wraps(original)
    def init_device(self: Any) -> None:  # noqa: ANN401
        from jenga.vllm_plugin.config import is_selected

        original(self)
        if is_selected(self.vllm_config):
            from jenga.vllm_plugin.patches.all_patches import apply_worker_replacements

            apply_worker_replacements()

    return init_device


CONFIG_WATCH = (
    Replacement(
        module="vllm.config.vllm",
        name="VllmConfig.try_verify_and_update_config",
        reason="a model may set a backend here if none is selected, before the platform is asked",
        parameters=("self",),
        make=_try_verify_and_update_config,
    ),
    Replacement(
        module="vllm.platforms",
        name="current_platform.check_and_update_config",
        reason=(
            "the only function that gets every configuration; the official hook is a platform "
            "plugin, which would replace the platform even if the backend is not selected"
        ),
        parameters=("vllm_config",),
        make=_check_and_update_config,
    ),
)
"""Applied as soon as vLLM loads the plugin. They call the originals if another backend is used."""

WHEN_SELECTED = (
    Replacement(
        module="vllm.platforms",
        name="current_platform.get_attn_backend_cls",
        reason="the CPU platform ignores the selected backend, and no platform reports a refusal",
        parameters=("selected_backend", "attn_selector_config", "num_heads"),
        make=_get_attn_backend_cls,
    ),
    Replacement(
        module="vllm.platforms",
        name="current_platform.update_block_size_for_backend",
        reason="enlarges the attention blocks of Mamba hybrids and pads their states to them",
        parameters=("vllm_config",),
        make=_update_block_size_for_backend,
    ),
    *(
        Replacement(
            module="vllm.v1.core.sched.scheduler",
            name="KVCacheManager",
            reason="vLLM has no hook for another manager; the scheduler looks up this name",
            parameters=(
                "kv_cache_config",
                "max_model_len",
                "scheduler_block_size",
                "hash_block_size",
                "max_in_flight_tokens",
                "enable_caching",
                "use_eagle",
                *further,
                "num_prefill_lookahead",
                "log_stats",
                "enable_kv_cache_events",
                "dcp_world_size",
                "pcp_world_size",
                "metrics_collector",
                "watermark",
                "enable_mamba_shared_prefix_checkpoint",
            ),
            make=_kv_cache_manager,
            series=(series,),
        )
        for series, further in (("0.32", ()), ("0.33", ("num_hash_lookahead_tokens",)))
    ),
    Replacement(
        module="vllm.v1.core.sched.output",
        name="strip_covered_mm_data",
        reason=(
            "drops the pixels of images whose tokens are hit; after a preemption the hit may be "
            "shorter, and layers of cross attention may have lost the image: the encoder needs them"
        ),
        parameters=("mm_features", "num_computed_tokens", "uses_mrope"),
        make=_strip_covered_mm_data,
    ),
    Replacement(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler.schedule",
        reason=(
            "a step's orders to workers are known at its end; vLLM sends only copies of blocks, "
            "unless there is a KV connector"
        ),
        parameters=("self", "throttle_prefills"),
        make=_schedule,
    ),
    Replacement(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler._mamba_block_aligned_split",
        reason=(
            "the place where vLLM shortens a step of a prompt; a prompt leaves room for short "
            "requests behind it, and layers with a token budget need steps that end with the "
            "prompt, with its last queries, and where they choose again"
        ),
        parameters=(
            "self",
            "request",
            "num_new_tokens",
            "num_new_local_computed_tokens",
            "num_external_computed_tokens",
        ),
        make=_mamba_block_aligned_split,
    ),
    Replacement(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler._enqueue_waiting_request",
        reason="the manager keeps pages that waiting requests will read; vLLM does not report them",
        parameters=("self", "request"),
        make=_enqueue_waiting_request,
    ),
    Replacement(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler._preempt_request",
        reason="the same for preempted requests, which wait again",
        parameters=("self", "request", "timestamp", "drop_stale_output"),
        make=_preempt_request,
    ),
    Replacement(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler._update_request_as_session",
        reason="would continue from a state that has read a token that the next turn replaces",
        parameters=("self", "session", "update"),
        make=_update_request_as_session,
    ),
    Replacement(
        module="vllm.v1.core.sched.scheduler",
        name="Scheduler._try_schedule_encoder_inputs",
        reason=(
            "runs an encoder again although its output is cached, and does not run it if only the "
            "decoder's tokens are cached; if a step begins with an image whose tokens read each "
            "other, and is too short for it, 0.32 cuts the image, and 0.33 waits, even if no step "
            "is long enough"
        ),
        parameters=(
            "self",
            "request",
            "num_computed_tokens",
            "num_new_tokens",
            "encoder_compute_budget",
            "shift_computed_tokens",
        ),
        make=_try_schedule_encoder_inputs,
    ),
    Replacement(
        module="vllm.v1.engine.core",
        name="EngineCoreProc._notify_idle_state_callbacks",
        reason="an engine without work takes no step in which it returns memory of a shared arena",
        parameters=("self",),
        make=_notify_idle_state_callbacks,
    ),
    Replacement(
        module="vllm.v1.engine.core",
        name="resolve_kv_cache_block_sizes",
        reason="would hash prefixes as coarsely as vLLM keeps states, where steps have to end",
        parameters=("kv_cache_config", "vllm_config"),
        make=_resolve_kv_cache_block_sizes,
    ),
    Replacement(
        module="vllm.v1.worker.worker_base",
        name="WorkerWrapperBase.init_device",
        reason="every worker calls it; after it, names of worker modules can be replaced",
        parameters=("self",),
        make=_init_device,
    ),
)
"""Applied once a configuration selects the backend."""
