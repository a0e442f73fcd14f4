"""Recorded sessions of coding agents: what prompts share, and what each request waits for."""

import json
import math
from itertools import pairwise

import pytest

from jenga.sim.arenas.by_name import make_arena
from jenga.sim.replays.replay import Replay, constant_clock
from jenga.sim.workload.requests import Piece, prefix_hashes
from jenga.sim.workload.sources import format_of, open_source
from jenga.sim.workload.weka import MOST_DEPTH, read_weka
from jenga.spec import FullAttention, Layer, ModelSpec

BLOCK = 64


def call(t, num_tokens, out, hash_ids, **fields):
    return {
        "t": t,
        "type": "s",
        "model": "m",
        "in": num_tokens,
        "out": out,
        "hash_ids": list(hash_ids),
        "input_types": ["text"],
        "output_types": ["text"],
        "stop": "end_turn",
        **fields,
    }


def subagent(t, requests, **fields):
    return {
        "t": t,
        "type": "subagent",
        "agent_id": "agent_001",
        "subagent_type": "Explore",
        "status": "completed",
        "models": ["m"],
        "requests": requests,
        **fields,
    }


def session(*requests, **fields):
    return {
        "id": "trace_0001",
        "models": ["m"],
        "block_size": BLOCK,
        "hash_id_scope": "local",
        "tool_tokens": 0,
        "system_tokens": 0,
        "requests": list(requests),
        **fields,
    }


THREE_TURNS = session(
    call(0.0, 200, 30, range(3), api_time=2.0, think_time=0.0),
    call(5.0, 300, 50, range(4), api_time=3.0, think_time=3.0),
    call(20.0, 310, 9, range(4), api_time=1.0, think_time=12.0),
)


def written(tmp_path, *sessions, name="trace.json"):
    path = tmp_path / name
    path.write_text("\n".join(map(json.dumps, sessions)), encoding="utf-8")
    return path


def read(tmp_path, *sessions, **options):
    return list(read_weka(written(tmp_path, *sessions), **options))


def shared_tokens(first, second):
    """Tokens of the longest prefix that two rows of pieces have in common."""
    hashes = [prefix_hashes(pieces, 1) for pieces in (first, second)]
    return next(
        (index for index, (a, b) in enumerate(zip(*hashes, strict=False)) if a != b),
        min(map(len, hashes)),
    )


def test_a_turn_goes_on_from_the_answer_before_it_and_follows_it(tmp_path):
    first, second, third = read(tmp_path, THREE_TURNS)

    assert [each.prompt_tokens for each in (first, second, third)] == [200, 300, 310]
    assert [each.output_tokens for each in (first, second, third)] == [30, 50, 9]
    # The rest of the first prompt, which no whole block holds, and its answer are prefix.
    assert second.prompt[: len(first.pieces)] == first.pieces
    assert [each.after for each in (first, second, third)] == [(), ("0.0",), ("0.1",)]
    assert [each.think_s for each in (first, second, third)] == [0.0, 3.0, 12.0]
    assert [each.arrival_s for each in (first, second, third)] == [0.0, 5.0, 20.0]


def test_an_answer_is_left_out_where_the_next_prompt_has_no_room_for_it(tmp_path):
    _, second, third = read(tmp_path, THREE_TURNS)

    assert shared_tokens(second.pieces, third.prompt) == 300
    assert third.prompt_tokens == 310


def test_answers_are_computed_again_where_asked(tmp_path):
    first, second, _ = read(tmp_path, THREE_TURNS, answers=False)

    assert shared_tokens(first.pieces, second.prompt) == 200


def test_the_hash_of_a_block_that_is_not_whole_is_passed_over(tmp_path):
    # 200 tokens have three whole blocks; some recordings hash the fourth, too.
    turns = [dict(each) for each in THREE_TURNS["requests"]]
    turns[0]["hash_ids"] = [0, 1, 2, 99]
    turns[1]["hash_ids"] = [0, 1, 2, 3, 98]

    assert read(tmp_path, session(*turns)) == read(tmp_path, THREE_TURNS)


def test_prompts_share_as_many_blocks_as_they_have_equal_hashes(tmp_path):
    first, other = read(
        tmp_path,
        session(
            call(0.0, 640, 5, range(10), api_time=1.0),
            call(9.0, 512, 5, [0, 1, 2, 7, 8, 9, 10, 11], api_time=1.0),
        ),
    )

    assert shared_tokens(first.prompt, other.prompt) == 3 * BLOCK


def test_equal_hashes_behind_unequal_ones_are_not_shared(tmp_path):
    first, other = read(
        tmp_path,
        session(call(0.0, 128, 5, [1, 2], api_time=1.0), call(9.0, 128, 5, [3, 2], api_time=1.0)),
    )

    assert shared_tokens(first.prompt, other.prompt) == 0


def test_of_two_turns_that_part_in_the_next_block_one_has_the_answer(tmp_path):
    first, one, two = read(
        tmp_path,
        session(
            call(0.0, 100, 20, [0], api_time=1.0),
            call(5.0, 256, 5, [0, 1, 2, 3], api_time=1.0),
            call(9.0, 256, 5, [0, 4, 5, 6], api_time=1.0),
        ),
    )

    assert shared_tokens(first.pieces, one.prompt) == 120
    assert shared_tokens(first.pieces, two.prompt) == BLOCK
    assert shared_tokens(one.prompt, two.prompt) == BLOCK


def test_turns_that_share_a_block_of_an_answer_share_it_all(tmp_path):
    first, one, two = read(
        tmp_path,
        session(
            call(0.0, 64, 128, [0], api_time=1.0),
            call(5.0, 256, 5, [0, 1, 2, 3], api_time=1.0),
            call(9.0, 256, 5, [0, 1, 2, 6], api_time=1.0),
        ),
    )

    assert shared_tokens(first.pieces, two.prompt) == 192
    assert shared_tokens(one.prompt, two.prompt) == 192


def test_a_request_without_hashes_shares_nothing(tmp_path):
    _, second = read(
        tmp_path,
        session(call(0.0, 100, 2, [0], api_time=1.0), call(5.0, 100, 2, [], api_time=1.0)),
    )

    assert second.prompt == (Piece("text of 0.1", 100),)
    assert second.after == ("0.0",)


def test_a_request_that_was_broken_off_generates_a_token(tmp_path):
    (only,) = read(tmp_path, session(call(0.0, 100, 0, [0])))

    assert only.output_tokens == 1


def test_think_times_follow_from_times_where_none_is_recorded(tmp_path):
    requests = read(
        tmp_path,
        session(call(0.0, 64, 2, [0], api_time=2.0), call(9.0, 128, 2, [0, 1], api_time=1.0)),
    )

    assert requests[1].think_s == 7.0


def test_an_end_that_is_not_recorded_follows_from_the_next_think_time(tmp_path):
    requests = read(
        tmp_path,
        session(
            call(0.0, 64, 2, [0]),
            call(9.0, 128, 2, [0, 1], think_time=6.0),
            call(9.5, 128, 2, [0, 2], think_time=0.5),
            call(20.0, 64, 2, [3]),
        ),
    )

    assert [each.after for each in requests] == [(), ("0.0",), ("0.1",), ("0.2",)]
    assert [each.think_s for each in requests] == [0.0, 6.0, 0.5, 10.5]


def test_long_think_times_are_cut_where_asked(tmp_path):
    requests = read(tmp_path, THREE_TURNS, most_think_s=10.0)

    assert [each.think_s for each in requests] == [0.0, 3.0, 10.0]


# A turn launches two agents; the first recording counts their times from each one's launch and
# marks when they ended, the second one counts from the session's beginning and marks the launch.
PARENT = (
    call(10.5, 128, 20, [0, 1], api_time=2.0, think_time=0.0),
    call(60.5, 320, 20, range(5), api_time=2.0, think_time=48.0),
)
RELATIVE = [
    subagent(
        43.0,
        [call(0.0, 64, 5, [70], api_time=4.0), call(9.0, 128, 5, [70, 71], api_time=1.0)],
        duration_ms=30_000,
    ),
    subagent(53.0, [call(0.0, 64, 5, [80], api_time=25.0)], duration_ms=40_000),
]
ABSOLUTE = [
    subagent(
        13.0,
        [call(13.0, 64, 5, [70], api_time=4.0), call(22.0, 128, 5, [70, 71], api_time=1.0)],
    ),
    subagent(13.0, [call(13.0, 64, 5, [80], api_time=25.0)]),
]


@pytest.mark.parametrize("agents", [RELATIVE, ABSOLUTE], ids=["relative", "absolute"])
def test_agents_start_beside_each_other_from_a_turn_and_the_next_one_waits_for_them(
    tmp_path, agents
):
    requests = read(tmp_path, session(PARENT[0], *agents, PARENT[1]))

    assert [each.name for each in requests] == ["0.0", "0.1", "0.2", "0.3", "0.4"]
    assert [each.after for each in requests] == [
        (),
        ("0.0",),
        ("0.1",),
        ("0.0",),
        ("0.2", "0.3"),
    ]
    assert [each.arrival_s for each in requests] == [10.5, 13.0, 22.0, 13.0, 60.5]
    assert [each.think_s for each in requests] == [0.0, 0.5, 5.0, 0.5, 22.5]
    assert requests[4].prompt[: len(requests[0].pieces)] == requests[0].pieces


def test_an_agent_that_was_launched_beside_the_turns_is_not_waited_for(tmp_path):
    agents = [dict(each, status="async_launched") for each in ABSOLUTE]

    requests = read(tmp_path, session(PARENT[0], *agents, PARENT[1]))

    assert requests[-1].after == ("0.0",)
    assert requests[-1].think_s == 48.0


def test_an_agent_that_still_ran_is_waited_for_by_a_later_turn(tmp_path):
    slow = subagent(13.0, [call(13.0, 64, 5, [80], api_time=60.0)])
    later = call(90.5, 384, 20, range(6), api_time=2.0)

    requests = read(tmp_path, session(PARENT[0], slow, PARENT[1], later))

    assert [each.after for each in requests] == [(), ("0.0",), ("0.0",), ("0.2", "0.1")]


def test_agents_that_fork_read_the_turns_prefix(tmp_path):
    forks = [
        subagent(13.0, [call(13.0, 256, 5, [0, 1, fork, fork + 1], api_time=4.0)])
        for fork in (70, 80)
    ]

    turn, one, two, following = read(tmp_path, session(PARENT[0], *forks, PARENT[1]))

    assert shared_tokens(turn.prompt, one.prompt) == shared_tokens(turn.prompt, two.prompt) == 128
    assert shared_tokens(one.prompt, two.prompt) == 128
    assert following.after == (one.name, two.name)


def test_agents_in_agents_are_read_up_to_a_depth(tmp_path):
    def nested(depth):
        inner = [call(0.0, 64, 5, [depth], api_time=1.0)]
        return subagent(1.0, [*inner, nested(depth - 1)] if depth else inner)

    requests = read(tmp_path, session(call(0.0, 64, 5, [99]), nested(MOST_DEPTH - 1)))

    assert len(requests) == MOST_DEPTH + 1
    with pytest.raises(ValueError, match="no sub-agent below 8 others"):
        read(tmp_path, session(call(0.0, 64, 5, [99]), nested(MOST_DEPTH)))


def test_flat_requests_that_overlapped_run_beside_each_other(tmp_path):
    main, one, two, after = read(
        tmp_path,
        session(
            call(0.0, 192, 20, [1, 2, 3], api_time=2.5),
            call(2.5, 256, 20, [1, 2, 50, 51], api_time=5.5),
            call(3.0, 256, 20, [1, 2, 60, 61], api_time=4.0),
            call(9.0, 320, 20, [1, 2, 3, 4, 5], api_time=1.0),
        ),
    )

    assert [each.after for each in (main, one, two, after)] == [
        (),
        ("0.0",),
        ("0.0",),
        ("0.2", "0.1"),
    ]
    assert after.think_s == 1.0


def test_chains_beside_each_other_do_not_wait_for_each_other(tmp_path):
    times = [(0.25, "a"), (10.25, "a"), (11.25, "b"), (20.25, "a"), (21.25, "b"), (30.25, "a")]
    blocks = {"a": [], "b": []}
    calls = []
    for index, (time_s, chain) in enumerate(times):
        blocks[chain] = [*blocks[chain], index + 100]
        # Every call still runs when the other chain's next one comes.
        calls.append(call(time_s, 64 * len(blocks[chain]), 5, blocks[chain], api_time=9.75))

    requests = read(tmp_path, session(*calls))

    assert [each.after for each in requests] == [
        (),
        ("0.0",),
        ("0.0",),
        ("0.1",),
        ("0.2",),
        ("0.3",),
    ]


def test_a_turn_whose_context_was_compacted_follows_the_last_one(tmp_path):
    requests = read(
        tmp_path,
        session(
            call(0.0, 640, 5, range(10), api_time=1.0),
            call(9.0, 704, 5, range(11), api_time=1.0),
            call(20.0, 256, 5, [0, 1, 40, 41], api_time=1.0),
        ),
    )

    assert requests[2].after == ("0.1",)
    assert shared_tokens(requests[1].prompt, requests[2].prompt) == 2 * BLOCK


def test_hashes_are_a_sessions_own_unless_they_are_global(tmp_path):
    local = read(tmp_path, THREE_TURNS, THREE_TURNS)
    everywhere = dict(THREE_TURNS, hash_id_scope="global")
    shared = read(tmp_path, everywhere, everywhere)

    assert shared_tokens(local[0].prompt, local[3].prompt) == 0
    assert shared_tokens(shared[0].prompt, shared[3].prompt) == 3 * BLOCK
    assert [each.name for each in shared] == [f"{s}.{t}" for s in range(2) for t in range(3)]


def test_sessions_begin_at_random_and_their_turns_stand_behind_them(tmp_path):
    requests = read(tmp_path, *[THREE_TURNS] * 50, arrivals_per_s=0.5, seed=3)

    begins = [each.arrival_s for each in requests if not each.after]
    assert len(begins) == 50
    assert begins == sorted(begins)
    assert begins[-1] / 49 == pytest.approx(2.0, rel=0.3)
    assert requests == read(tmp_path, *[THREE_TURNS] * 50, arrivals_per_s=0.5, seed=3)
    assert requests[1].arrival_s == requests[0].arrival_s + 5.0


def test_so_many_sessions_run_at_once_as_are_asked_for(tmp_path):
    requests = read(tmp_path, *[THREE_TURNS] * 5, concurrent=2)

    firsts = {each.name: each.after for each in requests if each.name.endswith(".0")}
    assert firsts == {"0.0": (), "2.0": ("0.2",), "4.0": ("2.2",), "1.0": (), "3.0": ("1.2",)}
    arena = make_arena("jenga", MODEL, 1 << 22)
    running = {step.num_running for step in Replay(requests, arena, clock=constant_clock(0.5))}
    assert max(running) == 2


MODEL = ModelSpec(
    name="full", layer_types=(FullAttention(name="full", layers=(Layer(name="0", slot_bytes=64),)),)
)


def test_a_session_is_replayed_in_closed_loop_and_hits_its_answers(tmp_path):
    requests = read(tmp_path, THREE_TURNS)
    ended = []
    arena = make_arena("jenga", MODEL, 1 << 22)
    for _ in Replay(requests, arena, clock=constant_clock(0.5), on_end=ended.append):
        pass

    assert [each.arrival_s for each in ended] == [0.0, 18.0, 55.0]
    for before, after in pairwise(ended):
        assert after.arrival_s == before.finished_s + after.request.think_s
    # Of 230 tokens the last one was not computed; of 300, all of the prompt.
    assert [each.hit_tokens for each in ended] == [0, 229 // 16 * 16, 300 // 16 * 16]


@pytest.mark.parametrize("form", ["pretty", "list", "lines", "folder", "parquet"])
def test_every_form_of_file_gives_the_same_requests(tmp_path, form):
    sessions = [THREE_TURNS, session(call(0.0, 64, 3, [5], api_time=1.0, think_time=0.0))]
    expected = read(tmp_path, *sessions)
    path = tmp_path / "other" / "traces.json"
    path.parent.mkdir()
    match form:
        case "pretty":
            path.write_text("\n".join(json.dumps(each, indent=2) for each in sessions))
        case "list":
            path.write_text(json.dumps(sessions, indent=1))
        case "lines":
            path.write_text("".join(json.dumps(each) + "\r\n" for each in sessions), "utf-8-sig")
        case "folder":
            for number, each in enumerate(sessions):
                (path.parent / f"{number}.json").write_text(json.dumps(each))
            (path.parent / "README.md").write_text("# Traces")
            path = path.parent
        case _:
            arrow = pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
            from pyarrow import parquet

            path = path.with_suffix(".parquet")
            parquet.write_table(arrow.Table.from_pylist(sessions), path)

    assert format_of(path) == "weka"
    assert list(read_weka(path)) == expected
    assert list(open_source(str(path))) == expected


def test_its_arguments_are_given_as_those_of_workloads_are(tmp_path):
    path = written(tmp_path, *[THREE_TURNS] * 3)

    found = list(open_source(f"weka:path={path},rate=0.5,most_think_s=4,answers=false,seed=2"))

    expected = read_weka(path, arrivals_per_s=0.5, most_think_s=4, answers=False, seed=2)
    assert found == list(expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"block_size": None}, "block_size must be an integer of at least 1, got None"),
        ({"hash_id_scope": "world"}, 'hash_id_scope must be "local" or "global", got \'world\''),
        ({"requests": []}, r"requests must be a list with a request, got \[\]"),
        ({"requests": {}}, "requests must be a list, got {}"),
        ({"requests": [3]}, r"requests\[0\] must be a JSON object, got 3"),
    ],
)
def test_a_malformed_session_is_named_with_its_field(tmp_path, change, words):
    with pytest.raises(ValueError, match=f"trace.json:2: {words}"):
        read(tmp_path, THREE_TURNS, session() | THREE_TURNS | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"t": -1}, "t must be a number of at least 0, got -1"),
        ({"t": math.inf}, "t must be a number of at least 0, got inf"),
        ({"t": 10**400}, r"t must be at most 1e\+15, got 1000"),
        ({"t": 1e16}, r"t must be at most 1e\+15, got 1e\+16"),
        ({"t": None}, "t must be a number of at least 0, got None"),
        ({"in": 0}, "in must be an integer of at least 1, got 0"),
        ({"in": 1 << 40}, "in must be at most 16777216"),
        ({"in": 300.5}, "in must be an integer of at least 1, got 300.5"),
        ({"out": -1}, "out must be an integer of at least 0, got -1"),
        ({"hash_ids": [1, 2, 3, 4, 5, 6]}, "hash_ids must be no more than 300 tokens have blocks"),
        ({"hash_ids": [1, "x"]}, r"hash_ids\[1\] must be an integer, got 'x'"),
        ({"hash_ids": [1, True]}, r"hash_ids\[1\] must be an integer, got True"),
        ({"hash_ids": 7}, "hash_ids must be a list, got 7"),
        ({"api_time": -2}, "api_time must be a number of at least 0, got -2"),
        ({"think_time": math.nan}, "think_time must be a number of at least 0, got nan"),
        ({"type": "subagent", "requests": None}, "requests must be a list, got None"),
        ({"type": "subagent", "requests": [[]]}, r"requests\[0\] must be a JSON object"),
    ],
)
def test_a_malformed_request_is_named_with_its_field(tmp_path, change, words):
    turns = [dict(each) for each in THREE_TURNS["requests"]]
    turns[1] |= change

    with pytest.raises(ValueError, match=rf"trace.json:1: requests\[1\]: {words}"):
        read(tmp_path, session(*turns))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arrivals_per_s": -1.0}, "arrivals_per_s must be finite and at least 0, got -1.0"),
        ({"concurrent": -1}, "concurrent must be finite and at least 0, got -1"),
        ({"most_think_s": -0.5}, "most_think_s must be at least 0, got -0.5"),
    ],
)
def test_an_argument_that_is_out_of_range_is_refused(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        read(tmp_path, THREE_TURNS, **options)


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must have files that end in .json, .jsonl, .parquet"):
        list(read_weka(tmp_path))
