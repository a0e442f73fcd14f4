"""Trials of a policy on short requests: its answers must not contradict each other.

A policy that gives up a slot which it reads later would let a request read another one's tokens.
"""

from collections.abc import Iterator, Sequence
from itertools import product

from jenga.policies.base import ALL_PAGES, NEVER, Grain, Image, LayerPolicy, RequestFacts

_TOKENS = 40
"""Length of the requests."""

_REQUESTS = (
    RequestFacts(
        prompt_tokens=23,
        images=(
            Image(start_token=3, num_tokens=5, content=b"first"),
            Image(start_token=20, num_tokens=3, content=b"second"),
        ),
    ),
    RequestFacts(prompt_tokens=9),
)

_CHUNK_TOKENS = (1, 7, 16)
"""Most tokens of a step."""

_MOST_HIT_PAGES = 5
"""Number of pages of which any may be cached."""


class _Trial:
    """One policy, and one request that it serves."""

    def __init__(
        self, owner: str, policy: LayerPolicy, page_slots: int, facts: RequestFacts
    ) -> None:
        self.owner = owner
        self.policy = policy
        self.page_slots = page_slots
        self.facts = facts

    def touched(self, processed: int, num_tokens: int) -> range:
        touched = self.policy.update_last_access(self.facts, processed, num_tokens)
        if touched.step != 1 or touched.start < 0:
            self.refuse(f"update_last_access must return slots in one piece, got {touched}")
        return touched

    def steps(self, num_tokens: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield the first token and the end of steps. None passes the end of the prompt."""
        for start in range(num_tokens):
            end = min(num_tokens, start + chunk_tokens)
            if start < self.facts.prompt_tokens:
                end = min(end, self.facts.prompt_tokens)
            yield start, end

    def refuse(self, reason: str) -> None:
        msg = (
            f"{self.owner}: its policy contradicts itself with pages of {self.page_slots} slots "
            f"and a prompt of {self.facts.prompt_tokens} tokens: {reason}"
        )
        raise ValueError(msg)


def check_policy(owner: str, policy: LayerPolicy, page_slots: int) -> None:
    """Ask a policy about short requests, and compare its answers.

    Args:
        owner: Name of the layer type with the policy, for the message.
        policy: The policy.
        page_slots: Number of slots of a page.

    Raises:
        ValueError: Two answers contradict each other. The message names the methods, the arguments
            and the answers.
    """
    for facts in _REQUESTS:
        policy.check_facts(facts)
        trial = _Trial(owner, policy, page_slots, facts)
        _check_releases(trial)
        _check_room(trial)
        _check_content(trial)
        _check_hits(trial)


def _check_releases(trial: _Trial) -> None:
    """No slot comes back once it was given up, and `next_release` misses no page."""
    policy, facts, page_slots = trial.policy, trial.facts, trial.page_slots
    for at in range(_TOKENS):
        start = trial.touched(at, _TOKENS).start
        after = trial.touched(at + 1, _TOKENS).start
        if after < start:
            trial.refuse(
                f"update_last_access gives up the slots before {start} at {at} processed tokens, "
                f"and wants those from {after} on at {at + 1}"
            )
        release = policy.next_release(facts, at, page_slots)
        if release <= at:
            trial.refuse(f"next_release at {at} processed tokens must be later, got {release}")
        leaves = next(
            (
                later
                for later in range(at + 1, _TOKENS)
                if trial.touched(later, _TOKENS).start // page_slots > start // page_slots
            ),
            NEVER,
        )
        if release > leaves:
            trial.refuse(
                f"next_release at {at} processed tokens is {release}, but update_last_access gives "
                f"up page {start // page_slots} at {leaves}"
            )


def _check_room(trial: _Trial) -> None:
    """`max_tokens` and `peak_slots` agree with the touched slots."""
    policy, facts = trial.policy, trial.facts
    for start, end in trial.steps(_TOKENS, 16):
        stop = trial.touched(start, end).stop
        if policy.max_tokens(facts, start, stop) < end:
            trial.refuse(
                f"max_tokens of the {stop} slots of a step must reach its end at {end} tokens, got "
                f"{policy.max_tokens(facts, start, stop)}"
            )
        for num_slots in range(stop):
            most = min(policy.max_tokens(facts, start, num_slots), end)
            if most > start and (wanted := trial.touched(start, most).stop) > num_slots:
                trial.refuse(
                    f"max_tokens of {num_slots} slots at {start} processed tokens is {most}, for "
                    f"which update_last_access wants {wanted} slots"
                )
    for num_tokens, chunk_tokens in product((1, 9, _TOKENS), _CHUNK_TOKENS):
        peak = policy.peak_slots(facts, num_tokens, chunk_tokens)
        for start, end in trial.steps(num_tokens, chunk_tokens):
            if (num_slots := len(trial.touched(start, end))) > peak:
                trial.refuse(
                    f"peak_slots of {num_tokens} tokens in steps of {chunk_tokens} is {peak}, but "
                    f"the step of tokens {start} to {end} touches {num_slots}"
                )


def _check_content(trial: _Trial) -> None:
    """There is one prefix length for each page, and one key for each final page."""
    policy, facts = trial.policy, trial.facts
    grain = Grain(page_slots=trial.page_slots, hash_tokens=trial.page_slots)
    for num_tokens in range(_TOKENS + 1):
        pages = range(-(-trial.touched(0, num_tokens).stop // trial.page_slots))
        lengths = list(policy.set_prefix_length(facts, pages, grain))
        if not policy.is_overwritten and len(lengths) != len(pages):
            trial.refuse(
                f"set_prefix_length of {len(pages)} pages must give as many, got {lengths}"
            )
        final = policy.final_pages(facts, num_tokens, grain)
        if not 0 <= final <= len(pages):
            trial.refuse(
                f"final_pages of {num_tokens} tokens must be among {len(pages)} pages, got {final}"
            )
        keys = policy.content_keys(
            facts, _hashes(num_tokens // trial.page_slots), grain, range(final)
        )
        if len(keys) != final or len({*keys}) != final:
            trial.refuse(
                f"content_keys of the {final} final pages of {num_tokens} tokens must be as many "
                f"different keys, got {list(keys)}"
            )


def _check_hits(trial: _Trial) -> None:
    """A request that goes on from a hit reads cached pages, all that it needs."""
    policy, facts, page_slots = trial.policy, trial.facts, trial.page_slots
    grain = Grain(page_slots=page_slots, hash_tokens=page_slots)
    num_keys = len(policy.content_keys(facts, _hashes(_MOST_HIT_PAGES), grain, ALL_PAGES))
    for hits in product((True, None), repeat=min(num_keys, _MOST_HIT_PAGES)):
        is_hit: Sequence[object] = [*hits, *[None] * (num_keys - len(hits))]
        at_most = _MOST_HIT_PAGES * page_slots
        while at_most >= 0:
            prefix = policy.get_possible_prefix(facts, is_hit, grain, at_most)
            if not 0 <= prefix <= at_most:
                trial.refuse(
                    f"get_possible_prefix must be between 0 and at_most_tokens, {at_most}, got "
                    f"{prefix}"
                )
            _check_reused(trial, is_hit, grain, prefix)
            at_most = prefix - 1


def _check_reused(trial: _Trial, is_hit: Sequence[object], grain: Grain, num_tokens: int) -> None:
    """All reused pages are cached. If slots belong to tokens, they are all that is read."""
    policy, page_slots = trial.policy, trial.page_slots
    reused = list(policy.reused_pages(trial.facts, is_hit, grain, num_tokens))
    missing = [page for page in reused if page >= len(is_hit) or is_hit[page] is None]
    if missing:
        trial.refuse(
            f"reused_pages of a prefix of {num_tokens} tokens must be cached, got {missing} of "
            f"{list(is_hit)}"
        )
    if policy.is_overwritten or policy.names_images:
        return
    touched = trial.touched(num_tokens, num_tokens)
    # Slots from the prefix on are the request's own.
    end = min(touched.stop, num_tokens)
    needed = range(touched.start // page_slots, -(-end // page_slots))
    if needed and not {*needed} <= {*reused}:
        trial.refuse(
            f"update_last_access reads the pages {list(needed)} after a prefix of {num_tokens} "
            f"tokens, but reused_pages are {reused}"
        )


def _hashes(num_hashes: int) -> list[bytes]:
    return [bytes([number]) for number in range(num_hashes)]
