"""Ways to compute prompts of gated delta nets: which kernels run, and how prompts are cut."""

from dataclasses import dataclass

from jenga_kernels.checks.tensors import check_at_least
from jenga_kernels.triton.lib.tiles import Machine
from jenga_kernels.triton.recurrent.tiles import (
    CHUNK_TOKENS,
    LEAST_SAVED,
    SEGMENT_COST_TOKENS,
)

SEGMENT_STATES_SHARE = 0.6
"""Work for the rows of a state that a segment leaves, relative to their scan: three of five matrix
products. Counted, not measured."""

SCAN_VALUES = 32
"""Values of a program that scans chunks of 16-bit elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPlan:
    """How `delta_scan` computes prompts. By default, two kernels prepare chunks and scan them.

    No GPU has timed the other ways. So an operation uses them only if its caller asks for them.

    Attributes:
        is_fused: Whether one kernel prepares each chunk where it scans it. Chunks then need no
            memory, but those of a request are prepared one after another. A kernel like this exists
            only for heads that decay as one.
        segment_tokens: Most tokens of a segment, a multiple of 64. Longer requests are cut into
            segments, which are scanned in parallel. Checkpoints may move the ends of segments by up
            to one chunk. None cuts no request.
    """

    is_fused: bool = False
    segment_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check the tokens of a segment.

        Raises:
            ValueError: If they are too few, no multiple of 64, or given for a fused kernel.
        """
        if self.segment_tokens is None:
            return
        if self.is_fused:
            msg = f"segment_tokens must be None for a fused kernel, got {self.segment_tokens}"
            raise ValueError(msg)
        check_at_least("segment_tokens", self.segment_tokens, 1)
        if self.segment_tokens % CHUNK_TOKENS:
            msg = f"segment_tokens must be a multiple of {CHUNK_TOKENS}, got {self.segment_tokens}"
            raise ValueError(msg)

    def num_segments(self, num_requests: int, num_tokens: int) -> int | None:
        """Upper bound of a call's segments for any lengths of its requests; None without cuts.

        Args:
            num_requests: Number of requests.
            num_tokens: Number of tokens of all requests.
        """
        if self.segment_tokens is None or self.segment_tokens >= num_tokens:
            return None
        return num_requests + (num_tokens - 1) // self.segment_tokens


def estimated_delta_plan(
    machine: Machine,
    *,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    num_requests: int,
    num_tokens: int,
    is_per_channel: bool,
) -> DeltaPlan:
    """Estimate the fastest way. It is an estimate from counts, so no operation calls this.

    A fused kernel needs a program, which has a whole head, for every multiprocessor. If the scan's
    programs would leave half of the multiprocessors idle, requests are cut.

    Args:
        machine: GPU that runs the kernels.
        num_v_heads: Number of heads of values.
        head_k_dim: Elements of a key.
        head_v_dim: Elements of a value.
        num_requests: Number of requests, at least one.
        num_tokens: Number of tokens of all requests, which are taken to be equally long.
        is_per_channel: Whether every key channel has its own decay.
    """
    if not is_per_channel and num_v_heads * num_requests >= machine.num_processors:
        return DeltaPlan(is_fused=True)
    num_programs = num_v_heads * -(-head_v_dim // SCAN_VALUES)
    num_cuts = machine.num_processors // num_programs - num_requests
    if num_cuts < 1:
        return DeltaPlan()
    segment_tokens = -(-num_tokens // (num_cuts + 1))
    segment_tokens = -(-segment_tokens // CHUNK_TOKENS) * CHUNK_TOKENS
    rows = (head_v_dim + head_k_dim) / head_v_dim
    cut_tokens = (1 + SEGMENT_STATES_SHARE * rows) * segment_tokens + SEGMENT_COST_TOKENS
    if cut_tokens > (1 - LEAST_SAVED) * num_tokens / num_requests:
        return DeltaPlan()
    return DeltaPlan(segment_tokens=segment_tokens)
