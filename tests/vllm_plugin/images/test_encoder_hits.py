"""What an encoder made is found again by its content, in the real scheduler and engine."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from jenga.tables.request import PrefixHit
from tests.machines.geometries import cross, embedding, full
from tests.vllm_plugin.attention.test_attention_features import WHISPER
from tests.vllm_plugin.conftest import V2_RUNNER, assert_same_generation
from tests.vllm_plugin.engine.test_model_runner_v2 import graphs_of
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths
from tests.vllm_plugin.scheduler.test_cache_manager import run_step

pytestmark = pytest.mark.vllm

MIB = 1 << 20
JENGA = WHISPER | {"attention_backend": "JENGA_TRITON", "enable_prefix_caching": True}
ENCODER_TOKENS = 50  # of a second of audio: three pages and two tokens

# In the scheduler


@pytest.fixture(scope="module")
def engine_config(tiny_model):
    from vllm.engine.arg_utils import EngineArgs

    options = EngineArgs(
        model=str(tiny_model("whisper")),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=256,
        max_num_seqs=4,
        attention_backend="JENGA_TRITON",
        enable_prefix_caching=True,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
    )
    return options.create_engine_config()


@pytest.fixture
def make_scheduler(engine_config):
    """Get a maker of real schedulers over an arena of so many bytes."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from jenga.vllm_plugin.arena.layout import get_kv_cache_config_from_groups, get_kv_cache_groups

    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}

    def make(arena_bytes=8 * MIB):
        specs = {"self": FullAttentionSpec(**shape), "cross": CrossAttentionSpec(**shape)}
        groups = get_kv_cache_groups(engine_config, specs)
        config = get_kv_cache_config_from_groups(engine_config, groups, arena_bytes)
        engine_config.cache_config.num_gpu_blocks = config.num_blocks
        return Scheduler(
            vllm_config=engine_config,
            kv_cache_config=config,
            structured_output_manager=StructuredOutputManager(engine_config),
            block_size=16,
            log_stats=True,
        )

    return make


def heard(*audios, num_tokens=ENCODER_TOKENS):
    """Encoder inputs as vLLM makes them of audio with such names."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    place = PlaceholderRange(offset=0, length=num_tokens)
    return [
        MultiModalFeatureSpec(data=None, modality="audio", identifier=audio, mm_position=place)
        for audio in audios
    ]


def request(name, tokens, audio, max_tokens=4, **options):
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        pooling_params=None,
        mm_features=audio if isinstance(audio, list) else heard(audio),
        block_hasher=get_request_block_hasher(16, sha256),
        **options,
    )


def adapter(name, path):
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, 1, path)


class Run:
    """A scheduler and what came of its requests."""

    def __init__(self, scheduler):
        self.scheduler, self.done = scheduler, None
        self.manager = scheduler.kv_cache_manager.manager
        self.cross = next(
            table.index for table in self.manager._tables if table.spec.name == "cross"
        )

    def add(self, *requests):
        for each in requests:
            self.scheduler.add_request(each)
        return self

    def step(self):
        """Schedule a step; get which requests it encodes for."""
        self.done = run_step(self.scheduler)
        return set(self.done.scheduled_encoder_inputs)

    def finish(self):
        encoded = set()
        while self.scheduler.has_unfinished_requests():
            encoded |= self.step()
        return encoded

    def pages(self, name):
        """Pages that a running request has of its own tokens, and of its encoder's."""
        tables = self.manager.page_tables(name)
        return tables[1 - self.cross], tables[self.cross]

    def forget_audio(self):
        """Evict what encoders made, and nothing else."""
        table, tree = self.manager._tables[self.cross], self.manager.prefix_cache.tree
        for content in {key[0] for key in table.cache.keys if key is not None}:
            tree.evict(tree.image(table, content))
        assert not any(table.cache.keys)


@pytest.fixture
def run(make_scheduler):
    return Run(make_scheduler())


def test_hashes_of_the_same_tokens_behind_other_audio_differ():
    tokens = list(range(3, 100))

    known = request("a", tokens, "one").block_hashes

    assert request("b", tokens, "one").block_hashes == known
    for other in (request("c", tokens, "two"), request("d", tokens, [])):
        assert len(other.block_hashes) == 6
        assert not set(other.block_hashes) & set(known)


def test_the_same_audio_behind_another_prompt_is_not_encoded_again(run):
    assert run.add(request("a", list(range(3, 8)), "one")).step() == {"a"}
    _, encoded = run.pages("a")
    run.finish()

    assert run.add(request("b", list(range(300, 340)), "one")).step() == set()
    assert run.pages("b")[1] == encoded
    assert len(encoded) == 4


def test_other_audio_behind_the_same_prompt_shares_nothing(run):
    tokens = list(range(3, 83))
    run.add(request("a", tokens, "one")).step()
    own, encoded = run.pages("a")

    assert run.add(request("b", tokens, "two")).step() == {"b"}
    others, other_encoded = run.pages("b")
    assert not set(own) & set(others)
    assert not set(encoded) & set(other_encoded)


def test_requests_of_one_step_encode_the_same_audio_once(run):
    names = ["a", "b", "c", "d"]
    asked = [request(name, [3, 4, 5], "two" if name == "c" else "one") for name in names]

    assert run.add(*asked).step() == {"a", "c"}
    assert run.pages("a")[1] == run.pages("b")[1] == run.pages("d")[1]
    assert run.pages("a")[1] != run.pages("c")[1]


def test_workers_are_sent_the_audio_of_whoever_finds_it(run):
    # The first runner keeps it for a request that is preempted and finds it evicted.
    asked = request("a", list(range(3, 83)), "one")
    run.add(asked).finish()
    again = request("b", list(range(3, 83)), [replace(asked.mm_features[0], data={"a": 1})])

    assert run.add(again).step() == set()
    (sent,) = run.done.scheduled_new_reqs
    assert run.done.num_scheduled_tokens == {"b": 80 - 48}
    assert sent.mm_features[0].data == {"a": 1}


def test_audio_that_was_evicted_is_encoded_again_behind_a_prompt_that_was_not(run):
    tokens = list(range(3, 83))
    run.add(request("a", tokens, "one")).step()
    own, _ = run.pages("a")
    run.finish()
    run.forget_audio()

    assert run.add(request("b", tokens, "one")).step() == {"b"}
    assert run.done.num_scheduled_tokens == {"b": 80 - 48}
    assert run.pages("b")[0][:3] == own[:3]
    assert run.add(request("c", [3], "one")).step() == set()
    assert run.pages("c")[1] == run.pages("b")[1]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"cache_salt": "mine"}, id="salt"),
        pytest.param({"lora_request": adapter("0", "/adapters/0")}, id="adapter"),
    ],
)
def test_what_an_adapter_or_a_tenant_computed_others_do_not_find(run, options):
    run.add(request("a", [3, 4], "one"))
    run.finish()

    own = request("b", [3, 4], "one", **options)
    again = request("c", [3, 4], "one", **options)

    manager = run.scheduler.kv_cache_manager
    manager.get_computed_blocks(own)
    assert not manager.finds_encoder_output(own)
    manager.get_computed_blocks(request("d", [5], "one"))
    assert not manager.finds_encoder_output(own)  # what another request finds says nothing of it
    assert manager._facts(own) == manager._facts(again)


def test_a_name_used_again_for_longer_audio_finds_nothing(run):
    run.add(request("a", [3], "one"))
    run.finish()

    assert run.add(request("b", [3], heard("one", num_tokens=40))).step() == {"b"}


def test_nothing_is_kept_of_several_encoder_inputs(run):
    # Hashes name the first of them alone.
    tokens = list(range(3, 83))
    run.add(request("a", tokens, heard("one", "two")))
    run.finish()

    assert run.add(request("b", tokens, heard("one", "three"))).step() == {"b"}
    assert run.done.num_scheduled_tokens == {"b": 80}
    assert run.manager.committed_tokens("b") == 0


def test_a_request_without_audio_finds_its_tokens(run):
    tokens = list(range(3, 83))
    run.add(request("a", tokens, [])).finish()

    assert run.add(request("b", tokens, [])).step() == set()
    assert run.done.num_scheduled_tokens == {"b": 16}


def test_who_may_not_read_the_cache_encodes_again(run):
    run.add(request("a", [3], "one"))
    run.finish()
    asked = request("b", [3], "one")
    asked.skip_reading_prefix_cache = True

    assert run.add(asked).step() == {"b"}


def test_who_was_preempted_finds_what_its_encoder_made(run):
    asked = request("a", [3, 4, 5], "one", max_tokens=40)
    run.add(asked)
    for _ in range(20):
        run.step()
    own, encoded = run.pages("a")

    run.scheduler._preempt_request(run.scheduler.running.pop(), 0.0)
    assert run.step() == set()
    assert run.done.num_scheduled_tokens == {"a": 7}

    assert asked.num_preemptions == 1
    assert run.pages("a")[0][:1] == own[:1]
    assert run.pages("a")[1] == encoded
    assert run.finish() == set()


def test_cache_events_tell_of_tokens_alone(run):
    batches = []
    run.scheduler.kv_event_publisher.publish = batches.append
    run.add(request("a", list(range(3, 53)), "one"))
    run.finish()
    run.forget_audio()
    run.add(request("b", [3], "one"))
    run.finish()

    events = [event for batch in batches for event in batch.events]
    assert {event.group_idx for event in events} == {1 - run.cross}
    assert sum(len(event.block_hashes) for event in events) == 3


# All layers or none


def test_what_some_layers_have_of_an_encoder_is_left_out_of_a_hit():
    from jenga.vllm_plugin.scheduler.encoder_hits import EncoderHits

    hits = EncoderHits(SimpleNamespace(page_tables=[full(), cross("one"), cross("other")]))
    asked = SimpleNamespace(request_id="a", mm_features=heard("one"))
    whole = PrefixHit(
        num_tokens=16,
        asked_tokens=16,
        branch_tokens=16,
        limit=-1,
        pages=([7], [3, 4], [5, 6]),
        host_pages=({}, {}, {}),
        has_missing=(False, False, False),
        facts=None,
        prefix_hashes=(),
        version=(0, 0),
    )

    assert hits.settle(asked, whole) == whole
    assert hits.are_found(asked)
    assert hits.settle(asked, replace(whole, pages=([7], [3, 4], []))).pages == ([7], (), ())
    assert not hits.are_found(asked)


# In a worker


def test_slots_are_of_who_was_encoded_in_the_order_of_rows():
    from jenga.vllm_plugin.layers.attention.cross_attention import encoder_slots

    page_table = torch.tensor([[9, 8, 0], [4, 0, 0], [2, 7, 5]], dtype=torch.int32)

    slots = encoder_slots(page_table, [18, 3, 33], (0, 2), page_tokens=16)

    of_first = [*range(144, 160), 128, 129]
    assert slots.tolist() == [*of_first, *range(32, 48), *range(112, 128), 80]


def test_keys_of_another_number_than_was_encoded_are_refused():
    import numpy as np

    from jenga.errors import InvariantError
    from jenga.vllm_plugin.layers.attention.cross_attention import JengaCrossMetadata
    from jenga.vllm_plugin.worker.step_mailbox import StepMailbox

    mailbox = StepMailbox()

    metadata = JengaCrossMetadata(
        num_actual_tokens=2,
        query_starts=torch.tensor([0, 1, 2]),
        seq_lens=torch.tensor([20, 5]),
        page_table=torch.tensor([[1, 2], [3, 0]], dtype=torch.int32),
        plan=SimpleNamespace(kind=SimpleNamespace(page_tokens=16)),
        encoder_tokens=np.array([20, 5], dtype=np.int32),
        mailbox=mailbox,
    )

    mailbox.encoded_rows = (1,)
    with pytest.raises(InvariantError, match="20"):
        metadata.slots_of(20)
    mailbox.encoded_rows = (2,)
    with pytest.raises(InvariantError, match="5"):
        metadata.slots_of(5)
    mailbox.encoded_rows = (1,)
    assert metadata.slots_of(5).tolist() == [48, 49, 50, 51, 52]


# In the engine

A, B, C, D = prompts_of_lengths((5, 100, 97, 1), seed=3)
# So long that a step holds two of them: further ones begin beside those that decode.
ASKED = [(A, 0), (B, 1), (B, 2), (A, 0), (C, 0), (C, 3), (D, 3), (A, 1)]
AGAIN = [(C, 1), (A, 4), (B, 2), (D, 4), (B, 0), (B, 4), (A, 2)]
"""Prompts with the seed of their audio: in either round the same audio behind other prompts, and
the same prompts behind other audio."""


def shared_tokens(a, b):
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def hit_tokens(asked):
    """Tokens that each request finds of what those before it left behind the same audio."""
    hits = []
    for index, (prompt, seed) in enumerate(asked):
        before = [other for other, its_seed in asked[:index] if its_seed == seed]
        most = max((shared_tokens(prompt, other) for other in before), default=0)
        hits.append(min(most, len(prompt) - 1, ENCODER_TOKENS - 1) // 16 * 16)
    return hits


@pytest.fixture
def compare(tiny_model, run_engine):
    """Run ours against stock vLLM; get both results, equal but for what was encoded."""

    def run(asked, *, runner, options=(), max_tokens=8, forget=(), **job):
        prompts, seeds = [list(each) for each in zip(*asked, strict=True)]
        job |= {"audio_seeds": seeds, "max_tokens": max_tokens}
        model = tiny_model("whisper")
        stock = run_engine(model, prompts, options=WHISPER, **job)
        ours = run_engine(
            model,
            prompts,
            options=JENGA | dict(options),
            environment={V2_RUNNER: runner, "VLLM_LOGGING_LEVEL": "INFO"},
            captures="compilation_config" in options,
            forget=list(forget),
            fill_arena=True,
            report_manager=True,
            **job,
        )
        assert_same_generation(ours, stock)
        assert ("Using V2 Model Runner" in ours["log"]) == (runner == "1")
        assert ours["request_tokens"] == {}
        assert sum(stock["encoded"]) == len(asked)
        return ours

    return run


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["0", "1"])
def test_an_encoder_runs_once_for_the_same_audio(compare, runner):
    asked = ASKED + AGAIN

    ours = compare(asked, runner=runner, rounds=2)

    assert sum(ours["encoded"]) == len({seed for _, seed in asked})
    assert [output["cached_tokens"] for output in ours["outputs"]] == hit_tokens(asked)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["0", "1"])
def test_an_encoder_runs_again_beside_tokens_that_were_hit(compare, runner):
    ours = compare(ASKED + ASKED, runner=runner, rounds=2, forget=["cross"])

    assert sum(ours["encoded"]) == 2 * len({seed for _, seed in ASKED})
    assert [output["cached_tokens"] for output in ours["outputs"]] == hit_tokens(ASKED + ASKED)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["0", "1"])
def test_preempted_requests_come_back_to_what_encoders_made(compare, runner):
    prompts = prompts_of_lengths((90, 100, 110, 95, 105, 60), seed=5)
    asked = list(zip(prompts, (0, 1, 1, 0, 2, 1), strict=True))

    options = {"kv_cache_memory_bytes": 2 << 20}
    ours = compare(asked, runner=runner, options=options, max_tokens=60)

    assert ours["preemptions"] > 0
    assert sum(ours["encoded"]) < len(asked)


@pytest.mark.slow
def test_replayed_graphs_read_what_other_requests_encoded(compare):
    # Of 17 tokens all but the last are hit: such a request begins in a graph of decoding ones.
    prompt = B[:17]
    asked = [(prompt, 0), (prompt, 1), (A, 1), (prompt, 0), (prompt, 1), (B[:1], 1)]

    ours = compare(asked, runner="1", options=graphs_of(1, 2, 4), max_tokens=16, rounds=2)

    assert sum(ours["replays"].values()) >= 28
    assert sum(ours["encoded"]) == 2
    assert [output["cached_tokens"] for output in ours["outputs"]] == hit_tokens(asked)


# Embeddings


def shown(offset, length, is_embed=None, name="one"):
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    mask = None if is_embed is None else torch.tensor(is_embed, dtype=torch.bool)
    place = PlaceholderRange(offset=offset, length=length, is_embed=mask)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place)


def test_every_image_of_a_request_has_its_place_and_its_content():
    from jenga.vllm_plugin.scheduler.encoder_hits import EncoderHits

    hits = EncoderHits(SimpleNamespace(page_tables=[full(), embedding()]))
    features = [shown(3, 4), shown(9, 7, [0, 0, 1, 1, 0, 1, 0]), shown(20, 4), shown(30, 3)]

    images = hits.images(SimpleNamespace(mm_features=features))

    assert [image.start_token for image in images] == [3, 11, 20, 30]
    assert [image.num_tokens for image in images] == [4, 3, 4, 3]
    assert [image.end_token for image in images] == [7, 15, 24, 33]
    # A name used again for an image of another size is another image.
    assert [image.content == images[0].content for image in images] == [True, False, True, False]
    assert hits.images(SimpleNamespace(mm_features=[])) == ()
