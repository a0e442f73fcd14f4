"""An engine process without a model: `fake_engine_process.py FOLDER NAME GUARANTEE LIMIT`.

It takes lines "load N" and "report" on its standard input, and answers "report" with one line of
JSON. In each step it stamps every large page that its requests use, in the mapped arena, and checks
before the next step that nobody else has.
"""

import json
import os
import random
import select
import sys
from pathlib import Path

from jenga.broker.client import SocketLender
from jenga.broker.folder import ArenaFolder
from jenga.broker.memory import DeviceArray
from jenga.errors import OutOfPagesError
from jenga.manager import Manager
from tests.broker import fake_cuda
from tests.machines.geometries import full, geometry, sliding

GEOMETRY = geometry("fake", full(tokens=4, per_large=2), sliding(tokens=4, per_large=2))


class Engine:
    def __init__(self, folder, name, guarantee, limit):
        self.name = name
        self.lender = SocketLender(
            folder,
            name,
            guarantee_pages=guarantee,
            limit_pages=limit,
            large_page_bytes=GEOMETRY.large_page_bytes,
            join_seconds=20,
        )
        self.memory = folder.memory
        self.arena = self.memory.map(0)
        if isinstance(self.arena, DeviceArray):
            self.arena = fake_cuda.bytes_of(self.arena)
        self.manager = Manager(
            GEOMETRY,
            num_large_pages=self.lender.num_pages,
            prefix_caching=True,
            hash_tokens=4,
            lender=self.lender,
        )
        self.random = random.Random(name)
        self.requests = {}  # name -> tokens, final tokens
        self.num_requests = self.num_steps = self.num_finished = 0
        self.used = set()

    def step(self, load):
        self.num_steps += 1
        self.memory.check()
        self.check_stamps()
        if not load and not self.requests:
            self.manager.borrowed.rest()
            self.lender.wait(0.01)
            self.used = set()
            return
        self.manager.new_step()
        for name, (num_tokens, final) in list(self.requests.items()):
            if num_tokens == final:
                self.num_finished += 1
            if num_tokens == final or not self.grow(name, num_tokens + 1, final):
                self.manager.free(name)
                del self.requests[name]
        while len(self.requests) < load:
            self.num_requests += 1
            name = f"{self.name}{self.num_requests}"
            prompt = self.random.randrange(1, 60)
            try:
                self.manager.allocate(name, num_tokens=prompt, full_tokens=prompt)
            except OutOfPagesError:
                break
            self.requests[name] = prompt, prompt + self.random.randrange(30)
            self.commit(name, prompt)
        self.stamp()
        if not self.num_steps % 50:
            self.manager.check()

    def grow(self, name, num_tokens, final):
        try:
            self.manager.allocate(name, num_tokens=num_tokens, num_processed_tokens=num_tokens - 1)
        except OutOfPagesError:
            return False
        self.requests[name] = num_tokens, final
        self.commit(name, num_tokens)
        return True

    def commit(self, name, num_tokens):
        hashes = [f"{name} {i}".encode() for i in range(num_tokens // 4)]
        self.manager.commit(name, hashes, num_tokens)

    def stamp(self):
        self.used = {
            page // table.small_pages_per_large_page
            for name in self.requests
            for table, pages in zip(
                GEOMETRY.page_tables, self.manager.page_tables(name), strict=True
            )
            for page in pages
            if page
        }
        for large in self.used:
            self.arena[large * GEOMETRY.large_page_bytes] = self.lender.row + 1

    def check_stamps(self):
        for large in self.used:
            stamp = self.arena[large * GEOMETRY.large_page_bytes]
            assert stamp == self.lender.row + 1, f"{self.name}: {large} was written by {stamp}"

    def report(self):
        return {
            "steps": self.num_steps,
            "finished": self.num_finished,
            "pages": self.manager.num_large_pages - 1,
            "connected": self.lender.is_connected,
            "returned": self.manager.borrowed.num_returned,
        }


def main():
    folder, name, guarantee, limit = sys.argv[1:]
    engine = Engine(ArenaFolder(Path(folder)), name, int(guarantee), int(limit))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    load, rest = 0, b""
    while True:
        if select.select([sys.stdin], [], [], 0)[0]:
            text = os.read(sys.stdin.fileno(), 4096)
            if not text:
                engine.lender.leave()
                return
            *lines, rest = (rest + text).split(b"\n")
            for line in lines:
                if line == b"report":
                    sys.stdout.write(json.dumps(engine.report()) + "\n")
                    sys.stdout.flush()
                else:
                    load = int(line.removeprefix(b"load "))
        engine.step(load)


if __name__ == "__main__":
    main()
