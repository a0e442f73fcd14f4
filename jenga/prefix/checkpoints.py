"""Where requests leave checkpoints for others, and how they start from them.

A request leaves a checkpoint at the end of its prompt, since it may be asked again; some hundred
tokens before that, since another question may end the next prompt; where it leaves a text that is
cached; where requests are known to have gone different ways; and at the end of its answer, since a
conversation goes on from there. Which of those are worth their memory is the eviction policy's
matter: it learns it.

A request writes over its running state in every step. So a kept state is a copy, in a page that has
a user until the tokens before it are final and the checkpoint is made; and a request that starts
from a kept state starts with a copy of it.

Source: Marconi (arXiv 2411.19379), section 4, for states at branches and ends.
"""

from collections.abc import Collection, Sequence

from jenga.arena.allocator import Allocator
from jenga.arena.large_pages import NULL_PAGE
from jenga.eviction.checkpoint import Checkpoint
from jenga.eviction.points import Kind, Past
from jenga.prefix.checkpoint_tree import QUESTION_TOKENS, CheckpointTree
from jenga.prefix.eviction_notices import Evictions
from jenga.prefix.host_cache import HostCache
from jenga.tables.page_table import Table
from jenga.tables.request import CopyPath, PageCopy, PrefixHit, Request, host_page, is_on_host

ANSWER_TOKENS = 64
"""Tokens of an answer between two states kept: copies then take a 64th of what updates do."""


class Checkpoints:
    """Plans and makes the checkpoints of requests.

    Attributes:
        states: Page tables that requests write over.
        answer_tokens: Tokens of an answer between two states kept; 0 for none.
        num_replaced: Checkpoints that made room for a later one of their request so far.
        num_states_kept: Times so far that the states of a request were copied for others.
        num_states_read: Times so far that a request started from such a copy.
    """

    __slots__ = (
        "_ahead_tokens",
        "_align_tokens",
        "_allocator",
        "_copies",
        "_evictions",
        "_fixed_bytes",
        "_hash_tokens",
        "_host",
        "_in_passing",
        "_tables",
        "_token_bytes",
        "_tree",
        "answer_tokens",
        "num_replaced",
        "num_states_kept",
        "num_states_read",
        "states",
    )

    def __init__(  # noqa: PLR0913  all that says what is kept, and where
        self,
        tables: Sequence[Table],
        allocator: Allocator,
        tree: CheckpointTree,
        evictions: Evictions,
        copies: list[PageCopy],
        *,
        hash_tokens: int,
        answer_tokens: int,
        ahead_tokens: int,
        host: HostCache | None,
    ) -> None:
        """No checkpoint.

        Args:
            tables: All page tables.
            allocator: Where pages for copies come from.
            tree: Where checkpoints are kept.
            evictions: Told of what makes room.
            copies: To which those are added that are to be made.
            hash_tokens: Tokens that each further prefix hash covers.
            answer_tokens: Distance between states kept within an answer; 0 for none.
            ahead_tokens: Tokens after a prefix that must be cached with it.
            host: Host memory, if there is any.
        """
        self._tables = tables
        self.states = tuple(table for table in tables if table.policy.is_overwritten)
        self._allocator = allocator
        self._tree = tree
        self._evictions = evictions
        self._copies = copies
        self._hash_tokens = hash_tokens
        self._align_tokens = tree.align_tokens
        self._ahead_tokens = -(-ahead_tokens // self._align_tokens) * self._align_tokens
        self._host = host
        # Owner -> request of which a step about to run writes states.
        self._in_passing: dict[int, Request] = {}
        self.answer_tokens = answer_tokens
        self.num_replaced = self.num_states_kept = self.num_states_read = 0
        self._token_bytes, self._fixed_bytes = tree.bytes_of_points()

    # Where

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Plan the checkpoints of a request that comes in, whose pages of the hit are shared."""
        for table in self._tables:
            if table.policy.names_images and hit.pages[table.index]:
                pages = [page for page in hit.pages[table.index] if page > 0]
                self._tree.read_images(table, pages)
        self.begin(request, hit.prefix_hashes, asked_tokens=hit.asked_tokens)

    def begin(self, request: Request, prefix_hashes: Sequence[bytes], *, asked_tokens: int) -> None:
        """Plan the checkpoints of a request whose text is known from now on.

        Args:
            request: The request; where it came in with a hit, it has the pages of it.
            prefix_hashes: Hash i is of its first `(i + 1) * hash_tokens` tokens.
            asked_tokens: Tokens that it could have started from.
        """
        tree, facts = self._tree, request.facts
        hashes = request.prefix_hashes = prefix_hashes
        hit_tokens, prompt_tokens = request.hit_tokens, facts.prompt_tokens
        admitted = tree.admit(
            hashes,
            facts,
            hit_tokens=hit_tokens,
            asked_tokens=asked_tokens,
            computed_bytes=(prompt_tokens - hit_tokens) * self._token_bytes + self._fixed_bytes,
        )
        request.past = admitted.past
        request.num_passed = hit_tokens
        stand = tree.stand_of(hashes, facts, hit_tokens)
        branch_tokens = self._aligned(request.branch_tokens)
        is_kept_here = stand.is_kept and stand.num_tokens == hit_tokens
        is_branch = 0 < hit_tokens == branch_tokens
        if is_branch and not is_kept_here and not self.states:
            # What was found had no checkpoint here, and another text goes on from it.
            here = tree.keep(stand, hashes, facts, hit_tokens, Kind.BRANCH, Past.READ)
            stand = here or stand
        request.stand = stand
        plan = request.plan
        end = self._aligned(prompt_tokens - 1)
        if tree.has_alone:
            plan[self._aligned(prompt_tokens - 1 - QUESTION_TOKENS)] = Kind.BEFORE_END
        plan[end] = Kind.PROMPT_END
        if not hit_tokens or branch_tokens - hit_tokens >= self._least_gap:
            plan[branch_tokens] = Kind.BRANCH
        for tokens in admitted.branches:
            plan[tokens] = Kind.BRANCH
        for tokens in [tokens for tokens in plan if not hit_tokens < tokens <= end]:
            del plan[tokens]

    def _aligned(self, num_tokens: int) -> int:
        """The last place within some tokens where a checkpoint can be."""
        return max(0, num_tokens) // self._align_tokens * self._align_tokens - self._ahead_tokens

    @property
    def _least_gap(self) -> int:
        """Fewer tokens after a kept state are not worth another one."""
        return self.answer_tokens + self._hash_tokens if self.states and self.answer_tokens else 0

    def planned(self, request: Request, branches: Collection[int]) -> dict[int, Kind]:
        """Tokens after which a request leaves its next checkpoints -> of which kind.

        Args:
            request: The request.
            branches: Tokens after which a request that waits goes another way.
        """
        plan, passed = request.plan, request.num_passed
        if branches:
            # What is generated has states in few places, which nobody can ask for.
            end = request.facts.prompt_tokens if self.states else request.num_tokens
            wanted = {self._aligned(tokens) for tokens in branches if tokens <= end}
            if request.num_tokens < max(branches):
                # A request that waits to share more than this step reaches may come in next.
                wanted.add(self._aligned(min(request.num_tokens, end)))
            plan = plan | dict.fromkeys(wanted - plan.keys(), Kind.BRANCH)
        return {tokens: kind for tokens, kind in plan.items() if tokens > passed}

    # Making them

    def enter_images(self, request: Request, table: Table, start: int) -> None:
        """Keep images whose pages, from one of a request's on, can be found now."""
        end = request.committed[table.index]
        if start < end:
            pages = [page for page in request.pages[table.index][start:end] if page > 0]
            self._tree.keep_images(table, pages, request.past)

    def begin_step(self) -> None:
        """Make the checkpoints whose states the step before was to write on its way.

        Not before: an unwritten state that is evicted would go to host memory as if it were there.
        """
        for request in list(self._in_passing.values()):
            self.keep_written(request)

    def keep_written(self, request: Request) -> None:
        """As `begin_step` for one request."""
        if self._in_passing.pop(request.owner, None) is not None:
            self.pass_by(request, request.committed_tokens)

    def keep_state(
        self, request: Request, key: bytes, num_tokens: int, *, in_passing: bool
    ) -> bool:
        """Copy a request's running states to pages of their own, for a checkpoint there.

        Args:
            request: Its slots hold the states after so many tokens, or will at the copy's time.
            key: Hash of those tokens.
            num_tokens: What went into the states.
            in_passing: Whether the step about to run writes them, so that they are not there yet.

        Returns:
            Whether there are pages for the copies, or the states are kept already.
        """
        answer = request.answer
        if self._tree.has_states(key):
            request.pending.setdefault(num_tokens, [])
        elif num_tokens not in request.pending:
            pages = self._state_pages(request, num_tokens)
            if pages is None:
                return False
            for index, page in pages:
                self._copy(
                    self._tables[index],
                    _running_page(request, self._tables[index], num_tokens),
                    page,
                )
            request.pending[num_tokens] = pages
            self.num_states_kept += 1
        if in_passing:
            self._in_passing[request.owner] = request
        else:
            self.pass_by(request, request.committed_tokens)
        if answer is not None:
            self._tree.prune(answer)
        return True

    def _state_pages(self, request: Request, num_tokens: int) -> list[tuple[int, int]] | None:
        """Pages for states, each with one user: those of the answer's last checkpoint, or new."""
        answer = request.answer
        if num_tokens > request.facts.prompt_tokens and answer is not None:
            pages = self._tree.take_states(answer, next_tokens=num_tokens)
            if pages:
                self.num_replaced += 1
                return pages
        needs = [0] * len(self._allocator.tables)
        for table in self.states:
            needs[table.index] = 1
        taken = self._allocator.take(needs, needs, owner=request.owner)
        if taken is None:
            return None
        self._evictions.note()
        return [(table.index, taken[table.index][0]) for table in self.states]

    def has_to_pass(self, request: Request) -> bool:
        """Whether a request may leave checkpoints that no state is kept for."""
        return not self.states and request.num_passed < request.facts.prompt_tokens

    def pass_by(self, request: Request, num_tokens: int, branches: Collection[int] = ()) -> None:
        """Make the checkpoints that a request has passed.

        Args:
            request: The request.
            num_tokens: Tokens whose content is final and can be found.
            branches: As for `planned`.
        """
        final_tokens = num_tokens - self._ahead_tokens
        plan = self.planned(request, branches)
        places = request.pending if self.states else plan
        for tokens in sorted(tokens for tokens in places if tokens <= final_tokens):
            is_answer = tokens > request.facts.prompt_tokens
            kind = plan.get(tokens, Kind.ANSWER_END if is_answer else Kind.BRANCH)
            self._make(request, tokens, kind)
            request.num_passed = max(request.num_passed, tokens)
        if not self.states:
            # States may be kept of tokens that are final before their step: those are not passed.
            request.num_passed = max(request.num_passed, final_tokens)

    def _make(self, request: Request, num_tokens: int, kind: Kind) -> None:
        pages = request.pending.pop(num_tokens, ())
        if request.stand is not None and self._tree.turns_down(
            request.stand, request.prefix_hashes, num_tokens, kind, request.past
        ):
            return
        node = self._keep(request, num_tokens, kind, pages)
        if node is None and self._enter_missing(request, num_tokens):
            node = self._keep(request, num_tokens, kind, pages)
        if node is None:
            for index, page in pages:
                self._tables[index].pages.release([page])
            return
        if kind == Kind.ANSWER_END and node is not request.answer:
            self._drop_answer(request)
            # One that another request has kept is left to it.
            request.answer = node if pages else None
        if request.stand is None or node.num_tokens > request.stand.num_tokens:
            request.stand = node

    def _drop_answer(self, request: Request) -> None:
        """Drop the states of an answer's last checkpoint from host memory: there is a later one.

        They stay if the checkpoint is still kept, or if another request has read it.
        """
        answer = request.answer
        if self._host is None or answer is None or answer.is_kept:
            return
        key = request.prefix_hashes[answer.num_tokens // self._hash_tokens - 1]
        point = self._tree.history.get(key)
        if point is None or point.past != Past.READ:
            for table in self.states:
                self._host.drop(table, key)

    def _keep(
        self, request: Request, num_tokens: int, kind: Kind, pages: Sequence[tuple[int, int]]
    ) -> Checkpoint | None:
        if request.stand is None:
            return None
        return self._tree.keep(
            request.stand,
            request.prefix_hashes,
            request.facts,
            num_tokens,
            kind,
            request.past,
            state_pages=pages,
        )

    def _enter_missing(self, request: Request, num_tokens: int) -> bool:
        """Let others find pages of a request whose content had another page, which is gone by now.

        Returns:
            Whether there were any.
        """
        has_entered = False
        for table in self._tables:
            if not table.policy.is_overwritten and not table.policy.names_images:
                end = (num_tokens + self._ahead_tokens) // table.grain.page_slots
                has_entered |= table.enter_missing(request, end)
        return has_entered

    def end(self, request: Request, branches: Collection[int]) -> None:
        """Leave the last checkpoints of a request that ends, which still uses its pages.

        Args:
            request: The request.
            branches: As for `planned`.
        """
        facts, tree = request.facts, self._tree
        tree.history.time += self._token_bytes * max(
            0, request.committed_tokens - max(facts.prompt_tokens, request.hit_tokens)
        )
        self.pass_by(request, request.committed_tokens, branches)
        if not self.states:
            last = self._aligned(request.committed_tokens)
            if request.stand is not None and last > request.stand.num_tokens:
                is_answer = last >= self._aligned(facts.prompt_tokens)
                self._make(request, last, Kind.ANSWER_END if is_answer else Kind.PROMPT_END)
        for pages in request.pending.values():
            for index, page in pages:
                self._tables[index].pages.release([page])
        request.pending.clear()
        request.answer = request.stand = None

    # Starting from one

    def protect(self, hit: PrefixHit) -> None:
        """Let the checkpoint of a hit be the last to be evicted until its states are copied."""
        node = None
        if hit.num_tokens and self.states:
            node = self._tree.at(hit.prefix_hashes, hit.num_tokens)
        self._tree.protect(node)

    def start_from(self, request: Request, hit: PrefixHit) -> None:
        """Order the copies with which an admitted request starts from the states of its hit."""
        self._tree.protect(None)
        if not hit.num_tokens or not self.states:
            return
        self.num_states_read += 1
        moves = [
            (table, source, _running_page(request, table, hit.num_tokens))
            for table in self.states
            for source in hit.pages[table.index]
        ]
        self._move([move for move in moves if not is_on_host(move[1]) and move[1] != move[2]])
        for table, source, target in moves:
            if is_on_host(source):
                self._copy(table, host_page(source), target, CopyPath.FROM_HOST)

    def _move(self, moves: list[tuple[Table, int, int]]) -> None:
        """Order copies of one state's parts, each read before another one is written over it.

        In a full arena a request may have been given the very pages of the state: each is evicted
        at the last and holds its content until it is written.
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
                # They stand in each other's place: one waits where nothing is kept.
                table, source, target = moves[0]
                self._copy(table, source, NULL_PAGE)
                moves[0] = table, NULL_PAGE, target
                continue
            moves.remove(move)
            self._copy(table, source, target)

    def _copy(
        self, table: Table, source: int, target: int, path: CopyPath = CopyPath.IN_ARENA
    ) -> None:
        copy = PageCopy(table_index=table.index, source=source, target=target, path=path)
        self._copies.append(copy)


def _running_page(request: Request, table: Table, num_tokens: int) -> int:
    """The page of a request's state after so many tokens."""
    pages = request.pages[table.index]
    return pages[num_tokens % len(pages)]
