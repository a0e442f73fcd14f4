"""Models and formats of keys and values that are planned, and that the vLLM plugin refuses.

The plugin, `jenga doctor` and `jenga plan` all take their checks and their words from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jenga.models.config import Config
from jenga.models.options import KvFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Texts of a refusal.

    Attributes:
        feature: Feature that is not served, in the words of vLLM's options and documentation.
        reason: Why it is not served, as a clause.
        instead: Alternative to use.
    """

    feature: str
    reason: str
    instead: str

    def text(self, met: str = "") -> str:
        """Get the refused feature, the reason and the alternative as one text.

        Args:
            met: Value or layer that was found. Empty means that none is named.
        """
        found = f"{self.feature}, got {met}" if met else self.feature
        return f"{found} ({self.reason}; use instead: {self.instead})"


SPARSE_LATENTS = Words(
    feature="sparse multi-head latent attention (DeepSeek-V3.2, DeepSeek-V4)",
    reason="no kernel reads only the tokens that an indexer selects",
    instead="stock vLLM",
)
DIFFUSION = Words(
    feature="generation by diffusion, not token by token (canvas_length in the model's config)",
    reason="tokens that are replaced would have to be removed from the cache completely",
    instead="stock vLLM",
)
HYMBA = Words(
    feature="Hymba",
    reason=(
        "two pieces are missing: layers in which one projection feeds attention and a Mamba-1 "
        "scan, and a window beside which every token also reads the memory tokens at the start"
    ),
    instead="a model of vLLM's with attention and Mamba in every layer, such as Falcon-H1",
)
CACHE_DTYPE = Words(
    feature="this --kv-cache-dtype",
    reason=(
        "the kernels read float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2, int8_per_token_head, "
        "fp8_per_token_head and int4_per_token_head"
    ),
    instead="one of these",
)

SPARSE_MODEL_TYPES = ("deepseek_v4", "deepseek_v41")
"""Types of models whose latent attention reads only chosen tokens, whatever their fields say."""

HYMBA_MODEL_TYPE = "hymba"

UNSERVED_FORMATS = (KvFormat.NVFP4, KvFormat.DS_MLA)
"""Formats of keys and values that no kernel reads."""

FLOAT8_FORMATS = (KvFormat.FP8, KvFormat.FP8_PER_TOKEN_HEAD)
"""Formats whose elements are float8_e4m3fn, which older GPUs cannot convert."""

FLOAT8_REASON = "float8 needs a GPU of compute capability 8.9 or newer"


def unserved_features(config: Config) -> list[Words]:
    """Get each feature of a model that the plugin refuses with any options.

    More models are refused after vLLM's classes have made their layers.
    """
    fields: Mapping[str, object] = config.as_dict() | config.language().as_dict()
    is_sparse = (
        fields.get("index_topk") is not None or fields.get("model_type") in SPARSE_MODEL_TYPES
    )
    checks = (
        (SPARSE_LATENTS, is_sparse),
        (DIFFUSION, fields.get("canvas_length") is not None),
        (HYMBA, fields.get("model_type") == HYMBA_MODEL_TYPE),
    )
    return [words for words, is_met in checks if is_met]


def unserved_format(kv_format: KvFormat, *, has_float8: bool | None) -> str:
    """Get the reason why a format of keys and values is refused. Empty if it is served.

    Args:
        kv_format: The format.
        has_float8: Whether the GPU converts to and from float8_e4m3fn. None if it is unknown.
    """
    if kv_format in UNSERVED_FORMATS:
        return CACHE_DTYPE.reason
    if kv_format in FLOAT8_FORMATS and has_float8 is False:
        return FLOAT8_REASON
    return ""
