"""Compare the rows of a whole benchmark with its peers."""

import json
import statistics
from pathlib import Path

GROUPS = {"D": "decode", "P": "prefill"}
"""First letter of a row of the goal table -> the kind of step that such rows time."""


def geometric_means(path: Path, commit: str) -> str:
    """Return geometric means of peers' times over ours, for the rows of one commit; one line each.

    For "best peer" the fastest peer of each shape counts. The mean of a single peer covers the
    shapes that it ran, and its line has their number.
    """
    times_us: dict[str, dict[str, float]] = {}  # shape -> implementation -> latest median
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record.get("commit") == commit:
            times_us.setdefault(record["shape"], {})[record["implementation"]] = record["p50_us"]
    lines: list[str] = []
    for letter, what in GROUPS.items():
        ratios: dict[str, list[float]] = {}
        shapes = [shape for shape in times_us if shape[0] == letter and shape[1:2].isdecimal()]
        for shape in shapes:
            peers_us = dict(times_us[shape])
            ours_us = peers_us.pop("jenga", None)
            if ours_us is None or not peers_us:
                continue
            ratios.setdefault("best peer", []).append(min(peers_us.values()) / ours_us)
            for peer, peer_us in peers_us.items():
                ratios.setdefault(peer, []).append(peer_us / ours_us)
        lines += [
            f"{what}: {name} takes {statistics.geometric_mean(found):.2f} times as long "
            f"(geometric mean of {len(found)} of {len(shapes)} shapes)"
            for name, found in ratios.items()
        ]
    return "\n".join(lines)
