"""Figure 20 of the paper: speculative decoding, a target and its draft in one arena, one H100.

The paper compares three systems:

- vLLM-max has pages as large as the target's for both models.
- vLLM-manual (SmartSpec's) has a page size for each model, and keeps every token of every layer.
- Jenga.

The tables of its artifact have these requests per second, in the same order: Gemma-2 .36, .51, .57;
Ministral .0793, .0834, .0896; character.ai .57, .92, 3.04; Llama 1.15, 1.68, 1.63.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from jenga.sim.replays.session import Machine
from jenga.spec import FullAttention, LayerType, State, TokenBudget
from perf.experiments.frame import Case, Experiment, Found

MMLU = "mmlu-pro:n=100,output=100-500"

# Models, bytes per parameter of the weights, trace, and the paper's requests per second of max,
# manual and Jenga.
PAIRS = (
    (
        ("gemma-2-27b", "gemma-2-2b"),
        1,
        "long-documents:n=40,tokens=6000-8000,output=150-150",
        (0.36, 0.51, 0.57),
    ),
    (
        ("ministral-8b-2410", "llama-3.2-1b"),
        2,
        "long-documents:n=20,tokens=55000-110000,output=50-100",
        (0.0793, 0.0834, 0.0896),
    ),
    (("characterai-llama-70b", "llama-3.2-1b"), 1, MMLU, (0.57, 0.92, 3.04)),
    (("llama-3.1-70b", "llama-3.2-1b"), 1, MMLU, (1.15, 1.68, 1.63)),
)

DRAFT_TOKENS, ACCEPTANCE = 4, 0.7
"""Drafted tokens per step, and the probability that one is accepted. The paper gives neither."""

NOTES = f"""\
"vLLM-max" is "paged" on both models' layers; "vLLM-manual" our manager on both models with every
layer keeping every token in slots of its own size. {DRAFT_TOKENS} tokens are drafted for a step,
each right with a probability of {ACCEPTANCE} if those before it are: an assumption, the paper names
neither. Seconds are those of the target's and the draft's rooflines. The paper's draft for
character.ai has that model's design, here it is Llama 3.2 1B. Weights of one byte a parameter where
the arena would hold no request otherwise; Gemma-2-27B too, which the paper has in two. Waste is
over the whole trace: of character.ai's it is 2 % while requests wait, and large pages half empty
when nobody does."""


def every_token(machine: Machine) -> Machine:
    """Return the machine with attention layers that keep every token."""
    model = machine.model
    kept = tuple(_full(each) for each in model.layer_types)
    return replace(machine, model=replace(model, layer_types=kept))


def _full(layer_type: LayerType) -> LayerType:
    if isinstance(layer_type, State):
        return layer_type
    layers = layer_type.layers
    if isinstance(layer_type, FullAttention | TokenBudget):
        return FullAttention(name=layer_type.name, layers=layers)
    # A layer that reads another layer's keys and values gets its own here.
    own = tuple(
        replace(layer, name=name, readers=())
        for layer in layers
        for name in (layer.name, *layer.readers)
    )
    return FullAttention(name=layer_type.name, layers=own)


SYSTEMS = ("vLLM-max", "vLLM-manual", "Jenga", "vLLM 0.32")


def cases() -> Iterator[Case]:
    for models, bytes_per_parameter, trace, _ in PAIRS:
        case = Case(
            models=models,
            trace=trace,
            bytes_per_parameter=bytes_per_parameter,
            draft_tokens=DRAFT_TOKENS,
            acceptance=ACCEPTANCE,
            prefix_caching=False,
            every=16,
            managers=("paged", "jenga", "vllm"),
        )
        yield case
        yield replace(case, adapt=every_token, managers=("jenga",), name="manual")


def lines(found: Sequence[tuple[Case, Found]]) -> Iterable[Sequence[str]]:
    header = "target and draft|system|paper: requests/s|x vLLM-max|x vLLM-manual"
    yield f"{header}|batch|waste|x vLLM-max|x vLLM-manual".split("|")
    papers = {models: paper for models, *_, paper in PAIRS}
    pairs = zip(found[::2], found[1::2], strict=True)
    for (case, both), (_, manual) in pairs:
        outcomes = dict(
            zip(
                SYSTEMS,
                (both.get("paged"), manual.get("jenga"), both.get("jenga"), both.get("vllm")),
                strict=True,
            )
        )
        paper = dict(zip(SYSTEMS, papers[case.models], strict=False))
        rates = {
            system: outcome.summary.requests_per_s
            for system, outcome in outcomes.items()
            if outcome is not None and not outcome.refusal
        }
        for system, outcome in outcomes.items():
            if outcome is None:
                continue
            yield (
                "+".join(case.models),
                system,
                f"{paper[system]}" if system in paper else "-",
                *(_ratio(paper, system, base) for base in SYSTEMS[:2]),
                outcome.text(lambda row: row.mean_decode_batch, ".2f"),
                # Layers that keep every token do not know which tokens are needed.
                "-" if system == "vLLM-manual" else outcome.text(lambda row: row.waste, ".1%"),
                *(_ratio(rates, system, base) for base in SYSTEMS[:2]),
            )


def _ratio(rates: dict[str, float], system: str, base: str) -> str:
    return f"{rates[system] / rates[base]:.2f}" if {system, base} <= rates.keys() else "-"


EXPERIMENT = Experiment(
    name="figure_20",
    description=__doc__ or "",
    cases=cases,
    lines=lines,
    notes=NOTES,
    steps_kept=20,
)

if __name__ == "__main__":
    EXPERIMENT.main()
