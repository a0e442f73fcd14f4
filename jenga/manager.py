"""Requests in, page tables out: the one place that knows allocator, prefix cache and policies."""

from collections.abc import Sequence

from jenga.allocator import Allocator
from jenga.capacity import Capacity
from jenga.errors import InvariantError, OutOfPagesError
from jenga.eviction_order import EvictionOrder, LeastRecentlyUsed
from jenga.geometry import Geometry
from jenga.large_pages import NULL_PAGE
from jenga.policies import ALL_PAGES, Grain, RequestFacts, policy_of
from jenga.prefix_cache import PrefixCache
from jenga.request import MISSING, NO_LIMIT, PageCopy, PrefixHit, Request
from jenga.stats import (
    CacheReport,
    Evictions,
    MemoryReport,
    TouchedPages,
    count_dead_slots,
    table_memory,
)


class Manager:
    """Gives requests their page tables out of one arena.

    Attributes:
        geometry: How the arena is cut.
        num_large_pages: Large pages of the arena, the null page included.
        capacity: What the arena can hold at all.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        num_large_pages: int,
        prefix_caching: bool = False,
        hash_tokens: int = 16,
        eviction_order: EvictionOrder | None = None,
    ) -> None:
        """An empty arena.

        Args:
            geometry: How the arena is cut.
            num_large_pages: Large pages of the arena, the null page included.
            prefix_caching: Whether pages of finished requests are kept for others.
            hash_tokens: Tokens that each further prefix hash covers.
            eviction_order: What goes first when space is needed; least recently used by default.

        Raises:
            ValueError: The arena is too small for the null page and one large page per page table,
                or pages and prefix hashes do not divide each other.
        """
        tables = geometry.page_tables
        if num_large_pages < 1 + len(tables):
            msg = (
                f"num_large_pages must be at least {1 + len(tables)}, the null page and one for "
                f"each of {len(tables)} page tables, got {num_large_pages}"
            )
            raise ValueError(msg)
        if hash_tokens <= 0:
            msg = f"hash_tokens must be a positive integer, got {hash_tokens}"
            raise ValueError(msg)
        self.geometry = geometry
        self.num_large_pages = num_large_pages
        self._policies = tuple(policy_of(table) for table in tables)
        self.capacity = Capacity(geometry, self._policies, num_large_pages)
        self._hash_tokens = hash_tokens
        self._page_slots = tuple(table.tokens_per_page for table in tables)
        self._grains = tuple(
            Grain(page_slots=page_slots, hash_tokens=hash_tokens) for page_slots in self._page_slots
        )
        self._caches: tuple[PrefixCache, ...] | None = None
        if prefix_caching:
            self._check_grains()
            self._caches = tuple(
                PrefixCache(num_large_pages * table.small_pages_per_large_page) for table in tables
            )
        self._order = eviction_order or LeastRecentlyUsed()
        self._allocator = Allocator(
            [table.small_pages_per_large_page for table in tables], num_large_pages
        )
        self._requests: dict[str, Request] = {}
        self._copies: list[PageCopy] = []
        self._step = self._num_owners = self._num_forgotten = 0
        # Tokens after which some page table may have one more page to commit.
        self._commit_tokens = min([hash_tokens, *self._page_slots])
        self._asked_tokens = self._hit_tokens = 0
        self._limited_tokens = [0] * len(tables)
        self._no_pages: tuple[list[int], ...] = tuple([] for _ in tables)
        self._copied = tuple(
            index for index, policy in enumerate(self._policies) if policy.is_overwritten
        )

    def _check_grains(self) -> None:
        for table, policy, grain in zip(
            self.geometry.page_tables, self._policies, self._grains, strict=True
        ):
            larger = max(grain.page_slots, grain.hash_tokens)
            if not policy.is_overwritten and larger % min(grain.page_slots, grain.hash_tokens):
                msg = (
                    f"hash_tokens must divide, or be a multiple of, the {grain.page_slots} tokens "
                    f"per page of {table.name!r}, got {grain.hash_tokens}"
                )
                raise ValueError(msg)

    # Time

    def new_step(self) -> None:
        """Note that a step of the engine begins: what it touches is younger than all before."""
        self._step += 1

    # The life of a request

    def lookup(
        self,
        prefix_hashes: Sequence[bytes],
        *,
        max_tokens: int,
        facts: RequestFacts | None = None,
    ) -> PrefixHit:
        """The longest cached prefix that every page table can go on from; changes nothing.

        Args:
            prefix_hashes: Hash i is of the request's first `(i + 1) * hash_tokens` tokens.
            max_tokens: The answer is no longer.
            facts: Of the request; by default that its prompt has one token more.
        """
        facts = facts or RequestFacts(prompt_tokens=max_tokens + 1)
        longest = max(0, min(max_tokens // self._hash_tokens, len(prefix_hashes)))
        num_tokens = longest * self._hash_tokens
        branch_tokens, limit = 0, NO_LIMIT
        pages: tuple[Sequence[int], ...] = self._no_pages
        if self._caches is not None and num_tokens + len(facts.images):
            hashes = prefix_hashes[:longest]
            found = [
                cache.find(policy.content_keys(facts, hashes, grain, ALL_PAGES))
                for cache, policy, grain in zip(
                    self._caches, self._policies, self._grains, strict=True
                )
            ]
            kept = [index for index in range(len(found)) if index not in self._copied]
            branch_tokens, limit = self._longest_prefix(facts, found, kept, num_tokens, limit)
            every = range(len(found))
            num_tokens, limit = self._longest_prefix(facts, found, every, branch_tokens, limit)
            pages = tuple(self._reused(index, facts, found[index], num_tokens) for index in every)
        else:
            num_tokens = 0
        return PrefixHit(
            num_tokens=num_tokens,
            asked_tokens=longest * self._hash_tokens,
            branch_tokens=branch_tokens,
            limit=limit,
            pages=pages,
            facts=facts,
            prefix_hashes=prefix_hashes,
            num_forgotten=self._num_forgotten,
        )

    def _longest_prefix(
        self,
        facts: RequestFacts,
        found: Sequence[Sequence[int | None]],
        indices: Sequence[int],
        num_tokens: int,
        limit: int,
    ) -> tuple[int, int]:
        """The longest prefix that these page tables agree on, and which shortened it last."""
        agreed = 0
        while agreed < len(indices):
            for index in indices:
                possible = self._policies[index].get_possible_prefix(
                    facts, found[index], self._grains[index], num_tokens
                )
                if possible < num_tokens:
                    num_tokens, limit, agreed = possible, index, 1
                else:
                    agreed += 1
                if agreed == len(indices):
                    break
        return num_tokens, limit

    def _reused(
        self, index: int, facts: RequestFacts, found: Sequence[int | None], num_tokens: int
    ) -> list[int]:
        """The page table of a request that goes on from a prefix, or the pages to copy from."""
        policy, grain = self._policies[index], self._grains[index]
        numbers = policy.reused_pages(facts, found, grain, num_tokens)
        if not numbers:
            return []
        reused = [found[number] or MISSING for number in numbers]
        if policy.is_overwritten:
            return reused
        touched = policy.update_last_access(facts, num_tokens, num_tokens)
        given_up = min(numbers[0], touched.start // grain.page_slots)
        pages = [NULL_PAGE] * given_up + [MISSING] * (numbers[-1] + 1 - given_up)
        if len(numbers) == numbers[-1] + 1 - given_up:
            pages[given_up:] = reused
        else:
            for number, page in zip(numbers, reused, strict=True):
                pages[number] = page
        return pages

    def allocate(  # noqa: PLR0913  one question of the engine, all facts of one step
        self,
        request_id: str,
        *,
        num_tokens: int,
        num_processed_tokens: int = 0,
        hit: PrefixHit | None = None,
        facts: RequestFacts | None = None,
        full_tokens: int = 0,
        reserve_large_pages: int = 0,
    ) -> tuple[list[int], ...]:
        """Give a request slots for its first `num_tokens` tokens; the first call admits it.

        Pages that no token from `num_processed_tokens` on reads are given up first, even if the
        request is then refused.

        Args:
            request_id: Who asks.
            num_tokens: Tokens to have slots for, those already there included.
            num_processed_tokens: Tokens whose step is over.
            hit: At admission, the prefix to start from; its tokens count as processed.
            facts: At admission, of the request; by default those of the hit, or that its prompt
                has `full_tokens` or `num_tokens` tokens, whichever are more.
            full_tokens: If positive, refuse unless so many tokens could be held now, in steps as
                large as this one.
            reserve_large_pages: Large pages that must stay empty or reclaimable.

        Returns:
            Page ids appended to each page table; at admission with a hit, those not of the hit.
            Not to be written.

        Raises:
            OutOfPagesError: They cannot be had; nothing else was changed.
            ValueError: An argument contradicts the others or what is known of the request.
        """
        request = self._requests.get(request_id)
        if (
            request is not None
            and num_tokens < request.grows_at
            and num_processed_tokens < request.shrinks_at
            and not full_tokens
        ):
            request.num_tokens = num_tokens
            request.num_processed_tokens = num_processed_tokens
            request.step = self._step
            return self._no_pages
        self._check_tokens(request_id, request, hit, num_tokens, num_processed_tokens)
        if request is None:
            prompt_tokens = max(full_tokens, num_tokens)
            request = self._new_request(hit, facts, prompt_tokens=prompt_tokens)
            request.owner = self._num_owners + 1
        if hit is not None:
            num_processed_tokens = hit.num_tokens
            self._start_from(request, hit, num_tokens)
        self._give_up(request, num_processed_tokens)
        needs = self._needs(request, num_tokens, from_hit=hit is not None)
        self._require(request_id, request, needs, hit, reserve_large_pages)
        if full_tokens > num_tokens:
            further = self._further_pages(request, hit, needs, num_tokens, full_tokens)
            self._require(request_id, request, further, hit, reserve_large_pages)
        if hit is not None:
            self._share(request, hit)
        request.num_tokens = num_tokens
        request.expected_tokens = max(request.expected_tokens, full_tokens, num_tokens)
        request.step = self._step
        new_pages = self._take(request, needs, reserve_large_pages)
        if request_id not in self._requests:
            self._num_owners += 1
            self._requests[request_id] = request
            if hit is not None:
                self._copy_hit(request, hit)
        return new_pages

    def _check_tokens(
        self,
        request_id: str,
        request: Request | None,
        hit: PrefixHit | None,
        num_tokens: int,
        num_processed_tokens: int,
    ) -> None:
        if num_tokens <= 0 or not 0 <= num_processed_tokens <= num_tokens:
            msg = (
                f"num_tokens must be positive and no less than num_processed_tokens, "
                f"got {num_tokens} and {num_processed_tokens}"
            )
            raise ValueError(msg)
        if request is not None and num_processed_tokens > request.num_tokens:
            msg = (
                f"num_processed_tokens must not exceed the {request.num_tokens} tokens that "
                f"request {request_id!r} has slots for, got {num_processed_tokens}"
            )
            raise ValueError(msg)
        if hit is None:
            return
        if request is not None:
            msg = f"hit must be None for request {request_id!r}, which is running"
            raise ValueError(msg)
        if num_processed_tokens not in (0, hit.num_tokens) or num_tokens <= hit.num_tokens:
            msg = (
                f"num_processed_tokens must be 0 or the {hit.num_tokens} tokens of the hit, and "
                f"num_tokens more than those, got {num_processed_tokens} and {num_tokens}"
            )
            raise ValueError(msg)
        if hit.num_forgotten != self._num_forgotten:
            again = self.lookup(hit.prefix_hashes, max_tokens=hit.asked_tokens, facts=hit.facts)
            if again.num_tokens != hit.num_tokens or again.pages != hit.pages:
                msg = (
                    f"hit must be looked up again: of its {hit.num_tokens} tokens "
                    f"{again.num_tokens} are still cached in the same pages"
                )
                raise ValueError(msg)

    def _new_request(
        self, hit: PrefixHit | None, facts: RequestFacts | None, *, prompt_tokens: int
    ) -> Request:
        if facts is None:
            facts = RequestFacts(prompt_tokens=prompt_tokens) if hit is None else hit.facts
        elif hit is not None and facts != hit.facts:
            msg = f"facts must be those of the hit, {hit.facts}, got {facts}"
            raise ValueError(msg)
        return Request(facts, len(self._policies))

    def _start_from(self, request: Request, hit: PrefixHit, num_tokens: int) -> None:
        """Give a new request the page tables of its hit, as far as this step touches them."""
        request.branch_tokens = hit.branch_tokens
        for index, pages in enumerate(hit.pages):
            if pages and not self._policies[index].is_overwritten:
                touched = self._policies[index].update_last_access(
                    request.facts, hit.num_tokens, num_tokens
                )
                request.pages[index] = list(pages[: -(-touched.stop // self._page_slots[index])])
                if MISSING not in request.pages[index]:
                    request.committed[index] = len(request.pages[index])

    def _hit_pages(self, request: Request) -> list[list[int]]:
        """Pages of a request that begins, all of them found in the cache."""
        return [[page for page in pages if page > 0] for pages in request.pages]

    def _give_up(self, request: Request, num_processed_tokens: int) -> None:
        """Give up pages out of every future window, at the time of the step before."""
        request.num_processed_tokens = num_processed_tokens
        if num_processed_tokens < request.shrinks_at:
            return
        facts = request.facts
        num_tokens = max(request.num_tokens, num_processed_tokens)
        for index, policy in enumerate(self._policies):
            if num_processed_tokens < request.releases[index]:
                continue
            page_slots = self._page_slots[index]
            touched = policy.update_last_access(facts, num_processed_tokens, num_tokens)
            pages = request.pages[index]
            start, end = touched.start // page_slots, -(-touched.stop // page_slots)
            first = request.first[index]
            # A request may come in with its first tokens out of the window already.
            pages.extend([NULL_PAGE] * (start - len(pages)))
            if first < start:
                if pages[start - 1] != NULL_PAGE:
                    self._leave(index, request, range(first, start))
                pages[first:start] = [NULL_PAGE] * (start - first)
                request.first[index] = start
            if request.num_tokens and end < len(pages):
                self._leave(index, request, range(max(start, end), len(pages)))
                del pages[end:]
            request.releases[index] = policy.next_release(facts, num_processed_tokens, page_slots)
            request.max_tokens[index] = policy.max_tokens(
                facts, num_processed_tokens, len(pages) * page_slots
            )
        request.shrinks_at = min(request.releases)
        request.grows_at = min(request.max_tokens) + 1

    def _leave(self, index: int, request: Request, numbers: range) -> None:
        """Take a request from pages of one page table: cached ones become evictable."""
        table = self._allocator.tables[index]
        pages = request.pages[index][numbers.start : numbers.stop]
        if self._caches is None:
            table.release(pages)
            return
        keys = self._caches[index].keys
        lengths = self._policies[index].set_prefix_length(
            request.facts, numbers, self._grains[index]
        )
        cached = [page for page in pages if keys[page] is not None]
        if len(cached) < len(pages):
            table.release([page for page in pages if keys[page] is None])
            lengths = [
                length
                for page, length in zip(pages, lengths, strict=True)
                if keys[page] is not None
            ]
        if cached:
            ranks = self._order.ranks(request.step, lengths)
            # The last page has the lowest rank: it goes first.
            cached.reverse()
            ranks.reverse()
            table.retire(cached, ranks)

    def _needs(self, request: Request, num_tokens: int, *, from_hit: bool) -> list[int]:
        """Small pages to take in each page table for so many tokens."""
        needs: list[int] = []
        for index, max_tokens in enumerate(request.max_tokens):
            need = 0
            if num_tokens > max_tokens:
                touched = self._policies[index].update_last_access(
                    request.facts, request.num_processed_tokens, num_tokens
                )
                need = -(-touched.stop // self._page_slots[index]) - len(request.pages[index])
            if from_hit:
                need += request.pages[index].count(MISSING)
            needs.append(need)
        return needs

    def _further_pages(
        self,
        request: Request,
        hit: PrefixHit | None,
        needs: Sequence[int],
        num_tokens: int,
        full_tokens: int,
    ) -> list[int]:
        """Small pages to take beyond those held until `full_tokens` tokens, at the peak.

        A page held counts against the peak if it will be touched to the end, or if giving it up
        makes room for another: not if someone else goes on using it.
        """
        chunk_tokens = num_tokens - request.num_processed_tokens
        peaks = self.capacity.peak_pages(
            full_tokens, chunk_tokens=chunk_tokens, facts=request.facts
        )
        further: list[int] = []
        for index, (peak, need) in enumerate(zip(peaks, needs, strict=True)):
            table, pages = self._allocator.tables[index], request.pages[index]
            first = request.first[index]
            at_end = self._policies[index].update_last_access(
                request.facts, full_tokens - 1, full_tokens
            )
            lasting = at_end.start // self._page_slots[index]
            num_kept = max(0, len(pages) - max(first, lasting))
            passing = pages[first:lasting]
            if hit is None:
                num_kept += sum(page not in table.shares for page in passing)
            else:
                num_kept -= pages[max(first, lasting) :].count(MISSING)
                num_kept += sum(page > 0 and table.stamps[page] >= 0 for page in passing)
            further.append(max(need, peak - num_kept))
        return further

    def _require(
        self,
        request_id: str,
        request: Request,
        needs: list[int],
        hit: PrefixHit | None,
        reserve_large_pages: int,
    ) -> None:
        """Refuse unless the needs can be met."""
        room = self._allocator.room(
            needs,
            hits=None if hit is None else self._hit_pages(request),
            reserve_large_pages=reserve_large_pages,
        )
        if not room.suffices:
            raise OutOfPagesError(
                request_id,
                needed_pages=needs,
                available_pages=room.spare_pages,
                needed_large_pages=room.needed_large_pages,
                available_large_pages=room.available_large_pages,
            )

    def _share(self, request: Request, hit: PrefixHit) -> None:
        """Use the pages of a hit, and make those to copy from the last to be evicted."""
        for table, pages in zip(self._allocator.tables, self._hit_pages(request), strict=True):
            if pages:
                table.share(pages)
        for index in self._copied:
            self._renew(index, hit.pages[index], hit.num_tokens)
        self._asked_tokens += hit.asked_tokens
        self._hit_tokens += hit.num_tokens
        if hit.limit != NO_LIMIT:
            self._limited_tokens[hit.limit] += hit.asked_tokens - hit.num_tokens

    def _renew(self, index: int, pages: Sequence[int], num_tokens: int) -> None:
        """Give cached pages that nobody uses the rank of this step."""
        table = self._allocator.tables[index]
        table.share(pages)
        table.retire(pages, self._order.ranks(self._step, [num_tokens] * len(pages)))

    def _copy_hit(self, request: Request, hit: PrefixHit) -> None:
        """Order the copies with which a request starts from kept states."""
        for index in self._copied:
            for source in hit.pages[index]:
                target = request.pages[index][0]
                if source != target:
                    copy = PageCopy(table_index=index, source=source, target=target)
                    self._copies.append(copy)
                key = hit.prefix_hashes[hit.num_tokens // self._hash_tokens - 1]
                request.kept.append((index, key, hit.num_tokens))

    def _take(
        self, request: Request, needs: list[int], reserve_large_pages: int
    ) -> tuple[list[int], ...]:
        """Take the pages needed, which can be had."""
        facts, num_processed_tokens = request.facts, request.num_processed_tokens
        expected = needs
        if request.expected_tokens > request.num_tokens:
            expected = [
                need
                and -(
                    -policy.update_last_access(
                        facts, num_processed_tokens, request.expected_tokens
                    ).stop
                    // page_slots
                )
                - len(pages)
                for need, policy, page_slots, pages in zip(
                    needs, self._policies, self._page_slots, request.pages, strict=True
                )
            ]
        taken = self._allocator.take(
            needs, expected, owner=request.owner, reserve_large_pages=reserve_large_pages
        )
        if self._caches is not None:
            self._forget_evicted(self._caches)
        for index, new_pages in enumerate(taken):
            if new_pages:
                pages = request.pages[index]
                appended = new_pages
                if MISSING in pages:
                    appended = list(new_pages)
                    for number in [n for n, page in enumerate(pages) if page == MISSING]:
                        pages[number] = appended.pop(0)
                pages += appended
                request.max_tokens[index] = self._policies[index].max_tokens(
                    facts, num_processed_tokens, len(pages) * self._page_slots[index]
                )
        request.grows_at = min(request.max_tokens) + 1
        return tuple(taken)

    def _forget_evicted(self, caches: Sequence[PrefixCache]) -> None:
        for table, cache in zip(self._allocator.tables, caches, strict=True):
            if table.evicted:
                self._num_forgotten += len(table.evicted)
                cache.forget(table.evicted)
                table.evicted.clear()

    def release_passed(self, request_id: str, num_processed_tokens: int) -> None:
        """Give up the pages that no token from `num_processed_tokens` on reads."""
        request = self._running(request_id)
        self._check_tokens(request_id, request, None, request.num_tokens, num_processed_tokens)
        self._give_up(request, num_processed_tokens)

    def commit(self, request_id: str, prefix_hashes: Sequence[bytes], num_tokens: int) -> None:
        """Let others find the full pages of a request's first tokens.

        Args:
            request_id: Whose pages.
            prefix_hashes: Hash i is of the request's first `(i + 1) * hash_tokens` tokens.
            num_tokens: Tokens whose content is final, at the latest when the next step reads it.
        """
        request = self._running(request_id)
        if num_tokens < request.commits_at or self._caches is None:
            return
        num_tokens = min(num_tokens, len(prefix_hashes) * self._hash_tokens)
        request.commits_at = (num_tokens // self._commit_tokens + 1) * self._commit_tokens
        request.committed_tokens = max(request.committed_tokens, num_tokens)
        for index, policy in enumerate(self._policies):
            start = request.committed[index]
            end = policy.final_pages(request.facts, num_tokens, self._grains[index])
            if end > start:
                request.committed[index] = end
                keys = policy.content_keys(
                    request.facts, prefix_hashes, self._grains[index], range(start, end)
                )
                self._caches[index].enter(request.pages[index][start:end], keys)

    def free(self, request_id: str) -> None:
        """End a request: it finished, was aborted or is preempted."""
        request = self._running(request_id)
        for index, pages in enumerate(request.pages):
            first = request.first[index]
            if first < len(pages):
                self._leave(index, request, range(first, len(pages)))
        if self._caches is not None:
            for index, key, num_tokens in request.kept:
                (page,) = self._caches[index].find([key])
                if page is not None:
                    self._renew(index, [page], num_tokens)
        self._allocator.disown(request.owner)
        del self._requests[request_id]

    def _running(self, request_id: str) -> Request:
        request = self._requests.get(request_id)
        if request is None:
            msg = f"request_id must name a running request, got {request_id!r}"
            raise ValueError(msg)
        return request

    # States

    def keep_state(self, request_id: str, prefix_hash: bytes, num_tokens: int) -> bool:
        """Keep a copy of a request's running states for others to start from.

        Args:
            request_id: Whose states; its last step ended at exactly `num_tokens` tokens.
            prefix_hash: Hash of those tokens.
            num_tokens: A multiple of `hash_tokens`.

        Returns:
            Whether there is a page for every copy; `take_copies` has them then.

        Raises:
            ValueError: The tokens are no multiple of `hash_tokens`, or states are not cached.
        """
        request = self._running(request_id)
        if self._caches is None or num_tokens <= 0 or num_tokens % self._hash_tokens:
            msg = (
                f"num_tokens must be a positive multiple of {self._hash_tokens}, with prefix "
                f"caching on, got {num_tokens}"
            )
            raise ValueError(msg)
        needs = [0] * len(self._policies)
        for index in self._copied:
            needs[index] = int(self._caches[index].find([prefix_hash])[0] is None)
        if not self._allocator.room(needs).suffices:
            return False
        taken = self._allocator.take(needs, needs, owner=request.owner)
        self._forget_evicted(self._caches)
        for index in self._copied:
            for page in taken[index]:
                self._caches[index].enter([page], [prefix_hash])
                ranks = self._order.ranks(self._step, [num_tokens])
                self._allocator.tables[index].retire([page], ranks)
                source = request.pages[index][0]
                self._copies.append(PageCopy(table_index=index, source=source, target=page))
            request.kept.append((index, prefix_hash, num_tokens))
        return True

    def take_copies(self) -> list[PageCopy]:
        """Copies to make before any kernel of the next step runs, in this order."""
        copies, self._copies = self._copies, []
        return copies

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False, and nothing forgotten, while requests run."""
        if self._requests:
            return False
        if self._caches is not None:
            self._num_forgotten += sum(len(cache) for cache in self._caches)
            for cache in self._caches:
                cache.clear()
            self._allocator.large_pages.surrender_all()
            self._copies.clear()
        return True

    # Questions

    def page_table(self, request_id: str, table_index: int) -> list[int]:
        """A request's small pages in order; the null page where given up."""
        return list(self._running(request_id).pages[table_index])

    def page_tables(self, request_id: str) -> tuple[list[int], ...]:
        """All page tables of a request."""
        return tuple(list(pages) for pages in self._running(request_id).pages)

    def request_tokens(self) -> dict[str, int]:
        """Running request -> tokens it has slots for."""
        return {request_id: request.num_tokens for request_id, request in self._requests.items()}

    def committed_tokens(self, request_id: str) -> int:
        """Tokens of a request whose full pages others may find."""
        return self._running(request_id).committed_tokens

    @property
    def usage(self) -> float:
        """Share of the arena's large pages that hold something a running request uses."""
        usable = self.num_large_pages - 1
        return (usable - self._allocator.large_pages.num_available) / usable

    def can_ever_fit(self, num_tokens: int, *, chunk_tokens: int) -> bool:
        """Whether a request could reach so many tokens with the arena to itself."""
        return self.capacity.can_ever_fit(num_tokens, chunk_tokens=chunk_tokens)

    def memory(self) -> MemoryReport:
        """Where every byte of the arena is."""
        large_page_bytes = self.geometry.large_page_bytes
        tables = tuple(
            table_memory(
                table,
                num_used=pages.num_used,
                num_evictable=pages.num_evictable,
                num_empty=pages.num_large * pages.pages_per_large
                - pages.num_used
                - pages.num_evictable,
                num_dead_slots=count_dead_slots(
                    self._touched(index), pages.shares, table.tokens_per_page
                ),
            )
            for index, (table, pages) in enumerate(
                zip(self.geometry.page_tables, self._allocator.tables, strict=True)
            )
        )
        return MemoryReport(
            tables=tables,
            empty_large_bytes=self._allocator.large_pages.num_empty * large_page_bytes,
            null_bytes=large_page_bytes,
        )

    def _touched(self, index: int) -> list[TouchedPages]:
        return [
            TouchedPages(
                pages=request.pages[index],
                first=request.first[index],
                slots=self._policies[index].update_last_access(
                    request.facts, request.num_processed_tokens, request.num_tokens
                ),
            )
            for request in self._requests.values()
        ]

    def cache_report(self) -> CacheReport:
        """What prefix hits brought since start-up."""
        names = [table.name for table in self.geometry.page_tables]
        return CacheReport(
            asked_tokens=self._asked_tokens,
            hit_tokens=self._hit_tokens,
            limited_tokens=dict(zip(names, self._limited_tokens, strict=True)),
            evictions=tuple(
                Evictions(
                    name=name,
                    alone=table.num_evicted_alone,
                    own_large=table.num_evicted_own,
                    foreign_large=table.num_evicted_foreign,
                )
                for name, table in zip(names, self._allocator.tables, strict=True)
            ),
        )

    def check(self) -> None:
        """Raise `InvariantError` unless the books of requests, allocator and cache agree."""
        self._allocator.check()
        for index, table in enumerate(self._allocator.tables):
            users: dict[int, int] = {}
            for request in self._requests.values():
                pages, first = request.pages[index], request.first[index]
                if any(page <= 0 for page in pages[first:]) or any(pages[:first]):
                    msg = f"page table {index} of owner {request.owner} has holes or no end"
                    raise InvariantError(msg)
                for page in pages[first:]:
                    users[page] = users.get(page, 0) + 1
            shares = {page: count - 1 for page, count in users.items() if count > 1}
            if shares != table.shares or len(users) != table.num_used:
                msg = (
                    f"page table {index}: requests use {len(users)} pages and share {shares}; "
                    f"the allocator counts {table.num_used} and {table.shares}"
                )
                raise InvariantError(msg)
            if self._caches is not None:
                self._check_cache(index, self._caches[index], users)
        if self.memory().arena_bytes != self.num_large_pages * self.geometry.large_page_bytes:
            msg = f"the memory report does not add up to the arena: {self.memory()}"
            raise InvariantError(msg)

    def _check_cache(self, index: int, cache: PrefixCache, users: dict[int, int]) -> None:
        """Pages that are evictable, and only used pages beside them, may be found."""
        cache.check()
        table = self._allocator.tables[index]
        cached = {page for page, key in enumerate(cache.keys) if key is not None}
        evictable = {page for page in cached - set(users) if table.stamps[page] >= 0}
        if evictable | (cached & set(users)) != cached or len(evictable) != table.num_evictable:
            msg = (
                f"page table {index}: {len(cached)} pages are cached, {len(evictable)} of them "
                f"evictable, {table.num_evictable} counted"
            )
            raise InvariantError(msg)
