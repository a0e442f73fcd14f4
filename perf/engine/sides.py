"""The engines that are compared: stock vLLM in several settings, and ours."""

from dataclasses import dataclass, field
from typing import Any

from perf.engine.models import Model

OURS = "JENGA_TRITON"

GRAPH_REQUESTS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of requests whose decoding steps are captured as CUDA graphs."""

TRIALS = ("JENGA_SPECIALIZED_PREFILL", "JENGA_SPECIALIZED_LATENTS", "JENGA_SPECIALIZED_SCANS")
"""Variables that, set to 1, take the kernels for one kind of GPU without a trial.

With the first two an engine does what it does once the trials have passed, and with the third one
where layers are no gated delta nets, whose prompts would not be given the faster of two kernels.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to run a model.

    Attributes:
        name: Name in rows.
        is_ours: Whether our backend serves it.
        options: Arguments of the engine that this side has.
        is_compiled: Whether torch compiles the model, and graphs are vLLM's default ones.
        uses_flash: Whether FlashAttention-3 attends over our arena.
        needs_gpu: Whether a CPU cannot run it.
    """

    name: str
    is_ours: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    is_compiled: bool = False
    uses_flash: bool = False
    needs_gpu: bool = False

    def engine_options(self, max_requests: int) -> dict[str, Any]:
        """Get the engine's arguments that make this side."""
        options = dict(self.options)
        if self.is_ours:
            options["attention_backend"] = OURS
        if not self.is_compiled:
            # No side waits for torch's compiler, and all capture the same steps.
            options["compilation_config"] = {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [
                    each for each in GRAPH_REQUESTS if each <= max_requests
                ],
            }
        return options

    def environment(self, model: Model | None) -> dict[str, str]:
        """Get variables of the engine's process."""
        if not self.is_ours:
            return {}
        has_gated_deltas = model is not None and model.has_gated_deltas
        return dict.fromkeys(TRIALS[:2] if has_gated_deltas else TRIALS, "1")


STOCK = Side(name="stock")
"""vLLM as it is, with the settings that all sides share."""

OURS_PLAIN = Side(name="ours", is_ours=True)
STOCK_COMPILED = Side(name="stock-compiled", is_compiled=True)
"""vLLM's own defaults: torch compiles the model."""

OURS_COMPILED = Side(name="ours-compiled", is_ours=True, is_compiled=True)
STOCK_ONE_TYPE = Side(name="stock-one-type", options={"disable_hybrid_kv_cache_manager": True})
"""All layers keep all tokens: the baseline of the paper."""

STOCK_DENSE = Side(name="stock-dense", options={"prefix_cache_retention_interval": None})
"""Windows and states are kept at every block, which finds more and evicts sooner."""

STOCK_FINE = Side(name="stock-fine", options={"prefix_match_unit": 16})
"""Prefixes may end at any 16 tokens, also inside of a block of states."""

OURS_FLASH = Side(name="ours-fa3", is_ours=True, uses_flash=True, needs_gpu=True)
"""Our memory manager with the kernel that stock vLLM has."""

REPLAY = {"use_replayssm": True}
STOCK_REPLAY = Side(name="stock-replay", options=REPLAY)
"""States are seldom written."""

OURS_REPLAY = Side(name="ours-replay", is_ours=True, options=REPLAY)

SIDES = {
    side.name: side
    for side in (
        STOCK,
        OURS_PLAIN,
        STOCK_COMPILED,
        OURS_COMPILED,
        STOCK_ONE_TYPE,
        STOCK_DENSE,
        STOCK_FINE,
        OURS_FLASH,
        STOCK_REPLAY,
        OURS_REPLAY,
    )
}
"""By name."""
