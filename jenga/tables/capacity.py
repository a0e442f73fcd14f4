"""The capacity of an arena: the largest requests it can hold with no other request running."""

from collections.abc import Sequence

from jenga.checks import check_count
from jenga.geometry import Geometry
from jenga.policies import LayerPolicy, RequestFacts


class Capacity:
    """Computes how much of the arena one request takes at its peak."""

    __slots__ = ("_geometry", "_num_large_pages", "_policies")

    def __init__(
        self, geometry: Geometry, policies: Sequence[LayerPolicy], num_large_pages: int
    ) -> None:
        self._geometry = geometry
        self._policies = policies
        self._num_large_pages = num_large_pages

    def peak_pages(
        self, num_tokens: int, *, chunk_tokens: int, facts: RequestFacts | None = None
    ) -> tuple[int, ...]:
        """Return the most small pages of each page table that a request holds at a time.

        Args:
            num_tokens: Number of tokens that the request ends with.
            chunk_tokens: Most tokens that a step computes.
            facts: Facts of the request. By default, all its tokens are prompt.

        Raises:
            ValueError: A number is not an integer of at least 0.
        """
        check_count("num_tokens", num_tokens)
        check_count("chunk_tokens", chunk_tokens)
        facts = facts or RequestFacts(prompt_tokens=num_tokens)
        peaks: list[int] = []
        for policy, table in zip(self._policies, self._geometry.page_tables, strict=True):
            page_slots = table.tokens_per_page
            total_slots = policy.update_last_access(facts, 0, num_tokens).stop
            peak_slots = policy.peak_slots(facts, num_tokens, chunk_tokens)
            # The touched slots may begin with the last slot of a page.
            anywhere = (peak_slots - 2) // page_slots + 2 if peak_slots > 1 else peak_slots
            peaks.append(min(-(-total_slots // page_slots), anywhere))
        return tuple(peaks)

    def large_pages(self, small_pages: Sequence[int]) -> int:
        """Return the number of large pages that hold the given small pages of each page table."""
        return sum(
            -(-count // table.small_pages_per_large_page)
            for count, table in zip(small_pages, self._geometry.page_tables, strict=True)
        )

    def can_ever_fit(
        self, num_tokens: int, *, chunk_tokens: int, facts: RequestFacts | None = None
    ) -> bool:
        """Whether a request could reach `num_tokens` tokens with the arena to itself."""
        peaks = self.peak_pages(num_tokens, chunk_tokens=chunk_tokens, facts=facts)
        return self.large_pages(peaks) < self._num_large_pages

    def require_fit(
        self, num_tokens: int, *, chunk_tokens: int, facts: RequestFacts | None = None
    ) -> None:
        """Refuse a request that could never be held.

        Raises:
            ValueError: The request would not fit even with the arena to itself. The message says by
                how much.
        """
        peaks = self.peak_pages(num_tokens, chunk_tokens=chunk_tokens, facts=facts)
        needed = self.large_pages(peaks)
        if needed < self._num_large_pages:
            return
        per_table = ", ".join(
            f"{table.name} {peak}"
            for table, peak in zip(self._geometry.page_tables, peaks, strict=True)
        )
        msg = (
            f"num_tokens must be such that the request fits in {self._num_large_pages - 1} large "
            f"pages of {self._geometry.large_page_bytes} bytes, got {num_tokens}, which takes "
            f"{needed} in steps of {chunk_tokens} tokens (small pages: {per_table})"
        )
        raise ValueError(msg)

    def max_tokens(self, *, chunk_tokens: int, limit_tokens: int) -> int:
        """Return the length of the longest request, all of it prompt, that the arena could hold.

        Args:
            chunk_tokens: Most tokens that a step computes.
            limit_tokens: Upper limit of the answer.

        Raises:
            ValueError: A number is not a positive integer.
        """
        check_count("chunk_tokens", chunk_tokens, least=1)
        check_count("limit_tokens", limit_tokens, least=1)
        low, high = 0, limit_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.can_ever_fit(middle, chunk_tokens=min(chunk_tokens, middle)):
                low = middle
            else:
                high = middle - 1
        return low
