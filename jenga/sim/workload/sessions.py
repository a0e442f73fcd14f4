"""Workloads over time whose requests continue after answers: chats beside documents, agents.

The prompt of a later turn contains the generated tokens of earlier turns, so that a cache that
keeps answers finds them.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from jenga.sim.workload.draws import Range, arrivals_s, check_arguments, wait_s
from jenga.sim.workload.requests import Piece, Request

MOST_CONTEXT_TOKENS = 150_000
"""Tokens at which an agent's session ends by default: the limit of clients of coding agents."""


def mixed(  # noqa: PLR0913  one workload, all that describes it
    *,
    num_requests: int = 700,
    num_chats: int = 40,
    head_tokens: int = 1000,
    message_tokens: Range = (20, 800),
    output_tokens: Range = (50, 800),
    chat_tokens: int = 32_000,
    burst_share: float = 0.04,
    num_in_burst: Range = (2, 6),
    document_tokens: Range = (10_000, 30_000),
    arrivals_per_s: float = 0.0,
    seed: int = 0,
) -> Iterator[Request]:
    """Chats that go on, beside bursts of documents that are read only once.

    A turn of a chat reads everything said in it before, answers included. It arrives whether or not
    the turn before it has ended by then.

    Args:
        num_requests: Number of requests, documents included.
        num_chats: Number of chats at a time, each equally likely to have the next turn.
        head_tokens: Tokens of the head with which all chats begin.
        message_tokens: Fewest and most tokens of a message.
        output_tokens: Fewest and most tokens of an answer, also of answers on documents.
        chat_tokens: Tokens at which a chat is replaced by a new one.
        burst_share: Probability that the next arrival is a burst instead of a turn of a chat.
        num_in_burst: Fewest and most documents of a burst, which arrive together.
        document_tokens: Fewest and most tokens of a document.
        arrivals_per_s: Requests a second on average, at random; 0 for all at once.
        seed: Seed of all random draws.

    Raises:
        ValueError: An argument is out of range.
    """
    check_arguments(
        num_requests=num_requests,
        num_chats=num_chats,
        head_tokens=head_tokens,
        message_tokens=message_tokens,
        output_tokens=output_tokens,
        chat_tokens=chat_tokens,
        burst_share=burst_share,
        num_in_burst=num_in_burst,
        document_tokens=document_tokens,
        arrivals_per_s=arrivals_per_s,
    )
    draw = random.Random(seed)
    head = Piece("head", head_tokens)
    chats: list[tuple[Piece, ...]] = [(head,)] * num_chats
    mean_requests = 1 + burst_share * (sum(num_in_burst) / 2 - 1)
    times_s = arrivals_s(draw, arrivals_per_s / mean_requests)
    number = 0
    while number < num_requests:
        arrival_s = next(times_s)
        if draw.random() < burst_share:
            for _ in range(min(draw.randint(*num_in_burst), num_requests - number)):
                yield Request(
                    name=str(number),
                    arrival_s=arrival_s,
                    prompt=(Piece(f"document {number}", draw.randint(*document_tokens)),),
                    output_tokens=draw.randint(*output_tokens),
                )
                number += 1
            continue
        chat = draw.randrange(num_chats)
        prompt = (*chats[chat], Piece(f"message {number}", draw.randint(*message_tokens)))
        request = Request(
            name=str(number),
            arrival_s=arrival_s,
            prompt=prompt,
            output_tokens=draw.randint(*output_tokens),
            output=f"answer {number}",
        )
        yield request
        is_full = request.prompt_tokens + request.output_tokens >= chat_tokens
        chats[chat] = (head,) if is_full else request.pieces
        number += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agents:
    """The way agents work, with the arguments of `agents`."""

    result_tokens: Range
    output_tokens: Range
    think_s: float
    pause_share: float
    pause_s: tuple[float, float]
    subagent_share: float
    num_subagents: Range
    num_subagent_turns: Range
    subagent_tokens: Range
    fork_share: float
    context_tokens: int


def agents(  # noqa: PLR0913  one workload, all that describes it
    *,
    num_sessions: int = 24,
    num_turns: Range = (8, 40),
    head_tokens: int = 8000,
    task_tokens: Range = (8000, 60_000),
    result_tokens: Range = (100, 4000),
    output_tokens: Range = (50, 1000),
    think_s: float = 4.0,
    pause_share: float = 0.1,
    pause_s: tuple[float, float] = (30.0, 240.0),
    subagent_share: float = 0.04,
    num_subagents: Range = (1, 3),
    num_subagent_turns: Range = (3, 10),
    subagent_tokens: Range = (1000, 8000),
    fork_share: float = 0.0,
    context_tokens: int = MOST_CONTEXT_TOKENS,
    arrivals_per_s: float = 0.05,
    seed: int = 0,
) -> Iterator[Request]:
    """Long sessions of agents that use tools, in closed loop.

    A turn follows the answer before it after the time that a tool or a person takes. It reads all
    turns before it, answers included. A turn may launch sub-agents, which all start when it has
    ended and take turns of their own. The next turn follows when all of them have ended, and reads
    their last answers.

    Args:
        num_sessions: Number of sessions.
        num_turns: Fewest and most turns of a session.
        head_tokens: Tokens of the head, tools and instructions, with which all prompts begin.
        task_tokens: Fewest and most tokens of a session's task, which its first turn reads.
        result_tokens: Fewest and most tokens that a turn adds: the words of a tool or a person.
        output_tokens: Fewest and most tokens of an answer.
        think_s: Seconds from an answer to the next turn, on average, at random.
        pause_share: Share of a session's turns before which a person thinks.
        pause_s: Fewest and most seconds that the person thinks, in addition to `think_s`.
        subagent_share: Share of a session's turns that launch sub-agents.
        num_subagents: Fewest and most sub-agents that a turn launches.
        num_subagent_turns: Fewest and most turns of a sub-agent.
        subagent_tokens: Fewest and most tokens of a sub-agent's task.
        fork_share: Share of the launching turns whose sub-agents begin with the turn's whole prompt
            and answer. All other sub-agents begin with the head alone.
        context_tokens: Most tokens of a prompt. A session ends before a turn that would read more.
        arrivals_per_s: Sessions that begin in a second, at random; 0 for all at once.
        seed: Seed of all random draws.

    Raises:
        ValueError: An argument is out of range.
    """
    check_arguments(
        num_sessions=num_sessions,
        num_turns=num_turns,
        head_tokens=head_tokens,
        task_tokens=task_tokens,
        result_tokens=result_tokens,
        output_tokens=output_tokens,
        think_s=think_s,
        pause_share=pause_share,
        pause_s=pause_s,
        subagent_share=subagent_share,
        num_subagents=num_subagents,
        num_subagent_turns=num_subagent_turns,
        subagent_tokens=subagent_tokens,
        fork_share=fork_share,
        context_tokens=context_tokens,
        arrivals_per_s=arrivals_per_s,
    )
    kind = _Agents(
        result_tokens=result_tokens,
        output_tokens=output_tokens,
        think_s=think_s,
        pause_share=pause_share,
        pause_s=pause_s,
        subagent_share=subagent_share,
        num_subagents=num_subagents,
        num_subagent_turns=num_subagent_turns,
        subagent_tokens=subagent_tokens,
        fork_share=fork_share,
        context_tokens=context_tokens,
    )
    draw = random.Random(seed)
    head = Piece("head", head_tokens)
    times_s = arrivals_s(draw, arrivals_per_s)
    for number in range(num_sessions):
        task = Piece(f"task of {number}", draw.randint(*task_tokens))
        session = _Session(str(number), head, kind, draw)
        yield from session.requests(task, draw.randint(*num_turns), next(times_s))


class _Session:
    """One session of an agent."""

    def __init__(self, name: str, head: Piece, kind: _Agents, draw: random.Random) -> None:
        self._name = name
        self._head = head
        self._kind = kind
        self._draw = draw

    def requests(self, task: Piece, num_turns: int, begin_s: float) -> Iterator[Request]:
        """Yield the session's turns, each after those that it follows."""
        kind, draw = self._kind, self._draw
        prompt = (self._head, task)
        turn = self._turn(f"{self._name}.0", prompt, begin_s, (), 0.0)
        yield turn
        for number in range(1, num_turns):
            last, reports = [turn], ()
            if draw.random() < kind.subagent_share:
                launched = list(self._subagents(turn))
                yield from launched
                followed = {name for each in launched for name in each.after}
                last = [each for each in launched if each.name not in followed]
                reports = tuple(each.pieces[-1] for each in last)
            result = Piece(f"result {number} of {self._name}", draw.randint(*kind.result_tokens))
            prompt = (*turn.pieces, *reports, result)
            if sum(piece.num_tokens for piece in prompt) > kind.context_tokens:
                return
            think_s = self._think_s()
            if draw.random() < kind.pause_share:
                think_s += draw.uniform(*kind.pause_s)
            time_s = max(each.arrival_s for each in last) + think_s
            turn = self._turn(
                f"{self._name}.{number}", prompt, time_s, tuple(each.name for each in last), think_s
            )
            yield turn

    def _subagents(self, parent: Request) -> Iterator[Request]:
        """Yield the turns of the sub-agents that a turn launches."""
        kind, draw = self._kind, self._draw
        begin = parent.pieces if draw.random() < kind.fork_share else (self._head,)
        for number in range(draw.randint(*kind.num_subagents)):
            name = f"{parent.name}/{number}"
            prompt = (*begin, Piece(f"task of {name}", draw.randint(*kind.subagent_tokens)))
            turn = self._turn(f"{name}.0", prompt, parent.arrival_s, (parent.name,), 0.0)
            yield turn
            for each in range(1, draw.randint(*kind.num_subagent_turns)):
                result = Piece(f"result {each} of {name}", draw.randint(*kind.result_tokens))
                think_s = self._think_s()
                time_s = turn.arrival_s + think_s
                prompt = (*turn.pieces, result)
                if sum(piece.num_tokens for piece in prompt) > kind.context_tokens:
                    break
                turn = self._turn(f"{name}.{each}", prompt, time_s, (turn.name,), think_s)
                yield turn

    def _turn(
        self,
        name: str,
        prompt: tuple[Piece, ...],
        arrival_s: float,
        after: tuple[str, ...],
        think_s: float,
    ) -> Request:
        return Request(
            name=name,
            arrival_s=arrival_s,
            after=after,
            think_s=think_s,
            prompt=prompt,
            output_tokens=self._draw.randint(*self._kind.output_tokens),
            output=f"answer of {name}",
        )

    def _think_s(self) -> float:
        think_s = self._kind.think_s
        return wait_s(self._draw, 1 / think_s) if think_s else 0.0
