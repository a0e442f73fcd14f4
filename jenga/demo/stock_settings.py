"""Choice of vLLM's setting that finds most tokens of the documents.

Replays on vLLM's manager count the tokens, without an engine.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jenga.demo.documents import OUTPUT_TOKENS, QUESTION_TOKENS, turns
from jenga.models import ReadOptions, find_model
from jenga.sim.arenas.vllm_plan import BLOCK_TOKENS, StockOptions
from jenga.sim.replays.session import Machine, Settings, Trace, outcome_of, replay_rows, run_row
from jenga.sim.workload.requests import Piece, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class StockSetting:
    """A way to run vLLM.

    Attributes:
        name: Name of the setting, for people.
        engine_options: Arguments of vLLM's engine.
        options: Options of vLLM's manager in a replay.
    """

    name: str
    engine_options: dict[str, Any]
    options: StockOptions


def _retention(tokens: int | None) -> StockSetting:
    return StockSetting(
        name="dense retention" if tokens is None else f"retention interval {tokens}",
        engine_options={"prefix_cache_retention_interval": tokens},
        options=StockOptions(retention_tokens=tokens),
    )


SETTINGS = (
    StockSetting(name="its default settings", engine_options={}, options=StockOptions()),
    _retention(1024),
    _retention(512),
    _retention(None),
    StockSetting(
        name="hybrid manager off",
        engine_options={"disable_hybrid_kv_cache_manager": True},
        options=StockOptions(is_hybrid=False),
    ),
)
"""Settings that are tried. Among settings that find equally many tokens, the first is taken."""


def best_setting(
    model: str, dtype: str, *, arena_bytes: int, document_tokens: int, step_tokens: int
) -> tuple[StockSetting, dict[str, int]]:
    """Get the setting that finds most tokens, and the number of tokens that each setting finds.

    Settings that vLLM's manager refuses for this model are left out.

    Args:
        model: Model, as `jenga plan` takes it.
        dtype: Dtype of keys and values.
        arena_bytes: Size in bytes of the engines' caches.
        document_tokens: Number of tokens of a document.
        step_tokens: Largest number of tokens of a step.

    Raises:
        ValueError: The layers of the model are unknown, or every setting was refused.
    """
    spec = find_model(model).spec(ReadOptions(model_dtype=dtype))
    machine = Machine(model=spec, arena_bytes=arena_bytes, clock=lambda _: 1.0)
    requests = list(_requests(document_tokens))
    trace = Trace("documents", lambda: iter(requests))
    found: dict[str, int] = {}
    for setting in SETTINGS:
        settings = Settings(chunk_tokens=step_tokens, stock=setting.options)
        row = run_row(machine, "vllm", trace, settings)
        with suppress(ValueError):
            summary = outcome_of(replay_rows(row, machine, trace, settings)).summary
            found[setting.name] = summary.hit_tokens
    if not found:
        msg = "vLLM's manager takes the model in no setting"
        raise ValueError(msg)
    return max((s for s in SETTINGS if s.name in found), key=lambda s: found[s.name]), found


def _requests(document_tokens: int) -> Iterator[Request]:
    """Yield the requests in the engines' order. Each waits until the one before it has ended."""
    question_tokens = QUESTION_TOKENS // 2 // BLOCK_TOKENS * BLOCK_TOKENS
    before: tuple[str, ...] = ()
    for document, question in turns():
        name = f"document {document}, question {question}"
        pieces = (Piece(f"document {document}", document_tokens), Piece(name, question_tokens))
        yield Request(name=name, after=before, prompt=pieces, output_tokens=OUTPUT_TOKENS)
        before = (name,)
