"""The checkpoints that requests leave for others, and how requests start from them.

A request leaves checkpoints in these places:

- At the end of its prompt, since the prompt may be sent again.
- Before the question at its end, as far as its length is known (`jenga.prefix.question_length`),
  since the next prompt may end with another question.
- At the point where it parts from a cached text.
- At points where other requests are known to have parted.
- At the end of its answer, since a conversation goes on from there.

The eviction policy learns which of them are worth their memory.

A request writes over its running state in every step. A kept state is therefore a copy. Its page
has a user until the tokens before it are final and the checkpoint is made. A request that starts
from a kept state starts with a copy of it.

Source: Marconi (arXiv 2411.19379), section 4, for states at branches and ends.
"""

from collections.abc import Collection, Sequence

from jenga.arena.allocator import Allocator
from jenga.eviction.checkpoint import Checkpoint
from jenga.eviction.points import Kind, Past, Point
from jenga.page_ids import NULL_PAGE, HostPageId, SmallPageId
from jenga.prefix.checkpoint_tree import CheckpointTree
from jenga.prefix.copy_orders import CopyOrders
from jenga.prefix.eviction_notices import EvictionNotices
from jenga.prefix.host_cache import HostCache
from jenga.prefix.new_points import NewPoints
from jenga.tables.page_table import Table
from jenga.tables.request import MISSING, CopyPath, PageCopy, PrefixHit, Request, StatePage

ANSWER_TOKENS = 64
"""Tokens of an answer between two kept states. Copies then take a 64th of the time of updates."""


class Checkpoints:
    """Plans and makes the checkpoints of requests.

    Attributes:
        states: Page tables that requests write over.
        answer_tokens: Number of tokens between two kept states of an answer. 0 keeps none.
        num_replaced: Number of checkpoints so far that a later one of their request replaced.
        num_states_kept: Number of times so far that a request's states were copied for others.
        num_states_read: Number of times so far that a request started from such a copy.
    """

    __slots__ = (
        "_ahead_tokens",
        "_align_tokens",
        "_allocator",
        "_copies",
        "_eviction_notices",
        "_fixed_bytes",
        "_hash_tokens",
        "_host",
        "_in_passing",
        "_new_points",
        "_tables",
        "_token_bytes",
        "_tree",
        "answer_tokens",
        "num_replaced",
        "num_states_kept",
        "num_states_read",
        "states",
    )

    def __init__(  # noqa: PLR0913  all parts that keep checkpoints
        self,
        tables: Sequence[Table],
        allocator: Allocator,
        tree: CheckpointTree,
        eviction_notices: EvictionNotices,
        copies: CopyOrders,
        *,
        hash_tokens: int,
        answer_tokens: int,
        ahead_tokens: int,
        host: HostCache | None,
    ) -> None:
        """Start without checkpoints.

        Args:
            tables: All page tables.
            allocator: Source of the pages for copies.
            tree: Tree that keeps the checkpoints.
            eviction_notices: Told when an allocation has evicted pages.
            copies: Receives the copies that must be made.
            hash_tokens: Number of tokens that each further prefix hash covers.
            answer_tokens: Number of tokens between two kept states of an answer. 0 keeps none.
            ahead_tokens: Number of tokens after a prefix that must be cached with it.
            host: Host memory. None if there is none.
        """
        self._tables = tables
        self.states = tuple(table for table in tables if table.policy.is_overwritten)
        self._allocator = allocator
        self._tree = tree
        self._new_points = NewPoints(tree)
        self._eviction_notices = eviction_notices
        self._copies = copies
        self._hash_tokens = hash_tokens
        self._align_tokens = tree.align_tokens
        self._ahead_tokens = -(-ahead_tokens // self._align_tokens) * self._align_tokens
        self._host = host
        # Owner number -> request whose states the step about to run writes.
        self._in_passing: dict[int, Request] = {}
        self.answer_tokens = answer_tokens
        self.num_replaced = self.num_states_kept = self.num_states_read = 0
        self._token_bytes, self._fixed_bytes = tree.parts.token_bytes, tree.parts.fixed_bytes

    # Places of checkpoints

    def admit_request(self, request: Request, hit: PrefixHit) -> None:
        """Plan the checkpoints of an admitted request whose hit pages are shared already."""
        for table in self._tables:
            if table.policy.names_images and hit.pages[table.index]:
                pages = [page for page in hit.pages[table.index] if page > 0]
                loaded = table.images_of(hit.facts, hit.host_pages[table.index])
                self._tree.read_images(table, pages, loaded)
        self.plan_checkpoints(request, asked_tokens=hit.asked_tokens)

    def plan_checkpoints(self, request: Request, *, asked_tokens: int) -> None:
        """Plan the checkpoints of a request whose text has just become known.

        Args:
            request: The request, with its prefix hashes. If it was admitted with a hit, it has the
                pages of the hit.
            asked_tokens: Number of tokens that it could have started from.
        """
        tree, facts = self._tree, request.facts
        hashes = request.prefix_hashes
        hit_tokens, prompt_tokens = request.hit_tokens, facts.prompt_tokens
        admitted = tree.admit(
            hashes,
            facts,
            hit_tokens=hit_tokens,
            asked_tokens=asked_tokens,
            computed_bytes=(prompt_tokens - hit_tokens) * self._token_bytes + self._fixed_bytes,
        )
        request.checkpoints.points_past = admitted.past
        request.checkpoints.num_passed = hit_tokens
        node_before = tree.last_node(hashes, facts, hit_tokens)
        branch_tokens = self._aligned(request.branch_tokens)
        is_kept_here = node_before.is_kept and node_before.num_tokens == hit_tokens
        is_branch = 0 < hit_tokens == branch_tokens
        if is_branch and not is_kept_here and not self.states:
            # The hit had no checkpoint here, and now a second text goes on from it.
            here = tree.keep(node_before, hashes, facts, hit_tokens, Kind.BRANCH, Past.READ)
            if here is not None:
                here.left_by = request.name
                node_before = here
        request.checkpoints.last_checkpoint = node_before
        plan = request.checkpoints.plan
        end = self._aligned(prompt_tokens - 1)
        if tree.parts.has_point_pages:
            self._observe_question(prompt_tokens, branch_tokens, admitted.last_point)
            distance = tree.questions.distance(prompt_tokens)
            plan[self._aligned(prompt_tokens - 1 - distance)] = Kind.BEFORE_END
        plan[end] = Kind.PROMPT_END
        if not hit_tokens or branch_tokens - hit_tokens >= self._least_gap:
            plan[branch_tokens] = Kind.BRANCH
        for tokens in admitted.branches:
            plan[tokens] = Kind.BRANCH
        for tokens in [tokens for tokens in plan if not hit_tokens < tokens <= end]:
            del plan[tokens]

    def _observe_question(
        self, prompt_tokens: int, branch_tokens: int, last_point: Point | None
    ) -> None:
        """Let the tree learn how long a question is, if it is known where the question begins.

        Args:
            prompt_tokens: Number of tokens of the prompt.
            branch_tokens: Number of its tokens that are cached. Evicted ones lower it.
            last_point: The last remembered point on its text, if any.
        """
        if last_point is not None and last_point.num_tokens >= branch_tokens:
            # Nothing is known of the text behind this point, unless texts are known to part there.
            branch_tokens = last_point.num_tokens if last_point.kind == Kind.BRANCH else 0
        if branch_tokens:
            self._tree.questions.observe(prompt_tokens, branch_tokens)

    def takes_little(self, hit: PrefixHit) -> bool:
        """Whether a prompt takes little memory beside the keys and values that it finds."""
        return self._tree.parts.takes_little(
            hit_tokens=hit.num_tokens, asked_tokens=hit.asked_tokens
        )

    def _aligned(self, num_tokens: int) -> int:
        """Return the last place within `num_tokens` tokens at which a checkpoint can be."""
        return max(0, num_tokens) // self._align_tokens * self._align_tokens - self._ahead_tokens

    @property
    def _least_gap(self) -> int:
        """Distance in tokens from a kept state below which another one is not worth it."""
        return self.answer_tokens + self._hash_tokens if self.states and self.answer_tokens else 0

    def planned(self, request: Request, branches: Collection[int]) -> dict[int, Kind]:
        """Return where a request leaves its next checkpoints: number of tokens -> kind.

        Args:
            request: The request.
            branches: Numbers of tokens after which a waiting request parts from its text.
        """
        plan, passed = request.checkpoints.plan, request.checkpoints.num_passed
        if branches:
            # Generated tokens have states in few places, for which no request can ask.
            end = request.facts.prompt_tokens if self.states else request.num_tokens
            wanted = {self._aligned(tokens) for tokens in branches if tokens <= end}
            if request.num_tokens < max(branches):
                # A waiting request that shares more than this step reaches may be admitted next.
                wanted.add(self._aligned(min(request.num_tokens, end)))
            plan = plan | dict.fromkeys(wanted - plan.keys(), Kind.BRANCH)
        return {tokens: kind for tokens, kind in plan.items() if tokens > passed}

    # Making checkpoints

    def keep_images(self, request: Request, table: Table, start: int) -> None:
        """Keep images whose pages, from the request's page `start` on, can be found now."""
        end = request.pages.num_committed[table.index]
        if start < end:
            pages = [page for page in request.pages.small_pages[table.index][start:end] if page > 0]
            self._tree.keep_images(table, pages, request.checkpoints.points_past)

    def begin_step(self) -> None:
        """Make the checkpoints whose states the step before has written.

        They are not made earlier. If an unwritten state were evicted, it would be copied to host
        memory as if it were there.
        """
        for request in list(self._in_passing.values()):
            self.keep_written(request)

    def keep_written(self, request: Request) -> None:
        """Do the work of `begin_step` for one request."""
        if self._in_passing.pop(request.owner, None) is not None:
            self.make_passed(request, request.committed_tokens)

    def keep_state(
        self, request: Request, key: bytes, num_tokens: int, *, in_passing: bool
    ) -> bool:
        """Copy a request's running states to pages of their own, for a checkpoint there.

        Args:
            request: The request. Its slots hold the states after `num_tokens` tokens, or will when
                the copy is made.
            key: Hash of those tokens.
            num_tokens: Number of tokens that the states contain.
            in_passing: Whether the step about to run writes the states, so that they are not there
                yet.

        Returns:
            Whether there are pages for the copies, or the states are kept already.
        """
        answer = request.checkpoints.answer
        if self._tree.has_states(key):
            request.checkpoints.pending.setdefault(num_tokens, [])
        elif num_tokens not in request.checkpoints.pending:
            pages = self._state_pages(request, key, num_tokens)
            if pages is None:
                return False
            for index, page in pages:
                self._copy(
                    self._tables[index],
                    _running_page(request, self._tables[index], num_tokens),
                    page,
                )
            request.checkpoints.pending[num_tokens] = pages
            self.num_states_kept += 1
        if in_passing:
            self._in_passing[request.owner] = request
        else:
            self.make_passed(request, request.committed_tokens)
        if answer is not None:
            self._tree.prune(answer)
        return True

    def _state_pages(self, request: Request, key: bytes, num_tokens: int) -> list[StatePage] | None:
        """Get pages for states, each with one user.

        They are those of the answer's last checkpoint, or new ones. None if neither can be had, or
        new ones would cost a checkpoint that is worth more.
        """
        answer = request.checkpoints.answer
        if num_tokens >= request.facts.prompt_tokens and answer is not None:
            pages = self._tree.take_states(answer, next_tokens=num_tokens)
            if pages:
                self.num_replaced += 1
                return pages
        if self._skips_states(request, key, num_tokens):
            return None
        if self._tree.log is not None:
            self._tree.log.for_request = request.name
        needs = [0] * len(self._allocator.tables)
        for table in self.states:
            needs[table.index] = 1
        taken = self._allocator.take(needs, needs, owner=request.owner)
        if taken is not None:
            self._eviction_notices.deliver()
        if self._tree.log is not None:
            self._tree.log.for_request = ""
        if taken is None:
            return None
        return [StatePage(table.index, taken[table.index][0]) for table in self.states]

    def _skips_states(self, request: Request, key: bytes, num_tokens: int) -> bool:
        """Whether states would cost a checkpoint that is worth more. Remember their point then.

        With host memory nothing is skipped, because evicted content is not lost.
        """
        is_answer = num_tokens >= request.facts.prompt_tokens
        skipped = request.checkpoints.skipped_answer
        if is_answer and skipped is not None:
            request.checkpoints.skipped_answer = None
            if skipped.past != Past.READ:
                self._tree.points.forget(skipped)
        before = request.checkpoints.last_checkpoint
        if (
            before is None
            or self._host is not None
            or not any(table.pages.costs_checkpoint(i) for i, table in enumerate(self.states))
        ):
            return False
        kind = request.checkpoints.plan.get(num_tokens)
        if kind is None:
            kind = Kind.ANSWER_END if is_answer else Kind.BRANCH
        past = request.checkpoints.points_past
        point = self._new_points.skips_states(before, key, num_tokens, kind, past)
        if is_answer:
            request.checkpoints.skipped_answer = point
        return point is not None

    def may_pass_more(self, request: Request) -> bool:
        """Whether a request may still leave checkpoints, in a model without states."""
        return not self.states and request.checkpoints.num_passed < request.facts.prompt_tokens

    def make_passed(
        self, request: Request, num_tokens: int, branches: Collection[int] = ()
    ) -> None:
        """Make the checkpoints that a request has passed.

        Args:
            request: The request.
            num_tokens: Number of tokens whose content is final and can be found.
            branches: Numbers of tokens after which a waiting request parts from its text.
        """
        final_tokens = num_tokens - self._ahead_tokens
        plan = self.planned(request, branches)
        places = request.checkpoints.pending if self.states else plan
        for tokens in sorted(tokens for tokens in places if tokens <= final_tokens):
            is_answer = tokens >= request.facts.prompt_tokens
            kind = plan.get(tokens, Kind.ANSWER_END if is_answer else Kind.BRANCH)
            self._make(request, tokens, kind)
            request.checkpoints.num_passed = max(request.checkpoints.num_passed, tokens)
        if not self.states:
            # With states, a state may be kept after its tokens are final, so these places are not
            # passed yet.
            request.checkpoints.num_passed = max(request.checkpoints.num_passed, final_tokens)

    def _make(self, request: Request, num_tokens: int, kind: Kind) -> None:
        pages = request.checkpoints.pending.pop(num_tokens, ())
        if request.checkpoints.last_checkpoint is not None and self._new_points.turns_down(
            request.checkpoints.last_checkpoint,
            request.prefix_hashes,
            num_tokens,
            kind,
            request.checkpoints.points_past,
        ):
            return
        node = self._keep(request, num_tokens, kind, pages)
        if node is None and self._commit_missing(request, num_tokens):
            node = self._keep(request, num_tokens, kind, pages)
        if node is None:
            for index, page in pages:
                self._tables[index].pages.release([page])
            return
        if kind == Kind.ANSWER_END and node is not request.checkpoints.answer:
            self._drop_answer(request)
            # A checkpoint that another request has kept is left to that request.
            request.checkpoints.answer = node if pages else None
        if (
            request.checkpoints.last_checkpoint is None
            or node.num_tokens > request.checkpoints.last_checkpoint.num_tokens
        ):
            request.checkpoints.last_checkpoint = node

    def _drop_answer(self, request: Request) -> None:
        """Drop the states of an answer's last checkpoint from host memory, as a later one exists.

        They stay if the checkpoint is still kept, or if another request has read it.
        """
        answer = request.checkpoints.answer
        if self._host is None or answer is None or answer.is_kept:
            return
        key = request.prefix_hashes[answer.num_tokens // self._hash_tokens - 1]
        point = self._tree.points.get(key)
        if point is None or point.past != Past.READ:
            for table in self.states:
                self._host.drop(table, key)

    def _keep(
        self, request: Request, num_tokens: int, kind: Kind, pages: Sequence[StatePage]
    ) -> Checkpoint | None:
        if request.checkpoints.last_checkpoint is None:
            return None
        node = self._tree.keep(
            request.checkpoints.last_checkpoint,
            request.prefix_hashes,
            request.facts,
            num_tokens,
            kind,
            request.checkpoints.points_past,
            state_pages=pages,
        )
        if node is not None:
            node.left_by = request.name
        return node

    def _commit_missing(self, request: Request, num_tokens: int) -> bool:
        """Enter pages of a request whose content was in another page that has been evicted since.

        Returns:
            Whether there were any.
        """
        has_committed = False
        for table in self._tables:
            if not table.policy.is_overwritten and not table.policy.names_images:
                end = (num_tokens + self._ahead_tokens) // table.grain.page_slots
                has_committed |= table.commit_missing(request, end)
        return has_committed

    def end_request(self, request: Request, branches: Collection[int]) -> None:
        """Leave the last checkpoints of a request that ends. The request still has its pages.

        Args:
            request: The request.
            branches: Numbers of tokens after which a waiting request parts from its text.
        """
        facts, tree = request.facts, self._tree
        tree.points.time += self._token_bytes * max(
            0, request.committed_tokens - max(facts.prompt_tokens, request.hit_tokens)
        )
        self.make_passed(request, request.committed_tokens, branches)
        if not self.states:
            last = self._aligned(request.committed_tokens)
            if (
                request.checkpoints.last_checkpoint is not None
                and last > request.checkpoints.last_checkpoint.num_tokens
            ):
                is_answer = last >= self._aligned(facts.prompt_tokens)
                self._make(request, last, Kind.ANSWER_END if is_answer else Kind.PROMPT_END)
        for pages in request.checkpoints.pending.values():
            for index, page in pages:
                self._tables[index].pages.release([page])
        request.checkpoints.pending.clear()
        request.checkpoints.answer = request.checkpoints.last_checkpoint = None

    # Starting from a checkpoint

    def protect_hit(self, hit: PrefixHit) -> None:
        """Make the checkpoint of a hit the last to be evicted, until its states are copied."""
        node = None
        if hit.num_tokens and self.states:
            node = self._tree.node_at(hit.prefix_hashes, hit.num_tokens)
        self._tree.pool.protect(node)

    def copy_states(self, request: Request, hit: PrefixHit) -> None:
        """Order the copies with which an admitted request starts from the states of its hit."""
        self._tree.pool.protect(None)
        if not hit.num_tokens or not self.states:
            return
        self.num_states_read += 1
        moves: list[tuple[Table, SmallPageId, SmallPageId]] = []
        loads: list[tuple[Table, HostPageId, SmallPageId]] = []
        for table in self.states:
            pages = hit.pages[table.index]
            if not pages:
                continue
            target = _running_page(request, table, hit.num_tokens)
            moves += [(table, page, target) for page in pages if page not in (MISSING, target)]
            loads += [(table, page, target) for page in hit.host_pages[table.index].values()]
        self._move(moves)
        for table, source, target in loads:
            self._copy(table, source, target, CopyPath.FROM_HOST)

    def _move(self, moves: list[tuple[Table, SmallPageId, SmallPageId]]) -> None:
        """Order copies of one state's parts, so that each is read before it is written over.

        In a full arena, a request may have been given the very pages of the state. Such a page is
        already evicted, and holds its content until it is written.
        """
        while moves:
            for move in moves:
                table, source, target = move
                large = target // table.pages.pages_per_large
                if all(
                    other_source // other.pages.pages_per_large != large or other is table
                    for other, other_source, _ in moves
                ):
                    break
            else:
                # Each part would be written over another one. One of them is saved in the null
                # page.
                table, source, target = moves[0]
                self._copy(table, source, NULL_PAGE)
                moves[0] = table, NULL_PAGE, target
                continue
            moves.remove(move)
            self._copy(table, source, target)

    def _copy(
        self,
        table: Table,
        source: SmallPageId | HostPageId,
        target: SmallPageId,
        path: CopyPath = CopyPath.IN_ARENA,
    ) -> None:
        copy = PageCopy(table_index=table.index, source=source, target=target, path=path)
        self._copies.order_copy(copy)


def _running_page(request: Request, table: Table, num_tokens: int) -> SmallPageId:
    """Return the page of a request's state after `num_tokens` tokens."""
    pages = request.pages.small_pages[table.index]
    return pages[num_tokens % len(pages)]
