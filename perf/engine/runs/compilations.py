"""Count an engine's compilations, so that runs that waited for a compiler can be recognized."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class Counts:
    """Numbers of compilations so far.

    Attributes:
        num_compiled: Number of Triton kernels that were compiled.
        compile_s: Seconds that their compilation took.
        num_loaded: Number of Triton kernels that were loaded from the cache on disk, some
            milliseconds each.
        num_tuned: Number of tile configurations that the autotuner timed.
        num_graphs: Number of graphs that torch compiled.
        num_captured: Number of CUDA graphs that were captured.
    """

    num_compiled: int = 0
    compile_s: float = 0.0
    num_loaded: int = 0
    num_tuned: int = 0
    num_graphs: int = 0
    num_captured: int = 0

    @property
    def is_disturbed(self) -> bool:
        """Whether anything was compiled, tuned or captured."""
        return any((self.num_compiled, self.num_tuned, self.num_graphs, self.num_captured))

    def since(self, before: "Counts") -> "Counts":
        """Return the differences from an earlier count."""
        earlier = asdict(before)
        return Counts(**{name: value - earlier[name] for name, value in asdict(self).items()})


class Watch:
    """Counter of compilations by Triton, torch and vLLM in this process, from its creation on."""

    def __init__(self) -> None:
        from triton import knobs
        from triton.runtime.autotuner import Autotuner

        self._counts = Counts()
        listener, bench = knobs.compilation.listener, Autotuner._bench

        def compiled(*, times: Any, cache_hit: bool, **others: Any) -> None:  # noqa: ANN401
            if cache_hit:
                self._counts.num_loaded += 1
            else:
                self._counts.num_compiled += 1
                self._counts.compile_s += times.total / 1e6
            if listener is not None:
                listener(times=times, cache_hit=cache_hit, **others)

        def counted_bench(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            self._counts.num_tuned += 1
            return bench(*arguments, **options)

        knobs.compilation.listener = compiled
        Autotuner._bench = counted_bench

    def counts(self) -> Counts:
        """Return the counts so far."""
        from vllm.compilation.counter import compilation_counter

        counts = Counts(**asdict(self._counts))
        counts.num_graphs = compilation_counter.num_backend_compilations
        counts.num_captured = compilation_counter.num_cudagraph_captured
        return counts
