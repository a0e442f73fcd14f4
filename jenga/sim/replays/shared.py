"""Several replays at once, on one GPU and over one modelled time."""

from collections.abc import Callable, Sequence

from jenga.sim.batching.arena import Chunk
from jenga.sim.replays.replay import Clock, Replay


class SharedGpu:
    """A GPU that computes the steps of several engines one after another.

    Attributes:
        now_s: Modelled time of the engine whose turn it is, in seconds.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._free_s = 0.0  # when all steps that were scheduled are over

    def clock(self, alone: Clock) -> Clock:
        """Return a clock whose steps wait until those of other engines are over.

        Args:
            alone: Clock of an engine that has the GPU to itself.
        """

        def seconds(chunks: Sequence[Chunk]) -> float:
            self._free_s = max(self._free_s, self.now_s) + alone(chunks)
            return self._free_s - self.now_s

        return seconds


def run_together(
    replays: Sequence[Replay], gpu: SharedGpu, on_turn: Callable[[], None] | None = None
) -> None:
    """Run replays to their ends, always the one that is earliest in modelled time.

    Args:
        replays: The replays. Their clocks are of `gpu`.
        gpu: The GPU.
        on_turn: Called before each turn of an engine.
    """
    turns = {replay: iter(replay) for replay in replays}
    while True:
        waiting = [
            (next_s, i) for i, replay in enumerate(replays) if (next_s := replay.next_s) is not None
        ]
        if not waiting:
            return
        next_s, index = min(waiting)
        gpu.now_s = max(gpu.now_s, next_s)
        if on_turn is not None:
            on_turn()
        next(turns[replays[index]], None)
