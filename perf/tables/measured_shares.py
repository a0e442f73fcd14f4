"""Measured shares of GPUs' peaks, as the package has them for modelled seconds.

    python -m perf.tables.measured_shares

The shares come from the rows in `perf/results`, and go to `jenga/sim/assets/measured_shares.json`.
A GPU without rows is left out: replays use its peaks.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from jenga.sim.batching.measured import SHARES_FILE, measured
from jenga.sim.batching.step_time import PEAKS, SHARES
from jenga.sim.hardware.gpus import GPUS

RESULTS = Path(__file__).parents[1] / "results"
FILE = Path(__file__).parents[2] / "jenga" / "sim" / "assets" / SHARES_FILE


def shares_text(results: Path) -> str:
    """Return the file's text for rows in a folder."""
    found = {gpu.name: measured(gpu, results) for gpu in GPUS.values()}
    shares = {
        name: {share: asdict(achieved)[share] for share in SHARES}
        for name, achieved in found.items()
        if achieved != PEAKS
    }
    return f"{json.dumps(shares, indent=2)}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    argparse.ArgumentParser(
        prog="python -m perf.tables.measured_shares",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(arguments)
    FILE.write_text(shares_text(RESULTS), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
