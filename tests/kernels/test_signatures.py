import doctest
import importlib
import inspect
import pkgutil

import pytest

from jenga_kernels import paged_attention, reference

OPERATIONS = [module.name for module in pkgutil.iter_modules(reference.__path__)]


def test_references_exist():
    assert {"kv_store", "paged_attention", "attention_merge", "page_copy"} <= set(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_reference_has_the_signature_of_its_operation(name):
    operation = getattr(importlib.import_module(f"jenga_kernels.{name}"), name)
    reference_operation = getattr(importlib.import_module(f"jenga_kernels.reference.{name}"), name)

    assert inspect.signature(reference_operation) == inspect.signature(operation)


def test_example_of_paged_attention_runs():
    results = doctest.testmod(paged_attention)

    assert results.attempted > 0
    assert results.failed == 0
