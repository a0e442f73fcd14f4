"""What a model's weights leave of a GPU's memory for the arena."""

from collections.abc import Sequence
from dataclasses import dataclass

from jenga.models import ModelFacts
from jenga.sim.hardware.gpus import Gpu
from jenga.spec import check_positive

UTILIZATION = 0.92
"""Share of a GPU's memory that the engine takes: vLLM 0.32's default."""

RESERVED_BYTES = 3 << 29
"""For activations, CUDA graphs and the runtime: an assumption; vLLM measures it as it starts."""

_MAX_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Memory of one rank.

    Attributes:
        gpu: Of each rank.
        ranks: Over which the weights are divided evenly.
        utilization: Share of the GPU's memory that the engine takes.
        total_weight_bytes: Of all models served, all ranks together.
        reserved_bytes: For everything that is neither weights nor arena.
    """

    gpu: Gpu
    ranks: int
    utilization: float
    total_weight_bytes: int
    reserved_bytes: int

    @property
    def usable_bytes(self) -> int:
        """Bytes that the engine takes."""
        return int(self.gpu.memory_bytes * self.utilization)

    @property
    def weight_bytes(self) -> int:
        """Weights of one rank."""
        return -(-self.total_weight_bytes // self.ranks)

    @property
    def arena_bytes(self) -> int:
        """What is left for the arena; below zero where the weights do not fit."""
        return self.usable_bytes - self.weight_bytes - self.reserved_bytes

    @property
    def enough_ranks(self) -> int | None:
        """The least power of two of ranks that leaves an arena at all; None where none does."""
        ranks = 1
        while ranks <= _MAX_RANKS:
            if self.total_weight_bytes // ranks + self.reserved_bytes < self.usable_bytes:
                return ranks
            ranks *= 2
        return None

    def require_arena(self) -> int:
        """The bytes left for the arena.

        Raises:
            ValueError: None are; the message says which number is too large against which.
        """
        if self.arena_bytes > 0:
            return self.arena_bytes
        enough = self.enough_ranks
        way_out = f"; {enough} ranks would fit" if enough and enough > self.ranks else ""
        share = f"1/{self.ranks} of " if self.ranks > 1 else ""
        msg = (
            f"weights do not fit on {self.gpu.name}: {share}{self.total_weight_bytes / 1e9:.1f} GB"
            f"{f' = {self.weight_bytes / 1e9:.1f} GB' if self.ranks > 1 else ''} and "
            f"{self.reserved_bytes / 1e9:.1f} GB set aside for activations are more than "
            f"{self.utilization:g} of its {self.gpu.memory_bytes / 1e9:.1f} GB = "
            f"{self.usable_bytes / 1e9:.1f} GB{way_out}"
        )
        raise ValueError(msg)


def memory_budget(
    models: Sequence[ModelFacts],
    gpu: Gpu,
    *,
    ranks: int = 1,
    weight_bytes: int | None = None,
    utilization: float = UTILIZATION,
    reserved_bytes: int = RESERVED_BYTES,
) -> Budget:
    """What some models, served together, leave of a GPU.

    Args:
        models: Their weights are added up.
        gpu: Of each rank.
        ranks: Over which all weights are divided.
        weight_bytes: Of all models and ranks together, in place of what is known of them.
        utilization: Share of the GPU's memory that the engine takes.
        reserved_bytes: For everything that is neither weights nor arena.

    Raises:
        ValueError: An argument out of its range, or weights of which nothing says the bytes.
    """
    check_positive("budget", "ranks", ranks)
    if not 0 < utilization <= 1:
        msg = f"utilization must be in (0, 1], got {utilization}"
        raise ValueError(msg)
    if weight_bytes is None:
        weight_bytes = 0
        for model in models:
            if model.weight_bytes is None:
                msg = (
                    f"weights of {model.name!r} are not known"
                    f"{f' ({model.parameters_source})' if model.parameters_source else ''}: "
                    f"give their bytes, all ranks together, with --weights BYTES"
                )
                raise ValueError(msg)
            weight_bytes += model.weight_bytes
    return Budget(
        gpu=gpu,
        ranks=ranks,
        utilization=utilization,
        total_weight_bytes=weight_bytes,
        reserved_bytes=reserved_bytes,
    )
