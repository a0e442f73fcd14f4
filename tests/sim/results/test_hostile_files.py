"""Whatever a file holds, a command that reads it names it in one line and exits with 2."""

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile

import pytest

from jenga.cli import EXIT_MISTAKE, main
from jenga.sim.files import archive, lines
from jenga.sim.files.archive import text_files
from jenga.sim.results.rows import read_rows
from jenga.sim.workload import records, servegen
from jenga.sim.workload.records import records_of
from jenga.sim.workload.sources import open_source

DEEP = b"[" * 10**5
HUGE = b"9" * 5000
LONG_NUMBER = b"1" + b"0" * 400
SURROGATE = b'"\\ud800"'

HEADERS = {
    "mooncake": b'{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [0]}\n',
    "weka": b'{"block_size": 64, "requests": [{"t": 0, "in": 70, "out": 1, "hash_ids": [1]}]}\n',
    "sharegpt": b'{"conversations": [{"from": "human", "value": "Why?"}]}\n',
    "wildchat": b'{"conversation": [{"role": "user", "content": "Why?"}]}\n',
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n",
    "burstgpt": b"Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n",
    "lengths": b"prompt_len,output_len\n10,2\n",
    "rows": b'{"kind": "run", "run": "a", "model": "m", "arena_bytes": 1, "manager": "jenga", '
    b'"trace": "t", "num_requests": 1}\n',
}
TABLES = ("azure", "burstgpt", "lengths")


def told(capsys, *arguments):
    """Run a command that cannot do what it is asked; the line that says so."""
    code = main([str(each) for each in arguments])
    printed = capsys.readouterr()
    assert code == EXIT_MISTAKE
    assert printed.err.startswith("jenga: error: ")
    assert printed.err.count("\n") == 1
    return printed.err


def replayed(capsys, trace):
    return told(
        capsys, "replay", "--model", "llama-3.2-1b", "--arena", "40MB", "--quiet", "--trace", trace
    )


def shown(capsys, tmp_path, path, command):
    arguments = {
        "report": ("report", path, "--out", tmp_path / "report.html"),
        "plot": ("plot", "batch", path, "--out", tmp_path / "plot.svg"),
        "replay": (
            *("replay", "--model", "llama-3.2-1b", "--arena", "40MB", "--quiet"),
            *("--trace", "articles:n=1,questions=1,tokens=20", "--out", path),
        ),
    }
    return told(capsys, *arguments[command])


@pytest.mark.parametrize(
    "line",
    [
        DEEP,
        b'{"a": ' * 10**5,
        b'{"timestamp": ' + HUGE + b"}",
        b"\x00" * 100,
        b"\xff\xfe{\x00}\x00",
        b"{broken",
        b"null",
        b'{"timestamp": NaN, "input_length": 10, "output_length": 5, "hash_ids": [0]}',
        b'{"timestamp": -1e999, "input_length": 10, "output_length": 5, "hash_ids": [0]}',
        b'{"timestamp": 0, "input_length": ' + LONG_NUMBER + b', "output_length": 1}',
        b'{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": ' + DEEP,
    ],
    ids=lambda line: line[:12].decode(errors="replace"),
)
@pytest.mark.parametrize("name", HEADERS)
def test_a_line_of_nonsense_is_named_with_its_number(tmp_path, capsys, name, line):
    path = tmp_path / "hostile.txt"
    path.write_bytes(HEADERS[name] + line + b"\n" + HEADERS[name])
    number = HEADERS[name].count(b"\n") + 1

    is_trace = name != "rows"
    said = replayed(capsys, path) if is_trace else shown(capsys, tmp_path, path, "report")

    assert f"hostile.txt:{number}: " in said
    assert len(said) < 500


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n\n\n",
        b"\x00\x01\x02",
        b"[]",
        b"{}",
        b"[[",
        b'{"a":',
        DEEP,
        HUGE,
        "prompt_len,output_len\n1,2\n".encode("utf-16"),
        gzip.compress(HEADERS["mooncake"], mtime=0),
        b"PK\x03\x04" + bytes(100),
        b"PAR1",
    ],
    ids=lambda data: data[:12].decode(errors="replace"),
)
def test_a_file_of_no_format_is_named(tmp_path, capsys, data):
    path = tmp_path / "hostile.txt"
    path.write_bytes(data)

    assert "hostile.txt" in replayed(capsys, path)


@pytest.mark.parametrize("name", [name for name in HEADERS if name != "rows"])
def test_a_file_of_another_format_is_named(tmp_path, name):
    path = tmp_path / "hostile.txt"
    for other, data in HEADERS.items():
        if other == name or (name == "lengths" and other in TABLES):
            continue
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"hostile.txt:1: "):
            list(open_source(str(path), file_format=name))


@pytest.mark.parametrize("name", HEADERS)
def test_a_line_that_never_ends_is_not_read_to_its_end(tmp_path, monkeypatch, name):
    for module, most in ((lines, "MOST_LINE_CHARS"), (records, "MOST_RECORD_CHARS")):
        monkeypatch.setattr(module, most, 1 << 18)
    path = tmp_path / "hostile.txt"
    path.write_bytes(HEADERS[name] + b'{"conversations": "' + b"x" * (1 << 22))

    with pytest.raises(
        ValueError, match=r"hostile.txt:\d: .*at most 262144 characters|field larger"
    ):
        list(read_rows(path) if name == "rows" else open_source(str(path)))


# Rows to show may come from a pipe, as in `jenga report <(zcat rows.jsonl.gz)`.
@pytest.mark.parametrize(
    ("kind", "command"),
    [
        (kind, command)
        for kind in ("folder", "pipe", "device", "dangling", "loop")
        for command in ("trace", "replay", "report", "plot")
        if kind != "pipe" or command in ("trace", "replay")
    ],
)
def test_what_is_no_regular_file_is_named_and_never_waited_for(tmp_path, capsys, kind, command):
    path = tmp_path / "hostile"
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "dangling":
            path.symlink_to(tmp_path / "nowhere" / "deeper")
        case _:
            path.symlink_to(path)

    said = replayed(capsys, path) if command == "trace" else shown(capsys, tmp_path, path, command)

    assert "hostile" in said


@pytest.mark.parametrize("field", ["arena_bytes", "num_requests", "tp"])
@pytest.mark.parametrize("value", ["-1", "1e400", "NaN", "1.5", "1" + "0" * 400, "null", '"x"'])
def test_a_number_of_a_row_that_is_none_is_named(tmp_path, capsys, field, value):
    row = json.loads(HEADERS["rows"]) | {field: "VALUE"}
    path = tmp_path / "hostile.jsonl"
    path.write_text(json.dumps(row).replace('"VALUE"', value) + "\n")

    said = shown(capsys, tmp_path, path, "report")

    assert f"hostile.jsonl:1: {field} must be" in said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", '"\\ud800"'),
        ("options", '{"\\udfff": 1}'),
        ("options", '{"n": NaN}'),
        ("options", '{"n": [Infinity]}'),
        ("trace", "[]"),
    ],
)
def test_text_of_a_row_that_is_none_is_named(tmp_path, capsys, field, value):
    row = json.loads(HEADERS["rows"]) | {field: "VALUE"}
    path = tmp_path / "hostile.jsonl"
    path.write_text(json.dumps(row).replace('"VALUE"', value) + "\n")

    assert f"hostile.jsonl:1: {field} must" in shown(capsys, tmp_path, path, "report")


def test_a_table_of_a_row_with_half_a_character_is_named(tmp_path):
    step = {"kind": "step", "run": "a", "step": 1, "time_s": 0.0, "tables": {"\ud800": {}}}
    path = tmp_path / "hostile.jsonl"
    path.write_text(json.dumps(step) + "\n")

    with pytest.raises(ValueError, match=r"hostile.jsonl:1: tables must hold text"):
        list(read_rows(path))


@pytest.mark.parametrize("value", ["-1.5", "Infinity", "NaN", "-1e999", "1e300"])
def test_a_time_of_a_row_that_is_none_is_named(tmp_path, value):
    path = tmp_path / "hostile.jsonl"
    path.write_text('{"kind": "step", "run": "a", "step": 1, "time_s": ' + value + "}\n")

    with pytest.raises(ValueError, match=r"hostile.jsonl:1: time_s must be from 0 to 92233"):
        list(read_rows(path))


def test_an_option_that_no_number_holds_is_no_parameter(tmp_path, capsys):
    row = json.loads(HEADERS["rows"]) | {"options": {"n": "VALUE"}}
    path = tmp_path / "hostile.jsonl"
    path.write_text(json.dumps(row).replace('"VALUE"', LONG_NUMBER.decode()) + "\n")

    said = told(capsys, "plot", "hits", path, "--out", tmp_path / "plot.svg")

    assert "hostile.jsonl" in said


def test_names_in_figures_are_text_whatever_they_hold(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    path = tmp_path / "rows.jsonl"
    arguments = ["replay", "--model", "llama-3.2-1b", "--arena", "40MB", "--quiet", "--every", "1"]
    arguments += ["--trace", "articles:n=1,questions=1,tokens=40", "--out", str(path)]
    main(arguments)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("llama-3.2-1b", "a$_{b$ \\\\frac$"), encoding="utf-8")

    assert main(["plot", "waste", str(path), "--out", str(tmp_path / "plot.png")]) == 0


# Archives.

TRACE = b"0,2.0,1.0,Gamma,1.0,0.5\n"
DATASET = json.dumps({"0": {"text_tokens": "{10: 1.0}", "output_tokens": "{7: 1.0}"}}).encode()
FILES = {"data/mm/chunk-0-trace.csv": TRACE, "data/mm/chunk-0-dataset.json": DATASET}


def tar_of(path, files=FILES, *members, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for member in members:
            tar.addfile(member)
    return path


def link(name, target, kind=tarfile.SYMTYPE):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def drawn(path):
    return list(open_source(f"servegen:path={path},workload=mm,seconds=30"))


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_an_archive_is_read_however_it_is_compressed(tmp_path, mode):
    assert len(drawn(tar_of(tmp_path / "data.tar", mode=mode))) > 10


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("nowhere", tarfile.SYMTYPE),
        ("nowhere", tarfile.LNKTYPE),
        ("chunk-1-trace.csv", tarfile.SYMTYPE),
        ("chunk-0-trace.csv", tarfile.SYMTYPE),
        ("data/mm/chunk-0-trace.csv", tarfile.LNKTYPE),
        ("/etc/passwd", tarfile.SYMTYPE),
        ("", tarfile.FIFOTYPE),
        ("", tarfile.CHRTYPE),
    ],
)
def test_a_link_of_an_archive_is_named(tmp_path, capsys, target, kind):
    member = link("data/mm/chunk-1-trace.csv", target, kind)
    path = tar_of(tmp_path / "hostile.tar", FILES, member)

    said = replayed(capsys, f"servegen:path={path},workload=mm")

    assert "hostile.tar: must be a folder, or a tar archive that can be read" in said
    assert "data/mm/chunk-1-trace.csv must be a regular file, and no link" in said


def test_a_link_of_an_archive_that_nobody_asks_for_is_passed_over(tmp_path):
    path = tar_of(tmp_path / "data.tar", FILES, link("data/other/chunk-1-trace.csv", "nowhere"))

    assert drawn(path)


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_an_archive_that_unpacks_to_too_much_is_not_read_to_its_end(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(archive, "MOST_ARCHIVE_BYTES", 1 << 20)
    before = {"data/other/zeros": bytes(1 << 23)}
    path = tar_of(tmp_path / "hostile.tar", before | FILES, mode=mode)

    with pytest.raises(ValueError, match=r"hostile.tar: .*at most 1048576 bytes, unpacked"):
        drawn(path)


def test_a_file_of_an_archive_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MOST_FILE_BYTES", 1 << 20)
    files = {"data/mm/chunk-0-trace.csv": TRACE * 10**5}

    with pytest.raises(ValueError, match=r"chunk-0-trace.csv must have at most 1048576 bytes, got"):
        drawn(tar_of(tmp_path / "hostile.tar", files))


def test_a_header_of_an_archive_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MOST_FILE_BYTES", 1 << 20)
    path = tmp_path / "hostile.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("data/mm/chunk-0-trace.csv")
        member.pax_headers = {"comment": "x" * (1 << 22)}
        tar.addfile(member)

    with pytest.raises(ValueError, match=r"a header must have at most 1048576 bytes"):
        drawn(path)


def test_an_archive_of_too_many_files_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MOST_MEMBERS", 10)
    many = {f"data/other/{number}": b"" for number in range(11)}

    with pytest.raises(ValueError, match=r"it must have at most 10 files"):
        drawn(tar_of(tmp_path / "hostile.tar", many | FILES))


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, bytes])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.09])
def test_an_archive_that_was_cut_short_is_named(tmp_path, compress, share):
    # A tenth is the first file; most of the rest is padding.
    whole = compress(tar_of(tmp_path / "whole.tar").read_bytes())
    path = tmp_path / "hostile.tar.gz"
    path.write_bytes(whole[: int(share * len(whole))])

    with pytest.raises(ValueError, match=r"hostile.tar.gz(: |, )"):
        drawn(path)


def test_a_file_of_an_archive_in_another_encoding_is_named(tmp_path, capsys):
    files = FILES | {"data/mm/chunk-0-trace.csv": TRACE.decode().encode("utf-16")}
    path = tar_of(tmp_path / "hostile.tar", files)

    said = replayed(capsys, f"servegen:path={path},workload=mm")

    assert "hostile.tar:data/mm/chunk-0-trace.csv: must be text in UTF-8" in said


@pytest.mark.parametrize("kind", ["pipe", "device", "dangling", "loop"])
def test_what_is_no_regular_file_in_a_folder_is_named(tmp_path, capsys, kind):
    folder = tmp_path / "data" / "mm"
    folder.mkdir(parents=True)
    path = folder / "chunk-0-trace.csv"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"device": "/dev/zero", "dangling": "nowhere", "loop": path}[kind])

    said = replayed(capsys, f"servegen:path={tmp_path},workload=mm")

    assert "chunk-0-trace.csv: must be a regular file" in said


def test_a_large_file_of_a_folder_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MOST_FILE_BYTES", 1 << 10)
    (tmp_path / "large").write_bytes(bytes(1 << 11))

    with pytest.raises(ValueError, match=r"large: must have at most 1024 bytes"):
        list(text_files(tmp_path, lambda _: True))


@pytest.mark.parametrize("workload", ["..", "/etc", "*", "", "mm/../mm"])
def test_a_workload_that_is_no_name_of_a_folder_is_refused(tmp_path, capsys, workload):
    tar_of(tmp_path / "data.tar")
    with tarfile.open(tmp_path / "data.tar") as tar:
        tar.extractall(tmp_path, filter="data")

    for path in (tmp_path, tmp_path / "data.tar"):
        said = replayed(capsys, f"servegen:path={path},workload={workload}")
        assert "workload must be a folder of the data in" in said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"0,-1,1,,0,0", "rate must be finite and from 0 to 1000, got -1"),
        (b"0,inf,1,,0,0", "rate must be finite and from 0 to 1000, got inf"),
        (b"0,nan,1,,0,0", "rate must be finite"),
        (b"0,1e300,1,,0,0", "rate must be finite and from 0 to 1000, got 1e+300"),
        (b"-5,1,1,,0,0", "second must be finite and from 0 to inf, got -5"),
        (b"0,1,1,Gamma,0,1", "shape must be finite"),
        (b"0,1,1,Gamma,1e308,1", "shape must be finite"),
        (b"0,1,1,Weibull,1,-1", "scale must be finite"),
        (b"0,1,1,Weibull,nan,1", "shape must be finite"),
        (b"0,1,1,Normal,1,1", "must be 6 columns"),
        (b"0,1,1", "must be 6 columns"),
        (b"x" * 200_000 + b",1,1,,0,0", "must be a line of CSV"),
    ],
    ids=lambda value: value[:20].decode() if isinstance(value, bytes) else None,
)
def test_a_line_of_a_client_that_is_none_is_named(tmp_path, capsys, line, words):
    files = FILES | {"data/mm/chunk-0-trace.csv": TRACE + line + b"\n"}
    path = tar_of(tmp_path / "hostile.tar", files)

    said = replayed(capsys, f"servegen:path={path},workload=mm")

    assert f"hostile.tar:data/mm/chunk-0-trace.csv:2: {words}" in said


def test_seconds_of_a_client_that_go_back_are_named(tmp_path):
    files = FILES | {"data/mm/chunk-0-trace.csv": b"600,1,1,,0,0\n0,1,1,,0,0\n"}

    with pytest.raises(ValueError, match=r"trace.csv:2: seconds must not go back, got 0 after 600"):
        drawn(tar_of(tmp_path / "hostile.tar", files))


def test_a_client_whose_waits_are_nothing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(servegen, "MOST_REQUESTS_PER_S", 2.0)
    files = FILES | {"data/mm/chunk-0-trace.csv": b"0,1,1,Weibull,1,1e-9\n"}

    with pytest.raises(ValueError, match=r"trace.csv:1: must make at most 1,200 requests in 600 s"):
        drawn(tar_of(tmp_path / "hostile.tar", files))


@pytest.mark.parametrize(
    "table",
    [
        "{10: -0.5}",
        "{10: inf}",
        "{10: nan}",
        "{-3: 1.0}",
        "{1.5: 1.0}",
        "{10}",
        "10: 1.0",
        "{99999999999: 1.0}",
        "{1" + "0" * 5000 + ": 1.0}",
        "__import__('os').abort()",
        "(" * 10**5,
        "-" * 10**6 + "1",
        7,
        None,
        {"10": 1.0},
    ],
    ids=lambda table: str(table)[:20],
)
@pytest.mark.parametrize("name", ["text_tokens", "image_count"])
def test_a_table_of_a_client_that_is_none_is_named(tmp_path, capsys, name, table):
    tables = {"text_tokens": "{10: 1.0}", "output_tokens": "{7: 1.0}"} | {name: table}
    files = FILES | {"data/mm/chunk-0-dataset.json": json.dumps({"0": tables}).encode()}
    path = tar_of(tmp_path / "hostile.tar", files)

    said = replayed(capsys, f"servegen:path={path},workload=mm")

    assert f"chunk-0-dataset.json: 0: {name} must be a table of probabilities" in said
    assert len(said) < 600


@pytest.mark.parametrize("data", [b"[]", b'{"0": []}', b'{"0": 7}', DEEP, b"{", b"\x00", b""])
def test_tables_of_a_client_that_are_no_objects_are_named(tmp_path, capsys, data):
    files = FILES | {"data/mm/chunk-0-dataset.json": data}
    path = tar_of(tmp_path / "hostile.tar", files)

    said = replayed(capsys, f"servegen:path={path},workload=mm")

    assert "hostile.tar:data/mm/chunk-0-dataset.json: " in said


def test_a_part_of_the_day_that_is_none_is_named(tmp_path):
    data = DATASET.replace(b'"0"', b'"noon"')

    with pytest.raises(ValueError, match=r"dataset.json: noon must be a second of the day"):
        drawn(tar_of(tmp_path / "hostile.tar", FILES | {"data/mm/chunk-0-dataset.json": data}))


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("rate=0", "rate must be finite and positive, got 0"),
        ("rate=-1", "rate must be finite and positive, got -1"),
        ("seconds=0", "seconds must be finite and positive, got 0"),
        ("start=-1", "start must be finite and at least 0, got -1"),
    ],
)
def test_an_argument_of_servegens_that_is_out_of_range_is_refused(
    tmp_path, capsys, argument, words
):
    path = tar_of(tmp_path / "data.tar")

    assert words in replayed(capsys, f"servegen:path={path},workload=mm,{argument}")


# Parquet.


@pytest.fixture
def parquet_file(tmp_path):
    pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    path = tmp_path / "hostile.parquet"
    arguments = ["replay", "--model", "llama-3.2-1b", "--arena", "40MB", "--quiet", "--every", "1"]
    arguments += ["--trace", "articles:n=1,questions=2,tokens=40", "--out", str(path)]
    main(arguments)
    return path


@pytest.mark.parametrize("num_bytes", [0, 3, 4, 100, -100, -9, -1])
@pytest.mark.parametrize("command", ["report", "plot", "replay"])
def test_parquet_that_was_cut_short_is_named(tmp_path, capsys, parquet_file, num_bytes, command):
    parquet_file.write_bytes(parquet_file.read_bytes()[:num_bytes])
    capsys.readouterr()

    assert "hostile.parquet: must be" in shown(capsys, tmp_path, parquet_file, command)


@pytest.mark.parametrize("place", range(0, 400, 40))
def test_parquet_with_a_byte_changed_is_named_or_read(parquet_file, place):
    data = bytearray(parquet_file.read_bytes())
    data[-8 - place] ^= 0xFF
    parquet_file.write_bytes(data)

    try:
        list(read_rows(parquet_file))
    except ValueError as error:
        assert "hostile.parquet" in str(error)  # noqa: PT017  some bytes are of no consequence


@pytest.mark.parametrize(
    "row",
    [
        {"kind": "run", "run": "a", "options": "{broken"},
        {"kind": "run", "run": "a", "options": 7},
        {"kind": "step", "run": "a", "tables": "x"},
        {"kind": "step", "run": "a", "tables": [7]},
        {"kind": "step", "run": "a", "step": -1},
        {"kind": "step", "run": b"a"},
        {"kind": 7},
        {"x": 1},
    ],
    ids=str,
)
def test_parquet_of_something_else_is_named(tmp_path, capsys, row):
    arrow = pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    from pyarrow import parquet

    path = tmp_path / "hostile.parquet"
    parquet.write_table(arrow.Table.from_pylist([row]), path)

    assert "hostile.parquet" in shown(capsys, tmp_path, path, "report")
    assert "hostile.parquet" in replayed(capsys, path)


# Streams of objects.


@pytest.mark.parametrize("chunk_chars", [1, 2, 7, 64])
def test_objects_are_read_whatever_pieces_they_come_in(tmp_path, monkeypatch, chunk_chars):
    monkeypatch.setattr(records, "_CHUNK_CHARS", chunk_chars)
    objects = [
        {"a": "x" * n, "b": [1.5e-9, -3, None, True, "\u20ac\n\\u0041\\"], "c": {"d": {}}}
        for n in range(0, 40, 7)
    ]
    path = tmp_path / "objects"
    for text in (
        json.dumps(objects),
        json.dumps(objects, indent=3, ensure_ascii=False),
        "\n".join(map(json.dumps, objects)),
        "".join(map(json.dumps, objects)),
        " \n" + "\r\n\r\n".join(map(json.dumps, objects)) + " \n ",
    ):
        path.write_text(text, encoding="utf-8")
        assert [record for _, record in records_of(path)] == objects


def test_objects_are_named_by_the_line_that_they_begin_in(tmp_path):
    path = tmp_path / "objects"
    path.write_text('[\n\n{"a":\n1},\n{"a": 2}, {"a": 3}\n]\n', encoding="utf-8")

    assert [where for where, _ in records_of(path)] == [f"{path}:{line}" for line in (3, 5, 5)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"a": 1}', "1: must be a list that ends in ], got ''"),
        ('[{"a": 1}] x', "1: must be nothing behind its list, got 'x'"),
        ('{"a": 1}\n]', "2: must be a JSON object, got ']'"),
        ('[{"a": 1}, 7]', "1: must be a JSON object, got '7"),
        ('[[{"a": 1}]]', "1: must be a JSON object, got '[{"),
        ('{"a": 1}\n{"a": \n\nx}', "2: must be a JSON object, which ends or breaks at line 4"),
        ('{"a": 1}\n{"a": "\n', "2: must be a JSON object, which ends or breaks at line 3"),
    ],
)
def test_what_is_no_stream_of_objects_is_named(tmp_path, text, words):
    path = tmp_path / "objects"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ValueError) as error:  # noqa: PT011  the words are compared as they are
        list(records_of(path))

    assert f"objects:{words}" in str(error.value)
