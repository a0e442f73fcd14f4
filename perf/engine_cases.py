"""What engines serve in `perf.bench_engine`: models as wide as real ones, traces, and for how much.

Weights are random, since a step takes as long with any; widths are those of the models' Hugging
Face configurations.
"""

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jenga.sim.workload import Piece, Request

GIB, MIB = 1 << 30, 1 << 20

FIRST_TOKEN = 16
"""Tokens before it mean something to some models: the end of a text, an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCase:
    """One model and one trace.

    Attributes:
        model: What the model is called.
        config: Makes its configuration, of transformers; or a folder that holds the model.
        trace: As `jenga replay` takes it.
        cache_bytes: What an engine gets for all that it remembers of requests.
        options: Arguments of the engine that differ from `ENGINE_OPTIONS`.
        num_runs: How often the trace is served, each time with an empty cache.
        limit: No more requests than these.
        speed: Arrivals come so many times as fast.
    """

    model: str
    config: Callable[[], Any] | Path
    trace: str
    cache_bytes: int
    options: dict[str, Any]
    num_runs: int = 2
    limit: int | None = None
    speed: float = 1.0

    @property
    def name(self) -> str:
        """What rows are filed under."""
        return f"{self.model} {self.trace}"


def gemma_3_4b(**others: Any) -> Any:  # noqa: ANN401  transformers' classes are made at run time
    """Get the configuration of the text model of google/gemma-3-4b-it."""
    from transformers import Gemma3TextConfig

    widths = {
        "vocab_size": 262_208,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "max_position_embeddings": 131_072,
    } | others
    every_sixth = [
        "full_attention" if number % 6 == 5 else "sliding_attention"
        for number in range(widths["num_hidden_layers"])
    ]
    return Gemma3TextConfig(**widths, layer_types=every_sixth, architectures=["Gemma3ForCausalLM"])


NEMOTRON_H_8B_LAYERS = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
"""Layer by layer: recurrent, dense, or of attention."""

_KINDS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}


def nemotron_h_8b(*, pattern: str = NEMOTRON_H_8B_LAYERS, **others: Any) -> Any:  # noqa: ANN401
    """Get the configuration of nvidia/Nemotron-H-8B-Base-8K, for longer texts."""
    from transformers import NemotronHConfig

    widths = {
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 21_504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 128,
        "max_position_embeddings": 131_072,
    } | others
    return NemotronHConfig(
        **widths,
        layers_block_type=[_KINDS[kind] for kind in pattern],
        architectures=["NemotronHForCausalLM"],
    )


CASES = (
    EngineCase(
        model="nemotron-h-8b",
        config=nemotron_h_8b,
        trace="articles:n=40,questions=4,tokens=4000,output=64",
        cache_bytes=4 * GIB,
        # Stock vLLM records graphs only of as many requests as it has blocks of states.
        options={"max_model_len": 8192, "max_num_seqs": 64},
    ),
    EngineCase(
        model="gemma-3-4b",
        config=gemma_3_4b,
        trace="articles:n=32,questions=4,tokens=6000,output=128",
        cache_bytes=4 * GIB,
        options={"max_model_len": 8192},
    ),
)

_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


def _tiny_gemma() -> Any:  # noqa: ANN401
    return gemma_3_4b(**_TINY, num_hidden_layers=6, sliding_window=40, query_pre_attn_scalar=64)


def _tiny_nemotron() -> Any:  # noqa: ANN401
    states = {"mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 32}
    return nemotron_h_8b(pattern="M*-M", **_TINY, **states, chunk_size=64)


_TINY_ENGINE = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8}

DRY_CASES = (
    EngineCase(
        model="tiny-nemotron-h",
        config=_tiny_nemotron,
        trace="articles:n=2,questions=2,tokens=70,question=5,output=3",
        cache_bytes=4 * MIB,
        options=_TINY_ENGINE,
    ),
    EngineCase(
        model="tiny-gemma-3",
        config=_tiny_gemma,
        trace="long-documents:n=3,tokens=40-90,output=2-4",
        cache_bytes=4 * MIB,
        options=_TINY_ENGINE,
    ),
)


def save_config(case: EngineCase, folder: Path) -> Path:
    """Get the folder of a case's model, written to `folder` unless it has one."""
    if isinstance(case.config, Path):
        return case.config
    case.config().save_pretrained(folder)
    return folder


def prompts_of(requests: Iterable[Request], vocab_size: int) -> list[list[int]]:
    """Tokens of requests' prompts, which share prefixes as those of the trace do.

    What a request goes on from is the same however often it comes, and so is not what a model with
    random weights said: that part of a prompt is found by nobody who looks for it.

    Raises:
        ValueError: A request shows images.
    """
    contents: dict[Piece, Sequence[int]] = {}
    prompts: list[list[int]] = []
    for request in requests:
        if request.images:
            msg = f"trace must be of text alone, request {request.name!r} shows images"
            raise ValueError(msg)
        prompt: list[int] = []
        for piece in request.prompt:
            if piece not in contents:
                contents[piece] = _tokens(piece, vocab_size)
            prompt += contents[piece]
        prompts.append(prompt)
    return prompts


def _tokens(piece: Piece, vocab_size: int) -> list[int]:
    """The first tokens of some content."""
    seed = hashlib.sha256(repr(piece.content).encode()).digest()
    draw = random.Random(seed)
    return [draw.randrange(FIRST_TOKEN, vocab_size) for _ in range(piece.num_tokens)]
