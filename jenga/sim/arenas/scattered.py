"""The baseline in which small pages are scattered over pieces of their greatest common divisor."""

from dataclasses import dataclass

from jenga.errors import InvariantError
from jenga.policies import LayerPolicy
from jenga.prefix.eviction_log import Eviction
from jenga.prefix.miss_log import Miss
from jenga.sim.arenas.baseline_geometries import GcdPages
from jenga.sim.batching.arena import NOTHING_MOVED, ActiveRequest, ArenaBytes, MovedBytes
from jenga.sim.results.rows import TableBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Small pages of one layer type.

    Attributes:
        name: Name of the layer type.
        policy: Policy that says which slots a request touches.
        page_slots: Slots of a page.
        slot_bytes: Bytes of a slot in all layers of the type.
        pieces: Number of pieces in a page. They may lie anywhere.
    """

    name: str
    policy: LayerPolicy
    page_slots: int
    slot_bytes: int
    pieces: int


class ScatteredArena:
    """A pool of pieces without padding and without large pages. No kernel could read its pages.

    It shows what memory alone would allow. It keeps nothing for later requests.
    """

    leaves_room = True

    def __init__(self, gcd_pages: GcdPages, arena_bytes: int, *, in_flight_tokens: int = 0) -> None:
        """Begin with all pieces free.

        Args:
            gcd_pages: Pieces, and the small pages made of them.
            arena_bytes: Bytes of all pieces.
            in_flight_tokens: Most tokens of a request that steps in flight compute, if these are
                more than the tokens of the step that admits the request.

        Raises:
            ValueError: The arena cannot hold one page of each layer type.
        """
        self._piece_bytes = gcd_pages.piece_bytes
        self._in_flight_tokens = in_flight_tokens
        self._num_pieces = arena_bytes // gcd_pages.piece_bytes
        self._kinds: list[_Kind] = []
        for content, pieces in zip(
            gcd_pages.contents, gcd_pages.pieces_per_small_page, strict=True
        ):
            if pieces > self._num_pieces:
                msg = (
                    f"arena_bytes must hold a small page of {content.content_bytes} bytes of layer "
                    f"type {content.layer_type.name!r}, got {arena_bytes}"
                )
                raise ValueError(msg)
            table = content.page_table(
                large_page_bytes=content.content_bytes, small_pages_per_large_page=1
            )
            self._kinds.append(
                _Kind(
                    name=table.name,
                    policy=table.policy(),
                    page_slots=table.tokens_per_page,
                    slot_bytes=table.payload_bytes // table.tokens_per_page,
                    pieces=pieces,
                )
            )
        self._held: dict[str, int] = {}  # request -> pieces
        self._num_held = 0

    @property
    def num_evicted(self) -> int:
        """See `Arena`. Nothing is cached."""
        return 0

    def record_evictions(self) -> None:
        """See `Memory`. There are no checkpoints."""

    def take_evictions(self) -> list[Eviction]:
        """See `Memory`. There are no checkpoints."""
        return []

    def take_misses(self) -> list[Miss]:
        """See `Memory`. There are no checkpoints."""
        return []

    @property
    def moved_bytes(self) -> MovedBytes:
        """See `Arena`. There is no host memory."""
        return NOTHING_MOVED

    def new_step(self) -> None:
        """See `Arena`."""

    def waits(self, active: ActiveRequest, *, first: bool = False) -> None:
        """See `Arena`. Nothing depends on it."""

    def refuse(self, active: ActiveRequest) -> None:
        """See `Arena`. Nothing depends on it."""

    def find(self, _active: ActiveRequest) -> int:
        """See `Arena`."""
        return 0

    def chunk_tokens(self, _active: ActiveRequest, _start: int, num_tokens: int) -> int:
        """See `Arena`. A chunk may have any length."""
        return num_tokens

    def rest_tokens(self, active: ActiveRequest) -> int | None:
        """See `Arena`."""
        return active.num_tokens

    def admit(
        self,
        active: ActiveRequest,
        _hit_tokens: int,
        num_tokens: int,
        lookahead_tokens: int = 0,
    ) -> bool:
        """See `Arena`."""
        num_tokens += lookahead_tokens
        if self._num_held + self._peak_pieces(active, num_tokens) > self._num_pieces:
            return False
        self._held[active.name] = 0
        return self.grow(active, num_tokens)

    def _peak_pieces(self, active: ActiveRequest, chunk_tokens: int) -> int:
        """Return the most pieces that a request holds until all its known tokens are computed."""
        facts, num_tokens = active.facts, active.num_tokens
        chunk_tokens = max(chunk_tokens, min(self._in_flight_tokens, num_tokens))
        num_pieces = 0
        for kind in self._kinds:
            most = -(-kind.policy.update_last_access(facts, 0, num_tokens).stop // kind.page_slots)
            slots = kind.policy.peak_slots(facts, num_tokens, chunk_tokens)
            # The touched slots may begin with the last slot of a page.
            anywhere = (slots - 2) // kind.page_slots + 2 if slots > 1 else slots
            num_pieces += min(most, anywhere) * kind.pieces
        return num_pieces

    def grow(self, active: ActiveRequest, num_tokens: int, lookahead_tokens: int = 0) -> bool:
        """See `Arena`."""
        held, start, end = self._held[active.name], active.num_processed, num_tokens
        wanted = 0
        for kind in self._kinds:
            touched = kind.policy.update_last_access(active.facts, start, end + lookahead_tokens)
            wanted += _num_pages(touched, kind.page_slots) * kind.pieces
        if self._num_held - held + wanted > self._num_pieces:
            return False
        self._held[active.name] = wanted
        self._num_held += wanted - held
        return True

    def end_step(self) -> None:
        """See `Arena`."""

    def settle(self, active: ActiveRequest, num_tokens: int, *, ends_prompt: bool = False) -> None:
        """See `Arena`. Nothing is kept."""

    def free(self, active: ActiveRequest) -> None:
        """See `Arena`."""
        self._num_held -= self._held.pop(active.name)

    def memory(self, running: list[ActiveRequest]) -> ArenaBytes:
        """See `Arena`."""
        tables: dict[str, TableBytes] = {}
        for kind in self._kinds:
            num_pages = num_slots = 0
            for active in running:
                start, end = active.num_processed, active.num_computed
                touched = kind.policy.update_last_access(active.facts, start, end)
                first, last = touched.start // kind.page_slots, touched.stop // kind.page_slots
                unfilled = kind.policy.unfilled_slots(active.facts, range(first, last + 1))
                num_pages += _num_pages(touched, kind.page_slots)
                num_slots += len(touched) - sum(unfilled.values())
            page_bytes = kind.pieces * self._piece_bytes
            used_bytes = num_slots * kind.slot_bytes
            tables[kind.name] = TableBytes(
                used_bytes=used_bytes, useless_bytes=num_pages * page_bytes - used_bytes
            )
        return ArenaBytes(
            used_bytes=sum(table.used_bytes for table in tables.values()),
            useless_bytes=sum(table.useless_bytes for table in tables.values()),
            cached_bytes=0,
            empty_bytes=0,
            unallocated_bytes=(self._num_pieces - self._num_held) * self._piece_bytes,
            tables=tables,
        )

    def check(self) -> None:
        """See `Arena`."""
        if self._num_held != sum(self._held.values()) or self._num_held > self._num_pieces:
            msg = f"{self._num_held} of {self._num_pieces} pieces are held, by {self._held}"
            raise InvariantError(msg)


def _num_pages(touched: range, page_slots: int) -> int:
    if not touched:
        return 0
    return -(-touched.stop // page_slots) - touched.start // page_slots
