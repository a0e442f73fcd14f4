"""Keys of --additional-config that are meant for the plugin and not read stop the engine."""

import re

import pytest

from jenga.vllm_plugin.settings.additional_config import (
    HISTORY_REQUESTS,
    HISTORY_TOKENS,
    HOST_BYTES,
    SHARED_ARENA,
    check_additional_config,
)
from jenga.vllm_plugin.settings.environment import KNOWN_VARIABLES
from tests.vllm_plugin.settings.test_switch import CONFIGURE, run_python


@pytest.mark.parametrize("key", ["jenga_left_share", "JENGA_LEFT_SHARE", "jenga_host_size"])
def test_an_unknown_key_is_refused_by_name_and_the_known_ones_are_listed(key):
    with pytest.raises(ValueError, match=f"unknown key '{key}'") as refused:
        check_additional_config({"other": 1, key: 0.5})

    for name in (HOST_BYTES, HISTORY_TOKENS, *KNOWN_VARIABLES):
        assert name in str(refused.value)


def test_token_budgets_belong_in_the_models_configuration():
    message = "'kv_token_budgets', which is read from the configuration of the model"
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        check_additional_config({"kv_token_budgets": "abc"})

    assert "--hf-overrides" in str(refused.value)


def test_keys_of_other_plugins_and_our_own_are_left_alone():
    check_additional_config({})
    check_additional_config(object())
    check_additional_config({"ascend_scheduler_config": {"jenga_left_share": 1}, "jengatown": 2})
    check_additional_config({HOST_BYTES: 1, HISTORY_REQUESTS: 2, SHARED_ARENA: {}})


@pytest.mark.vllm
def test_an_engine_does_not_start_with_an_unknown_key_and_does_with_foreign_ones(tiny_model):
    code = (
        CONFIGURE.format(model=str(tiny_model("llama")))
        + """
    config = configure(additional_config={"foreign": 1}, kv_offloading_size=1)
    config.__post_init__()
    print("KEPT", config.additional_config)
    configure(attention_backend=None, additional_config={"jenga_left_share": 0.5})
    print("OTHER BACKEND")
    configure(additional_config={"jenga_left_share": 0.5})
    """
    )

    returncode, output = run_python(code)

    assert returncode != 0
    assert f"KEPT {{'foreign': 1, '{HOST_BYTES}': {1 << 30}}}" in output
    assert "OTHER BACKEND" in output
    assert "--additional-config has the unknown key 'jenga_left_share'" in output
