"""`vllm serve` on JENGA_TRITON, as a user starts it: its own processes, real weights, streaming."""

import json
import socket
import sys
import time
import urllib.request

import pytest

from tests.vllm_plugin.conftest import PROGRAMS, engine_environment, gemma_3_directory, program

pytestmark = pytest.mark.vllm

PROMPT = "The capital of France is"


def model():
    return gemma_3_directory()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Start a server and yield its address; its log is shown if it does not come up."""
    port = free_port()
    log_path = tmp_path_factory.mktemp("server") / "log.txt"
    command = [
        sys.executable,
        str(PROGRAMS / "serve_process.py"),
        "serve",
        str(model()),
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "gemma"]
    command += ["--attention-backend", "JENGA_TRITON", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "256", "--max-num-seqs", "4"]
    command += ["--kv-cache-memory-bytes", str(64 << 20), "--kv-offloading-size", "0.25"]
    # vLLM asks for so much of a GPU to be free, where other tests may run.
    command += ["--gpu-memory-utilization", "0.05"]
    environment = engine_environment(by_references=True, VLLM_LOGGING_LEVEL="INFO")
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    with log_path.open("w") as log, program(command, environment, stdout=log) as process:
        while True:
            assert process.poll() is None, log_path.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            except OSError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}", log_path
        process.terminate()
        process.wait()


def post(address, path, **body):
    request = urllib.request.Request(
        f"{address}{path}",
        data=json.dumps({"model": "gemma"} | body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return response.read().decode()


def complete(address, **options):
    return post(address, "/v1/completions", prompt=PROMPT, max_tokens=6, temperature=0.0, **options)


def test_server_completes_and_streams_what_transformers_generates(server, run_engine):
    address, log_path = server

    whole = json.loads(complete(address))["choices"][0]["text"]
    events = [line[6:] for line in complete(address, stream=True).splitlines() if line[6:]]
    streamed = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    prompt = json.loads(post(address, "/tokenize", prompt=PROMPT))["tokens"]
    reference = run_engine(model(), [prompt], max_tokens=6, script="reference_process.py")
    (expected,) = reference["outputs"]

    assert json.loads(post(address, "/detokenize", tokens=expected["tokens"]))["prompt"] == whole
    assert events[-1] == "[DONE]"
    assert len(streamed) > 1
    assert "".join(streamed) == whole
    log = log_path.read_text()
    assert "JENGA_TRITON: planned geometry" in log
    assert "bytes of host memory on this rank" in log


def metrics_of(address):
    """Get what the server tells of itself: name -> sum over its labels."""
    with urllib.request.urlopen(f"{address}/metrics") as response:
        lines = response.read().decode().splitlines()
    values = {}
    for line in lines:
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = name.split("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    return values


def test_metrics_tell_what_requests_asked_and_found_and_what_is_in_use(server):
    address, _ = server
    prompt = "One two three four five six seven eight nine ten. " * 6
    before = metrics_of(address)

    numbers = [
        json.loads(post(address, "/v1/completions", prompt=prompt, max_tokens=2, temperature=0.0))
        for _ in range(2)
    ]
    request = urllib.request.Request(
        f"{address}/v1/completions",
        data=json.dumps(
            {"model": "gemma", "prompt": prompt, "max_tokens": 20, "stream": True}
        ).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        response.readline()  # a token, so that the request runs
        amid = metrics_of(address)
        response.read()
    after = metrics_of(address)

    num_tokens = numbers[0]["usage"]["prompt_tokens"]
    most_hit = (num_tokens - 1) // 16 * 16

    def grown(name):
        return after[f"vllm:{name}"] - before.get(f"vllm:{name}", 0.0)

    assert most_hit > 0
    assert grown("prefix_cache_queries_total") == 3 * num_tokens
    assert grown("prefix_cache_hits_total") == 2 * most_hit
    assert grown("prompt_tokens_total") == 3 * num_tokens
    # What host memory brings counts as found: it is one lookup over both.
    assert after.get("vllm:external_prefix_cache_queries_total", 0.0) == 0
    assert after["vllm:num_preemptions_total"] == 0
    assert 0 < amid["vllm:kv_cache_usage_perc"] < 1
    assert after["vllm:kv_cache_usage_perc"] == 0
