"""A broker and engines as processes: kills of each at random points lose and mix up nothing."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jenga.broker.client import BrokerError, SocketLender, check_join
from jenga.broker.folder import ArenaFolder
from tests.broker.fake_engine_process import GEOMETRY

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("fake_engine_process.py")
NUM_PAGES = 101
PATIENCE_S = 30


class Engine:
    """A process of `fake_engine_process.py`."""

    def __init__(self, folder, name, guarantee, limit):
        self.name = name
        arguments = [folder.path, name, guarantee, limit]
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def wait_ready(self):
        assert self.process.stdout.readline() == "ready\n"
        return self

    def load(self, num_requests):
        self.process.stdin.write(f"load {num_requests}\n")
        self.process.stdin.flush()

    def report(self):
        self.process.stdin.write("report\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill(self):
        self.process.kill()
        self.process.communicate()


class Shared:
    """An arena, its broker, and engines."""

    def __init__(self, path):
        self.folder = ArenaFolder(path)
        self.engines = []
        self.broker = None
        self.start_broker(
            "--large-page-bytes",
            str(GEOMETRY.large_page_bytes),
            "--bytes",
            str(NUM_PAGES * GEOMETRY.large_page_bytes),
        )

    def start_broker(self, *options):
        self.broker = subprocess.Popen(
            [sys.executable, "-m", "jenga", "broker", "start", self.folder.path, *options],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert "lends 100 large pages" in self.broker.stdout.readline()

    def kill_broker(self):
        self.broker.kill()
        self.broker.communicate()

    def engine(self, name, guarantee, limit=100):
        engine = Engine(self.folder, name, guarantee, limit)
        self.engines.append(engine)
        return engine

    def held(self):
        """Number of large pages of each engine, and of those that are free."""
        with self.folder.open_books().closing() as books:
            held = {each.name: len(books.pages_of(row + 1)) for row, each in books.agreements()}
            return held, books.num_free


@pytest.fixture
def shared(tmp_path):
    shared = Shared(tmp_path / "arena")
    yield shared
    for engine in shared.engines:
        if engine.process.poll() is None:
            engine.kill()
    if shared.broker.poll() is None:
        shared.kill_broker()


def until(condition):
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.02)


def test_large_pages_follow_the_load_from_one_process_to_another(shared):
    first = shared.engine("first", 10).wait_ready()
    second = shared.engine("second", 10).wait_ready()
    first.load(40)
    until(lambda: shared.held()[0]["first"] >= 80)
    first.load(0)
    second.load(40)
    until(lambda: shared.held()[0]["second"] >= 80)

    assert first.report()["returned"] > 0
    assert second.report()["finished"] > 0


def test_a_killed_engine_gives_all_back_at_once_and_others_take_it(shared):
    first = shared.engine("first", 10).wait_ready()
    second = shared.engine("second", 10).wait_ready()
    first.load(40)
    until(lambda: shared.held()[0]["first"] >= 80)
    first.kill()
    until(lambda: "first" not in shared.held()[0])
    second.load(40)
    until(lambda: shared.held()[0]["second"] >= 80)

    assert second.report()["connected"]


def test_engines_serve_on_while_the_broker_is_dead_and_find_the_next_one(shared):
    first = shared.engine("first", 10).wait_ready()
    second = shared.engine("second", 10).wait_ready()
    first.load(20)
    second.load(20)
    until(lambda: first.report()["finished"] > 20)
    shared.kill_broker()
    held_before, _ = shared.held()
    until(lambda: not first.report()["connected"])
    finished = first.report()["finished"]
    until(lambda: first.report()["finished"] > finished + 20)
    # One engine dies while nobody watches. The next broker notices.
    second.kill()
    held, _ = shared.held()
    assert held == held_before
    shared.start_broker()
    until(lambda: "second" not in shared.held()[0])
    until(lambda: first.report()["connected"])
    first.load(50)
    until(lambda: shared.held()[0]["first"] >= 80)


def test_an_engine_that_joins_gets_its_guarantee_from_others_that_use_the_whole_arena(shared):
    first = shared.engine("first", 10).wait_ready()
    first.load(60)
    until(lambda: shared.held()[0]["first"] >= 95)
    second = shared.engine("second", 50).wait_ready()

    assert shared.held()[0]["second"] >= 50
    assert first.report()["pages"] <= 50
    assert second.report()["connected"]


@pytest.mark.slow
def test_kills_of_anyone_at_random_points_leave_books_in_which_no_page_has_two_owners(shared):
    chance = random.Random(1)
    names = iter(f"engine{number}" for number in range(100))
    alive = [shared.engine(next(names), 15).wait_ready() for _ in range(3)]
    for _ in range(8):
        for engine in alive:
            engine.load(chance.choice([0, 5, 30]))
        time.sleep(chance.random() / 2)
        if chance.random() < 0.4:
            shared.kill_broker()
            time.sleep(chance.random() / 4)
            shared.start_broker()
        victim = alive.pop(chance.randrange(len(alive)))
        victim.kill()
        until(lambda name=victim.name: name not in shared.held()[0])
        alive.append(shared.engine(next(names), 15).wait_ready())
    until(lambda: all(engine.report()["connected"] for engine in alive))
    for engine in alive:
        engine.load(0)
    until(lambda: sum(shared.held()[0].values()) + shared.held()[1] == NUM_PAGES - 1)
    with shared.folder.open_books().closing() as books:
        assert all(books.owner(page) <= 64 for page in range(NUM_PAGES))


def test_who_does_not_join_gets_nothing_and_is_told_why(shared, tmp_path):
    shared.engine("first", 10).wait_ready()
    options = {"limit_pages": 100, "large_page_bytes": GEOMETRY.large_page_bytes}
    for ask in (check_join, SocketLender):
        with pytest.raises(BrokerError, match="only 90 are not guaranteed"):
            ask(shared.folder, "large", guarantee_pages=91, **options)
    check_join(shared.folder, "fits", guarantee_pages=90, **options)
    assert shared.held() == ({"first": 10}, 90)
    with pytest.raises(BrokerError, match="no broker listens"):
        check_join(ArenaFolder(tmp_path), "x", guarantee_pages=1, **options)


def test_the_command_refuses_what_does_not_fit_the_arena_that_is_there(shared):
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "jenga", "broker", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )

    engine = shared.engine("first", 10).wait_ready()
    status = json.loads(run("status", shared.folder.path, "--json").stdout)
    assert (status["free"], status["engines"][0]["held"]) == (90, 10)
    assert "another broker serves" in run("start", shared.folder.path).stderr
    assert f"uses this arena, in processes [{engine.process.pid}]" in (
        run("remove", shared.folder.path).stderr
    )
    other = run("start", shared.folder.path, "--large-page-bytes", "8192")
    assert "does not fit the arena that is there" in other.stderr
    assert "give --large-page-bytes and --bytes" in run("start", "/dev/shm/none").stderr
    engine.kill()
    until(lambda: not shared.held()[0])
    shared.broker.send_signal(signal.SIGTERM)  # a shell may have the run ignore SIGINT
    assert "engines keep what they have" in shared.broker.communicate()[0]
    assert run("remove", shared.folder.path).returncode == 0
    assert not shared.folder.path.exists()
    with pytest.raises(ValueError, match="has no shared arena"):
        ArenaFolder(shared.folder.path).open_books()
