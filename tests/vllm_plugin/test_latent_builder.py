"""How a step of latent attention is shared out between absorbed queries and vLLM's prefill."""

import pytest

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        pytest.param((512, 128, 128), 170, id="deepseek_v3"),
        pytest.param((512, 192, 256), 398, id="glm_4_7_flash"),
        pytest.param((16, 128, 64), None, id="latents_narrower_than_heads"),
    ],
)
def test_absorption_is_for_as_many_queries_as_it_costs_less(dims, expected):
    from jenga.vllm_plugin.latent_builder import absorbed_query_tokens

    latent, nope, value = dims

    def extra_products(queries):
        """Products a head and context token take more when absorbed than when expanded."""
        return queries * (2 * latent - nope - value) - latent * (nope + value)

    if expected is None:
        with pytest.raises(ValueError, match="latent_dim must exceed half of 128 \\+ 64, got 16"):
            absorbed_query_tokens(latent_dim=latent, nope_dim=nope, value_dim=value)
        return
    tokens = absorbed_query_tokens(latent_dim=latent, nope_dim=nope, value_dim=value)

    assert tokens == expected
    assert extra_products(tokens) <= 0 < extra_products(tokens + 1)
