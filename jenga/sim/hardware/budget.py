"""Memory that a model's weights leave for the arena on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

from jenga.models import ModelFacts
from jenga.models.weights import INDEX
from jenga.sim.hardware.gpus import Gpu
from jenga.spec import check_positive

UTILIZATION = 0.92
"""Share of a GPU's memory that the engine takes, 0 to 1: vLLM 0.32's default."""

RESERVED_BYTES = 3 << 29
"""Bytes for activations, CUDA graphs and the runtime. It is assumed; vLLM measures it at start."""

_MAX_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Memory of one rank.

    Attributes:
        gpu: GPU of each rank.
        ranks: Number of ranks over which the weights are divided evenly.
        utilization: Share of the GPU's memory that the engine takes, 0 to 1.
        total_weight_bytes: Bytes of the weights of all served models, all ranks together.
        reserved_bytes: Bytes for everything that is neither weights nor arena.
    """

    gpu: Gpu
    ranks: int
    utilization: float
    total_weight_bytes: int
    reserved_bytes: int

    @property
    def usable_bytes(self) -> int:
        """Number of bytes that the engine takes."""
        return int(self.gpu.memory_bytes * self.utilization)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of one rank."""
        return -(-self.total_weight_bytes // self.ranks)

    @property
    def arena_bytes(self) -> int:
        """Bytes left for the arena. Negative if the weights do not fit."""
        return self.usable_bytes - self.weight_bytes - self.reserved_bytes

    @property
    def enough_ranks(self) -> int | None:
        """Least power of two of ranks that leaves bytes for an arena. None if no number does."""
        ranks = 1
        while ranks <= _MAX_RANKS:
            if self.total_weight_bytes // ranks + self.reserved_bytes < self.usable_bytes:
                return ranks
            ranks *= 2
        return None

    def require_arena(self) -> int:
        """Return the bytes left for the arena.

        Raises:
            ValueError: No bytes are left. The message compares the numbers.
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
    """Return the memory of a rank that serves some models together.

    Args:
        models: Models whose weights are added up.
        gpu: GPU of each rank.
        ranks: Number of ranks over which all weights are divided.
        weight_bytes: Bytes of all models and ranks together. None for the known bytes of the
            models.
        utilization: Share of the GPU's memory that the engine takes, 0 to 1.
        reserved_bytes: Bytes for everything that is neither weights nor arena.

    Raises:
        ValueError: An argument is out of range, or the bytes of a model's weights are unknown.
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
                    f"give their bytes, all ranks together, with --weights BYTES, such as 65.5GB: "
                    f"the size of the weight files, or metadata.total_size in the model's "
                    f"{INDEX}, which is read if it is beside config.json"
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
