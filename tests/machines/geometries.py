"""Small geometries with every layer type, for machines that try everything."""

from math import lcm

from docs.examples.paper_window import PaperWindow
from jenga.geometry import Geometry, PageTable
from jenga.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    ImageEmbedding,
    Layer,
    LayerType,
    SlidingWindow,
    State,
    TokenBudget,
)


def _layer(name, slot_bytes):
    return (Layer(name=name, slot_bytes=slot_bytes),)


def page_table(layer_type: LayerType, tokens_per_page: int, pages_per_large: int, padding: int = 0):
    layers = len(layer_type.layers)
    slot_bytes = sum(layer.slot_bytes for layer in layer_type.layers)
    return PageTable(
        layer_type=layer_type,
        layer_start=0,
        layer_end=layers,
        tokens_per_page=tokens_per_page,
        small_page_bytes=slot_bytes * tokens_per_page + padding,
        layer_offset_bytes=(0,) * layers,
        small_pages_per_large_page=pages_per_large,
    )


def geometry(name, *page_tables) -> Geometry:
    large = {t.small_page_bytes * t.small_pages_per_large_page for t in page_tables}
    assert len(large) == 1, large
    return Geometry(name=name, large_page_bytes=large.pop(), page_tables=page_tables)


def in_whole_pages(cut: Geometry, num_tokens: int | None) -> int | None:
    """Round a number of tokens up to whole pages of all page tables."""
    if num_tokens is None:
        return None
    unit = lcm(*(table.tokens_per_page for table in cut.page_tables))
    return -(-num_tokens // unit) * unit


def full(name="full", slot_bytes=16, tokens=4, per_large=1, padding=0, *, holds_images=False):
    layer_type = FullAttention(
        name=name, layers=_layer(name, slot_bytes), holds_images=holds_images
    )
    return page_table(layer_type, tokens, per_large, padding)


def sliding(name="sliding", slot_bytes=16, tokens=4, per_large=1, window=6):
    layer_type = SlidingWindow(name=name, layers=_layer(name, slot_bytes), window_tokens=window)
    return page_table(layer_type, tokens, per_large)


def paper_window(name="own", slot_bytes=16, tokens=4, per_large=1, window=6):
    """Get a page table of the documented example: a layer type from outside the package."""
    layer_type = PaperWindow(name=name, layers=_layer(name, slot_bytes), window_tokens=window)
    return page_table(layer_type, tokens, per_large)


def chunked(name="chunked", slot_bytes=16, tokens=4, per_large=1, chunk=8):
    layer_type = ChunkedLocal(name=name, layers=_layer(name, slot_bytes), chunk_tokens=chunk)
    return page_table(layer_type, tokens, per_large)


def state(name="state", slot_bytes=192, per_large=1, draft_tokens=0):
    layer_type = State(name=name, layers=_layer(name, slot_bytes), draft_tokens=draft_tokens)
    return page_table(layer_type, 1, per_large)


def cross(name="cross", slot_bytes=24, tokens=4, per_large=1):
    return page_table(CrossAttention(name=name, layers=_layer(name, slot_bytes)), tokens, per_large)


def embedding(name="embedding", slot_bytes=96, tokens=4, per_large=1):
    return page_table(ImageEmbedding(name=name, layers=_layer(name, slot_bytes)), tokens, per_large)


def budget(name="budget", slot_bytes=32, tokens=4, per_large=1):
    layer_type = TokenBudget(
        name=name,
        layers=_layer(name, slot_bytes),
        mean_budget_tokens=20,
        recent_tokens=4,
        steepness=4,
        layer_index=1,
        num_layers=3,
    )
    return page_table(layer_type, tokens, per_large)


def growing_budget(name, slot_bytes, per_large, budget_tokens):
    layer_type = TokenBudget(
        name=name,
        layers=_layer(name, slot_bytes),
        mean_budget_tokens=budget_tokens,
        recent_tokens=2,
        steepness=1,
        layer_index=0,
        num_layers=1,
        output_tokens=5,
    )
    return page_table(layer_type, 4, per_large)


HOMOGENEOUS = geometry("homogeneous", full())
WINDOWED = geometry(
    "windowed", full(slot_bytes=48, per_large=2), sliding(slot_bytes=32, per_large=3)
)
HYBRID = geometry(
    "hybrid",
    full(slot_bytes=16, per_large=12),
    state("state[0]", slot_bytes=768),
    state("state[1]", slot_bytes=384, per_large=2),
)
MIXED = geometry(
    "mixed",
    full(slot_bytes=16, per_large=6),
    sliding(slot_bytes=32, per_large=3, window=6),
    chunked(slot_bytes=24, per_large=4, chunk=8),
    state(slot_bytes=192, per_large=2),
    full("draft", slot_bytes=96, per_large=1),
)
DRAFTING = geometry(
    "drafting",
    full(slot_bytes=16, per_large=12),
    state(slot_bytes=192, per_large=4, draft_tokens=3),
    sliding(slot_bytes=32, per_large=6, window=6),
)
ALL = (HOMOGENEOUS, WINDOWED, HYBRID, MIXED, DRAFTING)

ATTENTION = geometry(
    "attention_of_two_models",
    full(slot_bytes=16, tokens=4, per_large=6),
    sliding(slot_bytes=16, tokens=2, per_large=12, window=7),
    chunked(slot_bytes=48, tokens=4, per_large=2, chunk=12),
    full("draft", slot_bytes=16, tokens=8, per_large=3),
)
STATES = geometry(
    "states_of_two_sizes",
    full(slot_bytes=16, tokens=4, per_large=6),
    state("state[0]", slot_bytes=384, per_large=1),
    state("state[1]", slot_bytes=96, per_large=4),
    sliding(slot_bytes=32, tokens=4, per_large=3, window=5),
)
DRAFTED = geometry(
    "states_of_drafted_tokens",
    full("draft", slot_bytes=24, tokens=4, per_large=4),
    full(slot_bytes=16, tokens=4, per_large=6),
    state(slot_bytes=96, per_large=4, draft_tokens=2),
    sliding(slot_bytes=32, tokens=4, per_large=3, window=5),
)
VISION = geometry(
    "vision",
    full(slot_bytes=16, tokens=4, per_large=6),
    cross(slot_bytes=24, tokens=4, per_large=4),
    embedding(slot_bytes=96, tokens=4, per_large=1),
    sliding(slot_bytes=48, tokens=4, per_large=2, window=9),
)
ENCODED = geometry(
    "large_pages_of_one_image",
    cross(slot_bytes=96, tokens=4, per_large=1),
    embedding(slot_bytes=24, tokens=4, per_large=4),
    full(slot_bytes=16, tokens=4, per_large=6),
)
HOSTING = geometry(
    "images_in_slots_of_tokens",
    full(slot_bytes=16, tokens=8, per_large=6, holds_images=True),
    sliding(slot_bytes=48, tokens=4, per_large=4, window=9),
    full("draft", slot_bytes=24, tokens=4, per_large=8),
)
BUDGETED = geometry(
    "budgeted",
    full(slot_bytes=16, tokens=4, per_large=6),
    budget(slot_bytes=32, tokens=4, per_large=3),
    sliding(slot_bytes=96, tokens=4, per_large=1, window=6),
    full("draft", slot_bytes=24, tokens=4, per_large=4),
)
GROWING_BUDGETS = geometry(
    "growing_budgets",
    full(slot_bytes=16, tokens=4, per_large=6),
    growing_budget("small budget", slot_bytes=32, per_large=3, budget_tokens=8),
    growing_budget("large budget", slot_bytes=24, per_large=4, budget_tokens=17),
    sliding(slot_bytes=96, tokens=4, per_large=1, window=6),
)
OUTSIDE = geometry(
    "type_from_outside",
    full(slot_bytes=16, tokens=4, per_large=6),
    paper_window(slot_bytes=32, tokens=4, per_large=3, window=7),
    state(slot_bytes=96, per_large=4),
)
CACHED = (
    *(HOMOGENEOUS, ATTENTION, STATES, DRAFTED, VISION, ENCODED, HOSTING),
    *(BUDGETED, GROWING_BUDGETS, OUTSIDE),
)
