"""Decisions of the broker, and its books: limits, guarantees, restarts, engines that end."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jenga.broker.books import NOBODY, Agreement, Books, Supply
from jenga.broker.broker import Broker
from jenga.broker.folder import ArenaFolder
from jenga.broker.processes import Process, process_of, this_process
from jenga.broker.server import Server
from jenga.errors import InvariantError

PAGE_BYTES = 4096


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books.create(tmp_path / "books", large_page_bytes=PAGE_BYTES, num_pages=11)


def agreed(name: str, guarantee: int, limit: int, process: Process | None = None) -> Agreement:
    return Agreement(
        name=name,
        guarantee_pages=guarantee,
        limit_pages=limit,
        processes=(process or this_process(),),
    )


def join(broker: Broker, name: str, guarantee: int, limit: int) -> int:
    row = broker.join(agreed(name, guarantee, limit), large_page_bytes=PAGE_BYTES)
    broker.settle()
    broker.check()
    return row


def test_an_engine_gets_its_guarantee_when_it_joins_and_never_more_than_its_limit(books: Books):
    broker = Broker(books)

    row = join(broker, "a", 3, 5)
    assert broker.num_held(row) == 3

    broker.ask(row, 100, None)
    broker.settle()
    assert broker.num_held(row) == 5
    assert len(books.pages_of(row + 1)) == 5
    broker.check()


@pytest.mark.parametrize(
    ("name", "guarantee", "limit", "page_bytes", "complaint"),
    [
        ("b", 5, 10, PAGE_BYTES, "only 4 are not guaranteed"),
        ("b", 4, 11, PAGE_BYTES, "no more than the 10 large pages"),
        ("b", 4, 3, PAGE_BYTES, "guarantee of no more than its limit"),
        ("b", 0, 3, PAGE_BYTES, "guarantee_pages must be a positive integer"),
        ("a", 1, 3, PAGE_BYTES, "shares this arena already"),
        ("b", 1, 3, 8192, "planned for large pages of 8192 bytes"),
    ],
    ids=["sum", "limit", "order", "zero", "name", "page"],
)
def test_a_join_that_does_not_add_up_is_refused_before_anything_is_taken(
    books: Books, name: str, guarantee: int, limit: int, page_bytes: int, complaint: str
):
    broker = Broker(books)
    join(broker, "a", 6, 10)

    with pytest.raises(ValueError, match=complaint):
        broker.join(agreed(name, guarantee, limit), large_page_bytes=page_bytes)

    assert books.num_free == 4
    assert [agreement.name for _, agreement in books.agreements()] == ["a"]
    broker.check()


def test_an_engine_cannot_return_what_it_does_not_have_or_is_guaranteed(books: Books):
    broker = Broker(books)
    first, second = join(broker, "a", 2, 10), join(broker, "b", 2, 10)

    with pytest.raises(ValueError, match="does not have"):
        broker.take_back(first, books.pages_of(second + 1))
    with pytest.raises(ValueError, match="fewer than its 2"):
        broker.take_back(first, books.pages_of(first + 1)[:1])

    assert (broker.num_held(first), broker.num_held(second)) == (2, 2)


def test_empty_large_pages_are_called_for_first_then_the_oldest_content(books: Books):
    broker = Broker(books)
    rows = [join(broker, name, 1, 10) for name in "abc"]
    for row in rows[:2]:
        broker.ask(row, 3 if row == rows[0] else 4, None)
        broker.settle()
    assert books.num_free == 0
    books.write_supply(rows[0], Supply(num_empty=0, num_evictable=3, oldest_s=10.0))
    books.write_supply(rows[1], Supply(num_empty=1, num_evictable=3, oldest_s=5.0))

    broker.ask(rows[2], 4, 7.0)
    calls = broker.settle().calls

    # One is empty and three are older than 7 seconds, all of them of the second engine.
    assert {row: call.num_pages for row, call in calls.items()} == {rows[1]: 4}
    assert calls[rows[1]].older_than_s == 7.0
    broker.take_back(rows[1], books.pages_of(rows[1] + 1)[:4])
    news = broker.settle()
    assert [len(pages) for pages in news.granted.values()] == [4]
    broker.check()


def test_an_engine_below_its_guarantee_comes_before_others_and_may_evict_anything(books: Books):
    broker = Broker(books)
    first = join(broker, "a", 2, 10)
    broker.ask(first, 8, None)
    broker.settle()
    books.write_supply(first, Supply(num_evictable=8, oldest_s=1e9))

    second = broker.join(agreed("b", 4, 10), large_page_bytes=PAGE_BYTES)
    calls = broker.settle().calls
    broker.ask(first, 1, None)
    broker.take_back(first, books.pages_of(first + 1)[:2])
    broker.settle()

    assert calls[first].num_pages == 4
    assert calls[first].older_than_s == math.inf
    assert (broker.num_held(first), broker.num_held(second)) == (8, 2)
    broker.check()


def test_a_broker_that_starts_again_keeps_living_engines_and_frees_dead_ones(
    books: Books, tmp_path: Path
):
    living = join(Broker(books), "living", 3, 5)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    broker = Broker(books)
    broker.join(agreed("dead", 4, 5, process_of(child.pid)), large_page_bytes=PAGE_BYTES)
    broker.settle()
    pages = books.pages_of(living + 1)
    child.kill()
    child.communicate()

    again = Broker(Books(tmp_path / "books"))

    assert again.books.pages_of(living + 1) == pages
    assert again.books.num_free == 7
    assert [agreement.name for _, agreement in again.books.agreements()] == ["living"]
    again.check()
    again.rejoin(living, this_process())
    with pytest.raises(ValueError, match="belongs to"):
        again.rejoin(living, process_of(os.getppid()))


def test_a_process_with_the_same_id_that_started_later_is_another_process(books: Books):
    earlier = Process(os.getpid(), this_process().start_ticks - 1)
    broker = Broker(books)
    broker.join(agreed("earlier", 4, 5, earlier), large_page_bytes=PAGE_BYTES)
    broker.settle()

    broker.end_dead()

    assert books.num_free == 10


def test_large_pages_are_kept_until_the_last_process_of_an_engine_has_ended(books: Books):
    broker = Broker(books)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    broker.join(agreed("a", 4, 5, process_of(child.pid)), large_page_bytes=PAGE_BYTES)
    broker.settle()
    broker.attach("a", this_process())
    child.kill()
    child.communicate()

    broker.end_dead()

    assert books.num_free == 6
    with pytest.raises(ValueError, match="no engine of the name 'b'"):
        broker.attach("b", this_process())


def test_books_that_disagree_are_found(books: Books):
    broker = Broker(books)
    row = join(broker, "a", 3, 5)
    books.set_owner(books.pages_of(row + 1)[0], NOBODY)
    with pytest.raises(InvariantError, match="are free"):
        broker.check()


@pytest.mark.usefixtures("books")
def test_a_file_that_is_not_one_of_books_is_refused(tmp_path: Path):
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"something else" * 100)
    with pytest.raises(ValueError, match="not a file of a broker's books"):
        Books(foreign)
    cut = tmp_path / "cut"
    cut.write_bytes((tmp_path / "books").read_bytes()[:-2])
    with pytest.raises(ValueError, match="must have"):
        Books(cut)
    with pytest.raises(FileExistsError):
        Books.create(tmp_path / "books", large_page_bytes=PAGE_BYTES, num_pages=11)


def test_one_broker_serves_an_arena_at_a_time(tmp_path):
    folder = ArenaFolder(tmp_path / "arena")
    folder.create(large_page_bytes=4096, num_pages=5)
    server = Server(folder)
    with pytest.raises(ValueError, match="another broker serves"):
        Server(folder)
    server.close()
    Server(folder).close()
