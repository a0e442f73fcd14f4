"""What an engine's process is given: files, arguments, variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.engine import caches
from perf.engine.models import Model, Scale
from perf.engine.plan import Case
from perf.engine.sides import Side
from perf.gpu import gpu_bundle
from perf.harness.machine import ROOT

KEPT_VARIABLES = ("VLLM_USE_V2_MODEL_RUNNER",)
"""Of vLLM's and our variables, those that engines keep."""

Key = tuple[str, str, int]
"""Case, side and turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Where a plan's files are.

    Attributes:
        folder: All of them: rows, outputs, logs, caches, models.
        site: An unpacked bundle of vLLM; None where vLLM is installed.
    """

    folder: Path
    site: Path | None = None

    @property
    def rows(self) -> Path:
        """File of the rows."""
        return self.folder / "rows.jsonl"

    @property
    def caches(self) -> Path:
        """Folder of all caches."""
        return self.folder / "caches"

    @property
    def logs(self) -> Path:
        """Folder of what engines print."""
        return self.folder / "logs"

    @property
    def outputs(self) -> Path:
        """Folder of what engines generate."""
        return self.folder / "outputs"

    def log(self, key: Key) -> Path:
        """Get the file of what an engine prints."""
        return self.logs / f"{name_of(key)}.txt"

    def job(self, key: Key) -> Path:
        """Get the file of what an engine is told."""
        return self.folder / "jobs" / f"{name_of(key)}.json"

    def output(self, key: Key, workload: str, run: int) -> Path:
        """Get the file of what a run generates."""
        return self.outputs / f"{name_of(key)}-{workload}-{run}.json"

    def model(self, model: Model, scale: Scale) -> Path:
        """Get the folder of a model's configuration."""
        return self.folder / "models" / scale.value / model.name


def name_of(key: Key) -> str:
    """Name files after a case, a side and a turn."""
    case, side, turn = key
    return f"{case}-{side}-{turn}"


def key_of(row: Mapping[str, Any]) -> Key:
    """Get the case, side and turn of a row."""
    return row["case"], row["side"], row["turn"]


def job_of(case: Case, side: Side, scale: Scale, paths: Paths) -> dict[str, Any]:
    """Get what `perf.engine.child` reads.

    Args:
        case: What is served.
        side: How.
        scale: Of the models.
        paths: Where models' configurations are written.
    """
    options = case.engine_options(side, scale)
    models = [case.model] if case.model else []
    models += [case.draft.model] if case.draft else []
    options["model"] = str(paths.model(case.model, scale) if case.model else case.folder)
    draft_folder = None
    if case.draft is not None:
        draft_folder = str(paths.model(case.draft.model, scale))
        options["speculative_config"] = {
            "method": case.draft.method,
            "model": draft_folder,
            "num_speculative_tokens": case.draft.num_tokens,
        }
    return {
        "options": options,
        "configurations": {
            str(paths.model(model, scale)): model.configuration(scale) for model in models
        },
        "scale": scale.value,
        "uses_flash": side.uses_flash,
        "draft_folder": draft_folder,
        "draft_acceptance": case.draft.acceptance if case.draft else 1.0,
    }


def environment_of(asked: Mapping[str, str], scale: Scale, paths: Paths) -> dict[str, str]:
    """Get an engine's variables: of vLLM's and ours only those that are meant.

    Args:
        asked: Those of a side.
        scale: Of the models.
        paths: Where caches are, and vLLM.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT_VARIABLES or not name.startswith(("VLLM_", "JENGA_"))
    }
    path = [str(ROOT)]
    if paths.site is not None and scale is not Scale.TINY:  # a bundle is of the CUDA build
        path.append(str(paths.site))
    path += filter(None, [os.environ.get("PYTHONPATH")])
    variables |= gpu_bundle.SETTINGS | caches.environment(paths.caches)
    # An engine in one process imports once, and leaves no other behind.
    variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": os.pathsep.join(path)}
    if scale is Scale.TINY:
        # The interpreter's products are too small for several threads.
        variables |= {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
    return variables | dict(asked)
