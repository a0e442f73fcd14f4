"""Conversations become requests that read all messages before them, answers among them."""

import json
import math

import pytest

from jenga.sim.workload.chats import read_sharegpt, read_wildchat
from jenga.sim.workload.requests import prefix_hashes
from jenga.sim.workload.sources import format_of, open_source

LONG = "All happy families are alike; each unhappy family is unhappy in its own way. " * 10


def sharegpt(*messages, name="QWJhYvA_0"):
    return {"id": name, "conversations": [{"from": who, "value": text} for who, text in messages]}


def wildchat(*messages):
    fields = {"country": "France", "hashed_ip": "x", "toxic": False, "timestamp": None}
    return {
        "conversation_hash": "0cf125612a7e8ae81f1daa1e4c22f4d4",
        "model": "gpt-4",
        "timestamp": "2023-04-09T00:02:53+00:00",
        "conversation": [{"role": who, "content": text} | fields for who, text in messages],
        "turn": len(messages) // 2,
    }


FORMS = {
    "sharegpt": (read_sharegpt, sharegpt, ("human", "gpt")),
    "wildchat": (read_wildchat, wildchat, ("user", "assistant")),
}


@pytest.fixture(params=FORMS)
def form(request):
    """Name of a format, its reader, what makes a conversation, and who speaks in it."""
    return (request.param, *FORMS[request.param])


def written(tmp_path, *conversations):
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(conversations), encoding="utf-8")
    return path


def test_every_answer_is_a_request_that_reads_all_before_it(tmp_path, form):
    name, reader, conversation, (user, model) = form
    chat = conversation((user, LONG), (model, "a" * 100), (user, "why?"), (model, "b" * 41))
    path = written(tmp_path, chat)

    first, second = reader(path)

    assert format_of(path) == name
    assert first.prompt_tokens == math.ceil(len(LONG) / 4)
    assert (first.output_tokens, second.output_tokens) == (25, 11)
    assert second.prompt[: len(first.pieces)] == first.pieces
    assert second.prompt_tokens == first.prompt_tokens + 25 + 1
    assert (first.after, second.after) == ((), ("0.0",))


def test_prompts_share_as_much_as_their_texts_do(tmp_path, form):
    _, reader, conversation, (user, model) = form
    one, other = (conversation((user, LONG + end), (model, "yes")) for end in ("What?", "Who?"))

    first, second = reader(written(tmp_path, one, other))

    hashes = [prefix_hashes(each.prompt, 16) for each in (first, second)]
    num_shared = sum(a == b for a, b in zip(*hashes, strict=False))
    assert num_shared == len(LONG) // 64


def test_equal_conversations_share_their_answers(tmp_path, form):
    _, reader, conversation, (user, model) = form
    chat = conversation((user, LONG), (model, LONG[:400]), (user, "Why?"), (model, "Because."))

    requests = list(reader(written(tmp_path, chat, chat)))

    assert requests[1].prompt == requests[3].prompt
    assert requests[0].pieces == requests[2].pieces


def test_conversations_begin_at_random_and_their_turns_follow_after_thinking(tmp_path, form):
    _, reader, conversation, (user, model) = form
    chat = conversation(*[(user, "Go on."), (model, "Once")] * 4)
    path = written(tmp_path, *[chat] * 200)

    requests = list(reader(path, arrivals_per_s=2.0, think_s=30.0, seed=1))

    begins = [each.arrival_s for each in requests if not each.after]
    thinks = [each.think_s for each in requests if each.after]
    assert begins == sorted(begins)
    assert begins[-1] / 199 == pytest.approx(0.5, rel=0.2)
    assert sum(thinks) / len(thinks) == pytest.approx(30.0, rel=0.2)
    assert requests == list(reader(path, arrivals_per_s=2.0, think_s=30.0, seed=1))
    assert requests != list(reader(path, arrivals_per_s=2.0, think_s=30.0, seed=2))
    short = f"{form[0]}:path={path},rate=2,think_s=30,seed=1"
    assert requests == list(open_source(short))


def test_a_conversation_that_the_model_begins_has_that_in_its_prompt(tmp_path, form):
    _, reader, conversation, (user, model) = form
    chat = conversation((model, "Hello. " * 8), (user, "Hi. " * 8), (model, "x"))

    (only,) = reader(written(tmp_path, chat, conversation((user, "Nobody answers."))))

    assert only.prompt_tokens == 14 + 8
    assert only.name == "0.0"


def test_tokens_are_bytes_and_not_characters(tmp_path, form):
    _, reader, conversation, (user, model) = form
    path = written(tmp_path, conversation((user, "汉" * 400), (model, "\U0001f600" * 10)))

    (at_four,) = reader(path)
    (at_three,) = reader(path, bytes_per_token=3.0)

    assert (at_four.prompt_tokens, at_four.output_tokens) == (300, 10)
    assert (at_three.prompt_tokens, at_three.output_tokens) == (400, 14)


def test_messages_that_a_filter_emptied_are_read(tmp_path, form):
    _, reader, conversation, (user, model) = form
    chat = conversation((user, "Why?"), (model, ""), (user, None), (model, "x"))

    first, second = reader(written(tmp_path, chat))

    assert (first.output_tokens, second.prompt_tokens) == (1, 2)


def test_half_characters_are_read(tmp_path, form):
    _, reader, conversation, (user, model) = form
    path = written(tmp_path, conversation((user, "\ud83d" * 4), (model, "x")))

    assert next(reader(path)).prompt_tokens == 3


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({}, r"conversations? must be a list, got None"),
        ([1], r"conversations?\[0\] must be a JSON object, got 1"),
        ([{}], r"conversations?\[0\]: (from|role) must be text, got None"),
        ([{"from": "gpt", "role": "gpt", "value": 3, "content": 3}], "must be text, got 3"),
    ],
)
def test_a_malformed_conversation_is_named_with_its_field(tmp_path, form, record, words):
    _, reader, conversation, (user, model) = form
    good = conversation((user, "Why?"), (model, "Because."))
    bad = {"conversations": record, "conversation": record} if record else {}
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n", encoding="utf-8")

    with pytest.raises(ValueError, match=rf"chats.jsonl:2: .*{words}"):
        list(reader(path))


@pytest.mark.parametrize("option", ["arrivals_per_s", "think_s"])
@pytest.mark.parametrize("value", [-1.0, math.inf])
def test_a_time_that_is_out_of_range_is_refused(tmp_path, form, option, value):
    with pytest.raises(ValueError, match=f"{option} must be finite and at least 0"):
        list(form[1](written(tmp_path), **{option: value}))


@pytest.mark.parametrize("value", [0.0, 0.5, -1.0, math.inf, math.nan])
def test_bytes_of_a_token_are_one_or_more(tmp_path, form, value):
    with pytest.raises(ValueError, match="bytes_per_token must be finite and at least 1"):
        list(form[1](written(tmp_path), bytes_per_token=value))
