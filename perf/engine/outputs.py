"""What two engines generated, compared: where their outputs part, and how near the tie was."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_JUDGED = 16
"""Requests whose parting is looked at."""

NEAR_TIE_NATS = {"bfloat16": 0.25, "float16": 0.05, "float32": 2e-3}
"""Element type -> greatest difference of two log-probabilities that roundings may turn around.

Logits of some 5 are 2^-5 apart in bfloat16, so that the bound is eight such steps; 2^-8 in float16.
Between two float32 engines a thousandth was seen.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Outputs of a run beside those of another one.

    Attributes:
        num_same: Requests with the same prompt and the same output.
        num_parted: Requests with the same prompt and another output.
        num_other_prompts: Requests whose prompt held another answer before it.
        partings: Of those that parted: `index` of the request, `position` of the first token that
            differs, and the two `tokens`; earliest positions first.
    """

    num_same: int
    num_parted: int
    num_other_prompts: int
    partings: tuple[dict[str, Any], ...]


def compare(theirs: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> Comparison:
    """Compare outputs, request by request.

    Args:
        theirs: `prompt` and `tokens` of each request.
        ours: The same of another run of the same workload.

    Raises:
        ValueError: The runs have other numbers of requests.
    """
    if len(theirs) != len(ours):
        msg = f"runs must have as many requests as each other, got {len(theirs)} and {len(ours)}"
        raise ValueError(msg)
    num_same = num_other_prompts = 0
    partings: list[dict[str, Any]] = []
    for index, (first, second) in enumerate(zip(theirs, ours, strict=True)):
        if first["prompt"] != second["prompt"]:
            num_other_prompts += 1
            continue
        pairs = list(zip(first["tokens"], second["tokens"], strict=False))
        position = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        if position is None:
            num_same += 1
        else:
            tokens = list(pairs[position])
            partings.append({"index": index, "position": position, "tokens": tokens})
    partings.sort(key=lambda each: (each["position"], each["index"]))
    return Comparison(
        num_same=num_same,
        num_parted=len(partings),
        num_other_prompts=num_other_prompts,
        partings=tuple(partings),
    )


def read(path: Path) -> list[dict[str, Any]]:
    """Get the outputs of a run, as an engine's process has written them."""
    return json.loads(path.read_text())


def verdict(gaps: Sequence[float | None], dtype: str) -> dict[str, Any]:
    """Say whether partings are near ties.

    Args:
        gaps: Differences of log-probabilities; None for more than could be seen.
        dtype: Element type of the model.
    """
    bound = NEAR_TIE_NATS[dtype]
    seen = [gap for gap in gaps if gap is not None]
    return {
        "num_judged": len(gaps),
        "num_near_ties": sum(gap <= bound for gap in seen),
        "largest_gap_nats": max(seen, default=None),
        "near_tie_nats": bound,
    }
