"""The benchmark of engines in parts: workloads, serving, outputs, caches, the page."""

import json
import math
import random
from collections import Counter
from dataclasses import asdict, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from jenga.policies import Image
from jenga.sim.workload.requests import Piece, Request
from jenga.sim.workload.sources import open_source
from perf.engine import __main__ as command
from perf.engine.planning import models, plan, sides, weights, workloads
from perf.engine.planning.models import Scale
from perf.engine.planning.workloads import FIRST_TOKEN, Prompts, Turn, turns_of
from perf.engine.results import outputs, table
from perf.engine.runs import caches, compilations, flash, serving
from perf.engine.runs.jobs import Paths, job_of
from perf.engine.runs.lease import Lease


def request(name, *pieces, output_tokens=2, output=None, arrival_s=0.0):
    prompt = tuple(Piece(content, count) for content, count in pieces)
    return Request(
        name=name, prompt=prompt, output_tokens=output_tokens, output=output, arrival_s=arrival_s
    )


# Workloads.


def test_prompts_share_what_those_of_the_trace_share():
    requests = list(open_source("articles:n=2,questions=2,tokens=50,question=4,order=cyclic"))
    drawn = Prompts(vocab_size=1000)

    prompts = [drawn.tokens(each, {}) for each in requests]

    assert [len(prompt) for prompt in prompts] == [54] * 4
    assert prompts[0][:50] == prompts[2][:50] != prompts[1][:50]
    assert len({tuple(prompt[50:]) for prompt in prompts}) == 4
    assert all(FIRST_TOKEN <= token < 1000 for prompt in prompts for token in prompt)
    again = Prompts(vocab_size=1000)
    assert [again.tokens(each, {}) for each in reversed(requests)] == prompts[::-1]


def test_the_beginning_of_a_content_is_that_of_all_of_it():
    drawn = Prompts(vocab_size=200)

    beginning = drawn.tokens(request("short", ("text", 7)), {})
    all_of_it = drawn.tokens(request("long", ("text", 40)), {})

    assert all_of_it[:7] == beginning


def test_a_prompt_holds_what_was_said_before_it():
    prompt = Prompts(vocab_size=200).tokens(
        request("next", ("question", 3), ("answer", 2)), {"answer": [7, 8]}
    )

    assert prompt[3:] == [7, 8]


def test_a_turn_waits_for_the_answer_it_holds_and_then_for_its_user():
    requests = [
        request("a", ("x", 5), output="said"),
        request("b", ("y", 5), arrival_s=1.0),
        request("c", ("x", 5), ("said", 2), ("z", 1), arrival_s=4.0),
    ]

    turns = turns_of(requests)

    assert [(turn.after, turn.delay_s) for turn in turns] == [(None, 0.0), (None, 1.0), (0, 4.0)]
    serial = turns_of(requests, is_serial=True)
    assert [(turn.after, turn.delay_s) for turn in serial] == [(None, 0.0), (0, 0.0), (1, 0.0)]


def test_images_are_refused():
    image = Image(start_token=0, num_tokens=4, content=b"cat")
    shown = replace(request("seen", ("text", 9)), images=(image,))

    with pytest.raises(ValueError, match="request 'seen' shows images"):
        turns_of([shown])


@pytest.mark.parametrize("entry", plan.PLAN, ids=lambda entry: entry.label)
def test_every_request_of_the_plan_fits_its_engine(entry):
    for scale, longest in ((Scale.FULL, entry.case.max_model_tokens), (Scale.TINY, 128)):
        for workload in entry.case.workloads:
            turns = workload.turns(scale)
            tokens = [turn.request.prompt_tokens + turn.request.output_tokens for turn in turns]
            assert max(tokens) <= longest
    if entry.case.model is not None:
        assert longest <= entry.case.model.widths["max_position_embeddings"]


# The plan.


def test_entries_have_keys_of_their_own_and_stock_comes_first():
    keys = [entry.key for entry in plan.PLAN]
    first = {}
    for entry in plan.PLAN:
        first.setdefault(entry.case.name, entry.side.name)

    assert max(Counter(keys).values()) == 1
    assert set(first.values()) == {"stock"}
    assert [entry.case.name for entry in plan.PLAN[:4]] == ["gemma-3-4b"] * 2 + [
        "nemotron-h-8b"
    ] * 2


def test_sides_that_come_again_are_numbered():
    entries = plan.in_turns(
        plan.GEMMA, sides.STOCK, sides.OURS_PLAIN, sides.OURS_PLAIN, sides.STOCK
    )

    assert [(entry.side.name, entry.turn) for entry in entries] == [
        ("stock", 1),
        ("ours", 1),
        ("ours", 2),
        ("stock", 2),
    ]


def test_a_case_a_side_and_models_without_experts_can_be_chosen():
    chosen = plan.chosen(plan.PLAN, only=["gemma", "oss"], side_names=["ours"], has_experts=False)

    assert {entry.side.name for entry in chosen} == {"ours"}
    assert {entry.case.model_name for entry in chosen} == {"gemma-3-4b", "gemma-4-31b-12-layers"}
    with pytest.raises(ValueError, match="got theirs"):
        plan.chosen(plan.PLAN, side_names=["theirs"])


def test_both_sides_have_the_same_settings_but_for_what_makes_them(tmp_path):
    paths = Paths(folder=tmp_path)
    stock, ours = (
        job_of(plan.NEMOTRON, side, Scale.FULL, paths)["options"]
        for side in (sides.STOCK, sides.OURS_PLAIN)
    )

    assert ours.pop("attention_backend") == "JENGA_TRITON"
    assert ours == stock
    assert stock["gpu_memory_utilization"] == 0.5
    assert stock["compilation_config"]["mode"] == 0
    assert stock["compilation_config"]["cudagraph_capture_sizes"] == [1, 2, 4, 8, 16, 32, 48, 64]
    compiled = job_of(plan.NEMOTRON, sides.STOCK_COMPILED, Scale.FULL, paths)["options"]
    assert "compilation_config" not in compiled


def test_a_draft_is_named_to_the_engine_and_to_its_weights(tmp_path):
    job = job_of(plan.DRAFTED, sides.STOCK, Scale.FULL, Paths(folder=tmp_path))

    assert job["options"]["speculative_config"]["model"] == job["draft_folder"]
    assert len(job["configurations"]) == 2
    assert job["draft_acceptance"] == 0.7


def test_trials_are_left_out_where_that_chooses_no_other_kernel():
    assert "JENGA_SPECIALIZED_SCANS" in sides.OURS_PLAIN.environment(models.NEMOTRON_H_8B)
    assert "JENGA_SPECIALIZED_SCANS" not in sides.OURS_PLAIN.environment(
        models.QWEN3_NEXT_64_EXPERTS
    )
    assert sides.STOCK.environment(models.NEMOTRON_H_8B) == {}


@pytest.mark.parametrize("scale", Scale)
def test_configurations_are_written_as_transformers_reads_them(scale, tmp_path):
    from transformers import AutoConfig

    for model in models.MODELS:
        folder = tmp_path / model.name
        models.save(model.configuration(scale), folder)
        models.save(model.configuration(scale), folder)
        read = AutoConfig.from_pretrained(folder)

        assert read.architectures == [model.architecture]
        assert read.hidden_size == model.arguments(scale)["hidden_size"]
        assert [path.name for path in tmp_path.glob("tmp*")] == []


# Serving.


class FakeEngine:
    """Answers each request two steps after it came, one token a step, by its last token."""

    def __init__(self):
        self.clock_s = 0.0
        self.sent, self._active = [], {}

    def now(self):
        return self.clock_s

    def add_request(self, name, prompt, sampling):
        self.sent.append((name, self.clock_s, prompt["prompt_token_ids"]))
        self._active[name] = [prompt["prompt_token_ids"], 0, sampling.max_tokens]

    def has_unfinished_requests(self):
        return bool(self._active)

    def step(self):
        self.clock_s += 1.0
        outputs = []
        for name, state in list(self._active.items()):
            prompt, num_said, limit = state
            state[1] += 1
            is_over = num_said + 1 == limit
            if is_over:
                del self._active[name]
            outputs.append(
                SimpleNamespace(
                    request_id=name,
                    num_cached_tokens=4,
                    finished=is_over,
                    outputs=[SimpleNamespace(token_ids=[prompt[-1] + num_said + 1])],
                )
            )
        return outputs


@pytest.fixture
def fake(monkeypatch):
    pytest.importorskip("vllm")
    engine = FakeEngine()

    def sleep(seconds):
        engine.clock_s += seconds

    monkeypatch.setattr(serving.time, "sleep", sleep)
    return engine


@pytest.mark.vllm
def test_a_session_reads_what_the_engine_has_said_and_comes_after_a_pause(fake):
    requests = [
        request("a", ("x", 5), output="said", output_tokens=3),
        request("b", ("x", 5), ("said", 3), ("z", 1), arrival_s=4.0),
    ]

    served = serving.serve(fake, turns_of(requests), Prompts(100), label="run", now=fake.now)

    first, second = served
    assert second.prompt[5:8] == first.tokens
    assert second.due_s == pytest.approx(3.0 + 4.0)
    assert second.first_token_s == pytest.approx(8.0, abs=0.1)
    assert second.time_to_first_token_s == pytest.approx(1.0, abs=0.1)
    assert first.time_per_output_token_s == pytest.approx(1.0)
    assert math.isnan(serving.Served(due_s=0.0, prompt=[1]).time_per_output_token_s)


@pytest.mark.vllm
def test_time_to_the_first_token_counts_from_when_a_request_was_due(fake):
    turns = [
        Turn(request=request("a", ("x", 3), output_tokens=2), after=None, delay_s=0.0),
        Turn(request=request("b", ("y", 3)), after=None, delay_s=0.25),
    ]

    _, late = serving.serve(fake, turns, Prompts(100), label="run", now=fake.now)

    assert fake.sent[1][1] == 1.0  # a step was running
    assert late.time_to_first_token_s == pytest.approx(1.75)


def test_a_run_is_summed_up():
    served = [
        serving.Served(
            due_s=0.0,
            prompt=[1] * 10,
            tokens=[1, 2, 3],
            first_token_s=first_s,
            last_token_s=first_s + 0.2,
            found_tokens=5,
        )
        for first_s in (1.0, 2.0, 3.0)
    ]

    row = serving.summary(served)

    assert row["seconds"] == pytest.approx(3.2)
    assert row["requests_per_s"] == pytest.approx(3 / 3.2)
    assert (row["ttft_p50_s"], row["ttft_p99_s"]) == (2.0, 3.0)
    assert row["tpot_p50_ms"] == pytest.approx(100)
    assert row["found_share"] == 0.5
    assert row["output_hash"] == serving.output_hash(served)
    served[0].tokens[0] = 9
    assert row["output_hash"] != serving.output_hash(served)


def test_steps_are_weighed_by_how_long_they_took(monkeypatch):
    clock = iter((0.0, 1.0, 4.0))
    monkeypatch.setattr(serving.time, "monotonic", lambda: next(clock))
    stats = serving.StepStats()
    drafts = SimpleNamespace(num_draft_tokens=8, num_accepted_tokens=6)
    for running in (2, 6):
        scheduler = SimpleNamespace(
            num_running_reqs=running, kv_cache_usage=0.5, spec_decoding_stats=drafts
        )
        stats.record(scheduler, SimpleNamespace(num_preempted_reqs=1))

    summary = stats.summary()

    assert summary["mean_running"] == 5.0
    assert summary["most_running"] == 6
    assert summary["num_preemptions"] == 2
    assert summary["accepted_share"] == 0.75


def test_a_cache_that_cannot_be_emptied_is_an_error(monkeypatch):
    monkeypatch.setattr(serving, "RESET_S", 0.0)

    with pytest.raises(RuntimeError, match="still held"):
        serving.empty_cache(SimpleNamespace(reset_prefix_cache=lambda: False))


# Compilations.


@pytest.mark.vllm
def test_compilations_are_counted_and_marked(monkeypatch):
    pytest.importorskip("vllm")
    from triton import knobs
    from triton.runtime.autotuner import Autotuner

    heard = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **options: heard.append(options))
    monkeypatch.setattr(Autotuner, "_bench", lambda *_, **__: [1.0])
    watch = compilations.Watch()
    before = watch.counts()
    times = SimpleNamespace(total=2_500_000)

    knobs.compilation.listener(
        src=None, metadata={}, metadata_group={}, times=times, cache_hit=False
    )
    knobs.compilation.listener(
        src=None, metadata={}, metadata_group={}, times=times, cache_hit=True
    )
    assert not compilations.Counts(num_loaded=3).is_disturbed
    Autotuner._bench(None, config=None)

    counts = watch.counts().since(before)
    assert (counts.num_compiled, counts.num_loaded, counts.num_tuned) == (1, 1, 1)
    assert counts.compile_s == 2.5
    assert counts.is_disturbed
    assert len(heard) == 2


# Outputs.


def test_outputs_part_where_their_tokens_differ():
    theirs = [
        {"prompt": "a", "tokens": [1, 2, 3]},
        {"prompt": "b", "tokens": [1, 2, 3]},
        {"prompt": "c", "tokens": [4, 5, 6]},
        {"prompt": "d", "tokens": [7]},
    ]
    ours = [
        {"prompt": "a", "tokens": [1, 2, 3]},
        {"prompt": "b", "tokens": [1, 2, 9]},
        {"prompt": "c", "tokens": [8, 5, 6]},
        {"prompt": "other", "tokens": [7]},
    ]

    found = outputs.compare(theirs, ours)

    assert (found.num_same, found.num_parted, found.num_other_prompts) == (1, 2, 1)
    assert found.partings == (
        {"index": 2, "position": 0, "tokens": [4, 8]},
        {"index": 1, "position": 2, "tokens": [3, 9]},
    )
    with pytest.raises(ValueError, match="got 4 and 3"):
        outputs.compare(theirs, ours[:3])


def test_near_ties_are_within_a_bound_of_the_models_type():
    verdict = outputs.verdict([0.1, 0.3, None], "bfloat16")

    assert verdict["num_judged"] == 3
    assert verdict["num_near_ties"] == 1
    assert verdict["largest_gap_nats"] == 0.3
    assert outputs.verdict([None], "float32")["largest_gap_nats"] is None


# Weights.


def test_weights_are_the_same_in_every_process_and_differ_between_layers():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    first, second = LlamaForCausalLM(config), LlamaForCausalLM(config)

    weights.fill(first)
    weights.fill(second)

    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    layers = first.requires_grad_(False).model.layers
    assert not torch.equal(layers[0].mlp.up_proj.weight, layers[1].mlp.up_proj.weight)
    assert float(layers[0].mlp.up_proj.weight.std()) == pytest.approx(32**-0.5, rel=0.1)
    assert torch.equal(first.model.norm.weight, torch.ones(32))


def test_a_model_and_its_draft_agree_as_often_as_asked():
    from transformers import LlamaConfig, LlamaForCausalLM

    target, draft = (
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=512,
                hidden_size=width,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
            )
        )
        for width in (64, 96)
    )
    for model, wrong_share in ((target, 0.0), (draft, 0.3)):
        weights.fill(model)
        weights.speak_in_order(model, wrong_share=wrong_share)
    tokens = torch.randint(512, (8, 40), generator=torch.Generator().manual_seed(0))

    said, drafted = (model(tokens).logits.argmax(-1) for model in (target, draft))

    assert torch.equal(said, (tokens + 1) % 512)
    assert float((said == drafted).float().mean()) == pytest.approx(0.7, abs=0.08)


# FlashAttention over our arena.


def reference_flash(**call):
    """Do what `flash_attn_varlen_func` does with pages, request by request."""
    q, out, table = call["q"], call["out"], call["block_table"]
    page_tokens = call["k"].shape[1]
    starts = call["cu_seqlens_q"].tolist()
    before, after = call["window_size"]
    assert after in (0, -1)
    assert call["max_seqlen_q"] >= max(end - start for start, end in pairwise(starts))
    for row, stored in enumerate(call["seqused_k"].tolist()):
        pages = table[row, : -(-stored // page_tokens)].long()
        keys = call["k"][pages].flatten(0, 1)[:stored].float()
        values = call["v"][pages].flatten(0, 1)[:stored].float()
        queries = q[starts[row] : starts[row + 1]].float()
        group = q.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * call["softmax_scale"]
        if call["softcap"]:
            scores = call["softcap"] * torch.tanh(scores / call["softcap"])
        at = torch.arange(stored - len(queries), stored)[:, None]
        key = torch.arange(stored)[None]
        is_read = (key <= at) & ((key >= at - before) if before >= 0 else True)
        scores = scores.masked_fill(~is_read, -torch.inf)
        if call["s_aux"] is not None:
            sink = call["s_aux"].float()[:, None, None].expand(-1, len(queries), 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = scores.softmax(-1)[..., :stored]
        out[starts[row] : starts[row + 1]] = torch.einsum("hqk,khd->qhd", weights, values).to(
            out.dtype
        )


@pytest.mark.parametrize(
    "options",
    [{}, {"window_tokens": 9}, {"soft_cap": 3.0}, {"sinks": True}],
    ids=["plain", "window", "soft_cap", "sinks"],
)
def test_flash_attention_is_called_as_our_kernel_is(options):
    from jenga_kernels.reference.attention.paged_attention import paged_attention

    draw = torch.Generator().manual_seed(0)
    arena = torch.randn(6, 2, 2, 16, 2, 64, generator=draw).bfloat16()
    k_pages, v_pages = arena[:, 1, 0], arena[:, 1, 1]
    page_table = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32)
    query_starts, seq_lens = (
        torch.tensor(each, dtype=torch.int32) for each in ([0, 20, 21], [20, 12])
    )
    q = torch.randn(21, 4, 64, generator=draw).bfloat16()
    if options.get("sinks"):
        options = {"sinks": torch.randn(4, generator=draw)}
    tensors = {
        "k_pages": k_pages,
        "v_pages": v_pages,
        "page_table": page_table,
        "query_starts": query_starts,
        "seq_lens": seq_lens,
    }
    expected = paged_attention(q.float(), **_float(tensors), scale=0.125, **options)

    def never(*_, **__):
        pytest.fail("FlashAttention serves this")

    attend = flash.attention_by(reference_flash, never)
    unused = {"chunk_tokens": None, "spans": None, "alibi_slopes": None, "is_causal": True}
    found = attend(
        q, out=torch.empty_like(q), scale=0.125, plan=object(), **tensors, **options, **unused
    )

    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


def _float(tensors):
    return {
        name: each.float() if each.is_floating_point() else each for name, each in tensors.items()
    }


@pytest.mark.parametrize(
    "changes",
    [{"chunk_tokens": 32}, {"spans": torch.zeros(3, 2)}, {"is_causal": False}, {"head_dim": 512}],
    ids=["chunks", "images", "cross_attention", "wide_heads"],
)
def test_what_flash_attention_does_not_serve_keeps_our_kernel(changes):
    head_dim = changes.pop("head_dim", 64)
    q = torch.zeros(3, 2, head_dim, dtype=torch.bfloat16)
    pages = torch.zeros(2, 16, 1, head_dim, dtype=torch.bfloat16)
    calls = []

    def ours(*arguments, **options):
        calls.append(options)
        return arguments[0]

    attend = flash.attention_by(reference_flash, ours)
    attend(
        q, k_pages=pages, v_pages=pages, page_table=None, query_starts=None, seq_lens=None,
        scale=1.0, **changes,
    )  # fmt: skip

    assert len(calls) == 1


# Caches.


def test_caches_travel_without_texts_and_hold_in_another_folder(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    place = here / "triton" / "ABC"
    place.mkdir(parents=True)
    names = ["k.cubin", "k.json", "k.ptx"]
    for name in names:
        (place / name).write_bytes(random.Random(name).randbytes(3000))
    group = {"child_paths": {name: str(place / name) for name in names}}
    (place / "__grp__k.json").write_text(json.dumps(group))
    tool = here / "vllm" / "launcher.so"
    tool.parent.mkdir()
    tool.write_bytes(b"\x7fELF")
    tool.chmod(0o755)
    (here / "vllm" / "__pycache__").mkdir()
    (here / "vllm" / "__pycache__" / "m.pyc").touch()

    written = caches.pack(here, tmp_path / "caches.tar.xz", part_bytes=2000)
    assert len(written) > 1
    assert caches.is_there(tmp_path / "caches.tar.xz")
    assert caches.unpack(tmp_path / "caches.tar.xz", there) == 4

    kept = there / "triton" / "ABC"
    assert (kept / "k.cubin").read_bytes() == (place / "k.cubin").read_bytes()
    assert not (kept / "k.ptx").exists()
    paths = json.loads((kept / "__grp__k.json").read_text())["child_paths"]
    assert paths == {name: str(kept / name) for name in names[:2]}
    assert (there / "vllm" / "launcher.so").stat().st_mode & 0o111
    assert caches.unpack(tmp_path / "caches.tar.xz", there) == 0


def test_parts_of_an_earlier_archive_do_not_stay(tmp_path):
    archive = tmp_path / "a.tar.xz"
    caches.write_parts(b"123456", archive, part_bytes=2)
    caches.write_parts(b"12", archive, part_bytes=2)

    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.xz"]
    assert caches.read_parts(archive) == b"12"
    with pytest.raises(FileNotFoundError, match="nor parts"):
        caches.read_parts(tmp_path / "b.tar.xz")


def test_all_caches_lie_in_one_folder(tmp_path):
    variables = caches.environment(tmp_path)

    assert set(variables) == {
        "TRITON_CACHE_DIR",
        "VLLM_CACHE_ROOT",
        "TORCHINDUCTOR_CACHE_DIR",
        "JENGA_CACHE",
    }
    assert all(value.startswith(str(tmp_path)) for value in variables.values())


# The page.


def row_of(side, per_s, *, turn=1, is_disturbed=False, **changes):
    return {
        "kind": "run",
        "scale": "full",
        "commit": "abc",
        "gpu": "h100",
        "machine": "H100, 580",
        "versions": {"vllm": "0.32.0"},
        "case": "gemma-3-4b",
        "workload": "articles",
        "trace": "articles:n=2",
        "cache_bytes": 4 << 30,
        "side": side,
        "turn": turn,
        "run": 1,
        "seconds": 10 / per_s,
        "requests_per_s": per_s,
        "output_tokens_per_s": 100 * per_s,
        "ttft_p50_s": 1.0,
        "ttft_p99_s": 2.0,
        "tpot_p50_ms": 3.0,
        "tpot_p99_ms": 4.0,
        "found_share": 0.25,
        "mean_running": 8.0,
        "num_preemptions": 0,
        "start_s": 20.0,
        "is_disturbed": is_disturbed,
    } | changes


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_page_has_each_side_beside_stock_and_a_chart(tmp_path):
    pytest.importorskip("matplotlib")
    comparison = {
        "kind": "comparison", "scale": "full", "commit": "abc", "gpu": "h100",
        "case": "gemma-3-4b", "workload": "articles", "side": "ours", "turn": 1,
        "beside": {"side": "stock", "turn": 1, "run": 1}, "num_same": 60, "num_parted": 4,
        "num_other_prompts": 0, "earliest_parting": 7, "num_judged": 4, "num_near_ties": 4,
        "near_tie_nats": 0.25,
    }  # fmt: skip
    failure = {
        "kind": "failure", "scale": "full", "commit": "abc", "gpu": "h100", "case": "x",
        "side": "ours", "turn": 1, "reason": "x, ours 1 ended with 1", "error": "OutOfMemory",
    }  # fmt: skip
    rows = write(
        tmp_path / "rows.jsonl",
        row_of("stock", 2.0),
        row_of("stock", 1.0, turn=2, is_disturbed=True),
        row_of("ours", 3.0),
        row_of("stock-dense", 1.5, is_disturbed=True),
        comparison,
        failure,
    )
    out = tmp_path / "docs" / "engines.md"

    assert table.main([str(rows), "--out", str(out)]) == 0

    text = out.read_text()
    assert "## h100, abc" in text
    assert "| stock | 2 | 5.00 | 2.00 | 1.00 |" in text
    assert "| ours | 1 | 3.33 | 3.00 | 1.50 |" in text
    assert f"| stock-dense{table.MARK} |" in text
    assert "60 outputs are the same, 4 part, the first of them at token 7; 4 of 4" in text
    assert "x, ours 1 ended with 1: `OutOfMemory`" in text
    assert "![Requests a second over stock vLLM's](engines.svg)" in text
    drawn = (out.parent / "engines.svg").read_bytes()
    table.main([str(rows), "--out", str(out)])
    assert (out.parent / "engines.svg").read_bytes() == drawn


def test_nothing_is_written_without_a_row_from_a_gpu(tmp_path, capsys):
    rows = write(
        tmp_path / "rows.jsonl", row_of("ours", 1.0, gpu="cpu"), row_of("ours", 1.0, scale="tiny")
    )

    assert table.main([str(rows), "--out", str(tmp_path / "engines.md")]) == 1

    assert "there is nothing to say" in capsys.readouterr().err
    assert not (tmp_path / "engines.md").exists()


# The command line.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "."], "--model needs --trace and --cache too"),
        (["--model", ".", "--trace", "articles", "--cache", "1GiB"], "a folder with a config.json"),
        (["--model", "MODEL", "--trace", "articles", "--cache", "much"], "--cache: size must be"),
        (["--model", "MODEL", "--trace", "nothing", "--cache", "1GiB"], "--trace: trace must be"),
        (["--sides", "theirs"], "sides are stock, ours"),
        (["--bundle", "folder"], "--bundle and --site must be given together"),
    ],
)
def test_a_command_says_what_it_lacks(arguments, said, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    arguments = [str(tmp_path) if each == "MODEL" else each for each in arguments]

    with pytest.raises(SystemExit):
        command.main(["--tiny", *arguments])

    assert said in capsys.readouterr().err


def test_the_plan_is_listed(capsys):
    assert command.main(["--list", "--only", "gemma-3-4b", "--sides", "ours"]) == 0

    assert "gemma-3-4b, ours 1 x2" in capsys.readouterr().out.splitlines()


# Engines.

OURS = "nemotron-h-8b-agents-ours-1"


def rows_of(folder, kind="run"):
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def run_tiny(folder, *arguments):
    options = ["--tiny", "--folder", str(folder), "--without-warmers", "--without-trials"]
    return command.main([*options, "--seconds", "500", *arguments])


@pytest.mark.slow
@pytest.mark.vllm
def test_tiny_engines_serve_sessions_and_say_the_same(tmp_path):
    entries = plan.in_turns(plan.NEMOTRON_AGENTS, sides.STOCK, sides.OURS_PLAIN)
    said = []

    work = Lease(Paths(folder=tmp_path), scale=Scale.TINY, seconds=500, say=said.append)
    assert work.run(entries), "\n".join(said)

    stock, ours = rows_of(tmp_path)
    assert (stock["side"], ours["side"]) == ("stock", "ours")
    assert stock["num_requests"] == ours["num_requests"] == 9
    assert stock["prompt_tokens"] == ours["prompt_tokens"]
    assert "JENGA_TRITON" in ours["backend"]
    assert "JENGA" not in stock["backend"]
    assert ours["found_share"] > 0.3
    # In float32 a token far back that was read wrongly would show.
    assert ours["output_hash"] == stock["output_hash"]
    generated = json.loads((tmp_path / "outputs" / f"{OURS}-agents-1.json").read_text())
    assert len({tuple(each["tokens"]) for each in generated}) == 9
    (comparison,) = rows_of(tmp_path, "comparison")
    assert comparison["num_same"] == 9


@pytest.mark.vllm
@pytest.mark.slow
def test_a_model_of_ones_own_is_served_with_its_weights(tmp_path, capsys):
    from tests.vllm_plugin.tiny import tiny_checkpoints

    model = tiny_checkpoints.save("granite_hybrid", tmp_path)
    own = ["--model", str(model), "--cache", "4MiB", "--runs", "1"]
    own += ["--trace", "articles:n=2,questions=2,tokens=70,question=5,output=3"]

    assert run_tiny(tmp_path / "work", *own) == 0, capsys.readouterr().out

    stock, ours = rows_of(tmp_path / "work")
    assert (stock["side"], ours["side"]) == ("stock", "ours")
    assert ours["prompt_tokens"] == 4 * 75
    assert ours["found_share"] >= 2 * 64 / 300
    assert ours["output_hash"] == stock["output_hash"]


@pytest.mark.vllm
@pytest.mark.slow
def test_a_tiny_draft_is_taken_as_often_on_both_sides(tmp_path, capsys):
    code = run_tiny(tmp_path, "--only", "drafted", "--sides", "stock", "ours")

    assert code == 0, capsys.readouterr().out
    shares = {(row["workload"], row["accepted_share"]) for row in rows_of(tmp_path)}
    assert len(shares) == 2
    assert all(0.3 < share < 0.9 for _, share in shares)


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_whose_start_fails_is_named_with_its_error(tmp_path, capsys):
    code = run_tiny(tmp_path, "--only", "llama-3.1-8b-drafted", "--sides", "stock-replay")
    assert code == 0  # the plan has no such entry

    own = ["--model", str(tmp_path), "--trace", "articles:n=1,questions=1,tokens=20,output=2"]
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "x"}')
    assert run_tiny(tmp_path, *own, "--cache", "4MiB", "--sides", "stock") == 1

    assert "FAILED" in capsys.readouterr().out
    assert rows_of(tmp_path, "failure")[0]["stage"] == "start"


def test_workloads_travel_to_an_engines_process_whole():
    for workload in (workloads.AGENTS, workloads.CHAT):
        assert workloads.Workload(**json.loads(json.dumps(asdict(workload)))) == workload
