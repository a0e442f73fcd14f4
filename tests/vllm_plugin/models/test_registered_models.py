"""The models that the plugin adds to vLLM's registry."""

import pytest

from tests.vllm_plugin.settings.test_switch import run_python

REGISTERED = """
import importlib, sys
import vllm.model_executor.models.registry as registry
from vllm import ModelRegistry
stock = dict(ModelRegistry.models)
{before}
from jenga.vllm_plugin import register
register()
register()  # as vLLM does once more
from jenga.vllm_plugin.models.registered_models import MODELS
ours = {{name: ModelRegistry.models[name] for name in MODELS}}
print("IMPORTED", [module for module in MODELS.values() if module in sys.modules])
print("STOCK", all(ModelRegistry.models[name] is model for name, model in stock.items()))
print("OTHERS", set(ModelRegistry.models) - set(stock) == set(MODELS))
print("FOUND", all(model.load_model_cls().__name__ == name for name, model in ours.items()))
"""


@pytest.mark.vllm
def test_registration_imports_no_model_and_leaves_those_of_vllm_alone():
    returncode, output = run_python(REGISTERED.format(before=""))

    assert returncode == 0, output[-4000:]
    assert "IMPORTED []" in output
    assert "STOCK True" in output
    assert "OTHERS True" in output
    assert "FOUND True" in output


@pytest.mark.vllm
def test_an_architecture_that_vllm_has_stays_that_of_vllm():
    before = "ModelRegistry.models['HymbaForCausalLM'] = stock['HymbaForCausalLM'] = 'its own'"

    _, output = run_python(REGISTERED.format(before=before))

    assert "STOCK True" in output
