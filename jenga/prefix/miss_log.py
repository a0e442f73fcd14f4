"""A record of every look-up at an admission: tokens found, and why the others were not found.

Content that was lost is remembered in a ghost list, which holds names of content and no content.
The list is limited. The oldest loss is forgotten first, and its content then counts as never
cached.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from jenga.page_ids import SmallPageId
from jenga.policies import NEVER, RequestFacts
from jenga.prefix.host_cache import HostCache
from jenga.tables.page_table import Table
from jenga.tables.request import NO_LIMIT, PrefixHit

LOOSE = "loose"
"""Cause of the loss of loose pages, which no checkpoint needs. They have no `Eviction`."""

MOST_GHOSTS = 1 << 17
"""Number of lost pages that are remembered, and of lost checkpoints."""

MOST_LOSSES = 8
"""Number of losses that a record names."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of content.

    Attributes:
        cause: An `EvictionCause`, or `LOOSE`.
        taken: Number of calls of `Manager.take_evictions` before it. The next call returns its
            `Eviction`.
        left_by: Name of the request that left the checkpoint. Empty for loose pages.
        for_request: Name of the request whose allocation needed the memory, or empty.
    """

    cause: str
    taken: int
    left_by: str
    for_request: str


@dataclass(frozen=True, slots=True)
class MissedTokens:
    """Tokens of one look-up that were not found because of one loss.

    Attributes:
        loss: The loss.
        evicted_tokens: Number of tokens whose content it took.
        bare_tokens: Number of tokens whose content is cached, and whose checkpoint it took.
    """

    loss: Loss
    evicted_tokens: int
    bare_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A look-up of a prefix. Tokens not found are never, evicted or bare.

    Keys and values decide which of the three a token is, because they are kept for the whole
    prefix. Without full attention those of the first other layer type decide. With states alone
    nothing is bare, and the tokens up to the last lost state are evicted.

    Attributes:
        request: Name of the request.
        asked_tokens: Number of tokens that it could have started from.
        found_tokens: Number of tokens that it starts from.
        table: Name of the page table that allowed no longer prefix. Empty if none did.
        layer_type: Name of its layer type, or empty.
        never_tokens: Number of tokens that were never cached, as far as losses are remembered.
        evicted_tokens: Number of tokens that were cached and were lost.
        bare_tokens: Number of tokens that are cached, but that no request can start from: no
            checkpoint is there, or an earlier part is missing.
        losses: Losses that took the evicted tokens, or the checkpoint of bare ones. They are the
            `MOST_LOSSES` with most tokens, most tokens first.
    """

    request: str
    asked_tokens: int
    found_tokens: int
    table: str
    layer_type: str
    never_tokens: int
    evicted_tokens: int
    bare_tokens: int
    losses: tuple[MissedTokens, ...]


def missed_tokens(miss: Miss) -> dict[str, int]:
    """Return reason -> tokens of a look-up that were not found.

    The reasons are `never cached`, `evicted: CAUSE`, `evicted: other` for losses that the record
    does not name, `cached, checkpoint lost: CAUSE`, and `cached, no checkpoint`. Reasons without
    tokens are left out.
    """
    tokens = Counter({"never cached": miss.never_tokens})
    for each in miss.losses:
        tokens[f"evicted: {each.loss.cause}"] += each.evicted_tokens
        tokens[f"cached, checkpoint lost: {each.loss.cause}"] += each.bare_tokens
    tokens["evicted: other"] += miss.evicted_tokens - sum(
        each.evicted_tokens for each in miss.losses
    )
    tokens["cached, no checkpoint"] += miss.bare_tokens - sum(
        each.bare_tokens for each in miss.losses
    )
    return dict(+tokens)


class MissLog:
    """Look-ups since the last call of `take_misses`, and the ghost list."""

    __slots__ = (
        "_checkpoints",
        "_content",
        "_guide",
        "_hash_tokens",
        "_host",
        "_lost_keys",
        "_misses",
        "_most_ghosts",
        "_tables",
    )

    def __init__(
        self,
        tables: Sequence[Table],
        host: HostCache | None,
        *,
        hash_tokens: int,
        most_ghosts: int = MOST_GHOSTS,
    ) -> None:
        """Start without look-ups and losses.

        Args:
            tables: All page tables.
            host: Host memory, where evicted pages can still be found. None if there is none.
            hash_tokens: Number of tokens that each further prefix hash covers.
            most_ghosts: Number of lost pages that are remembered, and of lost checkpoints.
        """
        self._tables = tables
        self._host = host
        self._hash_tokens = hash_tokens
        self._most_ghosts = most_ghosts
        self._guide = _guide_of(tables)
        self._content: OrderedDict[Hashable, Loss] = OrderedDict()
        self._checkpoints: OrderedDict[Hashable, Loss] = OrderedDict()
        self._lost_keys: list[Hashable] = []
        self._misses: list[Miss] = []

    # Losses

    def lose_pages(self, table: Table, pages: Sequence[SmallPageId]) -> None:
        """Note pages that leave the cache. The next call of `record_loss` gives the reason.

        Args:
            table: Page table of the pages. Its cache still has their keys.
            pages: The pages.
        """
        if table is self._guide:
            self._lost_keys += table.keys_of(pages)

    def record_loss(self, loss: Loss, checkpoint: Hashable = None) -> None:
        """Remember a loss.

        Args:
            loss: Reason for the loss of all pages noted since the last call.
            checkpoint: Hash of the prefix up to the checkpoint that was lost. None for no
                checkpoint.
        """
        if checkpoint is not None:
            self._remember(self._checkpoints, [checkpoint], loss)
        if self._lost_keys:
            self._remember(self._content, self._lost_keys, loss)
            self._lost_keys.clear()

    def _remember(
        self, ghosts: OrderedDict[Hashable, Loss], keys: Sequence[Hashable], loss: Loss
    ) -> None:
        for key in keys:
            ghosts[key] = loss
            ghosts.move_to_end(key)
        while len(ghosts) > self._most_ghosts:
            ghosts.popitem(last=False)

    def clear(self) -> None:
        """Forget all losses, because the cache was reset."""
        self._content.clear()
        self._checkpoints.clear()
        self._lost_keys.clear()

    # Look-ups

    def record_lookup(self, request_id: str, hit: PrefixHit) -> None:
        """Add the look-up of a request that is being admitted.

        Args:
            request_id: Name of the request.
            hit: Its hit. Nothing was evicted since it was looked up.
        """
        evicted: Counter[Loss] = Counter()
        bare: Counter[Loss] = Counter()
        num_bare, missing = 0, hit.asked_tokens - hit.num_tokens
        if missing:
            end_tokens, lost = self._last_checkpoint(hit)
            for start, stop, key in self._pages_after(hit):
                if self._is_cached(key):
                    num_bare += stop - start
                    if lost is not None and stop <= end_tokens:
                        bare[lost] += stop - start
                elif (loss := self._content.get(key)) is not None:
                    evicted[loss] += stop - start
            if self._guide is None and lost is not None:
                evicted[lost] = end_tokens - hit.num_tokens
        losses = [MissedTokens(loss, evicted[loss], bare[loss]) for loss in {**evicted, **bare}]
        losses.sort(key=lambda each: each.evicted_tokens + each.bare_tokens, reverse=True)
        limit = self._tables[hit.limit].spec if missing and hit.limit != NO_LIMIT else None
        num_evicted = evicted.total()
        self._misses.append(
            Miss(
                request=request_id,
                asked_tokens=hit.asked_tokens,
                found_tokens=hit.num_tokens,
                table=limit.name if limit is not None else "",
                layer_type=limit.layer_type.name if limit is not None else "",
                never_tokens=missing - num_evicted - num_bare,
                evicted_tokens=num_evicted,
                bare_tokens=num_bare,
                losses=tuple(losses[:MOST_LOSSES]),
            )
        )

    def _last_checkpoint(self, hit: PrefixHit) -> tuple[int, Loss | None]:
        """Return the last checkpoint on a text that was lost: its tokens, and its loss."""
        get, hashes, hash_tokens = self._checkpoints.get, hit.prefix_hashes, self._hash_tokens
        first = hit.num_tokens // hash_tokens
        for index in range(hit.asked_tokens // hash_tokens - 1, first - 1, -1):
            if (loss := get(hashes[index])) is not None:
                return (index + 1) * hash_tokens, loss
        return hit.num_tokens, None

    def _pages_after(self, hit: PrefixHit) -> Iterator[tuple[int, int, Hashable]]:
        """Yield first token, end and key of each page that a hit lacks, of the guiding table."""
        if self._guide is None:
            return
        slots = self._guide.grain.page_slots
        first, end = hit.num_tokens // slots, -(-hit.asked_tokens // slots)
        keys = self._guide.policy.content_keys(
            hit.facts, hit.prefix_hashes, self._guide.grain, range(first, end)
        )
        for number, key in enumerate(keys, first):
            start, stop = number * slots, (number + 1) * slots
            yield max(start, hit.num_tokens), min(stop, hit.asked_tokens), key

    def _is_cached(self, key: Hashable) -> bool:
        """Whether the guiding table's content lies in the arena, or in host memory."""
        if self._guide is None:
            return False
        if self._guide.page_of(key) is not None:
            return True
        return self._host is not None and self._host.page_of(self._guide, key) is not None

    def take_misses(self) -> list[Miss]:
        """Return all look-ups since the last call, in order."""
        misses = self._misses
        self._misses = []
        return misses


def _guide_of(tables: Sequence[Table]) -> Table | None:
    """Return the page table whose content tells what was cached: one of whole prefixes, if any."""
    of_text = [
        table
        for table in tables
        if not table.policy.is_overwritten and not table.policy.names_images
    ]
    facts = RequestFacts(prompt_tokens=1)
    for table in of_text:
        if table.policy.next_release(facts, 0, table.grain.page_slots) == NEVER:
            return table
    return of_text[0] if of_text else None
