"""Figure 19 of the paper: caching the vision encoder's output, chunks of 1,024 tokens, one H100.

Without a cache for it, an engine runs the encoder again in every chunk that reads a part of an
image. In the paper, Jenga has 1.88 times the throughput on average. Its numbers are requests per
second from the tables of its artifact, for vLLM and for Jenga.

Three ways are compared:

- The encoder runs again in every chunk, as in the paper's vLLM.
- Embeddings have pages of their own in the arena, and stay cached once they were read.
- Embeddings lie in the pages that the request's keys and values will fill.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jenga.models import known_model
from jenga.sim.batching.arena import Chunk
from jenga.sim.hardware.gpus import find_gpu
from jenga.sim.replays.replay import Clock
from jenga.sim.replays.session import Machine
from jenga.spec import ImageEmbedding
from perf.experiments.frame import Case, Experiment, Found, Outcome

CHUNK_TOKENS = 1024

GPU = "H100-80G"

NOTES = """\
Encoder runs are counted: one for every image and chunk that reads a part of it, or one for every
image. Time is the roofline's with the encoder's matrix products added, at the GPU's peak; weights
of encoders are those of their model cards, patches those of one image at the model's own
resolution, as many tiles as its tokens are. With 20 tokens of an answer, which the paper does not
give: the longer the answer, the less is gained. At the peak an encoder of 0.3 billion parameters
costs little beside a language model of 8, so our ratios are smaller than the paper's, whose engine
ran encoders far below the peak.

"most MB held" are the bytes of embeddings that requests hold at once, those of cached images not
included. In pages of keys and values they take no bytes beside those. The arena has far more room
than these requests need, so both places give the same throughput. No image comes twice here, so
neither what stays cached nor host memory is of use.

vLLM 0.32 has an encoder cache and runs the encoder once for an image, too. "run again" is the
paper's vLLM. In vLLM 0.32 and here, a step reads the whole image of PaliGemma 2; these replays cut
it as the paper's engine did."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """A model's vision encoder.

    Attributes:
        parameters: Number of the encoder's parameters.
        patches_per_token: Number of patches that it reads for one token of the language model.
        paper: The paper's requests per second of vLLM and of Jenga.
    """

    parameters: float
    patches_per_token: float
    paper: tuple[float, float]


ENCODERS = {
    "internvl2-8b": Encoder(0.30e9, 4, (2.21, 3.96)),
    "llava-onevision-7b": Encoder(0.40e9, 1, (0.53, 1.87)),
    "phi-3-vision": Encoder(0.30e9, 4, (2.98, 3.96)),
    "paligemma2-10b": Encoder(0.41e9, 1, (1.43, 2.11)),
}


class EncoderClock:
    """Clock that adds the time of encoder runs to a step.

    Attributes:
        num_runs: Number of encoder runs so far.
    """

    def __init__(self, clock: Clock, encoder: Encoder, *, is_cached: bool) -> None:
        self._clock = clock
        self._encoder = encoder
        self._is_cached = is_cached
        self._operations_per_s = find_gpu(GPU).flops("bfloat16")
        self.num_runs = 0

    def __call__(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a step."""
        seconds = self._clock(chunks)
        for chunk in chunks:
            start, end = chunk.start, chunk.end
            for image in chunk.active.facts.images:
                first, last = image.start_token, image.start_token + image.num_tokens
                reads = start < last and end > first
                if reads and (start <= first or not self._is_cached):
                    patches = image.num_tokens * self._encoder.patches_per_token
                    operations = 2 * self._encoder.parameters * patches
                    seconds += operations / self._operations_per_s
                    self.num_runs += 1
        return seconds


AGAIN, OWN_PAGES, KV_PAGES = "run again", "own pages", "pages of keys and values"
WAYS = (AGAIN, OWN_PAGES, KV_PAGES)
"""Places of embeddings, described in the module's text."""


def cases() -> Iterator[Case]:
    for name, encoder in ENCODERS.items():
        image_tokens = image_type(name).typical_tokens
        for way in WAYS:
            is_cached = way != AGAIN

            def with_encoder(
                machine: Machine, encoder: Encoder = encoder, *, is_cached: bool = is_cached
            ) -> Machine:
                clock = EncoderClock(machine.clock, encoder, is_cached=is_cached)
                return replace(machine, clock=clock)

            yield Case(
                models=(name,),
                trace=f"mmmu-pro:n=100,image_tokens={image_tokens},text_tokens=130,output=20",
                gpu=GPU,
                chunk_tokens=CHUNK_TOKENS,
                prefix_caching=is_cached,
                embeddings_in_kv_pages=way == KV_PAGES,
                managers=("jenga",),
                adapt=with_encoder,
                name=f"{name}, {way}",
            )


def image_type(name: str) -> ImageEmbedding:
    """Return the layer type of a model's image embeddings."""
    for layer_type in known_model(name).spec().layer_types:
        if isinstance(layer_type, ImageEmbedding):
            return layer_type
    msg = f"model must take images, got {name!r}"
    raise ValueError(msg)


def most_held_bytes(outcome: Outcome) -> int:
    """Return the most bytes of embeddings that requests held at once, in pages of their own."""
    return max(
        (step.tables["image"].used_bytes for step in outcome.steps if "image" in step.tables),
        default=0,
    )


def lines(found: Sequence[tuple[Case, Found]]) -> Iterable[Sequence[str]]:
    header = "model|image tokens|embedding MB|most MB held|encoder runs an image|requests/s|E2E s"
    yield f"{header}|paper: requests/s|x|ours: x".split("|")
    again: dict[str, float] = {}
    for case, by_manager in found:
        name, way = case.models[0], case.name.partition(", ")[2]
        encoder, image = ENCODERS[name], image_type(name)
        outcome = by_manager["jenga"]
        clock = case.machine().clock
        runs = clock.num_runs if isinstance(clock, EncoderClock) else 0
        rate = outcome.summary.requests_per_s
        is_cached = way != AGAIN
        if not is_cached:
            again[name] = rate
        yield (
            case.title,
            f"{image.typical_tokens:,}",
            f"{image.typical_tokens * image.layers[0].slot_bytes / 1e6:.1f}",
            f"{most_held_bytes(outcome) / 1e6:.1f}" if is_cached else "-",
            f"{runs / outcome.summary.num_requests:.2f}",
            f"{rate:.2f}",
            outcome.text(lambda row: row.e2e_s.mean, ".2f"),
            f"{encoder.paper[is_cached]}" if way != KV_PAGES else "",
            f"{encoder.paper[1] / encoder.paper[0]:.2f}" if way == OWN_PAGES else "",
            f"{rate / again[name]:.2f}" if is_cached else "",
        )


EXPERIMENT = Experiment(
    name="figure_19",
    description=__doc__ or "",
    cases=cases,
    lines=lines,
    notes=NOTES,
    steps_kept=20,
)

if __name__ == "__main__":
    EXPERIMENT.main()
