"""Sessions of coding agents that WEKA recorded and SemiAnalysis published: AgentX, cc-traces-weka.

A trace is a session: requests with their tokens, the hashes of their blocks, and times. A turn
arrives when the answer before it has ended and the recorded think time has passed. Sub-agents start
from the turn that launched them and run beside each other. The next turn waits for those that had
ended before it in the recording.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jenga.sim.workload.fields import Place
from jenga.sim.workload.records import Record, records_of
from jenga.sim.workload.requests import Piece, Request

MOST_DEPTH = 8
"""Most levels of sub-agents in sub-agents. Published traces have one."""

_SUFFIXES = (".json", ".jsonl", ".parquet")
_ASYNC = "async_launched"

_WHOLE_S, _EXACT_S = 1.0, 0.01
"""Tolerance of recorded times in seconds: for agents with whole seconds only, and for others."""

Session = tuple[Request, ...]
"""Requests of a session: the first one, which follows none, and then those after it.

Times count from the session's beginning.
"""


def read_weka(
    path: Path,
    *,
    arrivals_per_s: float = 0.0,
    concurrent: int = 0,
    most_think_s: float = math.inf,
    answers: bool = True,
    seed: int = 0,
) -> Iterator[Request]:
    """Read the requests of recorded sessions, to be replayed in closed loop.

    Prompts share a prefix as far as the hashes of their whole blocks are equal. Sessions share no
    prefix unless their `hash_id_scope` is "global".

    The recording does not identify generated tokens, so the reader infers them. A turn may begin
    with all whole blocks of an earlier turn and be longer than that turn's prompt. If it is longer
    by at least the tokens of the earlier answer, it is assumed to continue with that answer. If it
    is longer by fewer, its client left out the answer's thoughts, or the whole answer.

    Args:
        path: A file of sessions: one JSON object, a list of them, lines of them, or Parquet; or a
            folder of such files.
        arrivals_per_s: Sessions that begin in a second, at random; 0 for all at once.
        concurrent: Number of sessions that run at once. Session `n` begins when session
            `n - concurrent` has ended. All sessions are then read before the first one begins. 0
            for no limit.
        most_think_s: Longest think time in seconds. Longer ones are cut to it; AgentX takes 10.
        answers: Whether prompts contain earlier answers as generated. If False, answers are part of
            the prompt's new text and are computed again.
        seed: Seed of the arrivals.

    Raises:
        ValueError: An argument is out of range, or the file is not in this format. The message
            names file, line and field.

    Source: callanjfox/kv-cache-tester, `docs/trace_replay_tester.md`; the data sets
        semianalysisai/cc-traces-weka-* of Hugging Face; AIPerf, `docs/tutorials/weka-trace.md`.
    """
    for name, value in (("arrivals_per_s", arrivals_per_s), ("concurrent", concurrent)):
        if not 0 <= value < math.inf:
            msg = f"{name} must be finite and at least 0, got {value}"
            raise ValueError(msg)
    if not most_think_s >= 0:
        msg = f"most_think_s must be at least 0, got {most_think_s}"
        raise ValueError(msg)
    draw = random.Random(seed)
    begin_s = 0.0
    for lane in _lanes(_sessions(path, most_think_s, answers=answers), concurrent):
        after: tuple[str, ...] = ()
        lane_s = begin_s
        for session in lane:
            yield from (
                replace(each, arrival_s=lane_s + each.arrival_s, after=each.after or after)
                for each in session
            )
            followed = {name for each in session for name in each.after}
            after = tuple(each.name for each in session if each.name not in followed)
            lane_s += max(each.arrival_s for each in session)
        begin_s += draw.expovariate(arrivals_per_s) if arrivals_per_s else 0.0


def _lanes(sessions: Iterator[Session], concurrent: int) -> Iterator[Sequence[Session]]:
    """Yield rows of sessions that run in sequence: `concurrent` rows, or one row per session."""
    if not concurrent:
        for session in sessions:
            yield (session,)
        return
    lanes: dict[int, list[Session]] = {}
    for number, session in enumerate(sessions):
        lanes.setdefault(number % concurrent, []).append(session)
    yield from lanes.values()


def _sessions(path: Path, most_think_s: float, *, answers: bool) -> Iterator[Session]:
    shared: dict[int, _Blocks] = {}
    number = 0
    for file in _files(path):
        for where, record in records_of(file):
            place = Place(where)
            block_tokens = place.tokens("block_size", record.get("block_size"))
            scope = record.get("hash_id_scope", "local")
            if scope == "global":
                blocks = shared.setdefault(block_tokens, _Blocks(block_tokens))
            elif scope == "local":
                blocks = _Blocks(block_tokens)
            else:
                place.refuse("hash_id_scope", '"local" or "global"', scope)
            reader = _SessionReader(number, blocks, answers=answers)
            reader.read(place, record)
            yield reader.requests(most_think_s)
            number += 1


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(each for each in path.iterdir() if each.suffix.lower() in _SUFFIXES)
    if not files:
        msg = f"{path}: must have files that end in {', '.join(_SUFFIXES)}, got none"
        raise ValueError(msg)
    for each in files:
        if not each.is_file():
            msg = f"{each}: must be a regular file"
            raise ValueError(msg)
    return files


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """One request as it was recorded. Times are in seconds from the session's beginning.

    Attributes:
        name: Name of the request.
        agent: Number of the agent whose turn it is.
        start_s: Time at which it was sent.
        end_s: Time at which its answer ended.
        blocks: Hashes of its whole blocks.
        node: Node of its last whole block in the tree of blocks.
        prompt: Pieces that it reads.
        prompt_tokens: Number of tokens of the prompt.
        output_tokens: Number of tokens that it generates.
        after: Calls that it follows.
        think_s: Seconds from the end of the last call that it follows to its start.
        is_gone_on_from: Whether a later call continues its prompt beyond the last whole block.
    """

    name: str
    agent: int
    start_s: float
    end_s: float
    blocks: list[object]
    node: int
    prompt: tuple[Piece, ...]
    prompt_tokens: int
    output_tokens: int
    after: list["_Call"]
    think_s: float
    is_gone_on_from: bool = False


class _Blocks:
    """A tree of blocks. Each path from the root is a prefix of some prompt."""

    ROOT = 0

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.ends: dict[int, _Call] = {}  # node -> the last call whose whole blocks end there
        self._children: dict[tuple[int, object], int] = {}
        self._prompts: list[tuple[Piece, ...]] = [()]  # node -> a prompt through it

    def child(self, node: int, block: object) -> int | None:
        """Return the node that a block leads to, or None if no prompt has that block there."""
        return self._children.get((node, block))

    def prefix(self, node: int, num_blocks: int) -> tuple[Piece, ...]:
        """Return the pieces of the first `num_blocks` blocks on the path to a node."""
        return _cut(self._prompts[node], num_blocks * self.block_tokens)

    def add(self, node: int, blocks: Sequence[object], prompt: tuple[Piece, ...]) -> int:
        """Add the blocks that a prompt has behind a node. Return the node of the last block."""
        for block in blocks:
            self._children[node, block] = len(self._prompts)
            node = len(self._prompts)
            self._prompts.append(prompt)
        return node


def _cut(prompt: tuple[Piece, ...], num_tokens: int) -> tuple[Piece, ...]:
    """Return the first tokens of a prompt."""
    kept: list[Piece] = []
    for piece in prompt:
        if piece.num_tokens >= num_tokens:
            return (*kept, Piece(piece.content, num_tokens)) if num_tokens else tuple(kept)
        kept.append(piece)
        num_tokens -= piece.num_tokens
    return prompt


@dataclass(slots=True)
class _Agent:
    """One agent and its turns.

    Attributes:
        number: Number of the agent in its session.
        offset_s: Seconds that are added to its recorded times.
        launched_by: Calls that its first turn follows.
        slack_s: Tolerance of its recorded times, in seconds.
        calls: Its turns so far.
        launched: Last calls of each launched sub-agent for which no turn has waited yet.
    """

    number: int
    offset_s: float
    launched_by: list[_Call]
    slack_s: float
    calls: list[_Call]
    launched: list[list[_Call]]


class _SessionReader:
    """Reader of one session."""

    def __init__(self, number: int, blocks: _Blocks, *, answers: bool) -> None:
        self._number = number
        self._blocks = blocks
        self._answers = answers
        self._calls: list[_Call] = []
        self._num_agents = 0

    def requests(self, most_think_s: float) -> Session:
        """Return the session's requests, each after those that it follows."""
        return tuple(
            Request(
                name=call.name,
                arrival_s=call.start_s,
                after=tuple(each.name for each in call.after),
                think_s=min(call.think_s, most_think_s),
                prompt=call.prompt,
                output_tokens=call.output_tokens,
                output=_answer(call),
            )
            for call in self._calls
        )

    def read(self, place: Place, record: Record) -> None:
        """Read a session from its record.

        Raises:
            ValueError: The record is not in this format.
        """
        entries = place.items("requests", record.get("requests"))
        self._agent(place, entries, 0.0, [])
        if not self._calls:
            place.refuse("requests", "a list with a request", entries)

    def _agent(
        self,
        place: Place,
        values: Sequence[object],
        offset_s: float,
        launched_by: list[_Call],
        *,
        depth: int = 0,
    ) -> list[_Call]:
        """Read the turns of one agent. Return those that no other turn of it follows."""
        entries = [place.members(f"requests[{index}]", value) for index, value in enumerate(values)]
        times = [each.get("t") for each in entries if each.get("type") != "subagent"]
        is_whole = all(isinstance(each, int | float) and each == each // 1 for each in times)
        slack_s = _WHOLE_S if is_whole else _EXACT_S
        agent = _Agent(self._num_agents, offset_s, launched_by, slack_s, [], [])
        self._num_agents += 1
        for index, entry in enumerate(entries):
            here = place.inside(f"requests[{index}]")
            if entry.get("type") == "subagent":
                if depth >= MOST_DEPTH:
                    here.refuse("type", f"no sub-agent below {MOST_DEPTH} others", "subagent")
                self._subagent(here, entry, agent, depth)
            else:
                after = next((e for e in entries[index + 1 :] if e.get("type") != "subagent"), None)
                self._call(here, entry, agent, after)
        followed = {id(each) for call in agent.calls for each in call.after}
        return [call for call in agent.calls if id(call) not in followed]

    def _subagent(self, here: Place, entry: Record, agent: _Agent, depth: int) -> None:
        values = here.items("requests", entry.get("requests"))
        if not values:
            return
        marked_s = agent.offset_s + here.number("t", entry.get("t"))
        first = here.members("requests[0]", values[0])
        first_s = here.inside("requests[0]").number("t", first.get("t"))
        launched_by = agent.calls[-1:] or agent.launched_by
        launched_s = launched_by[-1].start_s if launched_by else 0.0
        # Published data sets count times from the session's beginning, recordings from that of the
        # sub-agent. In recordings, a sub-agent with a known duration ended at its entry's time.
        offset_s = 0.0
        if first_s < launched_s or not first_s:
            ended_s = here.number("duration_ms", entry.get("duration_ms") or 0) / 1000
            offset_s = max(launched_s, marked_s - ended_s)
        last = self._agent(here, values, offset_s, launched_by, depth=depth + 1)
        if entry.get("status") != _ASYNC:
            agent.launched.append(last)

    def _call(self, here: Place, entry: Record, agent: _Agent, following: Record | None) -> None:
        start_s = agent.offset_s + here.number("t", entry.get("t"))
        prompt_tokens = here.tokens("in", entry.get("in"))
        # An aborted request generated no token, but an engine generates at least one.
        output_tokens = max(1, here.tokens("out", entry.get("out"), least=0))
        hashes = here.items("hash_ids", entry.get("hash_ids") or [])
        if len(hashes) > -(-prompt_tokens // self._blocks.block_tokens):
            here.refuse("hash_ids", f"no more than {prompt_tokens} tokens have blocks", len(hashes))
        for index, each in enumerate(hashes):
            if type(each) is not int:
                here.refuse(f"hash_ids[{index}]", "an integer", each)
        # The hash of a partial block cannot match that of a longer prompt.
        blocks = hashes[: prompt_tokens // self._blocks.block_tokens]
        node, num_shared, goes_on_from = self._find(blocks, agent, start_s)
        name = f"{self._number}.{len(self._calls)}"
        prompt = self._prompt(name, prompt_tokens, node, num_shared, goes_on_from)
        after, think_s = self._cause(agent, start_s, goes_on_from)
        if agent.calls and after == agent.calls[-1:] and entry.get("think_time") is not None:
            think_s = here.number("think_time", entry.get("think_time"))
        call = _Call(
            name=name,
            agent=agent.number,
            start_s=start_s,
            end_s=start_s + _api_time(here, entry, following),
            blocks=blocks,
            node=self._blocks.add(node, blocks[num_shared:], prompt),
            prompt=prompt,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            after=after,
            think_s=think_s,
        )
        if call.node != _Blocks.ROOT:
            self._blocks.ends[call.node] = call
        self._calls.append(call)
        agent.calls.append(call)

    def _find(
        self, blocks: list[object], agent: _Agent, start_s: float
    ) -> tuple[int, int, _Call | None]:
        """Match a call's blocks with those of earlier prompts.

        Returns:
            The last node that earlier prompts share, the number of blocks up to it, and the call of
            the same agent that this one continues, which had ended. None if there is none.
        """
        node, num_blocks, goes_on_from = _Blocks.ROOT, 0, None
        latest_s = start_s + agent.slack_s
        for last in agent.calls[-1:]:
            # Nearly every turn continues the one before it, so that walk can be skipped.
            num_last = len(last.blocks)
            if num_last and last.end_s <= latest_s and blocks[:num_last] == last.blocks:
                node, num_blocks, goes_on_from = last.node, num_last, last
        while num_blocks < len(blocks):
            child = self._blocks.child(node, blocks[num_blocks])
            if child is None:
                break
            node, num_blocks = child, num_blocks + 1
            call = self._blocks.ends.get(node)
            if call is not None and call.agent == agent.number and call.end_s <= latest_s:
                goes_on_from = call
        return node, num_blocks, goes_on_from

    def _prompt(
        self, name: str, num_tokens: int, node: int, num_shared: int, goes_on_from: _Call | None
    ) -> tuple[Piece, ...]:
        begin = self._blocks.prefix(node, num_shared)
        if goes_on_from is not None and goes_on_from.node == node:
            before = goes_on_from
            # The first new block holds the end of its prompt behind the last whole block, and its
            # answer. If two calls continue it with different blocks, one of them has another text
            # there. Only the first call is therefore assumed to continue it.
            if not before.is_gone_on_from and num_tokens >= before.prompt_tokens:
                before.is_gone_on_from = True
                begin = before.prompt
                num_added = num_tokens - before.prompt_tokens
                if self._answers and num_added >= before.output_tokens:
                    begin = (*begin, Piece(_answer(before), before.output_tokens))
        rest_tokens = num_tokens - sum(piece.num_tokens for piece in begin)
        return (*begin, Piece(f"text of {name}", rest_tokens)) if rest_tokens else begin

    def _cause(
        self, agent: _Agent, start_s: float, goes_on_from: _Call | None
    ) -> tuple[list[_Call], float]:
        """Return the calls that a call waited for, and the seconds from their end to its start.

        A call waited for:

        - the turn that it continues, or otherwise the last turn of its agent that had ended,
        - later turns of its agent that had ended,
        - sub-agents that had ended and that no earlier turn waited for.

        Calls that another one of them follows are left out.
        """
        latest_s = start_s + agent.slack_s
        before = goes_on_from or next(
            (each for each in reversed(agent.calls) if each.end_s <= latest_s), None
        )
        after = [] if before is None else [before]
        if before is None:
            # A call that came while the first turn still ran was launched together with it.
            after += agent.launched_by or self._calls[:1]
        else:
            for each in reversed(agent.calls):
                if each.start_s < before.end_s - agent.slack_s:
                    break
                if each is not before and each.end_s <= latest_s:
                    after.append(each)
        for last in list(agent.launched):
            if all(each.end_s <= latest_s for each in last):
                after += last
                agent.launched.remove(last)
        followed = {id(each) for call in after for each in call.after}
        after = [each for each in after if id(each) not in followed]
        return after, max(0.0, start_s - max((each.end_s for each in after), default=start_s))


def _answer(call: _Call) -> str:
    """Return the name of a call's generated content."""
    return f"answer of {call.name}"


def _api_time(here: Place, entry: Record, following: Record | None) -> float:
    """Return the seconds from a call's start to the end of its answer.

    If the entry does not record them, they are the time to the next turn's start less that turn's
    think time. If that is unknown too, they are 0.
    """
    if entry.get("api_time") is not None:
        return here.number("api_time", entry.get("api_time"))
    if following is None or following.get("think_time") is None:
        return 0.0
    next_s = here.number("t of the next request", following.get("t"))
    think_s = here.number("think_time of the next request", following.get("think_time"))
    return max(0.0, next_s - think_s - here.number("t", entry.get("t")))
