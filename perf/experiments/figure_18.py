"""Figure 18 of the paper: prefix caching, hit rate and throughput against the number of articles.

Each of several long articles gets eight questions, in random order, all there from the start. The
paper reports a hit rate of up to 1.60 times, and a throughput of up to 1.77 times, that of vLLM
0.6.3 ("paged").
"""

from collections.abc import Iterable, Iterator, Sequence

from jenga.eviction.known import DEFAULT_POLICY
from jenga.sim.results.rows import SummaryRow
from perf.experiments.frame import MANAGERS, Case, Experiment, Found

ARTICLES = (1, 3, 6, 12, 24)

MODELS = (
    ("ministral-8b-2410", "H100-80G", 1),
    ("llama-3.1-8b", "H100-80G", 1),
    ("gpt-oss-20b", "H100-80G", 1),
    ("gemma-3-27b", "H200", 1),
    ("llama-4-scout", "H200", 2),
    ("jamba-1.5-mini", "H100-80G", 2),
    ("nemotron-h-8b", "H100-80G", 1),
    ("qwen3-next-80b-a3b", "H200", 2),
)
"""Models, each with a GPU and the number of ranks that hold it."""

OTHERS = ("vllm", "static", "max", "lcm")

OURS = tuple(name for name in MANAGERS if name.startswith("jenga"))

NOTES = """\
Percent of prompt tokens hit. Ours runs with each of its eviction policies, the default first. The
ratios "hit x" and "tok/s x" are those of the default over the paper's baseline "paged" and over
vLLM's manager of today, seconds modelled. "bound": the most that any eviction could hit in that
arena, one request after another; "all": a cache without end. The baselines but vLLM run on our
manager with "lru".
The paper gives neither its articles' lengths nor its questions: 30,000 tokens and eight here."""


def cases() -> Iterator[Case]:
    for model, gpu, ranks in MODELS:
        for num_articles in ARTICLES:
            yield Case(
                models=(model,),
                trace=f"articles:n={num_articles},questions=8,tokens=30000",
                gpu=gpu,
                ranks=ranks,
                with_bounds=True,
                every=16,
            )


def hit_percent(row: SummaryRow) -> float:
    return 100 * row.hit_rate


def lines(found: Sequence[tuple[Case, Found]]) -> Iterable[Sequence[str]]:
    policies = [name.partition(" ")[2] or DEFAULT_POLICY for name in OURS]
    header = f"model|GPUs|n|paged|vllm|static|max|lcm|{'|'.join(policies)}|bound|all"
    yield f"{header}|hit x paged|x vllm|tok/s x paged|x vllm".split("|")
    yield ("paper", "", "most", *("" for _ in range(7 + len(OURS))), "1.60", "", "1.77", "")
    for case, by_manager in found:
        gpus = case.gpu if case.ranks == 1 else f"{case.ranks} {case.gpu}"
        ours = [by_manager[name] for name in OURS if name in by_manager]
        ours = [outcome for outcome in ours if not outcome.refusal]
        options = ours[0].row.options if ours else {}
        yield (
            case.title,
            gpus,
            case.trace.partition("n=")[2].partition(",")[0],
            *(_hits(by_manager, name) for name in ("paged", *OTHERS, *OURS)),
            *(
                f"{100 * options[name]:.1f}" if name in options else "-"
                for name in ("best_eviction_hit_rate", "unlimited_hit_rate")
            ),
            *(_ratio(by_manager, name, "hit_rate") for name in ("paged", "vllm")),
            *(_ratio(by_manager, name, "tokens_per_s") for name in ("paged", "vllm")),
        )


def _hits(by_manager: Found, name: str) -> str:
    return by_manager[name].text(hit_percent, ".1f") if name in by_manager else "-"


def _ratio(by_manager: Found, name: str, field: str) -> str:
    """Return our number, with the default policy, over another manager's.

    It is "-" if one of them does not run, or if the other's number is 0.
    """
    pair = [by_manager.get(each) for each in (OURS[0], name)]
    values = [
        getattr(each.summary, field) for each in pair if each is not None and not each.refusal
    ]
    return f"{values[0] / values[1]:.2f}" if len(values) == len(pair) and values[1] else "-"


EXPERIMENT = Experiment(
    name="figure_18",
    description=__doc__ or "",
    cases=cases,
    lines=lines,
    notes=NOTES,
    steps_kept=12,
    # Without "gcd", which caches no prefixes: its large pages belong to one request.
    managers=tuple(name for name in MANAGERS if name != "gcd"),
)

if __name__ == "__main__":
    EXPERIMENT.main()
