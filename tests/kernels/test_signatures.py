import ast
import doctest
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import jenga_kernels
from jenga_kernels import reference
from jenga_kernels.attention import paged_attention

OPERATIONS = [
    module.name.rpartition(".")[2]
    for module in pkgutil.walk_packages(reference.__path__, "jenga_kernels.reference.")
    if not module.ispkg
]

PARTS = {
    "checkpoints": ("checkpoint_starts", "checkpoint_after", "checkpoint_slots"),
    "*checkpoint_tensors(checkpoints)": (
        "checkpoint_starts",
        "checkpoint_after",
        "checkpoint_slots",
    ),
    "plan": (),
}
"""Arguments that are no tensors themselves -> names of what launches take of them."""


def lists_of_arguments(name):
    """Arguments of an operation: of its function, of `_Arguments`, and of the tuple `given`."""
    module = importlib.import_module(getattr(jenga_kernels, name).__module__)
    if not hasattr(module, "_Arguments"):
        return None
    tree = ast.parse(Path(module.__file__).read_text())
    function = next(node for node in tree.body if getattr(node, "name", "") == name)
    given = next(
        node.value.elts
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "given"
    )
    fields = module._Arguments._fields
    history = tuple(field for field in fields if field.startswith("history_"))
    parts = PARTS | {"history": history}
    named = list(inspect.signature(getattr(module, name)).parameters)
    signature = [part for each in named for part in parts.get(each, (each,))]
    written = [ast.unparse(element).replace("history.", "history_") for element in given]
    written = [part for each in written for part in parts.get(each, (each,))]
    return signature, list(fields), written


def test_references_exist():
    assert {"kv_store", "paged_attention", "attention_merge", "page_copy"} <= set(OPERATIONS)
    assert sorted(OPERATIONS) == reference.__all__

    with pytest.raises(AttributeError, match="no attribute 'paged_attentoin'"):
        _ = reference.paged_attentoin


@pytest.mark.parametrize("name", OPERATIONS)
def test_reference_has_the_signature_of_its_operation(name):
    operation = getattr(jenga_kernels, name)
    home = operation.__module__.replace("jenga_kernels.", "jenga_kernels.reference.")
    reference_operation = getattr(reference, name)

    assert reference_operation is getattr(importlib.import_module(home), name)
    assert inspect.signature(reference_operation) == inspect.signature(operation)


def test_arguments_of_an_operation_are_in_one_order():
    lists = {name: lists_of_arguments(name) for name in OPERATIONS}
    lists = {name: each for name, each in lists.items() if each is not None}

    assert {"paged_attention", "state_scan", "delta_scan", "state_replay"} <= lists.keys()
    for name, (signature, fields, written) in lists.items():
        assert fields == signature, name
        assert written == fields, name


def test_example_of_paged_attention_runs():
    results = doctest.testmod(paged_attention)

    assert results.attempted > 0
    assert results.failed == 0
