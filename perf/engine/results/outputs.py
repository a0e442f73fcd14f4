"""Compare the tokens of two engines: their first difference, and how near a tie it is."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_JUDGED = 16
"""Number of requests whose first difference is examined for a near tie."""

NEAR_TIE_NATS = {"bfloat16": 0.25, "float16": 0.05, "float32": 2e-3}
"""Element type -> largest difference of two log-probabilities, in nats, that rounding can reverse.

Logits near 5 have a spacing of 2^-5 in bfloat16, so the bound is eight such steps. In float16 the
spacing is 2^-8. Between two float32 engines a difference of 0.001 was observed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Outputs of a run compared with those of another run.

    Attributes:
        num_same: Number of requests with the same prompt and the same output.
        num_parted: Number of requests with the same prompt and different outputs.
        num_other_prompts: Number of requests whose prompts differ, because an earlier answer in
            them differs.
        partings: One entry for each request of `num_parted`, ordered by position. It has the
            `index` of the request, the `position` of the first different token, and the two
            `tokens` there.
    """

    num_same: int
    num_parted: int
    num_other_prompts: int
    partings: tuple[dict[str, Any], ...]


def compare(theirs: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> Comparison:
    """Compare outputs, request by request.

    Args:
        theirs: `prompt` and `tokens` of each request.
        ours: The same from another run of the same workload.

    Raises:
        ValueError: The runs have different numbers of requests.
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
    """Read the outputs of a run from the file that an engine's process wrote."""
    return json.loads(path.read_text())


def verdict(gaps: Sequence[float | None], dtype: str) -> dict[str, Any]:
    """Count the differences that are near ties.

    Args:
        gaps: Absolute differences of log-probabilities, in nats. None means that a token was not
            among the likeliest ones, so that the difference is unknown.
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
