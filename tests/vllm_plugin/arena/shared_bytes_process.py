"""A process that writes and reads an arena on a GPU: `shared_bytes_process.py FOLDER`.

A line of JSON on the standard input is ["write" or "read", seed of a pattern]. The answer is
whether the first, the middle and the last large page then have the pattern.
"""

import json
import os
import sys
from pathlib import Path

import torch

from jenga.broker.folder import ArenaFolder
from tests.broker import fake_cuda


def main():
    folder = ArenaFolder(Path(sys.argv[1]))
    with folder.open_books().closing() as books:
        large_page_bytes = books.large_page_bytes
    mapped = folder.memory.map(0)
    is_fake = fake_cuda.FOLDER_VARIABLE in os.environ
    arena = fake_cuda.tensor_over(mapped) if is_fake else torch.as_tensor(mapped, device="cuda:0")
    pages = arena.view(-1, large_page_bytes)
    chosen = [1, len(pages) // 2, len(pages) - 1]
    for line in sys.stdin:
        action, seed = json.loads(line)
        source = torch.Generator().manual_seed(seed)
        shape = len(chosen), large_page_bytes
        pattern = torch.randint(-128, 128, shape, dtype=torch.int8, generator=source)
        if action == "write":
            pages[chosen] = pattern.to(arena.device)
        is_same = torch.equal(pages[chosen].cpu(), pattern)  # it waits for the GPU
        sys.stdout.write(json.dumps(is_same) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
