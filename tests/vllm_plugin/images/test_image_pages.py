"""Image embeddings in pages of the arena: the layout, and the real engine.

Tokens are compared with the stock engine's, and the runs of the encoder are counted. In the engine,
the manager's books are checked after every step.
"""

from types import SimpleNamespace

import pytest
import torch

from jenga.models import read_model
from jenga.spec import FullAttention, ImageEmbedding
from tests.vllm_plugin.arena.test_layout import MIB, engine_config
from tests.vllm_plugin.conftest import V2_RUNNER, assert_same_generation
from tests.vllm_plugin.images.test_images import OPTIONS, prompts_about_images
from tests.vllm_plugin.programs.engine_process import prompts_of_lengths
from tests.vllm_plugin.tiny.tiny_vision_models import NVLM_IMAGE, PLACEHOLDERS, TOKEN_IDS

pytestmark = pytest.mark.vllm

ROWS_OF_IMAGE, WIDTH = 55, 256


# The layout


@pytest.fixture
def config():
    """Get the cache configuration of a model with one layer and one kind of image."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    from jenga.vllm_plugin.arena.layout import get_kv_cache_config_from_groups, get_kv_cache_groups
    from jenga.vllm_plugin.arena.ranks import planned_for
    from jenga.vllm_plugin.specs.image_rows import ENCODER_CACHE_PATH, IMAGE_LAYER

    shape = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    layers = {"full": FullAttentionSpec(block_size=16, **shape)}
    rows = MLAAttentionSpec(
        block_size=ROWS_OF_IMAGE, num_kv_heads=1, head_size=WIDTH, dtype=torch.float32
    )
    options = engine_config(enable_prefix_caching=True)
    options.ec_manager_config = SimpleNamespace(encoder_cache_manager_cls=None)
    with planned_for([layers | {IMAGE_LAYER: rows}]):
        groups = get_kv_cache_groups(options, layers)
    assert options.ec_manager_config.encoder_cache_manager_cls == ENCODER_CACHE_PATH
    return get_kv_cache_config_from_groups(options, groups, 8 * MIB)


def test_images_have_a_page_table_and_no_group(config):
    full, images = config.geometry.page_tables

    assert isinstance(full.layer_type, FullAttention)
    assert isinstance(images.layer_type, ImageEmbedding)
    assert images.layer_type.typical_tokens == ROWS_OF_IMAGE
    assert images.layer_type.layers[0].slot_bytes == 4 * WIDTH
    assert [group.layer_names for group in config.kv_cache_groups] == [["full"]]
    assert [tensor.layers for tensor in config.kv_cache_tensors] == [["full"]]


def test_the_longest_request_is_full_of_the_largest_images(config):
    from jenga.vllm_plugin.arena.layout import large_pages_of_longest_request

    options = engine_config(enable_prefix_caching=True)
    full, images = config.geometry.page_tables
    options.model_config.max_model_len = 256

    pages = large_pages_of_longest_request(options, config.kv_cache_groups)

    # A step of 64 tokens that begins the third image, of 4 pages, still reads the last rows of the
    # first one: 2 pages.
    assert pages == -(-16 // full.small_pages_per_large_page) - (
        -10 // images.small_pages_per_large_page
    )


def test_rows_lie_in_the_small_pages_that_the_geometry_says(config):
    from jenga.vllm_plugin.worker.image_pages import image_pages

    images = config.geometry.page_tables[1]
    arena = torch.zeros(config.num_blocks * config.geometry.large_page_bytes, dtype=torch.int8)

    pages = image_pages(config, arena)

    num_pages = config.num_blocks * images.small_pages_per_large_page
    assert pages.shape == (num_pages, images.tokens_per_page, WIDTH)
    pages[7, 3] = 1.5
    start = 7 * images.small_page_bytes + images.layer_offset_bytes[0] + 3 * 4 * WIDTH
    row = arena[start : start + 4 * WIDTH].view(torch.float32)
    assert torch.equal(row, torch.full((WIDTH,), 1.5))
    assert int((arena != 0).sum()) == int((row.view(torch.int8) != 0).sum())


@pytest.fixture
def manager(config):
    from jenga.vllm_plugin.scheduler.cache_manager import JengaKVCacheManager

    return JengaKVCacheManager(
        config,
        max_model_len=2048,
        scheduler_block_size=16,
        hash_block_size=16,
        max_in_flight_tokens=2048,
    )


def asked(num_images, name="a"):
    """Make a waiting request of so many images, each of one token beside a token of text."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.request import RequestStatus

    places = [PlaceholderRange(offset=2 * index, length=1) for index in range(num_images)]
    features = [
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=str(place.offset), mm_position=place
        )
        for place in places
    ]
    return SimpleNamespace(
        request_id=name, num_tokens=2000, mm_features=features, status=RequestStatus.WAITING
    )


def test_a_request_of_images_that_never_fit_is_told_of_by_its_pages(manager):
    assert manager.why_never(asked(100)) == ""
    assert "images 1000" in manager.why_never(asked(1000))
    assert manager.why_never(asked(0)) == ""


def test_a_request_of_images_that_never_fit_ends_with_an_error_and_others_go_on(
    manager, monkeypatch
):
    from jenga.vllm_plugin.patches import engine

    logged = []
    monkeypatch.setattr(engine.logger, "error", lambda words, *parts: logged.append(words % parts))
    vllms_answer = [0], 7, 5, [], []
    schedule = engine._try_schedule_encoder_inputs(lambda *_: vllms_answer)
    scheduler = SimpleNamespace(
        kv_cache_manager=manager,
        encoder_cache_manager=None,
        encoder_cache_mismatch_reqs=set(),
        is_encoder_decoder=False,
    )

    fits, never = asked(100, "fits"), asked(1000, "never")
    assert schedule(scheduler, fits, 0, 7, 64) == vllms_answer
    assert schedule(scheduler, never, 0, 7, 64) == ([], 0, 64, [], [])
    assert scheduler.encoder_cache_mismatch_reqs == {"never"}
    (line,) = logged
    assert line.startswith("Request never is refused: num_tokens must be such that")
    assert "images 1000" in line


# The engine

IMAGES = [[0], [1, 2], [], [0], [3]]
TILED_IMAGES = [[[0, 40, 40]], [[1, 24, 24], [2, 48, 24]], [], [[0, 40, 40]], [[3, 24, 72]]]
"""Of 4, 1, 2, 4 and 3 tiles of InternVL2, and a thumbnail where there are several."""
CROPPED_IMAGES = [[[0, 336, 336]], [[1, 672, 336], [2, 336, 672]], [], [[0, 336, 336]], [[3, 9, 9]]]
"""Of 1, 2, 2, 1 and 1 crops of Phi-3 Vision: 313, 457, 469, 313 and 313 tokens."""
NUM_IMAGES = 4  # two prompts show the same one
STOCK = {key: value for key, value in OPTIONS.items() if key != "attention_backend"}
SMALL = {"kv_cache_memory_bytes": 24 * 49152}
"""Room for one request of the largest length, and for little else."""
SMALL_BESIDE_WINDOWS = {"kv_cache_memory_bytes": 18 * 65536}
"""The least that Gemma 3 and PaliGemma 2 start with."""
HOST = {"kv_offloading_size": 1 / 32}


def run_both(
    run_engine, model, prompts, images, *, options=None, own=None, environment=None, **job
):
    """Run the stock engine and ours on the same prompts, twice each.

    InternVL2, NVLM and Phi-3 Vision bring classes of their own, which vLLM is told to trust.

    Args:
        run_engine: The fixture.
        model: Directory of the model.
        prompts: Tokens of each prompt.
        images: Seeds of the images of each prompt.
        options: Options of both engines.
        own: Options of our engine alone.
        environment: Variables of our engine alone.
        job: Further fields of both jobs.
    """
    options = {"max_num_batched_tokens": 48, "trust_remote_code": True} | (options or {})
    job |= {"reads_images": True, "by_references": True, "image_seeds": images * 2, "rounds": 2}
    theirs = run_engine(
        model, prompts * 2, options=STOCK | options | {"kv_cache_memory_bytes": 32 * MIB}, **job
    )
    ours = run_engine(
        model,
        prompts * 2,
        options=OPTIONS | options | (own or {}),
        environment=environment,
        fill_arena=True,
        report_manager=True,
        **job,
    )
    assert_same_generation(ours, theirs)
    assert ours["request_tokens"] == {}
    return ours, theirs


def tables_of(result):
    return [table["name"] for table in result["cache"]["evictions"]]


def images_of(name):
    tiled = dict.fromkeys(("internvl_chat", "nvlm_d"), TILED_IMAGES)
    return (tiled | {"phi3_v": CROPPED_IMAGES}).get(name, IMAGES)


def options_of(name):
    """Get options for a model whose images take more tokens than a prompt of the others."""
    return {"max_model_len": 1040, "max_num_batched_tokens": 160} if name == "phi3_v" else {}


def prompts_of(name):
    """Make prompts about images.

    Those of Phi-3 Vision name the first image and the second. NVLM wants a line feed behind each.
    """
    prompts = prompts_about_images(name)
    if name == "nvlm_d":
        image, line_feed = NVLM_IMAGE
        return [
            [
                each
                for token in prompt
                for each in ([token, line_feed] if token == image else [token])
            ]
            for prompt in prompts
        ]
    if name == "phi3_v":
        first = TOKEN_IDS[PLACEHOLDERS[name]]
        for prompt in prompts:
            places = [place for place, token in enumerate(prompt) if token == first]
            for number, place in enumerate(places):
                prompt[place] = first + number
    return prompts


@pytest.mark.parametrize(
    "name",
    [
        "llava_onevision",
        pytest.param("internvl_chat", marks=pytest.mark.slow),
        pytest.param("nvlm_d", marks=pytest.mark.slow),
        pytest.param("phi3_v", marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", marks=pytest.mark.slow),
    ],
)
def test_images_are_encoded_once_and_read_from_pages_of_the_arena(
    tiny_vision_model, run_engine, name
):
    model, prompts = tiny_vision_model(name), prompts_of(name)

    ours, _ = run_both(run_engine, model, prompts, images_of(name), options=options_of(name))

    assert tables_of(ours)[-1] == "images"
    assert sum(ours["encoded"]) == NUM_IMAGES


def test_a_plan_counts_the_layers_and_embeddings_of_a_phi_3_vision(tiny_vision_model):
    folder = tiny_vision_model("phi3_v")

    full, images = read_model(folder).layer_types

    # Its windows are as long as its context. Keys and values of 128 elements in 16 bits, and rows.
    assert isinstance(full, FullAttention)
    assert [layer.slot_bytes for layer in full.layers] == [2 * 128 * 2] * 3
    assert [layer.slot_bytes for layer in images.layers] == [128 * 2]
    assert images.typical_tokens == 1921


def evicted(result):
    """Get the number of evictions of each page table, by its name."""
    tables = [dict(table) for table in result["cache"]["evictions"]]
    return {table.pop("name"): sum(table.values()) for table in tables}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava_onevision", "internvl_chat"])
def test_images_give_way_and_requests_are_preempted_in_a_small_arena(
    tiny_vision_model, run_engine, name
):
    """Some requests are admitted with a hit of an image, and again with a hit of its half."""
    model, prompts = tiny_vision_model(name), prompts_about_images(name)

    ours, _ = run_both(
        run_engine, model, prompts * 2, images_of(name) * 2, options=SMALL, max_tokens=40
    )

    assert ours["preemptions"] > 0
    assert evicted(ours)["images"] > 0


def check_host(alone, ours, num_images, *, table="images"):
    """Check that host memory had all images that the arena lost, and not every image alone.

    Args:
        alone: Result without host memory.
        ours: Result of the same requests with it.
        num_images: Number of different images.
        table: Page table of the images.
    """
    assert alone["host"] is None
    assert sum(alone["encoded"]) > num_images
    assert ours["host"]["loaded_bytes"] > 0
    assert sum(ours["encoded"]) == num_images
    for each in (alone, ours):
        assert each["preemptions"] > 0
        assert evicted(each)[table] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava_onevision", "internvl_chat", "qwen2_5_vl"])
def test_images_that_a_small_arena_lost_come_back_from_host_memory(
    tiny_vision_model, run_engine, name
):
    model, prompts, images = tiny_vision_model(name), prompts_about_images(name), images_of(name)
    job = {"options": SMALL, "max_tokens": 40}

    alone, _ = run_both(run_engine, model, prompts * 2, images * 2, **job)
    ours, _ = run_both(run_engine, model, prompts * 2, images * 2, own=HOST, **job)

    check_host(alone, ours, NUM_IMAGES)


@pytest.mark.slow
def test_the_same_image_twice_in_a_prompt_is_encoded_once(tiny_vision_model, run_engine):
    name = "llava_onevision"
    model, prompts = tiny_vision_model(name), prompts_about_images(name)

    ours, _ = run_both(
        run_engine, model, [prompts[1]], [[5, 5]], options={"max_num_batched_tokens": 128}
    )

    assert ours["encoded"] == [1]


def run_phi_3_in_a_small_arena(run_engine, model, **job):
    """Run requests with up to two images each; see `run_both`.

    Beside 984 tokens of text and images, short answers grow until the arena is full.
    """
    name = "phi3_v"
    alone, about_two, text, again, other = prompts_of(name)
    texts = [text, *prompts_of_lengths((35, 35), seed=7)]
    ours, _ = run_both(
        run_engine,
        model,
        [about_two, *texts, alone, again, other],
        [CROPPED_IMAGES[index] for index in (1, 2, 2, 2, 0, 3, 4)],
        options=options_of(name) | {"kv_cache_memory_bytes": 80 * 49152},
        max_tokens=48,
        **job,
    )
    assert ours["preemptions"] > 0
    return ours


@pytest.mark.slow
def test_images_of_phi_3_vision_come_back_from_host_memory(tiny_vision_model, run_engine):
    model = tiny_vision_model("phi3_v")

    alone, ours = (run_phi_3_in_a_small_arena(run_engine, model, own=host) for host in (None, HOST))

    check_host(alone, ours, NUM_IMAGES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava_onevision", "internvl_chat", "qwen2_5_vl"])
def test_the_second_runner_reads_the_same_pages(tiny_vision_model, run_engine, name):
    model, prompts = tiny_vision_model(name), prompts_about_images(name)[:2]

    ours, _ = run_both(
        run_engine, model, prompts, images_of(name)[:2], environment={V2_RUNNER: "1"}, max_tokens=4
    )

    assert tables_of(ours)[-1] == "images"
    assert sum(ours["encoded"]) == 3


@pytest.mark.slow
def test_the_second_runner_reads_images_that_come_back_from_host_memory(
    tiny_vision_model, run_engine
):
    name = "llava_onevision"
    model, prompts = tiny_vision_model(name), prompts_about_images(name)

    ours, _ = run_both(
        run_engine,
        model,
        prompts,
        IMAGES,
        options=SMALL,
        own=HOST,
        environment={V2_RUNNER: "1"},
        max_tokens=3,
    )

    assert evicted(ours)["images"] > 0
    assert ours["host"]["loaded_bytes"] > 0
    assert sum(ours["encoded"]) == NUM_IMAGES


def run_phi_3_on_the_second_runner(run_engine, model, environment=None):
    """Run a request with an image of one crop, because a CPU interprets that runner's kernels."""
    ours, _ = run_both(
        run_engine,
        model,
        prompts_of("phi3_v")[:1],
        [[0]],
        options={
            "max_model_len": 352,
            "max_num_batched_tokens": 160,
            "mm_processor_kwargs": {"num_crops": 1},
        },
        environment={V2_RUNNER: "1"} | (environment or {}),
        max_tokens=4,
    )
    return ours


@pytest.mark.slow
def test_the_second_runner_reads_an_image_of_phi_3_vision(tiny_vision_model, run_engine):
    ours = run_phi_3_on_the_second_runner(run_engine, tiny_vision_model("phi3_v"))

    assert tables_of(ours)[-1] == "images"
    assert ours["encoded"] == [1]


@pytest.mark.slow
def test_a_variable_leaves_images_in_the_encoder_cache(tiny_vision_model, run_engine):
    name = "llava_onevision"
    model, prompts = tiny_vision_model(name), prompts_about_images(name)

    ours, theirs = run_both(
        run_engine, model, prompts, IMAGES, environment={"JENGA_IMAGE_EMBEDDINGS": "0"}
    )

    assert tables_of(ours) == ["full"]
    assert sum(ours["encoded"]) == sum(theirs["encoded"])


# Images whose tokens read each other

TABLES = ("full", "images", "sliding_40")
LENGTHS_BESIDE_IMAGE = (29, 58, 35, 54, 107)


def prompts_beside_images(name):
    """Make prompts, and the seeds of the images of each. PaliGemma has one image, before all text.

    Its prompts end with a line feed, which its processor would add.
    """
    if name != "paligemma":
        return prompts_about_images(name), IMAGES
    prompts = prompts_of_lengths(LENGTHS_BESIDE_IMAGE, seed=6)
    return [[*prompt[:-1], TOKEN_IDS["\n"]] for prompt in prompts], [[0], [1], [], [0], [2]]


def run_beside_transformers(
    run_engine, name, model, *, texts=(), copies=1, options=None, tables=TABLES, **job
):
    """Run transformers on some prompts, and our engine twice on so many copies of the same ones.

    Prompts of text alone, `texts`, come before those about images.

    Stock vLLM does not let tokens of an image read later ones on a CPU: transformers does.

    Returns:
        The engine's result, and how many images are different ones.
    """
    prompts, images = prompts_beside_images(name)
    prompts, images = [*texts, *prompts], [[] for _ in texts] + images
    limits = {"image": max(map(len, images)), "video": 0, "audio": 0}
    options = {"limit_mm_per_prompt": limits, "max_num_batched_tokens": 48} | (options or {})
    job |= {"reads_images": True}

    theirs = run_engine(model, prompts, image_seeds=images, script="reference_process.py", **job)
    ours = run_engine(
        model,
        prompts * 2 * copies,
        image_seeds=images * 2 * copies,
        rounds=2,
        options=OPTIONS | options,
        by_references=True,
        fill_arena=True,
        report_manager=True,
        **job,
    )

    assert "error" not in theirs, theirs["error"][-4000:]
    assert_same_generation(ours, {"outputs": theirs["outputs"] * 2 * copies})
    assert ours["request_tokens"] == {}
    assert sorted(tables_of(ours)) == sorted(tables)
    return ours, len({seed for seeds in images for seed in seeds})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_vision", "paligemma"])
def test_an_image_that_one_step_reads_whole_is_encoded_once(tiny_vision_model, run_engine, name):
    ours, num_images = run_beside_transformers(run_engine, name, tiny_vision_model(name))

    assert sum(ours["encoded"]) == num_images


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_vision", "paligemma"])
def test_the_second_runner_reads_whole_images_from_the_same_pages(
    tiny_vision_model, run_engine, name
):
    ours, num_images = run_beside_transformers(
        run_engine, name, tiny_vision_model(name), environment={V2_RUNNER: "1"}, max_tokens=3
    )

    assert sum(ours["encoded"]) == num_images


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paligemma"])
def test_images_that_one_step_reads_whole_give_way_in_a_small_arena(
    tiny_vision_model, run_engine, name
):
    ours, _ = run_beside_transformers(
        run_engine,
        name,
        tiny_vision_model(name),
        copies=2,
        options=SMALL_BESIDE_WINDOWS,
        max_tokens=24,
    )

    assert ours["preemptions"] > 0
    assert evicted(ours)["images"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_vision", "paligemma"])
def test_images_that_one_step_reads_whole_come_back_from_host_memory(
    tiny_vision_model, run_engine, name
):
    model, texts = tiny_vision_model(name), prompts_of_lengths((14, 15, 16), seed=8)

    (alone, num_images), (ours, _) = (
        run_beside_transformers(
            run_engine,
            name,
            model,
            texts=texts,
            options=SMALL_BESIDE_WINDOWS | host,
            max_tokens=48,
        )
        for host in ({}, HOST)
    )

    check_host(alone, ours, num_images)


@pytest.mark.slow
def test_gemma_3_evicts_and_preempts_all_the_time_in_the_least_arena(tiny_vision_model, run_engine):
    """Answers to short texts grow until the requests about images behind them are preempted."""
    name = "gemma3_vision"

    ours, num_images = run_beside_transformers(
        run_engine,
        name,
        tiny_vision_model(name),
        texts=prompts_of_lengths((14, 15, 16), seed=8),
        options=SMALL_BESIDE_WINDOWS,
        max_tokens=48,
    )

    assert ours["preemptions"] > 1
    assert min(evicted(ours).values()) > 0
    assert sum(ours["encoded"]) > num_images  # some were evicted and asked for again
