"""Compile kernels on a machine without a GPU, for use on a GPU that is borrowed for minutes.

    EMULATED_GPU=90 python -m perf.gpu.precompiled FOLDER tests/kernels/latent/test_latent_store.py

    # Our kernels that `perf.gpu.gpu_list` launches:
    python -m perf.gpu.precompiled FOLDER --list

    # Kernels of a list, with those of the peers that use Triton:
    python -m perf.gpu.precompiled FOLDER --list LIST --peers

    python -m perf.gpu.precompiled FOLDER --pack KERNELS.tar.xz

    # On the machine with the GPU, before anything else:
    python -m perf.gpu.precompiled CACHE --unpack KERNELS.tar.xz

Tests and benchmarks run here with launches that compile and then do nothing, so the tests fail. The
compiled kernels are packed without their intermediate sources.

Triton names the places in its cache after its own files, among other things. These files differ
between versions of Python, so the archive names kernels by the other things only. Both machines
need the same release of Triton with its assembler, but may have different versions of Python.
"""

import argparse
import base64
import dataclasses
import hashlib
import io
import json
import lzma
import math
import os
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TRITONS_OWN = "<triton>"
"""Placeholder for Triton's own part of a key (`triton_key`) in the names of packed kernels."""

LARGE_ELEMENTS = 1 << 22

FILTER = {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 29}
"""Compression filter with a large dictionary.

Kernels with the same name differ little, and may be far apart in the archive.
"""

KEYS = "keys.jsonl"
"""File with the cache keys of a folder's compiled kernels, one per line."""


def place_of(key: str) -> str:
    """Return the name of the cache folder in which Triton stores the kernel of a key."""
    digest = hashlib.sha256(key.encode()).digest()
    return base64.b32encode(digest).decode().rstrip("=")


def compile_alone(folder: Path) -> None:
    """From now on, compile for Hopper into a folder in this process, and launch nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(folder.resolve())
    from triton.compiler import compiler
    from triton.runtime import cache, driver

    from perf.emulator import driver as emulated

    get_key, keys = compiler.get_cache_key, (folder / KEYS).open("a")
    cache.triton_key = lambda: TRITONS_OWN

    def remembered(*arguments: Any, **options: Any) -> str:  # noqa: ANN401
        key = get_key(*arguments, **options)
        keys.write(json.dumps(key) + "\n")
        keys.flush()
        return key

    class NoLaunch:
        """A replacement for the object that launches a kernel. It does nothing."""

        def __init__(self, *_: object) -> None:
            pass

        def __call__(self, *_: object) -> None:
            pass

    compiler.get_cache_key = remembered
    emulated.Launcher = NoLaunch
    driver.set_active(emulated.EmulatedGpu(90))


def compile_tests(tests: Sequence[str]) -> None:
    """Run kernel tests in order to compile their kernels."""
    import pytest

    # Tests fail because their kernels did nothing. Their results do not matter.
    options = ["-q", "--tb=no", "-W", "default", "-m", "not slow", "-p", "no:cacheprovider"]
    pytest.main([*options, *tests])


def tune_by_order() -> None:
    """Let Triton's autotuner compile every configuration and choose the first one that fits."""
    from triton.runtime.autotuner import Autotuner, OutOfResources

    def compile_choice(
        self: Autotuner,
        *arguments: Any,  # noqa: ANN401
        config: Any,  # noqa: ANN401
        **options: Any,  # noqa: ANN401
    ) -> list[float]:
        try:
            self.fn.run(*arguments, **(options | config.all_kwargs()))
        except OutOfResources:
            return [math.inf]
        return [0.0]

    Autotuner._bench = compile_choice


def compile_list(text: str | None = None, *, with_peers: bool = False) -> None:
    """Run benchmarks in order to compile their kernels, on tensors without defined contents.

    Args:
        text: List in the format of `perf.gpu.gpu_list`. None means its own list.
        with_peers: Whether to compile vLLM's kernels too, with all their autotuning configurations.
    """
    if with_peers:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        from perf.harness.compiled_launches import show_vllm_a_gpu

        show_vllm_a_gpu()
        tune_by_order()
    import torch

    from perf.gpu import gpu_list
    from perf.harness import timing
    from perf.shapes import attention_shapes

    def unwritten(make: Any) -> Any:  # noqa: ANN401
        """Leave large tensors unwritten, because filling them takes seconds and memory."""

        def made(*shape: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401
            sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
            if math.prod(sizes) < LARGE_ELEMENTS:
                return make(*shape, **options)
            options.pop("generator", None)
            return torch.empty(*shape, **options)

        return made

    def launch_once(self: timing.Benchmark, launch: Any) -> timing.Timing:  # noqa: ANN401, ARG001
        launch()
        return timing.Timing(p20_us=0.0, p50_us=0.0, p80_us=0.0)

    start = timing.Benchmark.__init__

    def start_large(self: timing.Benchmark, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        start(self, *arguments, **options)
        self.is_dry, self.compiles_only = False, True

    torch.randn, torch.zeros = unwritten(torch.randn), unwritten(torch.zeros)
    attention_shapes.fill = lambda *_: None
    timing.Benchmark.__init__ = start_large
    timing.Benchmark.measure = launch_once
    items = [
        dataclasses.replace(
            item,
            # Our own kernels that are listed as peers are compiled in any case.
            peers=",".join(
                peer for peer in item.peers.split(",") if with_peers or peer.startswith("jenga")
            ),
        )
        for item in gpu_list.read_list(gpu_list.BEHIND if text is None else text)
        if item.benchmark not in ("roofline", "bench_host_memory")
    ]
    gpu_list.run(items, Path(os.devnull), seconds=float("inf"), is_dry=True)


def _likeness(item: tuple[str, bytes]) -> tuple[bool, str, int]:
    """Return a sort key that puts similar files next to each other."""
    place, content = item
    name = place.split("/", 1)[1]
    return name.endswith(".cubin"), name, len(content)


def pack(folder: Path, archive: Path) -> int:
    """Pack compiled kernels.

    Returns:
        Number of kernels.
    """
    keys = {json.loads(line) for line in (folder / KEYS).read_text().splitlines()}
    files: dict[str, bytes] = {}
    index: dict[str, str] = {}
    for key in sorted(keys):
        place = folder / place_of(key)
        kept = [path for path in sorted(place.glob("*")) if path.suffix in (".cubin", ".json")]
        if any(path.suffix == ".cubin" for path in kept):
            index[place.name] = key
            files |= {f"{place.name}/{path.name}": path.read_bytes() for path in kept}
    files = {"index.json": json.dumps(index).encode()} | dict(sorted(files.items(), key=_likeness))
    with lzma.open(archive, "w", filters=[FILTER]) as file, tarfile.open(None, "w", file) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return len(index)


def unpack(archive: Path, cache: Path, *, tritons_own: str | None = None) -> int:
    """Unpack kernels into a cache, under the names that this machine's Triton looks for.

    Args:
        archive: Archive made by `pack`.
        cache: TRITON_CACHE_DIR of the programs that will use the kernels.
        tritons_own: This machine's `triton_key()`. None means to ask Triton.

    Returns:
        Number of kernels.
    """
    if tritons_own is None:
        from triton.runtime.cache import triton_key

        tritons_own = triton_key()
    places: dict[str, tuple[str, str]] = {}
    with tarfile.open(archive, "r:xz") as tar:
        for entry in tar:
            file = tar.extractfile(entry)
            content = b"" if file is None else file.read()
            if entry.name == "index.json":
                for place, key in json.loads(content).items():
                    here = key.replace(TRITONS_OWN, tritons_own)
                    places[place] = key, here
                    (cache / place_of(here)).mkdir(parents=True, exist_ok=True)
                continue
            place, name = entry.name.split("/", 1)
            there, here = places[place]
            target = cache.resolve() / place_of(here)
            if name.startswith("__grp__"):
                group = json.loads(content)
                kept = [each for each in group["child_paths"] if each.endswith((".cubin", ".json"))]
                group["child_paths"] = {each: str(target / each) for each in kept}
                content = json.dumps(group).encode()
            elif name.endswith(".json"):
                old, new = (hashlib.sha256(key.encode()).hexdigest() for key in (there, here))
                content = content.replace(old.encode(), new.encode())
            (target / name).write_bytes(content)
    return len(places)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, pack or unpack from the command line.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu.precompiled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="folder of compiled kernels")
    parser.add_argument(
        "tests", nargs="*", help="test files whose kernels are compiled; needs EMULATED_GPU=90"
    )
    parser.add_argument(
        "--list",
        nargs="?",
        const="",
        help="compile the kernels of a list of perf.gpu.gpu_list (default: its built-in list)",
    )
    parser.add_argument(
        "--peers", action="store_true", help="with --list: also compile vLLM's kernels"
    )
    parser.add_argument("--pack", type=Path, help="pack the kernels of the folder into this file")
    parser.add_argument("--unpack", type=Path, help="add the kernels of this file to the folder")
    options = parser.parse_args(arguments)
    if options.tests and os.environ.get("EMULATED_GPU") != "90":
        parser.error("tests are compiled for with EMULATED_GPU=90 set")
    has_list = options.list is not None
    if options.peers and not has_list:
        parser.error("--peers goes with --list")
    if options.tests or has_list:
        os.environ.pop("TRITON_INTERPRET", None)
        compile_alone(options.folder)
    if options.tests:
        compile_tests(options.tests)
    if has_list:
        text = Path(options.list).read_text() if options.list else None
        compile_list(text, with_peers=options.peers)
    if options.pack is not None:
        print(f"{pack(options.folder, options.pack)} kernels packed")
    if options.unpack is not None:
        print(f"{unpack(options.unpack, options.folder)} kernels unpacked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
