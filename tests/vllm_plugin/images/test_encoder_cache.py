"""The book of image embeddings and the workers' pages, step by step, with every row checked."""

import random
from types import SimpleNamespace

import pytest
import torch

from jenga.errors import InvariantError, OutOfPagesError
from jenga.manager import Manager
from jenga.policies import RequestFacts
from jenga.tables.request import CopyPath
from tests.machines.geometries import embedding, full, geometry

pytestmark = pytest.mark.vllm

VISION = geometry("vision", full(slot_bytes=24, per_large=4), embedding(slot_bytes=96))
TABLE = 1
PAGE_ROWS, WIDTH = 4, 3
BUDGET = 64


def feature(name, offset, num_rows, breaks=()):
    """An image of so many rows, with line breaks at some places."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    length = num_rows + len(breaks)
    mask = None
    if breaks:
        mask = torch.ones(length, dtype=torch.bool)
        mask[list(breaks)] = False
    place = PlaceholderRange(offset=offset, length=length, is_embed=mask)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place)


class FakeRequest:
    """The fields of a request of vLLM that are read here."""

    def __init__(self, name, num_tokens, features):
        self.request_id, self.num_tokens, self.mm_features = name, num_tokens, features
        self.computed = 0

    def get_num_encoder_embeds(self, number):
        return self.mm_features[number].mm_position.get_num_embeds()


def request(name, num_tokens, *features):
    return FakeRequest(name, num_tokens, list(features))


def rows_of(name, num_rows):
    """What an encoder makes of an image: rows that are those of no other image."""
    base = torch.arange(num_rows * WIDTH, dtype=torch.float32).view(num_rows, WIDTH)
    return base + 1000 * (1 + sum(name.encode()))


class Engine:
    """vLLM's scheduler and a worker, as far as they touch embeddings."""

    def __init__(self, num_large_pages=24, num_host_large_pages=0):
        from jenga.vllm_plugin.scheduler.encoder_cache import ArenaEncoderCache, ImageBook
        from jenga.vllm_plugin.worker.image_pages import ArenaEmbeddings

        self.manager = Manager(
            VISION,
            num_large_pages=num_large_pages,
            prefix_caching=True,
            hash_tokens=4,
            num_host_large_pages=num_host_large_pages,
        )
        self.book = ImageBook(self.manager, TABLE)
        self.cache = ArenaEncoderCache(cache_size=1)
        self.cache.open(self.manager, self.book)
        self.pages = torch.full((num_large_pages, PAGE_ROWS, WIDTH), float("nan"))
        self.host_pages = torch.full((num_host_large_pages, PAGE_ROWS, WIDTH), float("nan"))
        self.num_loaded = 0
        self.embeddings = ArenaEmbeddings(self.pages)
        self.running, self.encoded = [], []

    def start_step(self):
        self.manager.new_step()
        for each in self.book.step_starts():
            self.manager.commit(each.request_id, [], each.computed)
        self.batch, self.inputs = {}, []

    def schedule(self, each, chunk):
        """Give a request tokens of the step, up to an image that must wait. False means none."""
        from vllm.multimodal.utils import get_mm_features_in_window

        start, name = each.computed, each.request_id
        end = min(each.num_tokens, start + chunk)
        wanted, names = [], set()
        low, high = get_mm_features_in_window(each.mm_features, start=start, end=end)
        duplicates = []
        for number in range(low, high):
            of = each.mm_features[number]
            if of.identifier in names:
                duplicates.append(number)
                continue
            if self.cache.check_and_update_cache(each, number):
                continue
            if not self.cache.can_allocate(each, number, BUDGET, 0):
                end = max(start, of.mm_position.offset)
                break
            place = of.mm_position
            first, last = place.get_embeds_indices_in_range(
                max(0, start - place.offset), min(place.length, end - place.offset)
            )
            if first < last:
                wanted.append(number)
                names.add(of.identifier)
        if end <= start:
            return False
        try:
            if self.manager.is_running(name):
                self.manager.commit(name, [], start)
                self.manager.allocate(name, num_tokens=end, num_processed_tokens=start)
            else:
                hit = self.manager.lookup([], max_tokens=0, facts=self.facts(each))
                self.manager.allocate(name, num_tokens=end, hit=hit)
        except OutOfPagesError:
            return False
        assert self.book.grant(each, start, end)
        for number in wanted:
            self.cache.allocate(each, number)
            self.inputs.append(each.mm_features[number])
        for number in duplicates:
            self.cache.check_and_update_cache(each, number)
        self.batch[name] = (each, start, end)
        return True

    @staticmethod
    def facts(each):
        from jenga.vllm_plugin.scheduler.encoder_hits import image_of

        images = tuple(map(image_of, each.mm_features))
        return RequestFacts(prompt_tokens=each.num_tokens, images=images)

    def admit(self, each, chunk):
        hit = self.manager.lookup([], max_tokens=0, facts=self.facts(each))
        self.book.record_hit(each, hit)
        if not self.schedule(each, chunk):
            self.cache.free(each)
            return False
        self.running.append(each)
        return True

    def drop(self, each):
        """Finish, abort or preempt a request."""
        if self.manager.is_running(each.request_id):
            self.manager.commit(each.request_id, [], each.computed)
            self.manager.free(each.request_id)
        self.book.forget(each.request_id)
        self.batch.pop(each.request_id, None)
        self.running.remove(each)

    def execute(self):
        """Run the step in the worker, and check every row that it reads."""
        ahead = self.manager.write_back_pages()
        for copy in [*self.manager.take_copies(), *ahead]:
            if copy.table_index == TABLE:
                self.copy(copy)
        self.embeddings.begin_step(self.cache.get_manager_metadata())
        names = [each.identifier for each in self.inputs]
        assert len(set(names)) == len(names)
        for each in self.inputs:
            assert each.identifier not in self.embeddings
            num_rows = each.mm_position.get_num_embeds()
            self.embeddings[each.identifier] = rows_of(each.identifier, num_rows)
        self.encoded += names
        for each, start, end in self.batch.values():
            for of in each.mm_features:
                place = of.mm_position
                first = max(0, start - place.offset)
                last = min(place.length, end - place.offset)
                if first >= last:
                    continue
                first, last = place.get_embeds_indices_in_range(first, last)
                if first < last:
                    read = self.embeddings.get(of.identifier)[first:last]
                    expected = rows_of(of.identifier, place.get_num_embeds())[first:last]
                    assert torch.equal(read, expected), (each.request_id, of.identifier)
            each.computed = end
        for each, _, _ in self.batch.values():
            for number in list(self.cache.get_cached_input_ids(each)):
                place = each.mm_features[number].mm_position
                if place.offset + place.length <= each.computed:
                    self.cache.free_encoder_input(each, number)
        self.manager.check()

    def copy(self, copy):
        """Copy a page of embeddings to host memory, or from there."""
        if copy.path == CopyPath.TO_HOST:
            self.host_pages[copy.target] = self.pages[copy.source]
        else:
            self.num_loaded += 1
            self.pages[copy.target] = self.host_pages[copy.source]

    def step(self, *chunks):
        """Run a step in which each running request gets so many tokens."""
        self.start_step()
        for each, chunk in zip(self.running, chunks, strict=True):
            assert self.schedule(each, chunk)
        self.execute()


def test_an_image_is_encoded_once_for_all_chunks_that_read_it():
    engine = Engine()
    engine.start_step()
    assert engine.admit(request("a", 30, feature("cat", 2, 11)), 5)
    engine.execute()
    for _ in range(5):
        engine.step(5)

    assert engine.encoded == ["cat"]


def test_requests_of_one_step_wait_for_the_image_that_one_of_them_encodes():
    engine = Engine()
    engine.start_step()
    for name, offset in (("a", 6), ("b", 8)):
        assert engine.admit(request(name, 30, feature("cat", offset, 11)), 5)
    engine.execute()

    engine.start_step()
    first, second = engine.running
    assert engine.schedule(first, 10)
    assert engine.schedule(second, 10)
    assert engine.batch["b"][1:] == (5, 8)  # up to the image
    engine.execute()
    engine.step(10, 10)

    assert engine.encoded == ["cat"]


def test_a_request_that_is_admitted_shares_what_the_step_encodes():
    engine = Engine()
    engine.start_step()
    assert engine.admit(request("a", 30, feature("cat", 2, 11)), 10)
    engine.manager.commit("a", [], 10)  # as the cache manager does before a lookup
    assert engine.admit(request("b", 30, feature("cat", 4, 11)), 10)
    engine.execute()
    engine.step(20, 20)

    assert engine.encoded == ["cat"]


def test_an_image_twice_in_a_step_is_encoded_once_and_lies_in_two_places():
    engine = Engine()
    engine.start_step()
    each = request("a", 30, feature("cat", 2, 6), feature("cat", 9, 6), feature("cat", 20, 6))
    assert engine.admit(each, 17)
    engine.execute()
    first, second = (engine.manager.image_pages("a", TABLE, number) for number in (0, 1))
    assert not set(first) & set(second)
    engine.step(13)

    assert engine.encoded == ["cat"]


def test_a_preempted_request_reads_its_image_again_without_the_encoder():
    engine = Engine()
    each = request("a", 30, feature("cat", 2, 11))
    engine.start_step()
    assert engine.admit(each, 8)
    engine.execute()
    engine.start_step()
    engine.drop(each)
    each.computed = 0
    assert engine.admit(each, 8)
    engine.execute()
    engine.step(22)

    assert engine.encoded == ["cat"]


def test_what_a_dropped_request_was_to_encode_in_the_step_another_encodes():
    engine = Engine()
    engine.start_step()
    for name in ("a", "b"):
        assert engine.admit(request(name, 30, feature("cat", 6, 11)), 5)
    engine.execute()
    first, second = engine.running
    engine.start_step()
    assert engine.schedule(first, 10)
    engine.drop(first)
    engine.inputs.clear()
    assert engine.schedule(second, 10)
    engine.execute()

    assert engine.encoded == ["cat"]
    assert engine.batch["b"][1:] == (5, 15)


def test_a_step_is_refused_if_an_image_is_gone_that_vllm_was_told_of():
    engine = Engine()
    engine.start_step()
    assert engine.admit(request("a", 30, feature("cat", 2, 6)), 10)
    assert engine.admit(request("b", 30, feature("cat", 6, 6)), 3)
    engine.execute()
    engine.start_step()
    second = engine.running[1]
    assert engine.cache.check_and_update_cache(second, 0)
    engine.manager.forget_images()
    engine.manager.allocate("b", num_tokens=10, num_processed_tokens=3)

    assert not engine.book.grant(second, 3, 10)


def test_an_image_that_the_arena_lost_is_loaded_and_not_encoded_again():
    engine = Engine(num_host_large_pages=12)
    first, second = (request(name, 30, feature("cat", 2, 11)) for name in ("a", "b"))
    engine.start_step()
    assert engine.admit(first, 20)
    assert engine.admit(request("c", 30, feature("cat", 12, 11)), 10)  # ends before its image
    engine.execute()
    running = engine.running[1]
    engine.drop(first)
    tree, table = engine.manager.prefix_cache.tree, engine.manager._tables[TABLE]
    content = engine.facts(second).images[0].content
    engine.start_step()
    tree.evict(tree.image(table, content))
    assert engine.schedule(running, 10)
    assert engine.admit(second, 20)
    engine.execute()

    assert engine.encoded == ["cat"]
    assert engine.num_loaded == 2 * 3
    assert table.page_of((content, 0)) is None
    engine.start_step()
    assert all(table.page_of((content, page)) for page in range(3))  # others find it again


def read_overlapping(engine):
    """Let a step end before an input that it encodes, because a later one in its place waits.

    A video and its sound stand for the same tokens, each for every second of them.
    """
    sight = feature("sight", 6, 6, breaks=range(1, 12, 2))
    sound = feature("sound", 6, 6, breaks=range(0, 12, 2))
    engine.start_step()
    assert engine.admit(request("a", 30, feature("sound", 6, 6)), 5)
    assert engine.admit(request("b", 30, sight, sound), 5)
    engine.execute()
    engine.start_step()
    first, second = engine.running
    assert engine.schedule(first, 10)
    assert engine.schedule(second, 10)
    assert engine.batch["b"][1:] == (5, 6)
    engine.execute()
    engine.step(10, 7)
    engine.step(5, 12)


def test_an_input_that_a_step_ends_before_is_encoded_again():
    engine = Engine()
    read_overlapping(engine)

    assert engine.encoded == ["sound", "sight", "sight"]


def test_a_promise_of_a_step_ends_with_it():
    engine = Engine()
    engine.start_step()
    assert engine.admit(request("a", 30, feature("cat", 2, 6)), 10)
    assert engine.admit(request("b", 30, feature("cat", 6, 6)), 3)
    engine.execute()
    engine.start_step()
    second = engine.running[1]
    assert engine.cache.check_and_update_cache(second, 0)  # and then vLLM skips the request
    engine.start_step()
    assert engine.schedule(engine.running[0], 5)
    assert engine.schedule(second, 2)  # only text
    engine.execute()

    assert engine.cache.get_cached_input_ids(second) == set()


def test_a_name_used_for_two_sizes_at_a_time_is_told_of():
    engine = Engine()
    engine.start_step()
    assert engine.admit(request("a", 30, feature("cat", 2, 6)), 4)
    other = request("b", 30, feature("cat", 2, 9))

    assert engine.cache.get_cached_num_encoder_embeds(other, 0) == 6
    engine.drop(engine.running[0])
    assert engine.cache.get_cached_num_encoder_embeds(other, 0) is None


def test_a_worker_refuses_rows_that_nobody_awaits():
    engine = Engine()
    engine.start_step()
    assert engine.admit(request("a", 30, feature("cat", 2, 6)), 10)
    engine.embeddings.begin_step(engine.cache.get_manager_metadata())

    for name, shape in (("dog", (6, WIDTH)), ("cat", (4, WIDTH)), ("cat", (6, WIDTH + 1))):
        with pytest.raises(InvariantError, match=f"rows of image '{name}'"):
            engine.embeddings[name] = torch.zeros(shape)
    engine.embeddings.update([("cat", rows_of("cat", 30))])
    assert torch.equal(engine.embeddings.get("cat")[1:6], rows_of("cat", 6)[1:])
    engine.embeddings.begin_step(SimpleNamespace(reads={"cat": [0, 3]}, writes={}))
    rows = engine.embeddings.get("cat")
    with pytest.raises(InvariantError, match="rows 0 to 2 of an image"):
        rows[0:2]


IMAGES = {"cat": (6, ()), "dog": (11, (0, 4)), "bird": (16, ()), "fish": (3, (2,))}


def random_request(source, name):
    features, offset = [], source.randrange(6)
    for _ in range(source.randrange(4)):
        image = source.choice(sorted(IMAGES))
        num_rows, breaks = IMAGES[image]
        features.append(feature(image, offset, num_rows, breaks))
        offset += num_rows + len(breaks) + source.randrange(5)
    return request(name, offset + source.randrange(1, 8), *features)


def schedule_running(engine, source, waiting):
    """Give most running requests tokens. Requests without room preempt the last ones."""
    for each in list(engine.running):
        if each not in engine.running or source.random() < 0.2:
            continue
        while not engine.schedule(each, source.choice([1, 3, 8, 20])):
            last = engine.running[-1]
            # A request that only waits for an image preempts none, as in vLLM.
            if source.random() < 0.5 or last.request_id in engine.batch:
                break
            engine.drop(last)
            last.computed = 0
            waiting.insert(0, last)
            if last is each:
                break


@pytest.mark.parametrize("num_host_large_pages", [0, 5, 40])
@pytest.mark.parametrize("num_large_pages", [11, 16, 40])
@pytest.mark.parametrize("seed", range(6))
def test_every_row_is_read_as_the_encoder_made_it_whatever_happens(
    seed, num_large_pages, num_host_large_pages
):
    source, engine = random.Random(seed), Engine(num_large_pages, num_host_large_pages)
    waiting, finished = [], 0
    for number in range(150):
        if source.random() < 0.5:
            waiting.append(random_request(source, f"r{number}"))
        engine.start_step()
        schedule_running(engine, source, waiting)
        while waiting and source.random() < 0.8:
            for each, _, end in engine.batch.values():
                engine.manager.commit(each.request_id, [], end)
            if not engine.admit(waiting[0], source.choice([2, 9])):
                break
            waiting.pop(0)
        if not engine.batch and source.random() < 0.3:
            engine.cache.reset()
        engine.execute()
        for each in list(engine.running):
            if each.computed == each.num_tokens or source.random() < 0.03:
                finished += each.computed == each.num_tokens
                engine.drop(each)
    assert finished > 10
    if num_large_pages == 11:
        assert bool(engine.num_loaded) == (num_host_large_pages > 0)
    for each in list(engine.running):
        engine.drop(each)
    engine.manager.check()
