"""Have Triton's interpreter multiply matrices by `interpreter_product`, once it is imported.

The interpreter also leaves out work whose result it throws away; see `_leave_out_unused_work`.

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
            _leave_out_unused_work(module)

        spec.loader.exec_module = exec_module
        return spec


def _numpy_with_product():
    """Get a module of what numpy has but for its product. Others keep numpy as it is."""
    import numpy as np
    from interpreter_product import product

    numpy = ModuleType(np.__name__)
    vars(numpy).update(vars(np) | {"matmul": product})
    return numpy


def _leave_out_unused_work(interpreter):
    """Leave out some four tenths of the tests' time. Nothing that a kernel computes changes."""
    from functools import cache

    builder, language = interpreter.interpreter_builder, interpreter.tl
    # It computes every sum, difference and product of integers again in 64 bits, to assert that it
    # fits. Without debugging, that assertion is then left out. Compiled kernels compute none of it.
    if not builder.options.debug:
        builder.options = type(builder.options)(sanitize_overflow=False)

    # It makes a table of all types whenever it looks one up.
    numpy_type = interpreter._get_np_dtype
    type_of_number = cache(numpy_type)

    def get_np_dtype(tt_dtype):
        scalar = tt_dtype.scalar
        return numpy_type(scalar) if scalar.is_ptr() else type_of_number(scalar)

    interpreter._get_np_dtype = get_np_dtype

    # It changes the language for a kernel, and again for each function that the kernel calls.
    change_language = interpreter._patch_lang

    @cache
    def modules_of(function):
        known = (language, language.core)
        return [one for one in known if any(one is each for each in function.__globals__.values())]

    def change_language_once(function):
        if any(language.core.is_builtin(each.load) for each in modules_of(function)):
            return change_language(function)
        return interpreter._LangPatchScope()

    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = change_language_once


if INTERPRETER in sys.modules:
    message = f"{INTERPRETER} was imported before its product could be replaced"
    raise ImportError(message)
sys.meta_path.insert(0, _Finder())
