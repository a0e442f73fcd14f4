"""Where in a request's text others are likely to go on, and the pages that they would read there.

Pages that a window has passed are read only by who goes on from within the text, so most of them
are not worth the memory. Three places are: where the request left what others had computed, since a
third may leave it there too; the end of its prompt, which may be asked again, or end in a question
that the next request puts otherwise; and, by the pages that it holds to its end, its own end. Where
another is likely to go on from that, as a turn of a conversation, the end of its prompt is not
likely to be asked again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from jenga.eviction_order import Prospect
from jenga.policies import Grain, LayerPolicy, RequestFacts

QUESTION_TOKENS = 128
"""Tokens before the end of a prompt from which somebody is likely to go on: a question."""

NEAR_TOKENS = 1024
"""Tokens before the end of a prompt from which somebody may go on: a long question."""

# Python 3.11 takes as long to find a member of an enumeration as to call a function.
_PASSED = Prospect.PASSED


@dataclass(frozen=True, slots=True)
class Landmark:
    """Pages read by who goes on from one place, or from a few that are close.

    Attributes:
        pages: Their numbers.
        prospect: Who that is.
    """

    pages: range
    prospect: Prospect


def landmarks(
    policy: LayerPolicy,
    facts: RequestFacts,
    grain: Grain,
    branches: Sequence[int],
    *,
    expects_turn: bool = False,
) -> tuple[Landmark, ...]:
    """The landmarks of a request in one page table.

    Args:
        policy: Of the page table.
        facts: Of the request.
        grain: Of the page table.
        branches: Tokens after which it left what others had computed.
        expects_turn: Whether another request is likely to go on from where it ends.
    """
    found = [
        Landmark(_pages(policy, facts, grain, tokens, tokens), Prospect.BRANCHED)
        for tokens in set(branches)
        if tokens
    ]
    end, known = facts.prompt_tokens, max(branches, default=0)
    of_question = Prospect.NEAR if expects_turn else Prospect.ENDED
    for tokens, prospect in ((QUESTION_TOKENS, of_question), (NEAR_TOKENS, Prospect.NEAR)):
        # Where the branch is known there is no need to guess.
        if known < end - tokens or not known:
            pages = _pages(policy, facts, grain, max(0, end - tokens), end)
            found.append(Landmark(pages, prospect))
    return tuple(found)


def _pages(policy: LayerPolicy, facts: RequestFacts, grain: Grain, start: int, end: int) -> range:
    """Pages touched by who goes on from any of these places."""
    slots = policy.update_last_access(facts, start, end)
    return range(slots.start // grain.page_slots, -(-slots.stop // grain.page_slots))


def prospect_of(marks: Sequence[Landmark], number: int) -> Prospect:
    """What is known of one page that was passed."""
    found = _PASSED
    for mark in marks:
        if number in mark.pages and mark.prospect > found:
            found = mark.prospect
    return found


def parts(marks: Sequence[Landmark], numbers: range) -> list[tuple[range, Prospect]]:
    """Divide pages that were passed by what is known of them, in order."""
    if len(numbers) == 1:
        return [(numbers, prospect_of(marks, numbers.start))]
    inner = {edge for m in marks for edge in (m.pages.start, m.pages.stop) if edge in numbers}
    edges = sorted({numbers.start, numbers.stop, *inner})
    return [(range(start, stop), prospect_of(marks, start)) for start, stop in pairwise(edges)]
