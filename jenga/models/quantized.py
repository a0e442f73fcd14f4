"""How keys and values are stored where a checkpoint says so: its makers calibrated their scales.

Source: what vLLM 0.33 makes of `--kv-cache-dtype auto`.
"""

from jenga.models.config import Config
from jenga.models.options import KvFormat

QUANTIZATION_FILE = "hf_quant_config.json"
"""Of older checkpoints of ModelOpt, what others have in their `config.json`."""

_SECTIONS = ("quantization_config", "compression_config")
_FORMATS = {"fp8": KvFormat.FP8, "nvfp4": KvFormat.NVFP4}
_FLOAT_FORMATS = {8: KvFormat.FP8, 4: KvFormat.NVFP4}
"""By the bits of an element."""


def quantization_of(config: Config) -> Config | None:
    """The section that says how a model is quantised; None for one that is not."""
    for fields in (config, config.language()):
        for name in _SECTIONS:
            if name in fields:
                return fields.section(name)
    return None


def kv_format_of(config: Config) -> KvFormat:
    """The format of keys and values where no option asks for another."""
    quantization = quantization_of(config)
    if quantization is None:
        return KvFormat.MODEL
    inner = quantization.section("quantization") if "quantization" in quantization else quantization
    for fields in (inner, quantization):
        if "kv_cache_scheme" in fields and not fields.is_text("kv_cache_scheme"):
            return _of_scheme(fields.section("kv_cache_scheme"))
        for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
            if name in fields:
                return _FORMATS.get(fields.text(name).lower(), KvFormat.MODEL)
    return KvFormat.MODEL


def _of_scheme(scheme: Config) -> KvFormat:
    """The format that compressed-tensors describes by the type of an element and its bits."""
    if not scheme.equals("type", "float"):
        return KvFormat.MODEL
    return _FLOAT_FORMATS.get(scheme.integer("num_bits"), KvFormat.MODEL)
