"""Room in a step of vLLM's scheduler for short requests behind a long prompt."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import RequestStatus

from jenga.admission.short_requests import tokens_to_leave

if TYPE_CHECKING:
    from vllm.v1.request import Request

_CAN_BE_ADMITTED = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def beside_short(
    scheduler: Any,  # noqa: ANN401
    request: "Request",
    num_new_tokens: int,
) -> int:
    """Shorten a step of a prompt by the tokens that it leaves to short requests behind it.

    Prompts with images are left alone, because a step must not cut an image. So are all prompts if
    vLLM limits their steps itself (`long_prefill_token_threshold`), or if requests have priorities.

    Args:
        scheduler: vLLM's scheduler, with this plugin's manager.
        request: The request with the prompt. The step does not end it.
        num_new_tokens: Number of tokens that the step would compute.

    Returns:
        The number of tokens to compute. 0 if a running request must wait for a step with more room.
    """
    config = scheduler.scheduler_config
    is_waiting = request.status in _CAN_BE_ADMITTED
    num_running = len(scheduler.running) + scheduler.num_waiting_for_streaming_input + is_waiting
    if (
        request.has_encoder_inputs
        or config.long_prefill_token_threshold
        or scheduler.policy != SchedulingPolicy.FCFS
    ):
        return num_new_tokens
    num_places = max(0, scheduler.max_num_active_reqs - num_running)
    speculation = scheduler.vllm_config.speculative_config
    left_tokens = tokens_to_leave(
        chain(
            () if is_waiting else _rests_of_running(scheduler, request),
            islice(_rests_of_waiting(scheduler, request), num_places),
        ),
        scheduler.max_num_scheduled_tokens,
        further_tokens=0 if speculation is None else speculation.max_num_new_slots_for_drafting,
    )
    if is_waiting and left_tokens >= num_new_tokens:
        return num_new_tokens  # it is not put off for requests behind it
    return max(0, num_new_tokens - left_tokens)


def _rests_of_running(scheduler: Any, request: "Request") -> Iterator[int]:  # noqa: ANN401
    """Yield the tokens that each running request behind another one would compute, in order."""
    running = scheduler.running
    for behind in islice(running, running.index(request) + 1, None):
        yield (
            behind.num_tokens_with_spec
            + behind.num_output_placeholders
            - behind.num_computed_tokens
        )


def _rests_of_waiting(scheduler: Any, request: "Request") -> Iterator[int | None]:  # noqa: ANN401
    """Yield the tokens that each request of the wait queue would compute, in order."""
    for waiting in scheduler.waiting:
        is_stale = waiting.num_stale_output_tokens and not waiting.drop_stale_output
        if waiting is not request and waiting.status in _CAN_BE_ADMITTED and not is_stale:
            yield scheduler.kv_cache_manager.rest_tokens(waiting)
