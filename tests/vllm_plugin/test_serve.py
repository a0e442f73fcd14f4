"""`vllm serve` on JENGA_TRITON, as a user starts it: its own processes, real weights, streaming."""

import json
import socket
import subprocess
import time
import urllib.request

import pytest

from tests.vllm_plugin.conftest import engine_environment

pytestmark = pytest.mark.vllm

PROMPT = "The capital of France is"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Start a server and yield its address; its log is shown if it does not come up."""
    import shutil
    import sys
    from pathlib import Path

    from jenga.demo.weights import gemma3_270m_directory

    vllm = shutil.which("vllm", path=str(Path(sys.executable).parent))
    port = free_port()
    log_path = tmp_path_factory.mktemp("server") / "log.txt"
    command = [vllm, "serve", str(gemma3_270m_directory("float32"))]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "gemma"]
    command += ["--attention-backend", "JENGA_TRITON", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "256", "--max-num-seqs", "4"]
    command += ["--kv-cache-memory-bytes", str(64 << 20)]
    environment = engine_environment(VLLM_LOGGING_LEVEL="INFO")
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    with log_path.open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 300
        while True:
            assert process.poll() is None, log_path.read_text()[-4000:]
            assert time.monotonic() < deadline, log_path.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}", log_path
    finally:
        process.terminate()
        process.wait(timeout=60)


def complete(address, **options):
    body = {"model": "gemma", "prompt": PROMPT, "max_tokens": 6, "temperature": 0.0} | options
    request = urllib.request.Request(
        f"{address}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=240)


def test_server_completes_and_streams_the_same_text_on_the_selected_backend(server):
    address, log_path = server

    with complete(address) as response:
        whole = json.load(response)["choices"][0]["text"]
    with complete(address, stream=True) as response:
        events = [
            line[6:] for line in response.read().decode().splitlines() if line[:6] == "data: "
        ]
    streamed = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]

    assert "Paris" in whole
    assert events[-1] == "[DONE]"
    assert len(streamed) > 1
    assert "".join(streamed) == whole
    assert "JENGA_TRITON" in log_path.read_text()
