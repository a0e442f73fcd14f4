"""Format of keys and values that a published model asks for: its makers calibrated the scales.

Source: the reading of `--kv-cache-dtype auto` in vLLM 0.33.
"""

from jenga.models.config import Config
from jenga.models.options import KvFormat

QUANTIZATION_FILE = "hf_quant_config.json"
"""File in which older ModelOpt models keep the section that others have in `config.json`."""

_SECTIONS = ("quantization_config", "compression_config")
_FORMATS = {"fp8": KvFormat.FP8, "nvfp4": KvFormat.NVFP4}
_FLOAT_FORMATS = {8: KvFormat.FP8, 4: KvFormat.NVFP4}
"""Bits of a floating-point element -> format."""


def quantization_of(config: Config) -> Config | None:
    """Return the section that says how a model is quantised; None if the model is not quantised."""
    for fields in (config, config.language()):
        for name in _SECTIONS:
            if name in fields:
                return fields.section(name)
    return None


def kv_format_of(config: Config) -> KvFormat:
    """Return the format of keys and values if no option asks for another."""
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
    """Return the format that compressed-tensors describes, from an element's type and bits."""
    if not scheme.equals("type", "float"):
        return KvFormat.MODEL
    return _FLOAT_FORMATS.get(scheme.integer("num_bits"), KvFormat.MODEL)
