"""The planner: it chooses the geometry that is expected to waste least of an arena.

The paper's rule puts all layers of a type into one small page, and makes the large page the exact
least common multiple. On models with recurrent layers this gives large pages of gigabytes, because
layer counts such as 27, 29 or 81 multiply into it. The planner varies two things instead:

- It cuts a state type's layers into runs, each with a page table of its own.
- It allows small pages a bounded padding, so that all of them divide a large page of moderate size.

It minimises the share of held bytes that holds no data, averaged over request lengths, plus
everything that costs a share of the arena:

- padding of small pages, and slots of a request's last page beyond its last token;
- a large page of n > 1 small pages that a request fills partly. The allocator packs requests into
  shared large pages. Of the (n - 1) / 2 small pages expected empty, only `UNSHARED_TAIL` is
  therefore counted per request, and one whole such tail per page table in the arena;
- a large page for the null page, and half of one lost at the arena's end;
- `PAGE_TABLE_COST` for every page table beyond one per layer type.

States kept one to a large page (n = 1) have no such tail. Plans of hybrid models therefore tend to
make the large page one run of states.

Source: Jenga paper, section 4.4, whose rule this replaces.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import count, islice
from math import inf, lcm
from operator import mul

from jenga.checks import check_multiple, check_number, check_positive
from jenga.errors import InvariantError
from jenga.geometry import (
    ALIGNMENT_BYTES,
    TOKENS_PER_PAGE,
    Geometry,
    PageContent,
    check_arena,
    check_page_options,
    place_layers,
    round_up,
)
from jenga.planning.demand import (
    TYPICAL_TOKENS,
    UNSHARED_TAIL,
    check_lengths,
    held_pages,
)
from jenga.spec import ModelSpec

TYPICAL_ARENA_BYTES = 8 << 30
"""Size of the arena that is planned for by default.

It is the memory that a model leaves free on a GPU that it barely fits.
"""

MAX_PADDING = 0.01
"""Share of held bytes that may be padding, at every typical length."""

MAX_PAGE_PADDING = 0.125
"""Most padding of a small page, as a share of its content, however few bytes of it are held."""

PAGE_TABLE_COST = 0.002
"""Waste that one page table less is worth, since each costs the engine host time in every step."""

_STRIDE_ALIGNMENT_BYTES = 128
"""Size of a cache line. Small pages begin on one if that costs no padding."""

_ARENA_LARGE_PAGES = 1.5
"""Number of large pages that an arena loses: the null page, and half a page at its end."""

_NO_LIMIT_BYTES = 1 << 62
"""Limit of a small page whose padding is not limited."""

_MAX_TRIALS = 2048
"""Most large pages tried per way to cut. Plans of one model settle within far fewer."""

_MAX_WAYS = 48
"""Most ways to cut that are tried, those with fewest page tables first."""

_MAX_FEWER_PAGES = 8
"""Most by which a page count is lowered below the one that fits, for a smaller common multiple."""


def plan(  # noqa: PLR0913  all options of a plan
    model: ModelSpec,
    *,
    arena_bytes: int | None = None,
    tokens_per_page: int = TOKENS_PER_PAGE,
    typical_tokens: Sequence[int] = TYPICAL_TOKENS,
    max_padding: float = MAX_PADDING,
    alignment_bytes: int = ALIGNMENT_BYTES,
    large_page_bytes: int | None = None,
) -> Geometry:
    """Return the geometry that is expected to waste least. Equal arguments give equal plans.

    Args:
        model: The layer types.
        arena_bytes: Size of the arena. A large page is a smaller part of a larger arena, so plans
            for different sizes may differ. None plans for `TYPICAL_ARENA_BYTES`.
        tokens_per_page: Number of tokens of a small page of every token type, a multiple of 16.
        typical_tokens: Request lengths over which the expected waste is averaged.
        max_padding: Share of held bytes that may be padding, at each of those lengths. No single
            small page gets more than `MAX_PAGE_PADDING` of its content. If no large page of a
            reasonable size keeps to the limit, the limit is doubled until one does.
        alignment_bytes: Alignment of every layer and small page, a power of two of at least 16.
        large_page_bytes: Size of the large pages, if it is given, as in an arena that several
            engines share. A multiple of 128. Small pages may then have any padding.

    Raises:
        ValueError: An argument is out of its range, the arena holds no geometry of the model, or a
            small page does not fit in the large page that is given.
    """
    check_page_options(tokens_per_page=tokens_per_page, alignment_bytes=alignment_bytes)
    check_lengths(typical_tokens)
    check_number("max_padding", max_padding)
    if not 0 < max_padding <= 1:
        msg = f"max_padding must be in (0, 1], got {max_padding}"
        raise ValueError(msg)
    if arena_bytes is not None:
        check_positive("planner", "arena_bytes", arena_bytes)

    best: _Candidate | None = None
    if large_page_bytes is not None:
        best = _given_candidate(
            model,
            large_page_bytes,
            arena_bytes=arena_bytes or TYPICAL_ARENA_BYTES,
            tokens_per_page=tokens_per_page,
            typical_tokens=typical_tokens,
            alignment_bytes=alignment_bytes,
        )
    padding = max_padding
    while best is None:
        best = _best_candidate(
            model,
            arena_bytes=arena_bytes or TYPICAL_ARENA_BYTES,
            tokens_per_page=tokens_per_page,
            typical_tokens=typical_tokens,
            max_padding=padding,
            alignment_bytes=alignment_bytes,
        )
        padding *= 2
    geometry = Geometry(
        name="planned" if large_page_bytes is None else "given",
        large_page_bytes=best.large_page_bytes,
        page_tables=tuple(
            content.page_table(
                large_page_bytes=best.large_page_bytes,
                small_pages_per_large_page=best.pages_of_content[content.content_bytes],
            )
            for content in best.contents
        ),
    )
    if arena_bytes is not None:
        check_arena(geometry, arena_bytes)
    return geometry


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A geometry that the search found, with the expected waste that the search minimises."""

    cost: float
    large_page_bytes: int
    contents: tuple[PageContent, ...]
    pages_of_content: dict[int, int]  # content_bytes -> small pages per large page


def _best_candidate(
    model: ModelSpec,
    *,
    arena_bytes: int,
    tokens_per_page: int,
    typical_tokens: Sequence[int],
    max_padding: float,
    alignment_bytes: int,
) -> _Candidate | None:
    """Return the cheapest candidate over all ways to cut the model's states. None if none fits."""
    best: _Candidate | None = None
    num_types = sum(layer_type.has_pages for layer_type in model.layer_types)
    ways = _cut_contents(model, tokens_per_page, alignment_bytes)
    for contents in islice(ways, _MAX_WAYS):
        tables_cost = PAGE_TABLE_COST * (len(contents) - num_types)
        if best is not None and tables_cost >= best.cost:
            break
        sizes = _size_costs(contents, arena_bytes=arena_bytes, typical_tokens=typical_tokens)
        search = _Search(
            contents,
            sizes,
            stride_bytes=_stride_alignment(contents, alignment_bytes),
            max_padding=max_padding,
            fixed_cost=tables_cost,
            per_large_page_byte=_ARENA_LARGE_PAGES / arena_bytes,
        )
        best = search.better_than(best)
    return best


def _given_candidate(
    model: ModelSpec,
    large_page_bytes: int,
    *,
    arena_bytes: int,
    tokens_per_page: int,
    typical_tokens: Sequence[int],
    alignment_bytes: int,
) -> _Candidate:
    """Return the cheapest candidate with large pages of a given size.

    Raises:
        ValueError: The size is no multiple of 128, or a small page does not fit.
    """
    check_multiple(
        "large_page_bytes",
        large_page_bytes,
        unit_name="the alignment",
        unit=max(alignment_bytes, _STRIDE_ALIGNMENT_BYTES),
    )
    num_types = sum(layer_type.has_pages for layer_type in model.layer_types)
    ways = list(_cut_contents(model, tokens_per_page, alignment_bytes))
    largest = [max(contents, key=lambda each: each.content_bytes) for contents in ways]
    fitting = [
        contents
        for contents, large in zip(ways, largest, strict=True)
        if large.content_bytes <= large_page_bytes
    ]
    best: _Candidate | None = None
    for contents in fitting[:_MAX_WAYS]:
        search = _Search(
            contents,
            _size_costs(contents, arena_bytes=arena_bytes, typical_tokens=typical_tokens),
            stride_bytes=_stride_alignment(contents, alignment_bytes),
            max_padding=inf,
            fixed_cost=PAGE_TABLE_COST * (len(contents) - num_types),
            per_large_page_byte=_ARENA_LARGE_PAGES / arena_bytes,
        )
        found = search.given(large_page_bytes)
        if best is None or found.cost < best.cost:
            best = found
    if best is None:
        least = min(largest, key=lambda each: each.content_bytes)
        msg = (
            f"large_page_bytes must be at least {least.content_bytes}, a small page of "
            f"{least.layer_type.name!r}, got {large_page_bytes}"
        )
        raise ValueError(msg)
    return best


def _stride_alignment(contents: Sequence[PageContent], alignment_bytes: int) -> int:
    """Return the alignment of small pages: a cache line if every content ends on one anyway."""
    free = all(content.content_bytes % _STRIDE_ALIGNMENT_BYTES == 0 for content in contents)
    return max(alignment_bytes, _STRIDE_ALIGNMENT_BYTES) if free else alignment_bytes


def _cut_contents(
    model: ModelSpec, tokens_per_page: int, alignment_bytes: int
) -> Iterator[tuple[PageContent, ...]]:
    """Yield ways to cut the model's state types, fewest page tables first.

    If there are several state types, their largest runs have about the same size. The number of
    ways then grows with the sum of their layers, and not with the product.
    """
    layer_types = [layer_type for layer_type in model.layer_types if layer_type.has_pages]
    layer_bytes = [
        max(layer.slot_bytes for layer in layer_type.layers) for layer_type in layer_types
    ]
    run_bytes = {
        num_layers * one_layer_bytes
        for layer_type, one_layer_bytes in zip(layer_types, layer_bytes, strict=True)
        if layer_type.is_state
        for num_layers in range(1, len(layer_type.layers) + 1)
    }
    ways = {
        tuple(
            _runs(len(layer_type.layers), max(1, limit_bytes // one_layer_bytes))
            if layer_type.is_state
            else (len(layer_type.layers),)
            for layer_type, one_layer_bytes in zip(layer_types, layer_bytes, strict=True)
        )
        for limit_bytes in run_bytes or {0}
    }
    for way in sorted(ways, key=lambda way: (sum(map(len, way)), way)):
        contents: list[PageContent] = []
        for layer_type, runs in zip(layer_types, way, strict=True):
            layer_start = 0
            for num_layers in runs:
                contents.append(
                    place_layers(
                        layer_type,
                        tokens_per_page=tokens_per_page,
                        alignment_bytes=alignment_bytes,
                        layer_start=layer_start,
                        layer_end=layer_start + num_layers,
                    )
                )
                layer_start += num_layers
        yield tuple(contents)


def _runs(num_layers: int, largest: int) -> tuple[int, ...]:
    """Cut a number of layers into runs whose sizes all divide the largest of them.

    Most runs have one size, and the rest is cut into ever smaller divisors of it. For example, 14 +
    14 + 1 are 29 layers. A large page of a whole number of largest runs then holds a whole number
    of every run, even if the number of layers is prime.
    """
    largest = min(largest, num_layers)
    runs = [largest] * (num_layers // largest)
    rest = num_layers % largest
    divisor = largest
    while rest:
        divisor = next(d for d in range(min(divisor, rest), 0, -1) if largest % d == 0)
        runs += [divisor] * (rest // divisor)
        rest %= divisor
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class _SizeCost:
    """Cost of small pages of one size, for all page tables of that size together."""

    content_bytes: int
    per_padding_byte: tuple[float, ...]  # share of held bytes, per typical length
    per_tail_byte: float  # expected waste of one byte of large page beyond the first small page

    @property
    def mean_per_padding_byte(self) -> float:
        """Expected waste of one byte of padding."""
        return sum(self.per_padding_byte) / len(self.per_padding_byte)

    def padding_limit_bytes(self, max_padding: float) -> int:
        """Return the most padding that this size alone may have."""
        share_limit = max_padding / max(self.per_padding_byte)
        return int(min(share_limit, max(max_padding, MAX_PAGE_PADDING) * self.content_bytes))


def _size_costs(
    contents: Sequence[PageContent], *, arena_bytes: int, typical_tokens: Sequence[int]
) -> list[_SizeCost]:
    """Return the costs of each size, largest first."""
    num_pages = [
        [held_pages(each.layer_type, each.tokens_per_page, length) for each in contents]
        for length in typical_tokens
    ]
    held_bytes = [
        sum(pages * each.content_bytes for pages, each in zip(counts, contents, strict=True))
        for counts in num_pages
    ]
    request_share = sum(1 / held for held in held_bytes) / len(typical_tokens)
    costs: list[_SizeCost] = []
    for content_bytes in sorted({each.content_bytes for each in contents}, reverse=True):
        members = [i for i, each in enumerate(contents) if each.content_bytes == content_bytes]
        num_unpacked = sum(not contents[i].layer_type.is_packed for i in members)
        costs.append(
            _SizeCost(
                content_bytes,
                tuple(
                    sum(counts[i] for i in members) / held
                    for counts, held in zip(num_pages, held_bytes, strict=True)
                ),
                (len(members) / arena_bytes + num_unpacked * UNSHARED_TAIL * request_share) / 2,
            )
        )
    return costs


class _Search:
    """Searches the large pages worth trying for one way to cut the states."""

    def __init__(
        self,
        contents: tuple[PageContent, ...],
        sizes: Sequence[_SizeCost],
        *,
        stride_bytes: int,
        max_padding: float,
        fixed_cost: float,
        per_large_page_byte: float,
    ) -> None:
        self._contents = contents
        self._sizes = sizes
        self._stride_bytes = stride_bytes
        self._max_padding = max_padding
        self._fixed_cost = fixed_cost
        self._per_large_page_byte = per_large_page_byte
        self._limits = [
            _NO_LIMIT_BYTES
            if max_padding == inf
            else size.content_bytes + size.padding_limit_bytes(max_padding)
            for size in sizes
        ]
        self._mean_per_padding_byte = [size.mean_per_padding_byte for size in sizes]

    def better_than(self, best: _Candidate | None) -> _Candidate | None:
        """Return the cheapest candidate, or the given one if none is cheaper."""
        largest = self._sizes[0].content_bytes
        multiples = merge(
            *(
                count(round_up(largest, size.content_bytes), size.content_bytes)
                for size in self._sizes
            )
        )
        for least_bytes in islice(multiples, _MAX_TRIALS):
            if best is not None and self._least_cost(least_bytes) >= best.cost:
                break
            for counts in self._counts(least_bytes):
                large_page_bytes = round_up(least_bytes, lcm(*counts) * self._stride_bytes)
                cost = self._cost(large_page_bytes, counts)
                if cost is not None and (best is None or cost < best.cost):
                    best = _Candidate(
                        cost=cost,
                        large_page_bytes=large_page_bytes,
                        contents=self._contents,
                        pages_of_content={
                            size.content_bytes: num_pages
                            for size, num_pages in zip(self._sizes, counts, strict=True)
                        },
                    )
        return best

    def given(self, large_page_bytes: int) -> _Candidate:
        """Return the candidate with large pages of a given size, in which every content fits."""
        counts = [
            next(
                num_pages
                for num_pages in range(large_page_bytes // size.content_bytes, 0, -1)
                if large_page_bytes % (num_pages * self._stride_bytes) == 0
            )
            for size in self._sizes
        ]
        cost = self._cost(large_page_bytes, counts)
        if cost is None:
            msg = f"a small page of {large_page_bytes // min(counts)} bytes has no content"
            raise InvariantError(msg)
        return _Candidate(
            cost=cost,
            large_page_bytes=large_page_bytes,
            contents=self._contents,
            pages_of_content={
                size.content_bytes: num_pages
                for size, num_pages in zip(self._sizes, counts, strict=True)
            },
        )

    def _least_cost(self, large_page_bytes: int) -> float:
        """Return a lower bound of the cost, which never falls as the large page grows."""
        cost = self._fixed_cost + self._per_large_page_byte * large_page_bytes
        for size, limit_bytes in zip(self._sizes, self._limits, strict=True):
            cost += size.per_tail_byte * max(0, large_page_bytes - limit_bytes)
        return cost

    def _cost(self, large_page_bytes: int, counts: Sequence[int]) -> float | None:
        """Return the expected waste of a large page cut into these counts.

        It is None if there is more padding than allowed.
        """
        cost = self._fixed_cost + self._per_large_page_byte * large_page_bytes
        paddings: list[int] = []
        for index, num_pages in enumerate(counts):
            size = self._sizes[index]
            stride_bytes = large_page_bytes // num_pages
            if stride_bytes > self._limits[index]:
                return None
            paddings.append(stride_bytes - size.content_bytes)
            cost += self._mean_per_padding_byte[index] * paddings[-1]
            cost += size.per_tail_byte * (large_page_bytes - stride_bytes)
        for shares in zip(*(size.per_padding_byte for size in self._sizes), strict=True):
            if sum(map(mul, shares, paddings)) > self._max_padding:
                return None
        return cost

    def _counts(self, least_bytes: int) -> Iterator[list[int]]:
        """Yield small pages per large page, for each size.

        The first answer is as many as fit. The second, if it differs, has counts with fewer
        different prime factors. A large page is a multiple of the counts' least common multiple. If
        counts share their prime factors, rounding stays small even for many sizes.
        """
        most: list[int] = []
        for size, limit_bytes in zip(self._sizes, self._limits, strict=True):
            num_pages = least_bytes // size.content_bytes
            if num_pages * limit_bytes < least_bytes:
                return
            most.append(num_pages)
        yield most
        common = 1
        chosen: list[int] = []
        for highest, limit_bytes in zip(most, self._limits, strict=True):
            lowest = max(-(-least_bytes // limit_bytes), highest - _MAX_FEWER_PAGES)
            num_pages = min(range(highest, lowest - 1, -1), key=lambda option: lcm(common, option))
            common = lcm(common, num_pages)
            chosen.append(num_pages)
        if chosen != most:
            yield chosen
