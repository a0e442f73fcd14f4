"""No module that handles a step's orders has state: engines of one process share nothing there."""

import ast
import dataclasses
import enum
import importlib
import inspect
import logging
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
FOLDERS = ("orders", "scheduler", "worker", "layers")

pytestmark = pytest.mark.vllm

LAYERS = "jenga.vllm_plugin.layers.attention"
ALLOWED = {
    f"{LAYERS}.backend.JengaTritonBackend.supported_dtypes": "vLLM's interface asks for a list",
    f"{LAYERS}.backend.JengaTritonBackend.supported_kv_cache_dtypes": "the same",
    f"{LAYERS}.latent.JengaLatentBackend.supported_kv_cache_dtypes": "the same",
    f"{LAYERS}.prompt_scratch._allocated": "memory that each layer overwrites before it reads it",
}
"""Values that could be changed, with the reason why engines do not meet in them."""

UNCHANGING = (
    *(str, bytes, int, float, type(None), type, enum.Enum, torch.dtype, logging.Logger),
    *(types.FunctionType, types.GenericAlias, types.UnionType, types.MappingProxyType),
    *(staticmethod, classmethod, property),
)


def can_change(value):
    """Whether a value could hold something of an engine."""
    if isinstance(value, (tuple, frozenset)):
        return any(can_change(each) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return not type(value).__dataclass_params__.frozen
    return not (isinstance(value, UNCHANGING) or type(value).__module__ == "typing")


def assigned_names(body):
    """Get the names that statements assign, those within conditions too, but not in functions."""
    for statement in body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
        elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
            if statement.value is not None and isinstance(statement.target, ast.Name):
                yield statement.target.id
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                yield from assigned_names(getattr(statement, field, []))


def state_of(source, module):
    """Get the names of a module that hold state, and of its classes.

    Args:
        source: Text of the module.
        module: The module.
    """
    tree, found = ast.parse(source), []
    scopes = [("", tree.body, module)]
    scopes += [
        (f"{node.name}.", node.body, getattr(module, node.name))
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    ]
    for prefix, body, owner in scopes:
        is_data = prefix and dataclasses.is_dataclass(owner)
        for name in assigned_names(body):
            # Defaults of dataclasses are of their instances.
            if not (is_data and name in owner.__dataclass_fields__):
                value = inspect.getattr_static(owner, name, None)
                found += [prefix + name] * can_change(value)
        functions = (each for each in body if isinstance(each, ast.FunctionDef))
        for function in functions:
            value = inspect.getattr_static(owner, function.name)
            value = getattr(value, "__func__", value)
            found += [prefix + function.name] * hasattr(value, "cache_clear")
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found += node.names
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_modules_that_handle_orders_have_no_state(folder):
    found, paths = [], sorted((ROOT / "jenga/vllm_plugin" / folder).rglob("*.py"))
    assert len(paths) > 2
    for path in paths:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        module = importlib.import_module(name)
        found += [f"{name}.{each}" for each in state_of(path.read_text(), module)]

    in_folder = [name for name in ALLOWED if name.startswith(f"jenga.vllm_plugin.{folder}.")]
    assert sorted(found) == in_folder


@pytest.mark.parametrize(
    "source",
    [
        "from contextvars import ContextVar\nx = ContextVar('x')",
        "x: dict[str, int] = {}",
        "if True:\n    x = []",
        "x, y = set(), 1",
        "x = (1, [])",
        "x = ()\ndef f():\n    global x\n    x = (1,)",
        "import functools\n@functools.cache\ndef x(of):\n    return of",
        "import functools\nclass C:\n    @functools.cache\n    def x(self):\n        return 1",
        "class C:\n    x = {}",
    ],
)
def test_state_is_found_whatever_holds_it(source):
    module = types.ModuleType("example")
    exec(source, vars(module))

    (name,) = state_of(source, module)
    assert name.split(".")[-1] == "x"


def test_constants_classes_and_functions_are_no_state():
    source = (
        "import logging\nlogger = logging.getLogger('x')\nSIZES = (1, 2.0, 'a', None)\n"
        "class C:\n    x = 1\n    def f(self):\n        return {}\nof = type('D', (C,), {})"
    )
    module = types.ModuleType("example")
    exec(source, vars(module))

    assert state_of(source, module) == []
