"""Read rows that a GPU has timed, in groups that can share a table and a mean.

Ratios are a peer's time over ours: above 1, ours is faster. Rows are compared only within a commit.
A mean is geometric, over shapes of one group: the same kernel, dtype and kind of work.
"""

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.tables.kernel_sources import changed_since, read_digests

OURS = "jenga"

TOGETHER = {"bench_specialized_prefill": "bench_paged_attention"}
"""File -> the file in whose tables its rows appear."""

SHIPPED = {
    "P12 llama-8b fp8 prefill 8k": "jenga-plain",
    "falcon-h1-7b 1x2048": "jenga-halves",
}
"""Shape -> its row that is called by default, for shapes whose row "jenga" is not.

The row "jenga" of P12 is of a kernel that has been removed since.
"""

UNSHIPPED = "jenga-unshipped"
"""Name in tables of such a shape's row "jenga"."""

STATES = "activations in bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Shapes that are comparable.

    Attributes:
        name: Name of the group, which README's table refers to.
        benchmark: Name of their file of rows.
        title: Title of their table.
        shapes: Pattern of the beginnings of their names.
        setting: Their dtypes, and other things that they have in common.
        kernels: Kernels that serve them, named as in `perf.tables.kernel_sources`.
    """

    name: str
    benchmark: str
    title: str
    shapes: str
    setting: str
    kernels: tuple[str, ...]


GROUPS = (
    Group(
        name="decode",
        benchmark="bench_paged_attention",
        title="Decoding, 16-bit caches",
        shapes=r"D([1-9]|1[0-4]|16|19) |X2 ",
        setting="queries, keys and values in bfloat16, heads of at most 256 elements",
        kernels=("attention_decode",),
    ),
    Group(
        name="wide decode",
        benchmark="bench_paged_attention",
        title="Decoding, 16-bit caches, heads of 512 elements",
        shapes=r"D(17|18|20) ",
        setting="queries, keys and values in bfloat16",
        kernels=("attention_decode",),
    ),
    Group(
        name="small decode",
        benchmark="bench_paged_attention",
        title="Decoding, caches of 8 and 4 bits",
        shapes=r"D(15|2[1-6]) ",
        setting="queries in bfloat16, keys and values as the name says",
        kernels=("attention_decode",),
    ),
    Group(
        name="prompts",
        benchmark="bench_paged_attention",
        title="Prompts, 16-bit caches",
        shapes=r"P([1-7]|9) ",
        setting="queries, keys and values in bfloat16, heads of at most 256 elements",
        kernels=("attention_prefill_hopper",),
    ),
    Group(
        name="other prompts",
        benchmark="bench_paged_attention",
        title="Prompts, heads of 512 elements and caches of 8 and 4 bits",
        shapes=r"P(8|1[0-2]) ",
        setting="queries in bfloat16, keys and values in bfloat16 or as the name says",
        kernels=("attention_prefill",),
    ),
    Group(
        name="mixed",
        benchmark="bench_paged_attention",
        title="A prompt beside decoding requests",
        shapes=r"X1 ",
        setting="queries, keys and values in bfloat16",
        kernels=("attention_decode", "attention_prefill_hopper"),
    ),
    Group(
        name="latents",
        benchmark="bench_latent_attention",
        title="Multi-head latent attention, decoding",
        shapes=r"D17 |L([1-8]|1[01]) ",
        setting="queries and latents in bfloat16",
        kernels=("latent_decode_hopper",),
    ),
    Group(
        name="float8 latents",
        benchmark="bench_latent_attention",
        title="Multi-head latent attention, decoding from float8",
        shapes=r"L9 ",
        setting="queries in bfloat16, latents in float8",
        kernels=("latent_decode_hopper",),
    ),
    Group(
        name="latent prompts",
        benchmark="bench_latent_attention",
        title="Multi-head latent attention, prompts",
        shapes=r"L12 ",
        setting="queries and latents in bfloat16",
        kernels=("latent_prefill",),
    ),
    Group(
        name="scratch",
        benchmark="bench_scratch_attention",
        title="Prompts over caches of 8 and 4 bits, and through a scratch of 16 bits",
        shapes="",
        setting="queries in bfloat16, keys and values as the name says",
        kernels=("attention_prefill", "attention_prefill_hopper", "dequantise_pages"),
    ),
    Group(
        name="token budgets",
        benchmark="bench_token_budgets",
        title="Prompts that shrink to a token budget",
        shapes=r"(scores|choice|move) B",
        setting="queries, keys and values in bfloat16",
        kernels=("token_scores", "pack_slots"),
    ),
    *(
        Group(
            name=f"{tuned} steps {label}",
            benchmark="bench_state_update",
            title=f"One token through Mamba layers, states in {dtype}, {tiles}",
            shapes=rf"({models}).* {label} ",
            setting=f"{STATES}, states in {dtype}",
            kernels=("state_update",),
        )
        for tuned, models, tiles in (
            ("tuned", "nemotron|granite", "for which vLLM has tuned tiles on an H200"),
            ("untuned", "falcon|jamba", "for which vLLM has no tuned tiles"),
        )
        for label, dtype in (("bf16", "bfloat16"), ("f32", "float32"))
    ),
    Group(
        name="scans of heads",
        benchmark="bench_state_scan",
        title="Prompts through Mamba-2 layers",
        shapes="nemotron|granite|falcon",
        setting=f"{STATES}, states in float32",
        kernels=("state_scan_hopper",),
    ),
    Group(
        name="scans of channels",
        benchmark="bench_state_scan",
        title="Prompts through Mamba-1 layers",
        shapes="jamba",
        setting=f"{STATES}, states in float32",
        kernels=("state_scan_channels",),
    ),
    *(
        Group(
            name=f"replay {label}",
            benchmark="bench_state_replay",
            title=f"One token through Mamba-2 layers, states in {dtype} that are seldom written",
            shapes=rf".* {label} b\d+$",
            setting=f"{STATES}, states in {dtype}",
            kernels=("state_replay_token",),
        )
        for label, dtype in (("bf16", "bfloat16"), ("f32", "float32"))
    ),
    Group(
        name="replay with drafts",
        benchmark="bench_state_replay",
        title="Drafted tokens through Mamba-2 layers, states that are seldom written",
        shapes=r".* drafts",
        setting=f"{STATES}, states as the name says",
        kernels=("state_replay",),
    ),
    Group(
        name="delta prompts of heads",
        benchmark="bench_delta",
        title="Prompts through gated delta nets whose heads decay as one",
        shapes=r"qwen3-next.* f32 (\d+x|16 odd)",
        setting=f"{STATES}, states in float32",
        kernels=("delta_scan of heads",),
    ),
    Group(
        name="delta prompts of channels",
        benchmark="bench_delta",
        title="Prompts through gated delta nets whose channels decay on their own",
        shapes=r"kimi-linear.* f32 (\d+x|16 odd)",
        setting=f"{STATES}, states in float32",
        kernels=("delta_scan of channels",),
    ),
    Group(
        name="delta steps",
        benchmark="bench_delta",
        title="One token through gated delta nets",
        shapes=r".* f32 b\d+$",
        setting=f"{STATES}, states in float32",
        kernels=("delta_update",),
    ),
    Group(
        name="delta replay",
        benchmark="bench_delta_replay",
        title="One token through gated delta nets, states that are seldom written",
        shapes="",
        setting=f"{STATES}, states in float32",
        kernels=("delta_replay",),
    ),
    Group(
        name="linear attention",
        benchmark="bench_linear_attention",
        title="Linear attention",
        shapes="",
        setting="activations as the name says, states in bfloat16",
        kernels=("state_update",),
    ),
    Group(
        name="convolution steps",
        benchmark="bench_conv_update",
        title="Causal convolutions, one token",
        shapes=r".* b\d+$",
        setting="all in bfloat16",
        kernels=("conv_update",),
    ),
    Group(
        name="convolutions",
        benchmark="bench_conv_update",
        title="Causal convolutions, prompts",
        shapes=".* prompt",
        setting="all in bfloat16",
        kernels=("causal_conv",),
    ),
    Group(
        name="stores",
        benchmark="bench_kv_store",
        title="Keys and values into pages",
        shapes="",
        setting="keys and values in bfloat16, pages in bfloat16 or as the name says",
        kernels=("kv_store",),
    ),
    Group(
        name="latent stores",
        benchmark="bench_latent_store",
        title="Latents into pages",
        shapes="",
        setting="latents in bfloat16, pages in bfloat16 or as the name says",
        kernels=("latent_store",),
    ),
    Group(
        name="copies",
        benchmark="bench_pages",
        title="Copies of pages",
        shapes="copy",
        setting="",
        kernels=("page_copy",),
    ),
    Group(
        name="clears",
        benchmark="bench_pages",
        title="Clears of pages",
        shapes="clear",
        setting="",
        kernels=("page_clear",),
    ),
    Group(
        name="merges",
        benchmark="bench_pages",
        title="Merges of attention over two sets of keys",
        shapes="merge",
        setting="results in bfloat16",
        kernels=("attention_merge",),
    ),
)
"""Groups in the order of the tables. A row belongs to the first group that matches."""

Row = dict[str, Any]
Rows = dict[str, Row]
"""Implementation -> its row, for one shape at one commit. Ours is the row that is shipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The newest rows of a shape.

    Attributes:
        name: Name of the shape.
        rows: Rows of one commit, including ours.
        changed: Change since that commit, as from `changed_since`.
    """

    name: str
    rows: Rows
    changed: str

    @property
    def commit(self) -> str:
        """Commit of the rows."""
        return self.rows[OURS]["commit"]

    def ratio(self, peer: str) -> float | None:
        """Return a peer's time over ours; None if it has no row."""
        if peer not in self.rows:
            return None
        return self.rows[peer]["p50_us"] / self.rows[OURS]["p50_us"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A peer's times over ours, for some shapes of a group.

    Attributes:
        ratios: One ratio for each shape.
        num_changed: Number of shapes whose kernel, or choice of tiles, has changed since.
        page_tokens: Tokens per page of these shapes, each number once. Empty if they have no pages.
    """

    ratios: tuple[float, ...]
    num_changed: int
    page_tokens: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Geometric mean of the ratios."""
        return statistics.geometric_mean(self.ratios)

    @property
    def median(self) -> float:
        """Median of the ratios. An outlier does not move it."""
        return statistics.median(self.ratios)

    @property
    def num_behind(self) -> int:
        """Number of shapes on which ours is slower, by ratios rounded to two decimals."""
        return sum(round(ratio, 2) < 1 for ratio in self.ratios)


def read_groups(folder: Path) -> dict[str, list[Shape]]:
    """Return group -> its shapes, in natural order, each with its newest rows.

    The newest rows are those of the last commit with a row of ours and one of a peer. If there is
    no such commit, they are those of the last commit with a row of ours.
    """
    newest = [
        (benchmark, name, rows)
        for benchmark, shapes in _by_commit(folder).items()
        for name, commits in shapes.items()
        if (rows := _newest(name, commits))
    ]
    digests = read_digests(folder, sorted({rows[OURS]["commit"] for _, _, rows in newest}))
    found: dict[str, list[Shape]] = {}
    for group in GROUPS:
        for benchmark, name, rows in newest:
            if benchmark != group.benchmark or not re.match(group.shapes, name):
                continue
            changed = changed_since(digests.get(rows[OURS]["commit"]), group.kernels)
            shape = Shape(name=name, rows=rows, changed=changed)
            found.setdefault(group.name, []).append(shape)
    return {name: sorted(shapes, key=_natural) for name, shapes in found.items()}


def compare(shapes: Sequence[Shape], peer: str) -> Comparison | None:
    """Compare a peer with ours over the shapes that it ran; None if it ran none."""
    ran = [shape for shape in shapes if peer in shape.rows]
    if not ran:
        return None
    tokens = {row["page_tokens"] for shape in ran if "page_tokens" in (row := shape.rows[OURS])}
    return Comparison(
        ratios=tuple(ratio for shape in ran if (ratio := shape.ratio(peer)) is not None),
        num_changed=sum(bool(shape.changed) for shape in ran),
        page_tokens=tuple(sorted(tokens)),
    )


def unsteady(folder: Path) -> tuple[str, str, float] | None:
    """Return the shape, the peer and the ratio of the peer's time that varied most between commits.

    Only times of at least 50 us count. The result is None if no peer ran a shape at two commits.
    """
    least_us = 50
    moved: list[tuple[float, str, str]] = []
    for shapes in _by_commit(folder).values():
        for name, commits in shapes.items():
            times_us: dict[str, list[float]] = {}
            for rows in commits.values():
                for peer, row in rows.items():
                    if not peer.startswith(OURS) and row["p50_us"] >= least_us:
                        times_us.setdefault(peer, []).append(row["p50_us"])
            moved += [
                (max(found) / min(found), name, peer)
                for peer, found in times_us.items()
                if len(found) > 1
            ]
    if not moved:
        return None
    ratio, name, peer = max(moved)
    return name, peer, ratio


def _by_commit(folder: Path) -> dict[str, dict[str, dict[str, Rows]]]:
    """Return benchmark -> shape -> commit -> its last rows.

    Commits are in the order of last rows.
    """
    known = {group.benchmark for group in GROUPS}
    found: dict[str, dict[str, dict[str, Rows]]] = {}
    for benchmark, row in _rows(folder):
        if benchmark in known:
            commits = found.setdefault(benchmark, {}).setdefault(row["shape"], {})
            rows = commits.pop(row["commit"], {})
            commits[row["commit"]] = rows | {row["implementation"]: row}
    return found


def _rows(folder: Path) -> Iterator[tuple[str, Row]]:
    for path in sorted(folder.glob("bench_*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield TOGETHER.get(path.stem, path.stem), json.loads(line)


def _newest(shape: str, commits: Mapping[str, Rows]) -> Rows:
    ours = [_as_shipped(shape, rows) for rows in commits.values() if OURS in rows]
    ours.sort(key=lambda rows: rows[OURS]["date"])
    compared = [rows for rows in ours if any(not name.startswith(OURS) for name in rows)]
    return (compared or ours or [{}])[-1]


def _as_shipped(shape: str, rows: Rows) -> Rows:
    shipped = SHIPPED.get(shape)
    if shipped not in rows:
        return rows
    others = {name: row for name, row in rows.items() if name not in {OURS, shipped}}
    return {OURS: rows[shipped], UNSHIPPED: rows[OURS], **others}


def _natural(shape: Shape) -> list[tuple[int, str]]:
    """Return a sort key by which the numbers in names count as numbers."""
    parts = re.findall(r"\d+|\D+", shape.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
