"""Checks of torch and vLLM on this machine, in a separate process, for `jenga doctor`.

    python -m jenga.vllm_plugin.without_engine.self_check torch|vllm FILE

The answer is a JSON object in the file. If the process dies before, there is no file. Torch is
checked with the environment as it is, and makes no context on a GPU. vLLM is checked without a GPU.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jenga.vllm_plugin.patches.patch import Replacement


def torch_answer() -> dict[str, Any]:
    """Import torch and Triton, and count the GPUs that torch can use.

    Returns:
        `num_gpus`, and `warning`, torch's message if it can use no GPU.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch

        import_module("triton")
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    said = [" ".join(str(each.message).split()) for each in caught]
    about_cuda = [each for each in said if "CUDA" in each]
    return {"num_gpus": num_gpus, "warning": about_cuda[0] if about_cuda and not num_gpus else ""}


def vllm_answer() -> dict[str, Any]:
    """Import vLLM, and compare the names that the plugin replaces with those it was written for.

    Returns:
        `num_names`, number of names that were compared; `mismatches`, a sentence for each name that
        differs; and `unknown`, a sentence for each name whose module could not be imported without
        a GPU.

    Raises:
        ValueError: The plugin was not written for this version of vLLM.
    """
    from jenga.vllm_plugin.without_engine.weightless_model import have_no_device

    have_no_device()
    from jenga.vllm_plugin.patches.all_patches import REPLACEMENTS
    from jenga.vllm_plugin.patches.patch import of_installed_vllm

    return compared(of_installed_vllm(REPLACEMENTS))


def compared(replacements: "Iterable[Replacement]") -> dict[str, Any]:
    """Compare names; see `vllm_answer`."""
    num_names = 0
    mismatches: list[str] = []
    unknown: list[str] = []
    for each in replacements:
        num_names += 1
        try:
            if not each.is_applied:
                each.check()
        except (AttributeError, ModuleNotFoundError, ValueError) as error:
            mismatches.append(str(error))
        except Exception as error:
            unknown.append(f"{each.module}: {type(error).__name__}: {error}")
    return {"num_names": num_names, "mismatches": mismatches, "unknown": unknown}


ANSWERS: dict[str, Callable[[], dict[str, Any]]] = {"torch": torch_answer, "vllm": vllm_answer}


def main(subject: str, file: Path) -> None:
    """Write an answer, or the error that prevents it."""
    try:
        answer = ANSWERS[subject]()
    except Exception as error:
        answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(answer), encoding="utf-8")
    partial.rename(file)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
