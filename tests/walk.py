"""Count the files that a call of the manager runs through: `python -m tests.walk [MODEL]`.

It serves a request whose prompt is partly cached, and follows each call of the manager. For each
call it prints how many files of `jenga` ran, and how many arrows connect them: pairs of a file and
one that it called. Files that form a tree have one arrow less than files. Each further arrow is a
file that is called from one more place. `--follow` prints the arrows.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import jenga
from jenga.geometry import Geometry
from jenga.manager import Manager
from jenga.models.known import known_model
from jenga.planning.planner import plan
from jenga.tables.request import PrefixHit

PACKAGE = Path(jenga.__file__).parent

Arrows = dict[tuple[str, str], str]
"""A file, and a file that it called -> the first function of the second that it called."""


def arrows_of(call: Callable[[], object]) -> Arrows:
    """Run a call, and return the arrows between files of `jenga`, in order of their first use.

    The first arrow leads from outside, which is named `""`. Files of other packages are left out,
    as if their callers had called what they call.
    """
    arrows: Arrows = {}
    files = [""]

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            is_ours = path.is_relative_to(PACKAGE)
            file = path.relative_to(PACKAGE).as_posix() if is_ours else files[-1]
            if file != files[-1]:
                arrows.setdefault((files[-1], file), frame.f_code.co_qualname)
            files.append(file)
        elif event == "return" and len(files) > 1:
            files.pop()

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return arrows


HASH_TOKENS = 16
PROMPT_TOKENS = 4096
SHARED_TOKENS = 2048


def hashes(name: str, shared_tokens: int) -> list[bytes]:
    """Return the prefix hashes of a prompt that shares its first tokens with the others."""
    return [
        f"{'shared' if end <= shared_tokens else name}{end}".encode()
        for end in range(HASH_TOKENS, PROMPT_TOKENS + 1, HASH_TOKENS)
    ]


def walks(geometry: Geometry) -> dict[str, Arrows]:
    """Follow the calls of one request: name of the call -> its arrows."""
    large_pages = 64 * (1 + len(geometry.page_tables))
    manager = Manager(geometry, num_large_pages=large_pages, prefix_caching=True)
    keys = hashes("first", SHARED_TOKENS)
    for end in (SHARED_TOKENS, PROMPT_TOKENS):
        manager.new_step()
        manager.allocate(
            "first", num_tokens=end, num_processed_tokens=0 if end == SHARED_TOKENS else end // 2
        )
        if end == SHARED_TOKENS:
            manager.keep_state("first", keys[end // HASH_TOKENS - 1], end)
        manager.commit("first", keys, end)
    manager.free("first")
    keys = hashes("second", SHARED_TOKENS)
    manager.announce("second", keys, num_tokens=PROMPT_TOKENS)
    manager.new_step()
    followed: dict[str, Arrows] = {}

    hits: list[PrefixHit] = []

    def follow(name: str, call: Callable[[], object]) -> None:
        followed[name] = arrows_of(call)

    follow("lookup", lambda: hits.append(manager.lookup(keys, max_tokens=PROMPT_TOKENS - 1)))
    [hit] = hits
    follow(
        "allocate (admission)",
        lambda: manager.allocate(
            "second", num_tokens=PROMPT_TOKENS, num_processed_tokens=hit.num_tokens, hit=hit
        ),
    )
    follow("commit", lambda: manager.commit("second", keys, PROMPT_TOKENS))
    manager.new_step()
    follow(
        "allocate (a page more)",
        lambda: manager.allocate(
            "second", num_tokens=PROMPT_TOKENS + 1, num_processed_tokens=PROMPT_TOKENS
        ),
    )
    follow("keep_state", lambda: manager.keep_state("second", keys[-1], PROMPT_TOKENS))
    follow("take_copies", manager.take_copies)
    follow("free", lambda: manager.free("second"))
    manager.check()
    return followed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.walk", description=__doc__)
    parser.add_argument("model", nargs="?", default="jamba-1.5-mini", help="a known model")
    parser.add_argument("--follow", action="store_true", help="print the arrows")
    options = parser.parse_args(arguments)
    for name, arrows in walks(plan(known_model(options.model).spec())).items():
        num_files = len({callee for _, callee in arrows})
        sys.stdout.write(f"{name:24} {num_files:3} files, {len(arrows):3} arrows\n")
        if options.follow:
            for (caller, callee), function in arrows.items():
                sys.stdout.write(f"    {caller or 'caller'} -> {callee}: {function}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
