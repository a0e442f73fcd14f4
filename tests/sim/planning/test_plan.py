"""Plans against what the manager really holds, and as people and programs read them."""

import itertools
import json
import re

import pytest

from jenga.cli import main
from jenga.errors import OutOfPagesError
from jenga.manager import Manager
from jenga.models import KvFormat, ReadOptions, known_model, known_names
from jenga.models.unserved import CACHE_DTYPE, SPARSE_LATENTS
from jenga.policies import Image, RequestFacts
from jenga.sim.arenas.baseline_geometries import geometry_by_name
from jenga.sim.hardware.budget import memory_budget
from jenga.sim.hardware.gpus import find_gpu
from jenga.sim.planning import vllm_fit
from jenga.sim.planning.image_fits import image_fits
from jenga.sim.planning.plan import LENGTHS, System, decode_bytes, fit_of, plan_model
from jenga.sim.planning.plan_text import WIDTH, plan_json, plan_text
from jenga.sim.planning.stages import layers_per_rank
from jenga.spec import State

ARENA_BYTES = 8 << 30
CHUNK_TOKENS = 2048
CHUNK_TOKENS_OF_VLLM = 8192


def plan_of(name, arena_bytes=ARENA_BYTES, **options):
    return plan_model([known_model(name)], arena=arena_bytes, **options)


def system(plan, name):
    (found,) = [each for each in plan.systems if each.name == name]
    return found


def requests_held(geometry, arena_bytes, num_tokens):
    """Requests that the manager holds at once when each is grown to a length in steps."""
    manager = Manager(
        geometry,
        num_large_pages=geometry.num_large_pages(arena_bytes),
        hash_tokens=16,
        prefix_caching=False,
    )
    count = 0
    while True:
        request_id = str(count)
        processed = 0
        while processed < num_tokens:
            manager.new_step()
            wanted = min(processed + CHUNK_TOKENS, num_tokens)
            try:
                manager.allocate(request_id, num_tokens=wanted, num_processed_tokens=processed)
            except OutOfPagesError:
                return count
            processed = wanted
        manager.release_passed(request_id, num_tokens - 1)
        count += 1


@pytest.mark.parametrize("rule", ["planned", "max", "homogeneous"])
@pytest.mark.parametrize("name", ["gemma-3-12b", "jamba-v0.1", "ministral-8b-2410"])
def test_capacity_is_what_the_manager_holds(name, rule):
    arena_bytes, num_tokens = 4 << 30, 5000
    model = known_model(name).spec()
    geometry = geometry_by_name(rule, model)
    expected = fit_of(
        geometry,
        geometry.num_large_pages(arena_bytes),
        num_tokens,
        needed=decode_bytes(model, num_tokens),
    )

    held = requests_held(geometry, arena_bytes, num_tokens)

    # A request that is prefilled when the arena is nearly full holds more than it decodes with.
    assert expected.num_requests - 2 <= held <= expected.num_requests + 1


@pytest.mark.parametrize("name", known_names())
def test_planned_pages_fit_nearly_as_many_requests_as_could_be(name):
    facts = known_model(name)
    budget = memory_budget([facts], find_gpu("H200"), ranks=8, weight_bytes=300 * 10**9)
    plan = plan_model([facts], arena=budget)

    planned = system(plan, "planned")
    for (_, _, ideal), fit in zip(plan.needed, planned.fits, strict=True):
        assert fit.waste <= 0.035
        assert fit.num_requests <= ideal
        if planned.longest_tokens is None or fit.num_tokens <= planned.longest_tokens:
            assert fit.num_requests >= int(0.95 * ideal) - 1


def test_paged_attention_has_no_room_for_states_of_short_requests():
    plan = plan_of("nemotron-h-8b", lengths=(512, 65_536))

    short, long = system(plan, "homogeneous").fits
    assert (short.num_requests, short.waste, short.is_below_state) == (0, None, True)
    assert long.waste > 0.5
    assert not long.is_below_state
    text = plan_text(plan)
    assert "no room" not in text
    assert '"holds no state": the slots of so short a request are smaller' in text
    assert "holds no state" not in plan_text(plan_of("gemma-3-4b"))


def test_paged_attention_takes_slots_for_an_image_in_every_layer():
    (fit,) = system(plan_of("llama-3.2-11b-vision", lengths=(43,)), "homogeneous").fits

    # MMMU-Pro: 43 tokens of text beside 6,193 of images waste 79.6 %, the paper's table says.
    assert fit.waste == pytest.approx(0.796, abs=0.005)


def requests_held_with_unread_images(geometry, num_large_pages, num_tokens, image_tokens):
    """Requests that the manager holds at once when the last step of each begins its image."""
    manager = Manager(
        geometry, num_large_pages=num_large_pages, hash_tokens=16, prefix_caching=False
    )
    start_token = num_tokens - image_tokens
    ends = [*range(CHUNK_TOKENS, start_token, CHUNK_TOKENS), start_token, num_tokens]
    image = Image(start_token=start_token, num_tokens=image_tokens)
    facts = RequestFacts(prompt_tokens=num_tokens, images=(image,))
    count = 0
    while True:
        for processed, wanted in itertools.pairwise([0, *ends]):
            manager.new_step()
            try:
                manager.allocate(
                    str(count), num_tokens=wanted, num_processed_tokens=processed, facts=facts
                )
            except OutOfPagesError:
                return count
        count += 1


@pytest.mark.parametrize("name", ["internvl2-8b", "llava-onevision-7b", "paligemma2-10b"])
def test_as_many_requests_with_unread_images_fit_as_the_manager_holds(name):
    plan = plan_of(name, arena_bytes=4 << 30, lengths=(200, 6000))

    images = image_fits(plan)

    (fit,) = images.in_arena  # no image fits in 200 tokens
    held = requests_held_with_unread_images(
        plan.geometry, plan.systems[0].num_units, 6000, images.image_tokens
    )
    assert fit.num_tokens == 6000
    assert 0 < fit.num_unread <= fit.num_requests == plan.systems[0].fits[1].num_requests
    # A request that is prefilled when the arena is nearly full holds more than when it decodes.
    assert fit.num_unread - 2 <= held <= fit.num_unread + 1


def test_vllms_encoder_cache_takes_a_part_of_the_arena_and_has_room_for_few_images():
    lengths = (8192, 16_384)
    plan = plan_of("llava-onevision-7b", lengths=lengths)

    images = image_fits(plan)

    # 5,103 tokens an image of 3,584 elements in 16 bits; the cache has room for one of them.
    assert images.image_bytes == 5103 * 7168
    assert images.cache_bytes == CHUNK_TOKENS_OF_VLLM * 7168
    less = plan_of("llava-onevision-7b", ARENA_BYTES - images.cache_bytes, lengths=lengths)
    assert [each.num_requests for each in images.in_cache] == [
        fit.num_requests for fit in less.systems[0].fits
    ]
    assert [each.num_unread for each in images.in_cache] == [1, 1]
    assert images.in_arena[0].num_unread > 10
    assert "Requests with an image of 5,103 tokens (36.6 MB) that fit" in plan_text(plan)
    assert json.loads(plan_json(plan))["images"]["cache_bytes"] == images.cache_bytes


def test_no_request_fits_beside_an_encoder_cache_that_takes_the_whole_arena():
    arena_bytes = CHUNK_TOKENS_OF_VLLM * 7168 + (1 << 19)

    images = image_fits(plan_of("llava-onevision-7b", arena_bytes, lengths=(8192,)))

    assert [(each.num_requests, each.num_unread) for each in images.in_cache] == [(0, 0)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-3.1-8b", {}),
        ("gemma-3-4b", {"pipeline_parallel": 2}),
        ("gemma-3-4b", {"large_page_bytes": 8 << 20}),
        ("llava-onevision-7b", {"lengths": (1024,)}),
    ],
    ids=["no_images", "pipeline", "shared_arena", "short_requests"],
)
def test_no_images_are_counted_where_the_arena_has_no_pages_for_them(name, options):
    plan = plan_of(name, **options)

    assert image_fits(plan) is None
    assert "Requests with an image" not in plan_text(plan)


def test_system_that_does_not_start_says_which_number_is_too_large():
    refused = system(plan_of("zamba2-7b"), "lcm")

    assert refused.fits == ()
    assert re.search(
        r"3 large pages of 907680743424 bytes .*8589934592 bytes hold 0", refused.refusal
    )


def test_draft_and_target_share_the_arena():
    models = [known_model("gemma-2-9b"), known_model("gemma-2-2b")]

    plan = plan_model(models, arena=ARENA_BYTES)

    assert len(plan.model.layer_types) == 4
    alone = plan_of("gemma-2-9b")
    assert plan.systems[0].fits[0].num_requests < alone.systems[0].fits[0].num_requests
    assert "draft, gemma-2-2b" in plan_text(plan)


def state_bytes(plan):
    """Bytes of one state of the model that is drafted for."""
    first = next(each for each in plan.model.layer_types if isinstance(each, State))
    return sum(layer.slot_bytes for layer in first.layers)


def test_drafted_tokens_take_a_state_each_of_the_model_that_is_drafted_for():
    models = [known_model("granite-4.0-h-small"), known_model("jamba-1.5-mini")]
    options = ReadOptions(draft_tokens=3)

    plan = plan_model(models, arena=8 * ARENA_BYTES, options=options, lengths=(1024,))

    states = [each for each in plan.model.layer_types if isinstance(each, State)]
    assert [state.slots_per_request for state in states] == [4, 1]
    assert "4 states, for drafted tokens" in plan_text(plan)
    alone = plan_model(models, arena=8 * ARENA_BYTES, lengths=(1024,))
    # Four states of 79 MB in place of one of 77, whose convolutions have no columns for drafts.
    more_bytes = plan.needed[0][1] - alone.needed[0][1]
    assert more_bytes == 4 * state_bytes(plan) - state_bytes(alone)
    assert plan.systems[0].fits[0].num_requests < alone.systems[0].fits[0].num_requests / 2


# What is kept of one token beside a state, and the channels of the convolution.
KEPT = {
    # Of 128 heads of 64, 8 groups and states of 128: x and B in 16 bits, steps in 32.
    "nemotron-h-8b": ({}, (128 * 64 + 8 * 128) * 2 + 128 * 4, 10_240),
    # Of 32 heads of values and 16 of keys: changes as states are, keys in 16 bits, decays in 32.
    "qwen3-next-80b-a3b": ({}, (32 + 16) * 128 * 2 + 32 * 4, 8192),
    "qwen3.5-27b": ({}, 48 * 128 * 4 + 16 * 128 * 2 + 48 * 4, 10_240),
    # Every channel of its 32 heads has a decay of its own.
    "kimi-linear-48b": ({}, 32 * 128 * (4 + 2 + 4), 12_288),
    "ling-3.0-flash": ({}, 32 * 128 * (4 + 2 + 4), 12_288),
    "qwen3-next-80b-a3b in halves": (
        {"tensor_parallel": 2},
        (16 + 8) * 128 * 2 + 16 * 4,
        4096,
    ),
    "qwen3-next-80b-a3b in float16": (
        {"state_dtype": "float16"},
        32 * 128 * 4 + 16 * 128 * 2 + 32 * 4,
        8192,
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_drafted_tokens_take_no_states_where_inputs_are_kept_beside_them(name):
    facts = known_model(name.split()[0])
    run, token_bytes, num_channels = KEPT[name]
    plain, drafted, kept = (
        state_type_of(facts, **run, **options)
        for options in ({}, {"draft_tokens": 3}, {"draft_tokens": 3, "history_tokens": 16})
    )
    (plain_layer, *_), (layer, *_) = plain.layers, kept.layers

    assert [each.slots_per_request for each in (plain, drafted, kept)] == [1, 4, 1]
    # A count too, and three columns of the convolution.
    more_bytes = 16 * token_bytes + 16 + 3 * num_channels * 2
    assert layer.slot_bytes - plain_layer.slot_bytes == more_bytes


@pytest.mark.parametrize(
    ("name", "slots"),
    [("nemotron-h-8b", (1, 4)), ("qwen3.5-27b", (1, 4)), ("jamba-1.5-mini", (4, 4))],
)
def test_engines_keep_histories_for_drafts_and_stock_vllm_does_not(name, slots):
    facts, read = known_model(name), ReadOptions(draft_tokens=3)
    engine = facts.engine_options(read)
    assert facts.engine_options(ReadOptions()) == ReadOptions()
    assert engine.history_tokens == (16 if slots[0] == 1 else 0)
    asked = []

    def stock(model, *_):
        asked.append(model)
        return System(name="vllm", label="asked")

    plan = plan_model(
        [facts],
        arena=8 * ARENA_BYTES,
        options=engine,
        stock_options=read,
        lengths=(1024,),
        stock=stock,
    )

    found = [
        state.slots_per_request
        for model in (plan.model, *asked)
        for state in model.layer_types
        if isinstance(state, State)
    ]
    assert found == list(slots)


def test_states_of_the_delta_rule_have_their_histories_behind_them():
    (layer, *_) = state_type_of(known_model("kimi-linear-48b"), history_tokens=8).layers

    assert [(part.name, part.shape, part.dtype) for part in layer.parts[2:]] == [
        ("history changes", (32, 8, 128), "float32"),
        ("history keys", (32, 8, 128), "bfloat16"),
        ("history decays", (32 * 8 * 128 + 4,), "float32"),
    ]


def state_type_of(facts, **options):
    spec = facts.spec(ReadOptions(**options))
    (found,) = [each for each in spec.layer_types if isinstance(each, State)]
    return found


def test_prompt_that_cannot_be_prefilled_is_not_counted_in_decode():
    plan = plan_of("pyramidkv-llama-8b", arena_bytes=2 * 10**9, lengths=(131_072,))

    planned = plan.systems[0]
    assert planned.fits[0].num_requests == 0
    assert planned.longest_tokens < 131_072
    assert "needed while the prompt is read" in plan_text(plan)


@pytest.mark.parametrize("name", known_names())
def test_text_keeps_to_its_width(name):
    text = plan_text(plan_of(name, arena_bytes=40 << 30, lengths=(*LENGTHS, 1 << 20)))

    assert max(map(len, text.splitlines())) <= WIDTH


def test_json_holds_what_the_text_rounds():
    fields = json.loads(plan_json(plan_of("gemma-3-27b")))

    planned = fields["geometry"]
    for table in planned["page_tables"]:
        product = table["small_page_bytes"] * table["small_pages_per_large_page"]
        assert product == planned["large_page_bytes"]
    assert [each["name"] for each in fields["systems"]][:2] == ["planned", "lcm"]
    assert fields["models"][0]["total_parameters"] == 27_400_000_000


def plan_command(*arguments):
    return main(["plan", *arguments, "--without-vllm"])


def test_command_prints_a_plan(capsys):
    assert plan_command("gemma-3-27b", "--gpu", "H200", "--length", "2048") == 0

    printed = capsys.readouterr().out
    assert "0.92 of the 150.8 GB of an H200" in printed
    assert "PagedAttention" in printed


def test_command_lists_the_known_models(capsys):
    assert main(["plan", "--list"]) == 0

    assert set(known_names()) <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (
            ["deepseek-v3.2", "--gpu", "H200", "--tp", "16"],
            f"deepseek-v3.2 is planned, but the vLLM plugin refuses it: {SPARSE_LATENTS.text()}.",
        ),
        (
            ["deepseek-v4-flash", "--gpu", "H200", "--tp", "2", "--weights", "160GB"],
            f"flash is planned, but the vLLM plugin refuses it: {SPARSE_LATENTS.text()}.",
        ),
        (
            ["gemma-3-27b", "--kv-dtype", "nvfp4"],
            f"nvfp4 are planned, but the vLLM plugin refuses them: {CACHE_DTYPE.reason}.",
        ),
        (
            ["gemma-3-4b", "--kv-dtype", "fp8", "--gpu", "A100-80G"],
            "fp8 are planned, but the vLLM plugin refuses them: float8 needs a GPU of compute",
        ),
    ],
    ids=["sparse", "compressed", "four_bits", "no_float8"],
)
def test_command_says_what_the_plugin_refuses(arguments, note, capsys):
    assert plan_command(*arguments, "--length", "8192") == 0
    assert note in " ".join(capsys.readouterr().out.split())
    assert plan_command(*arguments, "--length", "8192", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["notes"]
    assert note in found


def test_command_says_nothing_of_what_the_plugin_serves(capsys):
    assert plan_command("gemma-3-4b", "--kv-dtype", "fp8", "--gpu", "24GiB", "--json") == 0

    assert json.loads(capsys.readouterr().out)["notes"] == []


def test_list_marks_the_models_that_the_plugin_refuses(capsys):
    assert main(["plan", "--list"]) == 0

    lines = capsys.readouterr().out.splitlines()
    marked = [line.split()[0] for line in lines if line.endswith("the vLLM plugin refuses it)")]
    assert marked == ["deepseek-v3.2", "deepseek-v4-flash", "hymba-1.5b"]


def test_command_takes_ranks_format_and_arena(capsys):
    arguments = ["qwen3-next-80b-a3b", "--tp", "2", "--kv-dtype", "fp8", "--arena", "20GB"]
    assert plan_command(*arguments, "--json") == 0

    fields = json.loads(capsys.readouterr().out)
    assert (fields["tensor_parallel"], fields["kv_format"]) == (2, "fp8")
    assert fields["arena_bytes"] == 20 * 10**9
    full = ReadOptions(tensor_parallel=2, kv_format=KvFormat.FP8)
    layers = known_model("qwen3-next-80b-a3b").spec(full).layer_types[0].layers
    assert fields["layer_types"][0]["slot_bytes"] == sum(layer.slot_bytes for layer in layers)


def test_command_spreads_a_model_over_the_ranks_of_a_pipeline(capsys):
    assert plan_command("gemma-3-27b", "--gpu", "L4", "--tp", "2", "--pp", "2", "--json") == 0
    fields = json.loads(capsys.readouterr().out)
    assert plan_command("gemma-3-27b", "--gpu", "L4", "--tp", "2", "--pipeline-parallel", "2") == 0
    printed = capsys.readouterr().out

    geometry = fields["geometry"]
    ranks = geometry["pipeline_ranks"]
    assert fields["pipeline_parallel"] == len(ranks) == 2
    assert geometry["large_page_bytes"] == sum(rank["large_page_bytes"] for rank in ranks)
    assert [sum(table["num_layers"] for table in rank["page_tables"]) for rank in ranks] == [31, 31]
    for rank in ranks:
        used_bytes = geometry["num_large_pages"] * rank["large_page_bytes"]
        assert used_bytes + rank["left_bytes"] == fields["arena_bytes"]
    assert [each["name"] for each in fields["systems"]] == ["planned", "lcm"]
    assert "remaining memory on each of 2 pipeline ranks" in printed
    assert "1/4 on each rank" in printed


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"pipeline_parallel": 2}, "in a pipeline"),
        ({"large_page_bytes": 8 << 20}, "in an arena that engines share"),
    ],
    ids=["pipeline", "shared_arena"],
)
def test_embeddings_are_left_out_where_engines_keep_them_in_vllms_cache(options, where):
    plan = plan_of("gemma-3-27b", **options)

    assert [each.name for each in plan.model.layer_types] == ["full", "sliding"]
    assert [each.name for each in plan.geometry.page_tables] == ["full", "sliding"]
    note = f"Embeddings are not planned: {where} they stay in vLLM's encoder cache."
    assert plan.notes == (note,)
    assert plan_of("llama-3.1-8b", **options).notes == ()


def test_a_plan_of_a_pipeline_says_which_rows_are_left_out():
    words = "The MAX page, PagedAttention and vLLM's planner are left out, because"

    assert words in plan_text(plan_of("gemma-3-4b", pipeline_parallel=2))
    assert words not in plan_text(plan_of("gemma-3-4b"))


def test_a_pipeline_of_like_ranks_holds_what_as_many_arenas_together_hold():
    one = plan_of("llama-3.1-8b", 2 * ARENA_BYTES)
    two = plan_of("llama-3.1-8b", ARENA_BYTES, pipeline_parallel=2)

    for alone, spread in zip(one.systems[0].fits, two.systems[0].fits, strict=True):
        assert spread.num_requests == pytest.approx(alone.num_requests, rel=0.02)


def test_ranks_of_a_pipeline_have_the_layers_that_vllm_gives_them():
    assert layers_per_rank(62, 4) == (15, 16, 16, 15)
    assert layers_per_rank(7, 2) == (4, 3)
    assert layers_per_rank(11, 4) == (3, 3, 3, 2)
    assert layers_per_rank(5, 1) == (5,)

    indices = pytest.importorskip("vllm.distributed.utils").get_pp_indices
    for num_layers in range(1, 20):
        for num_ranks in range(1, num_layers + 1):
            bounds = [indices(num_layers, rank, num_ranks) for rank in range(num_ranks)]
            counts = tuple(end - start for start, end in bounds)
            assert layers_per_rank(num_layers, num_ranks) == counts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-3.1-8b", "--pp", "0"], "ranks must be"),
        (["llama-3.1-8b", "--pp", "33"], "at most the 32 layers, got 33"),
        (["llama-3.1-8b", "--pp", "2", "--draft", "llama-3.2-1b"], "draft must be planned without"),
        (["llama-3.1-70b"], "141.2 GB and 1.6 GB set aside .* 2 ranks would fit"),
        (["deepseek-v4-flash", "--tp", "4"], "--weights BYTES"),
        (["gemma-3-72b"], "did you mean"),
        (["llama-3.1-8b", "--gpu", "H300"], "gpu must be one of"),
        (["llama-3.1-8b", "--length", "0"], "every length must be a positive integer"),
        (["llama-3.1-8b", "--tp", "3"], "tensor_parallel must divide"),
        (["llama-3.1-8b", "--draft", "llama-3.1-8b"], "two models named"),
        (["llama-3.1-8b", "--draft-tokens", "-1"], "draft_tokens must be at least 0"),
        (["jamba-1.5-mini", "--history-tokens", "16"], "models of Mamba-2 or gated delta layers"),
        (["lfm2-1.2b", "--history-tokens", "16"], "models of Mamba-2 or gated delta layers"),
        (
            ["ling-2.6-flash", "--tp", "4", "--history-tokens", "16"],
            "models of Mamba-2 or gated delta layers",
        ),
        (
            ["nemotron-h-8b", "--history-tokens", "7", "--draft-tokens", "3"],
            "history_tokens must be 0 or at least 8",
        ),
        (
            ["qwen3.5-27b", "--history-tokens", "65"],
            "history_tokens must be at most 64 for models of gated delta layers, got 65",
        ),
        (
            ["llama-3.1-8b", "--large-page-bytes", "1000"],
            "multiple of the alignment, 128, got 1000",
        ),
        (["llama-3.1-8b", "--gpu", "24"], "gpu memory needs a unit, such as 24GiB"),
        (["llama-3.1-8b", "--plot", "x.gif"], "file must end in .svg"),
        ([], "MODEL must be given"),
    ],
)
def test_command_says_what_is_wrong_in_one_line(arguments, message, capsys):
    assert plan_command(*arguments) == 2

    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert re.search(message, line)
    assert printed.out == ""


def test_vllm_is_left_out_by_name_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(vllm_fit, "find_spec", lambda _name: None)

    plan = plan_of("gemma-3-27b", lengths=(2048,), stock=vllm_fit.stock_system)

    assert system(plan, "vllm").refusal == "vLLM 0.32 or 0.33 is not installed"
    assert "vLLM's planner does not start: vLLM 0.32 or 0.33 is not installed" in plan_text(plan)


def test_vllms_planner_wastes_what_its_replay_was_seen_to_waste():
    pytest.importorskip("vllm", reason="vLLM is not installed")
    arena_bytes = 40 << 30

    stock = vllm_fit.stock_system
    gemma = plan_of("gemma-3-27b", arena_bytes, lengths=(1300,), stock=stock)
    llama = plan_of("llama-3.1-8b", arena_bytes, lengths=(1300, 400_000), stock=stock)

    # Replays of requests of about 1.3k tokens: 12 % and half a percent.
    assert system(gemma, "vllm").fits[0].waste == pytest.approx(0.12, abs=0.03)
    short, long = system(llama, "vllm").fits
    assert short.waste < 0.015
    assert (long.num_requests, long.waste) == (0, None)
    # One layer type: all cut alike, and admit the same.
    assert system(llama, "vllm").longest_tokens == system(llama, "planned").longest_tokens
