"""Run of the demo: serve a few prompts with a real vLLM engine on JENGA_TRITON."""

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Generator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from jenga.demo.ending import Ending, run_ending
from jenga.demo.memory import Timeline, read_memory_log
from jenga.demo.modelled import ReadersGpu, readers_gpu
from jenga.demo.stock import StockTimeline, replay_on_stock
from jenga.demo.weights import gemma3_270m_directory

_BACKEND_NAME = "JENGA_TRITON"

_MAX_MODEL_TOKENS = 2048
"""Most tokens of a request, if the model allows them. It is several of the default's windows."""

_MAX_STEP_TOKENS = 256
"""Most tokens of a step. They are so few that the long prompt is prefilled in several chunks."""

_HEARTBEAT_S = 10.0
"""Seconds between two progress lines while the engine starts or generates."""

_LAST_LINES = 15
"""Number of last lines of the engine's output that may hold the cause of a failure."""

_SHORT_PROMPTS = (
    "The capital of France is",
    "Here is a list of the planets of the solar system:\n1.",
    "Water boils at",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One prompt and its generated text.

    Attributes:
        prompt: Text of the prompt.
        num_prompt_tokens: Number of tokens of the prompt.
        text: Generated text.
        num_tokens: Number of generated tokens.
    """

    prompt: str
    num_prompt_tokens: int
    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Result of a demo.

    Attributes:
        model: Directory of the model.
        dtype: Dtype of weights, keys and values.
        machine: Name of the GPU, or number of CPU cores, that the kernels ran on.
        computed_by: Code that computed attention: compiled or interpreted kernels, or the
            references.
        arena_bytes: Size of the arena in bytes.
        completions: Completions, one for each prompt, in the same order.
        start_s: Seconds until the engine could serve.
        generate_s: Seconds from the first prompt to the last generated token.
        timeline: Memory that the arena held, step by step.
        stock: Memory that vLLM's own manager would have held, for each configuration of vLLM.
        ending: Results of vLLM and JENGA_TRITON on documents. None if there are none.
        ending_left_out: Reason why the ending was left out, or an empty string.
        ending_failure: Failure of the ending, or an empty string.
    """

    model: str
    dtype: str
    machine: str
    computed_by: str
    arena_bytes: int
    completions: tuple[Completion, ...]
    start_s: float
    generate_s: float
    timeline: Timeline
    stock: tuple[StockTimeline, ...]
    ending: Ending | None = None
    ending_left_out: str = ""
    ending_failure: str = ""


def default_prompts() -> list[str]:
    """Get three short prompts, and one that exceeds the default model's window of 512 tokens."""
    ledger = [
        f"Day {day}: {7 * day % 23 + 5} boxes of apples came in and {5 * day % 11 + 2} went out."
        for day in range(1, 46)
    ]
    return [*_SHORT_PROMPTS, "\n".join(["A grocer keeps this ledger.", *ledger, "Day 46:"])]


def has_gpu() -> bool:
    """Return whether the driver of an NVIDIA GPU is present."""
    return Path("/dev/nvidiactl").exists()


def run_demo(
    *,
    max_tokens: int,
    arena_bytes: int,
    prompts: Sequence[str] | None = None,
    model_directory: Path | None = None,
    picture: Path | None = None,
) -> DemoResult:
    """Serve prompts with a real engine and collect the memory that it held.

    Progress is printed on standard error.

    Args:
        max_tokens: Number of tokens to generate for each prompt.
        arena_bytes: Size of the arena in bytes.
        prompts: Texts to continue. None means `default_prompts`.
        model_directory: Directory of a model in Hugging Face's format. None means Gemma 3 270M.
        picture: File for the ending's picture. None leaves the ending out.

    Raises:
        ModuleNotFoundError: vLLM, or a package that the default model needs, is not installed.
        ValueError: `model_directory` has no `config.json`, or vLLM refused the options.
        RuntimeError: The engine failed. The message names the file with its output.
    """
    if model_directory is not None and not (model_directory / "config.json").is_file():
        msg = f"--model must be a directory with a config.json, got {str(model_directory)!r}"
        raise ValueError(msg)
    if find_spec("vllm") is None:
        msg = "vLLM is not installed"
        raise ModuleNotFoundError(msg, name="vllm")
    # Progress goes to a copy of standard error, because the engine's own goes to a file.
    with os.fdopen(os.dup(2), "w", encoding="utf-8") as progress:
        return _run(
            texts=list(prompts) if prompts else default_prompts(),
            max_tokens=max_tokens,
            arena_bytes=arena_bytes,
            model_directory=model_directory,
            picture=picture,
            progress=progress,
        )


def _run(
    *,
    texts: list[str],
    max_tokens: int,
    arena_bytes: int,
    model_directory: Path | None,
    picture: Path | None,
    progress: TextIO,
) -> DemoResult:
    # This comes first, because preparing the weights imports packages that read the environment.
    _prepare_environment(os.environ)
    dtype = "bfloat16" if has_gpu() else "float32"
    directory = model_directory or gemma3_270m_directory(dtype, progress=progress)
    folder = Path(tempfile.mkdtemp(prefix="jenga-demo-"))
    os.environ["JENGA_MEMORY_LOG"] = str(folder / "memory.jsonl")
    options: dict[str, Any] = {
        "model": str(directory),
        "attention_backend": _BACKEND_NAME,
        "dtype": dtype,
        "enforce_eager": True,
        "max_model_len": min(_MAX_MODEL_TOKENS, _position_limit(directory)),
        "max_num_batched_tokens": _MAX_STEP_TOKENS,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": arena_bytes,
        "seed": 0,
    }
    if has_gpu():
        # vLLM requires that this share of GPU memory is free. Model and arena need less than that.
        options["gpu_memory_utilization"] = 0.1
    completions, start_s, generate_s = _serve(options, texts, max_tokens, folder, progress)
    timeline = read_memory_log(folder / "memory.jsonl")
    with _engine_output(folder / "stock.log"):
        stock = replay_on_stock(timeline, options)
    ending, left_out, failure = _ending(options, picture, folder, progress)
    if not failure:
        shutil.rmtree(folder)
    return DemoResult(
        model=str(directory),
        dtype=dtype,
        machine=_machine(),
        computed_by=_computed_by(),
        arena_bytes=arena_bytes,
        completions=completions,
        start_s=start_s,
        generate_s=generate_s,
        timeline=timeline,
        stock=tuple(stock),
        ending=ending,
        ending_left_out=left_out,
        ending_failure=failure,
    )


def _ending(
    options: dict[str, Any], picture: Path | None, folder: Path, progress: TextIO
) -> tuple[Ending | None, str, str]:
    """Run the ending.

    Returns:
        Ending, or None; the reason why it was left out, or ""; the failure, or "".
    """
    if picture is None:
        return None, "--without-documents", ""

    @contextmanager
    def waiting(what: str) -> Generator[None]:
        with _heartbeat(what, progress), _engine_output(folder / "ending.log"):
            yield

    directory = Path(options["model"])
    try:
        ending = run_ending(
            model=directory,
            dtype=options["dtype"],
            position_limit=_position_limit(directory),
            gpu=_readers_gpu(),
            options={key: options[key] for key in options if key == "gpu_memory_utilization"},
            picture=picture,
            folder=folder,
            waiting=waiting,
        )
    except ValueError as error:
        return None, str(error), ""
    except RuntimeError as error:
        return None, "", str(error)
    return ending, "", ""


def _readers_gpu() -> ReadersGpu:
    if not has_gpu():
        return readers_gpu()
    import torch

    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    return readers_gpu(torch.cuda.get_device_name(0), memory_bytes)


def _prepare_environment(environ: MutableMapping[str, str]) -> None:
    """Set the variables that vLLM and Triton read when imported, here and in child processes."""
    environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # The engine's argument selects the backend. The replay on vLLM's own manager must not use it.
    environ.pop("VLLM_ATTENTION_BACKEND", None)
    environ.setdefault("HF_HUB_OFFLINE", "1")
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not has_gpu():
        # Engine and worker run in this process, so vLLM is imported once instead of three times.
        environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def _position_limit(directory: Path) -> int:
    """Get the number of tokens of the longest request that a model was made for."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    text_config = config.get("text_config", config)
    return int(text_config.get("max_position_embeddings", _MAX_MODEL_TOKENS))


def _computed_by() -> str:
    if has_gpu():
        return "compiled kernels"
    from triton import knobs

    is_interpreted = bool(knobs.runtime.interpret)
    return "kernels in Triton's interpreter" if is_interpreted else "PyTorch references"


def _machine() -> str:
    if not has_gpu():
        return f"{os.cpu_count()} CPU cores"
    import torch

    return torch.cuda.get_device_name(0)


def _serve(
    options: dict[str, Any], prompts: list[str], max_tokens: int, folder: Path, progress: TextIO
) -> tuple[tuple[Completion, ...], float, float]:
    """Start an engine, generate with it and shut it down.

    Returns:
        The completions, the seconds it took to start and the seconds it took to generate.
    """
    log = folder / "engine.log"
    try:
        begin_s = time.monotonic()
        with _engine_output(log), _heartbeat("starting vLLM", progress):
            from vllm import LLM, SamplingParams

            llm = LLM(**options)
        start_s = time.monotonic() - begin_s
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        begin_s = time.monotonic()
        what = f"generating for {len(prompts)} prompts"
        with _engine_output(log), _heartbeat(what, progress, memory_log=folder / "memory.jsonl"):
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
        generate_s = time.monotonic() - begin_s
        with _engine_output(log):
            llm.llm_engine.engine_core.shutdown()
    except ModuleNotFoundError:
        raise
    except Exception as error:
        msg = f"{_cause(error, log)} (the engine's output is in {log})"
        raise RuntimeError(msg) from error
    completions = tuple(
        Completion(
            prompt=prompt,
            num_prompt_tokens=len(output.prompt_token_ids or ()),
            text=output.outputs[0].text,
            num_tokens=len(output.outputs[0].token_ids),
        )
        for prompt, output in zip(prompts, outputs, strict=True)
    )
    return completions, start_s, generate_s


def _cause(error: Exception, log: Path) -> str:
    """Find the line that says why the engine failed.

    An engine in a process of its own only logs the reason. The exception that arrives here is
    generic.
    """
    if "Engine core initialization failed" not in str(error):
        return f"vLLM failed: {error}"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    reasons = [line for line in lines if "Error: " in line and "Engine core init" not in line]
    return f"vLLM failed: {(reasons or lines[-_LAST_LINES:] or [str(error)])[-1]}"


@contextmanager
def _engine_output(log: Path) -> Generator[None]:
    """Send file descriptors 1 and 2 to a file, for this process and its children."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {number: os.dup(number) for number in (1, 2)}
    try:
        with log.open("ab") as file:
            for number in saved:
                os.dup2(file.fileno(), number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)


@contextmanager
def _heartbeat(what: str, progress: TextIO, *, memory_log: Path | None = None) -> Generator[None]:
    """Print the beginning of a task, its progress every few seconds, and its duration."""
    begin_s = time.monotonic()
    is_done = threading.Event()

    def beat() -> None:
        while not is_done.wait(_HEARTBEAT_S):
            doing = _latest_step(memory_log) if memory_log else ""
            print(f"    {time.monotonic() - begin_s:.0f} s{doing}", file=progress, flush=True)

    print(f"{what} ...", file=progress, flush=True)
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
    print(f"    done in {time.monotonic() - begin_s:.0f} s", file=progress, flush=True)


def _latest_step(memory_log: Path) -> str:
    """Describe the last complete line of a memory log that is still being written."""
    *lines, _ = memory_log.read_text(encoding="utf-8").split("\n")
    record = json.loads(lines[-1]) if lines else {}
    if "step" not in record:
        return ""
    tokens = record["tokens"]
    return f": step {record['step']}, {sum(tokens.values())} tokens held before it"
