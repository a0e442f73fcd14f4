"""The cache manager as vLLM's real scheduler drives it, without workers."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.vllm

MIB = 1 << 20


@pytest.fixture(scope="module")
def engine_config(tiny_model):
    from vllm.engine.arg_utils import EngineArgs

    options = EngineArgs(
        model=str(tiny_model("gpt_oss")),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        attention_backend="JENGA_TRITON",
    )
    return options.create_engine_config()


@pytest.fixture
def make_scheduler(engine_config):
    """Get a maker of real schedulers over an arena of so many bytes."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from jenga.vllm_plugin.arena.layout import get_kv_cache_config_from_groups, get_kv_cache_groups

    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}

    def make(arena_bytes, *, schedules_ahead=False):
        specs = {
            "full": FullAttentionSpec(**shape),
            "sliding.0": SlidingWindowSpec(**shape, sliding_window=32),
            "sliding.1": SlidingWindowSpec(**shape, sliding_window=32),
        }
        groups = get_kv_cache_groups(engine_config, specs)
        config = get_kv_cache_config_from_groups(engine_config, groups, arena_bytes)
        engine_config.cache_config.num_gpu_blocks = config.num_blocks
        return (AsyncScheduler if schedules_ahead else Scheduler)(
            vllm_config=engine_config,
            kv_cache_config=config,
            structured_output_manager=StructuredOutputManager(engine_config),
            block_size=16,
            log_stats=True,
        )

    return make


def request(name, tokens, max_tokens=4):
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=get_request_block_hasher(16, sha256),
    )


def run_step(scheduler):
    """Schedule a step and answer it with token 7 for every request whose prompt is read."""
    step = scheduler.schedule()
    finish_step(scheduler, step)
    return step


def finish_step(scheduler, step):
    """Answer a step with token 7 for every request whose prompt is read."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(step.num_scheduled_tokens)
    cached = step.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    ends = {name: starts[name] + step.num_scheduled_tokens[name] for name in names}
    sampled = [[7] if ends[name] >= scheduler.requests[name].num_tokens else [] for name in names]
    output = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=sampled,
    )
    answers = scheduler.update_from_output(step, output)
    scheduler.kv_cache_manager.manager.check()
    return [each for client in answers.values() for each in client.outputs]


def test_scheduler_uses_the_manager_and_gives_every_page_back(make_scheduler):
    from jenga.vllm_plugin.scheduler.cache_manager import JengaKVCacheManager

    scheduler = make_scheduler(8 * MIB)
    assert isinstance(scheduler.kv_cache_manager, JengaKVCacheManager)
    for index in range(6):
        scheduler.add_request(request(f"r{index}", list(range(3 + index, 103 + 9 * index))))

    for _ in range(40):
        run_step(scheduler)

    assert not scheduler.has_unfinished_requests()
    assert scheduler.kv_cache_manager.manager.request_tokens() == {}
    assert scheduler.kv_cache_manager.usage == 0.0


def test_the_manager_knows_who_waits_in_the_order_of_the_queue(make_scheduler):
    from vllm.v1.request import RequestStatus

    # Room for about two of these at their full length, so that one of three is preempted.
    scheduler = make_scheduler(22 * 32 << 10)
    queue = scheduler.kv_cache_manager.manager._wait_queue
    waiters = queue._waiters
    for index in range(3):
        scheduler.add_request(request(f"r{index}", list(range(3 + index, 103 + index)), 60))
    scheduler.add_request(request("last", list(range(3, 103)), 60))
    assert list(waiters) == ["r0", "r1", "r2", "last"]

    orders = set()
    for _ in range(60):
        run_step(scheduler)
        waiting = [each.request_id for each in scheduler.waiting]
        positions = [waiters[name].position for name in waiting]
        assert positions == sorted(positions)
        assert not queue._running.keys() & set(waiting)
        orders.add(tuple(waiting))
    scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)

    # Somebody was preempted, and waits before who was never admitted.
    assert any(len(names) > 1 and names[-1] == "last" for names in orders)
    assert waiters == {}


def test_the_manager_takes_the_share_left_to_others_from_the_environment(
    make_scheduler, monkeypatch
):
    monkeypatch.setenv("JENGA_LEFT_SHARE", "all")
    with pytest.raises(ValueError, match="JENGA_LEFT_SHARE='all'"):
        make_scheduler(1 << 20)


def test_aborting_requests_that_wait_run_or_were_preempted_loses_nothing(make_scheduler):
    from vllm.v1.request import RequestStatus

    # Room for about two of these at their full length, so that one of three is preempted.
    scheduler = make_scheduler(22 * 32 << 10)
    for name in ("a", "b", "c", "waits"):
        scheduler.add_request(request(name, [*range(3, 90)], max_tokens=150))
    preempted = set()
    for _ in range(60):
        step = run_step(scheduler)
        preempted |= step.preempted_req_ids or set()
    assert preempted
    waiting = [r.request_id for r in scheduler.waiting]
    assert waiting

    scheduler.finish_requests(waiting, RequestStatus.FINISHED_ABORTED)
    scheduler.kv_cache_manager.manager.check()
    scheduler.finish_requests(
        [r.request_id for r in list(scheduler.running)], RequestStatus.FINISHED_ABORTED
    )
    scheduler.kv_cache_manager.manager.check()

    assert scheduler.kv_cache_manager.manager.request_tokens() == {}
    assert scheduler.kv_cache_manager.usage == 0.0
    assert scheduler.kv_cache_manager.reset_prefix_cache()


def test_a_request_without_pages_is_answered_with_none(make_scheduler):
    manager = make_scheduler(8 * MIB).kv_cache_manager
    unknown = request("unknown", [1, 2, 3])

    manager.free(unknown)

    assert manager.get_block_ids("unknown") == ([], [])
    assert manager.estimate_cached_tokens(unknown) == 0


@pytest.mark.parametrize("schedules_ahead", [False, True], ids=["step_by_step", "ahead"])
@pytest.mark.parametrize(
    ("num_tokens", "num_written"), [(50, 48), (100, 96), (48, 48), (10, 0)], ids=str
)
def test_usage_tells_the_tokens_that_a_prompt_wrote_to_the_cache(
    num_tokens, num_written, schedules_ahead, make_scheduler
):
    scheduler = make_scheduler(8 * MIB, schedules_ahead=schedules_ahead)
    told = []
    for name in ("first", "second"):
        scheduler.add_request(request(name, [*range(3, 3 + num_tokens)]))
        steps = []
        while scheduler.has_unfinished_requests():
            steps.append(scheduler.schedule())
            while len(steps) > schedules_ahead:
                answers = finish_step(scheduler, steps.pop(0))
                told += [each.prefill_stats for each in answers if each.prefill_stats]

    first, second = told
    assert first.num_cache_creation_tokens == num_written
    # A prompt's last token is always computed.
    assert second.num_cached_tokens == min(num_written, (num_tokens - 1) // 16 * 16)
    assert second.num_cached_tokens + second.num_cache_creation_tokens == num_written


def test_a_second_request_starts_from_the_pages_of_the_first(make_scheduler):
    scheduler = make_scheduler(8 * MIB)
    tokens = [*range(3, 103)]
    scheduler.add_request(request("first", tokens))
    for _ in range(10):
        run_step(scheduler)

    scheduler.add_request(request("second", [*tokens, 1, 2]))
    step = scheduler.schedule()

    assert step.num_scheduled_tokens == {"second": 102 - 96}
    (new,) = step.scheduled_new_reqs
    assert new.num_computed_tokens == 96
    full, sliding = sorted(new.block_ids, key=lambda pages: pages.count(0))
    assert full.count(0) == 0
    assert sliding[:4] == [0, 0, 0, 0]  # tokens 0 to 64 are in no window from 96 on
    assert 0 not in sliding[4:]


def test_requests_admitted_in_one_step_share_what_it_computes(make_scheduler):
    scheduler = make_scheduler(8 * MIB)
    tokens = [*range(3, 43)]
    scheduler.add_request(request("first", tokens))
    scheduler.add_request(request("second", [*tokens, 1, 2]))

    step = scheduler.schedule()

    assert step.num_scheduled_tokens == {"first": 40, "second": 42 - 32}
    first, second = step.scheduled_new_reqs
    for first_pages, second_pages in zip(first.block_ids, second.block_ids, strict=True):
        assert second_pages[:2] in (first_pages[:2], [0, first_pages[1]])


def test_requests_that_a_reset_preempts_in_flight_share_what_they_compute_again(make_scheduler):
    scheduler = make_scheduler(8 * MIB, schedules_ahead=True)
    for name in ("one", "other"):
        scheduler.add_request(request(name, list(range(3, 43))))
    in_flight = scheduler.schedule()
    assert list(in_flight.num_scheduled_tokens) == ["one", "other"]

    # As where new weights are loaded, with --async-scheduling.
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    step = scheduler.schedule()
    finish_step(scheduler, in_flight)
    finish_step(scheduler, step)

    assert dict(step.num_scheduled_tokens) == {"one": 40, "other": 8}
    while scheduler.has_unfinished_requests():
        run_step(scheduler)
    assert scheduler.kv_cache_manager.usage == 0.0


def test_a_request_lost_in_its_step_leaves_nothing_to_find(make_scheduler):
    manager = make_scheduler(8 * MIB).kv_cache_manager
    tokens = [*range(3, 43)]
    lost, other = request("lost", tokens), request("other", [*tokens, 1])
    manager.new_step_starts()
    assert manager.allocate_slots(lost, 40) is not None

    manager.free(lost)

    assert manager.get_computed_blocks(other)[1] == 0


def test_a_hit_does_not_end_inside_an_image_that_must_be_computed_whole(make_scheduler):
    scheduler = make_scheduler(8 * MIB)
    manager = scheduler.kv_cache_manager
    tokens = list(range(3, 103))
    scheduler.add_request(request("first", tokens))
    while scheduler.has_unfinished_requests():
        run_step(scheduler)
    again = request("again", tokens)
    hits = {}

    for keeps_images_whole in (False, True):
        manager.kv_cache_config.keeps_images_whole = keeps_images_whole
        for offset, length in ((4, 40), (70, 50)):
            position = SimpleNamespace(offset=offset, length=length)
            again.mm_features = [SimpleNamespace(mm_position=position)]
            hits[keeps_images_whole, offset] = manager.get_computed_blocks(again)[1]

    assert hits == {(False, 4): 96, (False, 70): 96, (True, 4): 96, (True, 70): 64}


def test_an_image_that_must_be_computed_whole_waits_for_a_step_with_room_for_it(
    make_scheduler, monkeypatch
):
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    scheduler = make_scheduler(8 * MIB)
    config = scheduler.scheduler_config
    monkeypatch.setattr(config, "disable_chunked_mm_input", True)
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=200)
    scheduler.max_num_encoder_input_tokens = 200
    scheduler.kv_cache_manager.kv_cache_config.keeps_images_whole = True

    def about_image(name, offset, length):
        asked = request(name, [*range(3, 3 + offset), *[2] * length, 5, 6])
        position = PlaceholderRange(offset=offset, length=length)
        feature = MultiModalFeatureSpec(None, "image", name, position)
        asked.mm_features = [feature]
        return asked

    def computed():
        return {name: each.num_computed_tokens for name, each in scheduler.requests.items()}

    # Of 64 tokens a step the others are left 25 and 20, and the last one then 29.
    for name in ("whole", "first", "second"):
        scheduler.add_request(about_image(name, 5, 32))
    run_step(scheduler)
    assert computed() == {"whole": 39, "first": 5, "second": 5}
    run_step(scheduler)
    assert computed() == {"whole": 40, "first": 39, "second": 5}
    run_step(scheduler)
    assert computed() == {"whole": 41, "first": 40, "second": 39}
    while scheduler.has_unfinished_requests():
        run_step(scheduler)

    # One that no step has room for is cut, as vLLM cuts it.
    monkeypatch.setattr(config, "long_prefill_token_threshold", 20)
    for name in ("cut", "other"):
        scheduler.add_request(about_image(name, 0, 30))
    run_step(scheduler)
    assert computed() == {"cut": 20, "other": 20}
    run_step(scheduler)
    assert computed() == {"cut": 32, "other": 32}
    assert config.disable_chunked_mm_input


def test_parallel_engines_log_what_they_hold_in_files_of_their_own(
    engine_config, make_scheduler, tmp_path, monkeypatch
):
    monkeypatch.setenv("JENGA_MEMORY_LOG", str(tmp_path / "log.jsonl"))

    for index in (0, 1, 12):
        monkeypatch.setattr(engine_config.parallel_config, "data_parallel_index", index)
        scheduler = make_scheduler(4 * MIB)
        scheduler.schedule()

    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["log.1.jsonl", "log.12.jsonl", "log.jsonl"]
    assert all(len(path.read_text().splitlines()) == 2 for path in tmp_path.iterdir())


def test_who_was_refused_alone_comes_in_without_a_hit(make_scheduler, monkeypatch):
    scheduler = make_scheduler(8 * MIB)
    tokens = list(range(3, 103))
    scheduler.add_request(request("first", tokens))
    for _ in range(8):
        run_step(scheduler)
    manager = scheduler.kv_cache_manager
    again = request("again", tokens)
    assert manager.get_computed_blocks(again)[1] == 96

    monkeypatch.setattr(manager.manager._gate, "_refused_alone", "again")

    assert manager.get_computed_blocks(again)[1] == 0
    assert manager.get_computed_blocks(request("other", tokens))[1] == 96


def test_a_request_has_left_to_compute_what_is_not_cached_for_it(make_scheduler, monkeypatch):
    scheduler = make_scheduler(8 * MIB)
    tokens = list(range(3, 103))
    scheduler.add_request(request("first", tokens))
    for _ in range(8):
        run_step(scheduler)
    manager, again = scheduler.kv_cache_manager, request("again", tokens)
    assert manager.rest_tokens(again) == 4

    again.skip_reading_prefix_cache = True
    assert manager.rest_tokens(again) == 100
    monkeypatch.setattr(manager.manager._gate, "_refused", "again")
    assert manager.rest_tokens(again) is None
    again.skip_reading_prefix_cache = False
    assert manager.rest_tokens(again) is None


def test_admissions_without_room_are_counted_as_held_back_until_they_come_in(make_scheduler):
    scheduler = make_scheduler(MIB)
    for index in range(4):
        scheduler.add_request(request(f"r{index}", list(range(3 + index, 203 + index))))
    held_back = scheduler.kv_cache_manager.metrics.held_back
    most_waiting = 0

    for _ in range(60):
        run_step(scheduler)
        most_waiting = max(most_waiting, len(held_back._waiting))

    assert not scheduler.has_unfinished_requests()
    assert most_waiting == 1  # the head of the queue
    assert held_back.num_requests["memory"] > 0
    assert held_back.seconds["memory"] > 0
    assert held_back._waiting == {}


def test_a_request_that_is_aborted_while_it_is_held_back_waits_no_longer(make_scheduler):
    from vllm.v1.request import RequestStatus

    scheduler = make_scheduler(MIB)
    for index in range(4):
        scheduler.add_request(request(f"r{index}", list(range(3 + index, 203 + index))))
    held_back = scheduler.kv_cache_manager.metrics.held_back
    while not held_back._waiting:
        run_step(scheduler)
    (name,) = held_back._waiting

    scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    assert held_back._waiting == {}
