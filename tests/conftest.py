"""Choose Triton's interpreter before any kernel is imported, where there is no GPU."""

import os
from pathlib import Path

HAS_GPU = any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0"))
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
