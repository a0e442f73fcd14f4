"""Let vLLM's CPU build take Triton's interpreter for the Triton of a CPU.

vLLM's second model runner, its default wherever there is Triton, prepares each step in Triton
kernels. Its CPU build has that runner too, but looks for a Triton that compiles for CPUs. With
`TRITON_INTERPRET=1` none is needed: this module, found by every Python process whose PYTHONPATH
names its folder, adds a backend called "cpu" before vLLM looks. Nothing is ever compiled by it.

Python imports one `sitecustomize`, so this one also does what that of `tests/interpreter` does.
"""

import os
from importlib.util import find_spec

import interpreter_hook  # noqa: F401


class _Driver:
    """What vLLM asks of a backend's driver."""

    @staticmethod
    def is_active() -> bool:
        return True


def _offer() -> None:
    from types import SimpleNamespace

    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)
    # torch's compiler would ask that backend for more than there is.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"


_WANTED = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

if find_spec("triton") and _WANTED.items() <= dict(os.environ).items():
    _offer()
