"""When a prompt leaves room in a step of vLLM's scheduler, and to which requests.

`tests/sim/replays/test_engine_equality.py` compares whole schedules with those of a replay.
"""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm


def made(name, **fields):
    from vllm.v1.request import RequestStatus

    usual = {
        "status": RequestStatus.WAITING,
        "has_encoder_inputs": False,
        "num_stale_output_tokens": 0,
        "drop_stale_output": False,
        "rest_tokens": 0,
    }
    return SimpleNamespace(name=name, **usual | fields)


def running(name, num_left=1, **fields):
    from vllm.v1.request import RequestStatus

    counts = {
        "status": RequestStatus.RUNNING,
        "num_tokens_with_spec": 100 + num_left,
        "num_output_placeholders": 0,
        "num_computed_tokens": 100,
    }
    return made(name, **counts | fields)


def scheduler_of(*, runs, waits, drafts=None, threshold=0, policy="FCFS", places=8):
    from vllm.v1.core.sched.request_queue import SchedulingPolicy

    return SimpleNamespace(
        running=runs,
        waiting=waits,
        policy=SchedulingPolicy[policy],
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=threshold),
        vllm_config=SimpleNamespace(speculative_config=drafts),
        num_waiting_for_streaming_input=0,
        max_num_active_reqs=places,
        max_num_scheduled_tokens=1600,
        kv_cache_manager=SimpleNamespace(rest_tokens=lambda request: request.rest_tokens),
    )


def beside_short(scheduler, request, num_new_tokens):
    from jenga.vllm_plugin.scheduler.short_requests import beside_short

    return beside_short(scheduler, request, num_new_tokens)


def test_running_requests_behind_a_prompt_come_before_those_that_wait():
    prompt = running("prompt", 5000)
    runs = [running("before", 50), prompt, running("behind"), running("with drafts", 4)]
    waits = [made("short", rest_tokens=90), made("next", rest_tokens=10)]

    assert beside_short(scheduler_of(runs=runs, waits=waits), prompt, 1550) == 1550 - 95
    assert beside_short(scheduler_of(runs=runs, waits=[]), prompt, 1550) == 1550 - 5
    assert beside_short(scheduler_of(runs=[prompt], waits=waits), prompt, 1550) == 1550 - 100
    assert beside_short(scheduler_of(runs=[prompt], waits=waits), prompt, 70) == 0


def test_a_prompt_that_comes_in_leaves_room_but_is_not_put_off():
    prompt = made("prompt")
    scheduler = scheduler_of(runs=[running("a")], waits=[prompt, made("short", rest_tokens=90)])

    assert beside_short(scheduler, prompt, 1550) == 1460
    assert beside_short(scheduler, prompt, 90) == 90


def test_requests_that_cannot_come_in_are_passed_over_or_end_the_room():
    from vllm.v1.request import RequestStatus

    prompt, short = running("prompt", 5000), made("short", rest_tokens=90)
    streaming = made("session", status=RequestStatus.WAITING_FOR_STREAMING_REQ, rest_tokens=9)
    stale = made("stale", num_stale_output_tokens=1, rest_tokens=9)
    refused = made("refused", rest_tokens=None)

    passed = scheduler_of(runs=[prompt], waits=[streaming, stale, short])
    ended = scheduler_of(runs=[prompt], waits=[refused, short])
    full = scheduler_of(runs=[prompt], waits=[short, made("next", rest_tokens=5)], places=1)
    nearly_full = scheduler_of(runs=[prompt], waits=full.waiting, places=2)

    assert beside_short(passed, prompt, 1600) == 1510
    assert beside_short(ended, prompt, 1600) == 1600
    assert beside_short(full, prompt, 1600) == 1600
    assert beside_short(nearly_full, prompt, 1600) == 1510


def test_drafts_of_each_request_are_counted():
    prompt, drafts = running("prompt", 5000), SimpleNamespace(max_num_new_slots_for_drafting=3)
    scheduler = scheduler_of(
        runs=[prompt, running("a", 2)], waits=[made("b", rest_tokens=90)], drafts=drafts
    )

    assert beside_short(scheduler, prompt, 1500) == 1500 - 5 - 93


@pytest.mark.parametrize(
    "options", [{"threshold": 512}, {"policy": "PRIORITY"}], ids=lambda each: next(iter(each))
)
def test_no_room_is_left_if_vllm_limits_prompts_or_orders_the_queue_otherwise(options):
    prompt = running("prompt", 5000)
    scheduler = scheduler_of(runs=[prompt], waits=[made("b", rest_tokens=90)], **options)

    assert beside_short(scheduler, prompt, 1500) == 1500


def test_a_prompt_with_images_is_left_alone():
    prompt = running("prompt", 5000, has_encoder_inputs=True)
    scheduler = scheduler_of(runs=[prompt], waits=[made("b", rest_tokens=90)])

    assert beside_short(scheduler, prompt, 1500) == 1500
