"""Inputs of an engine's process: files, engine arguments and environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.engine.planning.models import Model, Scale
from perf.engine.planning.plan import Case
from perf.engine.planning.sides import Side
from perf.engine.runs import caches
from perf.gpu import gpu_bundle
from perf.harness.machine import ROOT

KEPT_VARIABLES = ("VLLM_USE_V2_MODEL_RUNNER",)
"""Variables of vLLM and Jenga that engines inherit. All others of theirs are removed."""

Key = tuple[str, str, int]
"""Case, side and turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Places of a plan's files.

    Attributes:
        folder: Folder of rows, outputs, logs, caches and models.
        site: Folder of an unpacked bundle of vLLM. None if vLLM is installed.
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
        """Folder of the engines' logs."""
        return self.folder / "logs"

    @property
    def outputs(self) -> Path:
        """Folder of the generated tokens."""
        return self.folder / "outputs"

    def log(self, key: Key) -> Path:
        """Return the log file of an engine."""
        return self.logs / f"{name_of(key)}.txt"

    def job(self, key: Key) -> Path:
        """Return the job file of an engine."""
        return self.folder / "jobs" / f"{name_of(key)}.json"

    def output(self, key: Key, workload: str, run: int) -> Path:
        """Return the file of the tokens that a run generates."""
        return self.outputs / f"{name_of(key)}-{workload}-{run}.json"

    def model(self, model: Model, scale: Scale) -> Path:
        """Return the folder of a model's configuration."""
        return self.folder / "models" / scale.value / model.name


def name_of(key: Key) -> str:
    """Return the base name of files of a case, side and turn."""
    case, side, turn = key
    return f"{case}-{side}-{turn}"


def key_of(row: Mapping[str, Any]) -> Key:
    """Return the case, side and turn of a row."""
    return row["case"], row["side"], row["turn"]


def job_of(case: Case, side: Side, scale: Scale, paths: Paths) -> dict[str, Any]:
    """Make the job that `perf.engine.runs.child` reads.

    Args:
        case: Model and workloads.
        side: Engine settings.
        scale: Scale of the models.
        paths: Places of files. Models' configurations are written there.
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
    """Make an engine's environment variables. Inherited ones of vLLM and Jenga are mostly removed.

    Args:
        asked: Variables that the side sets.
        scale: Scale of the models.
        paths: Places of the caches and of vLLM.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT_VARIABLES or not name.startswith(("VLLM_", "JENGA_"))
    }
    path = [str(ROOT)]
    if paths.site is not None and scale is not Scale.TINY:  # a bundle has the CUDA build
        path.append(str(paths.site))
    path += filter(None, [os.environ.get("PYTHONPATH")])
    variables |= gpu_bundle.SETTINGS | caches.environment(paths.caches)
    # With the engine in one process, packages are imported once, and no other process is left
    # behind.
    variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": os.pathsep.join(path)}
    if scale is Scale.TINY:
        # Products in the interpreter are too small to gain from several threads.
        variables |= {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
    return variables | dict(asked)
