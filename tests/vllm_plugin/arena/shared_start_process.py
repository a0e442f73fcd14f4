"""An engine that starts as on a GPU in a shared arena: `shared_start_process.py OPTIONS FOLDER`.

It prints the large pages to which its start has written, as a line of JSON. The arena was empty.
"""

import json
import os
import sys
from pathlib import Path


def main():
    options, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own output

    from vllm import LLM

    from jenga.broker.folder import ArenaFolder
    from tests.vllm_plugin.engine.emulated_graphs import emulate_graphs, start_as_on_a_gpu

    emulate_graphs()
    llm = LLM(**options)
    start_as_on_a_gpu(llm)
    folder = ArenaFolder(path)
    with folder.open_books().closing() as books:
        num_bytes, num_pages = books.large_page_bytes, books.num_pages
    content = folder.arena.read_bytes()
    pages = (content[page * num_bytes : (page + 1) * num_bytes] for page in range(num_pages))
    json.dump([page for page, part in enumerate(pages) if any(part)], answers)
    answers.flush()
    del llm


if __name__ == "__main__":
    main()
