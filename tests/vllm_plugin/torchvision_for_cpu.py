"""Make torchvision's Python importable beside a torch for CPUs.

    pip install --no-deps --target FOLDER torchvision
    python -m tests.vllm_plugin.torchvision_for_cpu FOLDER
    PYTHONPATH=FOLDER python ...

Models with images need it to load at all, and its build on PyPI is compiled for CUDA. Of that, the
models of the tests need none: this leaves it out, and declares the operations whose Python would
otherwise not import. `make env` does this; the folder is on the path of the tests that need it.
"""

import shutil
import sys
from pathlib import Path

_DECLARE = """import torch

for _name in ("nms", "qnms"):
    torch.library.define(
        f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )

"""


def leave_out_compiled(folder: Path) -> None:
    """Make what was installed in a folder importable without its compiled operations.

    Args:
        folder: Holds torchvision; changed in place.
    """
    shutil.rmtree(folder / "torchvision.libs", ignore_errors=True)
    for library in folder.glob("torchvision/*.so"):
        library.unlink()
    module = folder / "torchvision" / "_meta_registrations.py"
    module.write_text(_DECLARE + module.read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    leave_out_compiled(Path(sys.argv[1]))
