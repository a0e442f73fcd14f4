"""Division of a model's layers among the ranks of a pipeline, as in vLLM."""

import re

from jenga.models import ModelFacts
from jenga.spec import ModelSpec, check_positive

_LAYER_NUMBER = re.compile(r"layers\.(\d+)")


def layers_per_rank(num_layers: int, num_ranks: int) -> tuple[int, ...]:
    """Divide a model's layers evenly. The ranks before the last get the layers that are left over.

    Raises:
        ValueError: A number is not positive, or there are more ranks than layers.

    Source: vLLM 0.33, `vllm.distributed.utils.get_pp_indices`.
    """
    check_positive("pipeline", "num_layers", num_layers)
    check_positive("pipeline", "num_ranks", num_ranks)
    if num_ranks > num_layers:
        msg = f"pipeline ranks must be at most the {num_layers} layers, got {num_ranks}"
        raise ValueError(msg)
    even, left_over = divmod(num_layers, num_ranks)
    counts = [even] * num_ranks
    # One rank leaves no layer over. Of several, the last gets none of them, as it has the head.
    for rank in range(num_ranks - 1 - left_over, num_ranks - 1):
        counts[rank] += 1
    return tuple(counts)


def stages_of(facts: ModelFacts, model: ModelSpec, num_ranks: int) -> tuple[frozenset[str], ...]:
    """Return the names of the layers of each rank. Layers without a number are on the first rank.

    Args:
        facts: The model, for its number of layers, because some layers store nothing.
        model: The model's layer types.
        num_ranks: Number of ranks of the pipeline.

    Raises:
        ValueError: See `layers_per_rank`. Or a layer's number is beyond the layers that are
            divided.
    """
    ends = [
        sum(counts[: rank + 1])
        for counts in [layers_per_rank(facts.num_layers, num_ranks)]
        for rank in range(num_ranks)
    ]
    stages: list[set[str]] = [set() for _ in range(num_ranks)]
    for name in {layer.name for layer_type in model.layer_types for layer in layer_type.layers}:
        found = _LAYER_NUMBER.search(name)
        number = int(found.group(1)) if found else 0
        if number >= ends[-1]:
            msg = f"pipeline ranks divide {ends[-1]} layers of {model.name!r}, and not {name!r}"
            raise ValueError(msg)
        stages[next(rank for rank, end in enumerate(ends) if number < end)].add(name)
    return tuple(frozenset(names) for names in stages)
