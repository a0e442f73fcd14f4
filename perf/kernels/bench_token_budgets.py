"""Time the scores and the moves that shrink a prompt to a token budget, compared with PyTorch.

python -m perf.kernels.bench_token_budgets [--only 8192] [--peers none] [--dry-run]
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from jenga_kernels.attention.token_choice import choose_tokens
from jenga_kernels.attention.token_scores import token_scores
from jenga_kernels.pages.pack_slots import pack_slots
from jenga_kernels.reference.attention import token_scores as scores_reference
from jenga_kernels.reference.pages import pack_slots as pack_reference
from perf.harness.timing import Benchmark, Row, read_roofline

RECENT_TOKENS, SINK_TOKENS, POOL_TOKENS = 32, 4, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetShape:
    """Prompts of one layer that end in a step. Heads are those of Llama 3.1 8B or Gemma 3 270M."""

    name: str
    prompt_tokens: int
    budget_tokens: int
    num_prompts: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_tokens: int = 16
    num_layers: int = 4

    @property
    def key_bytes(self) -> int:
        """Number of bytes of the keys of all prompts."""
        return self.num_prompts * self.prompt_tokens * self.num_kv_heads * self.head_dim * 2

    @property
    def moved_bytes(self) -> int:
        """Number of bytes of the kept keys and values, which are read and written."""
        kept = self.num_prompts * self.budget_tokens * self.num_kv_heads * self.head_dim * 2
        return 4 * kept


SHAPES = (
    BudgetShape(name="B1 8192 tokens to 2048", prompt_tokens=8192, budget_tokens=2048),
    BudgetShape(name="B2 131072 tokens to 2048", prompt_tokens=131_072, budget_tokens=2048),
    BudgetShape(name="B3 16 x 2048 tokens to 512", num_prompts=16, prompt_tokens=2048,
                budget_tokens=512),
    BudgetShape(name="B4 8192 tokens to 1024, one wide head", prompt_tokens=8192,
                budget_tokens=1024, num_heads=4, num_kv_heads=1, head_dim=256),
)  # fmt: skip
DRY_SHAPES = (
    BudgetShape(name="dry", prompt_tokens=96, budget_tokens=48, num_heads=2, num_kv_heads=1),
)


def prepared(
    shape: BudgetShape, device: torch.device
) -> dict[str, dict[str, Callable[[], object]]]:
    """Make random prompts in shuffled pages, and the launches to time.

    Scores stand for those of a step, since timings do not depend on them. A move is repeated on
    what it has moved, with the same sources.
    """
    torch.manual_seed(0)
    pages_each = -(-shape.prompt_tokens // shape.page_tokens)
    num_pages = 1 + shape.num_prompts * pages_each
    rows = (shape.num_layers, shape.num_kv_heads, shape.page_tokens, 2 * shape.head_dim)
    arena = torch.randn(num_pages, *rows, device=device).bfloat16()
    layer = arena[:, 1].transpose(1, 2)
    k_pages, v_pages = layer[..., : shape.head_dim], layer[..., shape.head_dim :]
    ints = {"dtype": torch.int32, "device": device}
    order = 1 + torch.randperm(num_pages - 1, device=device).int()
    table = order.view(shape.num_prompts, pages_each)
    num_queries = shape.num_prompts * RECENT_TOKENS
    q = torch.randn(num_queries, shape.num_heads, shape.head_dim, device=device).bfloat16()
    lse = torch.randn(num_queries, shape.num_heads, device=device)
    ends = torch.arange(1, shape.num_prompts + 1, **ints) * RECENT_TOKENS
    seq_lens = torch.full((shape.num_prompts,), shape.prompt_tokens, **ints)
    num_kept = torch.full((shape.num_prompts,), shape.budget_tokens, **ints)
    scores = torch.rand(shape.num_prompts, shape.num_kv_heads, shape.prompt_tokens, device=device)
    num_queries_each = torch.full((shape.num_prompts,), RECENT_TOKENS, **ints)
    given = (q, k_pages, table, ends, seq_lens, num_queries_each, lse)
    named = {"scale": shape.head_dim**-0.5}
    out = torch.empty_like(scores)

    def choose() -> torch.Tensor:
        return choose_tokens(
            scores,
            seq_lens,
            num_kept,
            max_kept=shape.budget_tokens,
            sink_tokens=SINK_TOKENS,
            recent_tokens=RECENT_TOKENS,
            pool_tokens=POOL_TOKENS,
        )

    moved = (k_pages, v_pages, table, choose(), num_kept, seq_lens)
    return {
        "scores": {
            "jenga": lambda: token_scores(*given, **named, out=out),
            "torch": lambda: scores_reference.token_scores(*given, **named, out=out),
        },
        "choice": {"jenga": choose},
        "move": {
            "jenga": lambda: pack_slots(*moved),
            "torch": lambda: pack_reference.pack_slots(*moved),
        },
    }


def main(arguments: list[str] | None = None) -> None:
    benchmark = Benchmark(
        "bench_token_budgets",
        __doc__ or "",
        ["tests/kernels/attention/test_token_scores.py", "tests/kernels/pages/test_pack_slots.py"],
        arguments,
    )
    for shape in DRY_SHAPES if benchmark.is_dry else SHAPES:
        if not benchmark.wants_shape(shape.name):
            continue
        for operation, by_name in prepared(shape, benchmark.device).items():
            num_bytes = {
                "scores": shape.key_bytes,
                "choice": shape.num_prompts * shape.num_kv_heads * shape.prompt_tokens * 4,
                "move": shape.moved_bytes,
            }[operation]
            for name, launch in by_name.items():
                if name != "jenga" and not benchmark.wants_peer(name):
                    continue
                benchmark.add(
                    Row(
                        shape=f"{operation} {shape.name}",
                        implementation=name,
                        timing=benchmark.measure(launch),
                        num_bytes=num_bytes,
                        details={"page_tokens": shape.page_tokens},
                    )
                )
    benchmark.finish(roofline_gigabytes_per_second=read_roofline(benchmark.options.results))


if __name__ == "__main__":
    main()
