"""Have Triton's interpreter multiply matrices by `interpreter_product`, once it is imported.

Importing this module is all that it takes. It imports nothing heavy: most processes interpret no
kernel.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from types import ModuleType

INTERPRETER = "triton.runtime.interpreter"


class _Finder(MetaPathFinder):
    """Finds the interpreter as Python would, and changes it when it is loaded."""

    def find_spec(self, fullname, path, target=None):  # noqa: ARG002
        if fullname != INTERPRETER:
            return None
        spec = PathFinder.find_spec(fullname, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.np = _numpy_with_product()

        spec.loader.exec_module = exec_module
        return spec


def _numpy_with_product():
    """Get a module of what numpy has but for its product. Others keep numpy as it is."""
    import numpy as np
    from interpreter_product import product

    numpy = ModuleType(np.__name__)
    vars(numpy).update(vars(np) | {"matmul": product})
    return numpy


if INTERPRETER in sys.modules:
    message = f"{INTERPRETER} was imported before its product could be replaced"
    raise ImportError(message)
sys.meta_path.insert(0, _Finder())
