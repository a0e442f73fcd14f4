"""The bytes of the arena of a real engine."""

import pytest

pytestmark = pytest.mark.vllm


# Those of MiMo-V2 are of two widths.
@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("mimo_v2", marks=pytest.mark.slow)])
def test_keys_and_values_lie_where_the_geometry_says_and_nothing_else_is_touched(
    tiny_model, run_engine, name
):
    result = run_engine(
        tiny_model(name),
        [],
        script="arena_process.py",
        options={"attention_backend": "JENGA_TRITON"},
    )

    assert "error" not in result, result["error"][-4000:]
    # Of each prompt all tokens are stored and 3 generated ones (the fourth is never computed on).
    assert result["layers"] == 4
    assert result["stores"] == (19 + 70 + 2 * 3) * 4
    assert result["lowest_address"] >= result["large_page_bytes"]  # the null page is not written
    assert result["differing_bytes"] == 0
