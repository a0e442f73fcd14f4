"""Sides of a comparison: settings of stock vLLM, and settings of vLLM with Jenga."""

from dataclasses import dataclass, field
from typing import Any

from perf.engine.planning.models import Model

OURS = "JENGA_TRITON"

GRAPH_REQUESTS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes whose decode steps are captured as CUDA graphs."""

TRIALS = ("JENGA_SPECIALIZED_PREFILL", "JENGA_SPECIALIZED_LATENTS", "JENGA_SPECIALIZED_SCANS")
"""Environment variables that, set to 1, enable GPU-specific kernels without a trial.

With the first two, an engine behaves as it does after its trials have passed. The third is set only
for models without gated delta nets: their prompts would not get the faster of two kernels.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One engine configuration.

    Attributes:
        name: Name in rows.
        is_ours: Whether Jenga's backend serves the model.
        options: Engine arguments that only this side has.
        is_compiled: Whether torch compiles the model, and vLLM captures its default CUDA graphs.
        uses_flash: Whether FlashAttention-3 computes attention over our arena.
        needs_gpu: Whether this side cannot run on a CPU.
    """

    name: str
    is_ours: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    is_compiled: bool = False
    uses_flash: bool = False
    needs_gpu: bool = False

    def engine_options(self, max_requests: int) -> dict[str, Any]:
        """Return the engine arguments that define this side."""
        options = dict(self.options)
        if self.is_ours:
            options["attention_backend"] = OURS
        if not self.is_compiled:
            # No side waits for torch's compiler, and all sides capture the same CUDA graphs.
            options["compilation_config"] = {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [
                    each for each in GRAPH_REQUESTS if each <= max_requests
                ],
            }
        return options

    def environment(self, model: Model | None) -> dict[str, str]:
        """Return the environment variables that this side sets for the engine's process."""
        if not self.is_ours:
            return {}
        has_gated_deltas = model is not None and model.has_gated_deltas
        return dict.fromkeys(TRIALS[:2] if has_gated_deltas else TRIALS, "1")


STOCK = Side(name="stock")
"""Unchanged vLLM, with the settings that all sides share."""

OURS_PLAIN = Side(name="ours", is_ours=True)
STOCK_COMPILED = Side(name="stock-compiled", is_compiled=True)
"""vLLM with its own defaults: torch compiles the model."""

OURS_COMPILED = Side(name="ours-compiled", is_ours=True, is_compiled=True)
STOCK_ONE_TYPE = Side(name="stock-one-type", options={"disable_hybrid_kv_cache_manager": True})
"""vLLM without its hybrid manager: all layers keep all tokens, as in the paper's baseline."""

STOCK_DENSE = Side(name="stock-dense", options={"prefix_cache_retention_interval": None})
"""Windows and states are cached at every block, which gives more hits and earlier evictions."""

STOCK_FINE = Side(name="stock-fine", options={"prefix_match_unit": 16})
"""Prefix hits may end at any multiple of 16 tokens, also inside a block of states."""

OURS_FLASH = Side(name="ours-fa3", is_ours=True, uses_flash=True, needs_gpu=True)
"""Our memory manager with the attention kernel of stock vLLM."""

REPLAY = {"use_replayssm": True}
STOCK_REPLAY = Side(name="stock-replay", options=REPLAY)
"""vLLM's `use_replayssm`: states are seldom written, and recent tokens are replayed."""

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
"""Name -> side."""
