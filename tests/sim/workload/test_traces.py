"""Traces are read as their formats say; what is wrong is named by file, line and field."""

import gzip
import io
import json
import tarfile
from itertools import pairwise

import pytest

from jenga.sim.replays.session import Trace
from jenga.sim.workload import generators
from jenga.sim.workload.requests import Piece, prefix_hashes
from jenga.sim.workload.sources import GENERATORS, format_of, open_source
from jenga.sim.workload.traces import read_azure, read_lengths, read_mooncake

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 500, "input_length": 1024, "output_length": 6, "hash_ids": [0, 3]},
    {"timestamp": 3000, "input_length": 1536, "output_length": 7, "hash_ids": [0, 1, 4]},
]


def mooncake_file(tmp_path, rows):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_mooncake_prompts_share_as_many_blocks_as_they_have_equal_hashes(tmp_path):
    requests = list(read_mooncake(mooncake_file(tmp_path, MOONCAKE)))

    hashes = [prefix_hashes(request.prompt, 16) for request in requests]
    assert [request.prompt_tokens for request in requests] == [1100, 1024, 1536]
    assert [request.output_tokens for request in requests] == [5, 6, 7]
    assert [request.arrival_s for request in requests] == [0.0, 0.5, 3.0]
    assert hashes[0][:32] == hashes[1][:32]
    assert not set(hashes[0][32:]) & set(hashes[1][32:])
    assert hashes[0][:64] == hashes[2][:64]
    assert not set(hashes[0][64:]) & set(hashes[2][64:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_length": "many"}, "input_length must be an integer of at least 1, got 'many'"),
        ({"output_length": 0}, "output_length must be an integer of at least 1, got 0"),
        ({"output_length": None}, "output_length must be an integer of at least 1, got None"),
        ({"output_length": 1 << 40}, "output_length must be at most 16777216, got 1099511627776"),
        ({"timestamp": -1}, "timestamp must be a number of at least 0, got -1"),
        ({"timestamp": float("inf")}, "timestamp must be a number of at least 0, got inf"),
        ({"timestamp": 10**400}, r"timestamp must be at most 1e\+15, got 1000"),
        ({"hash_ids": [0]}, "hash_ids must be a list of 2 hashes, one for each 512 of 1024"),
        ({"hash_ids": [0, "x"]}, r"hash_ids\[1\] must be an integer of at least 0, got 'x'"),
    ],
)
def test_a_malformed_line_of_mooncake_is_named_with_its_field(tmp_path, change, words):
    rows = [MOONCAKE[0], MOONCAKE[1] | change]

    with pytest.raises(ValueError, match=rf"trace.jsonl:2: {words}"):
        list(read_mooncake(mooncake_file(tmp_path, rows)))


@pytest.mark.parametrize("line", [b"{broken", b"\xff\xfe", b"[" * 10**5, b"[" + b"9" * 5000 + b"]"])
def test_a_line_of_mooncake_that_is_no_object_is_named(tmp_path, line):
    path = mooncake_file(tmp_path, MOONCAKE[:1])
    path.write_bytes(path.read_bytes() + line + b"\n")

    requests = read_mooncake(path)
    assert next(requests).name == "1"
    with pytest.raises(ValueError, match=r"trace.jsonl:2: the line must be one JSON object"):
        next(requests)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def test_azure_times_count_from_the_first_request_and_nothing_is_shared(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE, encoding="utf-8")

    first, second = read_azure(path)

    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579)
    assert first.prompt[0].content != second.prompt[0].content


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("2023-11-16 18:15:50,0,1", "ContextTokens must be an integer of at least 1, got 0"),
        ("2023-11-16 18:15:50,3,x", "GeneratedTokens must be an integer of at least 1, got 'x'"),
        ("yesterday,3,1", "TIMESTAMP must be a time such as .* got 'yesterday'"),
        ("2023-11-16 18:15:50,3", "the line must be 3 columns"),
        ("2023-11-16 18:15:50,5000000000,1", "ContextTokens must be at most 16777216, got 5"),
        (f"2023-11-16 18:15:50,{'9' * 200_000},1", "the line must be CSV: field larger than"),
    ],
)
def test_a_malformed_line_of_azure_is_named_with_its_field(tmp_path, line, words):
    path = tmp_path / "azure.csv"
    path.write_text(f"{AZURE}{line}\n", encoding="utf-8")

    with pytest.raises(ValueError, match=rf"azure.csv:4: {words}"):
        list(read_azure(path))


def test_azure_times_that_name_no_zone_are_in_utc(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(f"{AZURE}2023-11-16 19:15:51.6805900+01:00,3,1\n", encoding="utf-8")

    assert [each.arrival_s for each in read_azure(path)][-1] == 5.0


def test_every_format_may_begin_with_a_byte_order_mark_and_end_lines_as_windows_does(tmp_path):
    mooncake = mooncake_file(tmp_path, MOONCAKE)
    azure, lengths = tmp_path / "azure.csv", tmp_path / "lengths.csv"
    azure.write_text(AZURE, encoding="utf-8")
    lengths.write_text("prompt_len,output_len\n10,2\n", encoding="utf-8")

    for path in (mooncake, azure, lengths):
        requests = list(open_source(str(path)))
        text = path.read_text(encoding="utf-8")
        path.write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
        assert list(open_source(str(path))) == requests


def test_lengths_are_read_by_the_names_of_their_columns(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,x,num_decode_tokens\n10,a,2\n20,b,3\n", encoding="utf-8")

    requests = list(read_lengths(path))
    later = list(read_lengths(path, arrivals_per_s=0.5))

    assert [(each.prompt_tokens, each.output_tokens) for each in requests] == [(10, 2), (20, 3)]
    assert [each.arrival_s for each in requests] == [0.0, 0.0]
    assert later[1].arrival_s > 0
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"lengths.csv:1: columns must be .* got 'a,b'"):
        list(read_lengths(path))


def servegen_folder(tmp_path, trace="0,2.0,1.0,Gamma,1.0,0.5\n600,1.0,1.0,,0,0\n"):
    folder = tmp_path / "data" / "mm-image"
    folder.mkdir(parents=True)
    (folder / "chunk-0-trace.csv").write_text(trace, encoding="utf-8")
    tables = {
        "text_tokens": "{10: 0.5, 20: 0.5}",
        "image_tokens": "{100: 1.0}",
        "image_count": "{0: 0.5, 2: 0.5}",
        "output_tokens": "{7: 1.0}",
    }
    (folder / "chunk-0-dataset.json").write_text(json.dumps({"0": tables}), encoding="utf-8")
    return tmp_path


def test_servegen_is_drawn_from_its_tables_with_its_rate(tmp_path):
    path = servegen_folder(tmp_path)

    requests = list(open_source(f"servegen:path={path},workload=mm-image,seconds=600"))
    again = list(open_source(f"servegen:path={path},workload=mm-image,seconds=600"))
    twice = list(open_source(f"servegen:path={path},workload=mm-image,seconds=600,rate=2"))

    assert requests == again
    assert len(requests) == pytest.approx(1200, rel=0.15)
    assert len(twice) == pytest.approx(2400, rel=0.15)
    assert {each.output_tokens for each in requests} == {7}
    assert {each.prompt_tokens for each in requests} == {10, 20, 210, 220}
    with_images = next(each for each in requests if each.images)
    assert [(image.start_token, image.num_tokens) for image in with_images.images] == [
        (0, 100),
        (100, 100),
    ]
    assert [piece.num_tokens for piece in with_images.prompt][:2] == [100, 100]
    times = [each.arrival_s for each in requests]
    assert times == sorted(times)


def test_servegen_is_read_from_its_archive_as_from_its_folder(tmp_path):
    path = servegen_folder(tmp_path)
    archive = tmp_path / "servegen.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(path / "data", arcname="data")
        tar.addfile(tarfile.TarInfo("README.md"), io.BytesIO())

    from_archive = list(open_source(f"servegen:path={archive},workload=mm-image,seconds=60"))

    assert from_archive == list(open_source(f"servegen:path={path},workload=mm-image,seconds=60"))


def test_servegen_names_what_is_wrong_with_its_files(tmp_path):
    path = servegen_folder(tmp_path, trace="0,2.0,1.0,Gamma,1.0,0.5\n600,fast,1,,0,0\n")

    with pytest.raises(ValueError, match=r"chunk-0-trace.csv:2: must be 6 columns"):
        list(open_source(f"servegen:path={path},workload=mm-image"))
    with pytest.raises(ValueError, match="workload must be a folder of the data"):
        list(open_source(f"servegen:path={path},workload=language"))
    (path / "data/mm-image/chunk-0-trace.csv").write_text("0,1,1,,0,0\n", encoding="utf-8")
    (path / "data/mm-image/chunk-0-dataset.json").write_text(
        '{"0": {"output_tokens": "many"}}', encoding="utf-8"
    )
    with pytest.raises(ValueError, match=r"chunk-0-dataset.json: 0: output_tokens must be a table"):
        list(open_source(f"servegen:path={path},workload=mm-image"))


def test_the_format_of_a_file_is_known_by_its_first_line(tmp_path):
    azure = tmp_path / "azure.csv"
    azure.write_text(AZURE, encoding="utf-8")
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt_tokens,output_tokens\n1,2\n", encoding="utf-8")
    text = tmp_path / "text"
    text.write_text("nothing\n", encoding="utf-8")

    assert format_of(mooncake_file(tmp_path, MOONCAKE)) == "mooncake"
    assert format_of(azure) == "azure"
    assert format_of(lengths) == "lengths"
    with pytest.raises(
        ValueError, match=r"text:1: format must be one of mooncake, .* lengths, got"
    ):
        format_of(text)
    text.write_bytes(gzip.compress(AZURE.encode(), mtime=0))
    with pytest.raises(
        ValueError, match=r"text:1: format must be one of mooncake, .* lengths, got"
    ):
        format_of(text)
    text.write_text('{"kind": "step"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"text:1: must be a JSON object with timestamp"):
        format_of(text)


def test_arrivals_come_faster_and_fewer_where_asked(tmp_path):
    path = mooncake_file(tmp_path, MOONCAKE)

    requests = list(open_source(str(path), limit=2, speed=4.0))

    assert [each.arrival_s for each in requests] == [0.0, 0.125]


def test_workloads_take_short_arguments():
    short = list(open_source("articles:n=2,questions=3,tokens=100,question=8,output=4,rate=2"))

    assert short == list(
        generators.articles(
            num_articles=2,
            num_questions=3,
            article_tokens=100,
            question_tokens=8,
            output_tokens=4,
            arrivals_per_s=2.0,
        )
    )
    assert list(open_source("mmlu-pro:n=3,output=5-6")) == list(
        generators.mmlu_pro(num_requests=3, output_tokens=(5, 6))
    )
    without = list(open_source("mmmu-pro:n=2,image_in_prompt=false"))
    assert all(request.prompt_tokens < 100 for request in without)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("artikles", "did you mean articles"),
        ("articles:size=3", r"articles must have arguments of num_articles \(n\), .* got 'size=3'"),
        (
            "articles:n=2000,questions=600",
            "num_articles times num_questions must be at most 1000000",
        ),
        (f"articles:n={'9' * 400}", "num_articles must be from 1 to 1000000, got 9999"),
        ("articles:n=three", "articles: n must be an integer, got 'three'"),
        ("mmlu-pro:rate=nan", "mmlu-pro: rate must be a number, got 'nan'"),
        ("articles:tokens=5000000000", "article_tokens must be from 1 to 16777216, got 5000000000"),
        ("mmlu-pro:output=9-5", "mmlu-pro: output must be first-last, got '9-5'"),
        ("mmmu-pro:image_in_prompt=no", "image_in_prompt must be true or false, got 'no'"),
        ("servegen:workload=x", "servegen must be given path"),
        ("nowhere.jsonl", "trace must be a file or one of articles, .* got 'nowhere.jsonl'"),
    ],
)
def test_a_trace_that_is_none_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        list(open_source(text))


def test_speed_and_number_of_requests_must_be_positive():
    with pytest.raises(ValueError, match="speed must be positive, got 0"):
        open_source("articles", speed=0)
    with pytest.raises(ValueError, match="requests must be a positive number, got 0"):
        open_source("articles", limit=0)


@pytest.mark.parametrize("name", [name for name in GENERATORS if name != "servegen"])
def test_every_workload_is_the_same_each_time_and_in_order(name):
    first, second = list(open_source(name, limit=200)), list(open_source(name, limit=200))

    assert first == second
    assert len({request.name for request in first}) == len(first)
    times = [request.arrival_s for request in first if not request.after]
    assert times == sorted(times)
    assert len(list(Trace(name, lambda: iter(first)).by_arrival())) == len(first)


def test_the_papers_workloads_have_its_lengths():
    documents = list(open_source("long-documents"))
    assert len(documents) == 20
    assert all(55_000 <= each.prompt_tokens <= 110_000 for each in documents)
    assert all(50 <= each.output_tokens <= 100 for each in documents)

    questions = [each.prompt_tokens for each in open_source("mmlu-pro")]
    assert min(questions) >= 775
    assert max(questions) <= 3076

    dynamic = [each.prompt_tokens for each in open_source("dynamic-lengths")]
    assert sum(dynamic[:20]) < sum(dynamic[90:110]) < sum(dynamic[-20:])

    images = list(open_source("mmmu-pro"))
    assert all(each.images[0].num_tokens == 6193 for each in images)
    assert sum(each.prompt_tokens for each in images) / 200 == pytest.approx(6193 + 43, rel=0.01)


def test_a_turn_reads_all_turns_before_it():
    requests = list(generators.agentic(num_sessions=2, num_turns=3))

    turns = sorted(each.name for each in requests if each.name.startswith("1."))
    by_name = {each.name: each for each in requests}
    for before, after in pairwise(turns):
        read = by_name[before].pieces
        assert by_name[after].prompt[: len(read)] == read
    assert by_name["0.0"].prompt[0] == by_name["1.2"].prompt[0] == Piece("system", 3000)


def test_articles_refuse_an_order_that_is_none():
    with pytest.raises(ValueError, match="order must be random, rounds or cyclic, got 'any'"):
        list(open_source("articles:order=any"))


BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""


def test_burstgpt_times_count_from_the_first_request_and_failures_are_passed_over(tmp_path):
    path = tmp_path / "BurstGPT_1.csv"
    path.write_text(BURSTGPT, encoding="utf-8")

    requests = list(open_source(str(path)))

    assert format_of(path) == "burstgpt"
    assert [(each.arrival_s, each.prompt_tokens, each.output_tokens) for each in requests] == [
        (0.0, 472, 18),
        (113.0, 417, 276),
    ]
    assert requests[0].prompt[0].content != requests[1].prompt[0].content


def test_burstgpt_of_later_releases_has_more_columns(tmp_path):
    path = tmp_path / "BurstGPT_3.csv"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type\n5.5,1,2.5,GPT-4,472,18,490,API log\n",
        encoding="utf-8",
    )

    (only,) = open_source(str(path))

    assert (only.prompt_tokens, only.output_tokens) == (472, 18)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("x,GPT-4,1,1,2,API log", "Timestamp must be a number of at least 0, got 'x'"),
        ("inf,GPT-4,1,1,2,API log", "Timestamp must be a number of at least 0, got inf"),
        ("-3,GPT-4,1,1,2,API log", "Timestamp must be a number of at least 0, got -3"),
        ("1,GPT-4,1,1,2,API log", "Timestamp must be at least 5, that of the first line, got 1.0"),
        ("9,GPT-4,-1,1,2,API log", "Request tokens must be an integer of at least 0, got -1"),
        (
            "9,GPT-4,1,many,2,API log",
            "Response tokens must be an integer of at least 0, got 'many'",
        ),
        ("9,GPT-4,1,1", "the line must be 6 columns"),
    ],
)
def test_a_malformed_line_of_burstgpt_is_named_with_its_field(tmp_path, line, words):
    path = tmp_path / "burst.csv"
    path.write_text(f"{BURSTGPT}{line}\n", encoding="utf-8")

    with pytest.raises(ValueError, match=rf"burst.csv:5: {words}"):
        list(open_source(str(path)))


def test_azure_times_before_the_first_are_refused(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(f"{AZURE}2023-11-16 18:15:40,3,1\n", encoding="utf-8")

    with pytest.raises(ValueError, match=r"azure.csv:4: TIMESTAMP must be no earlier than 2023"):
        list(read_azure(path))
