"""Images that running requests find in the cache when they reach them."""

import pytest

from jenga.errors import OutOfPagesError
from jenga.manager import Manager
from jenga.policies import Image, RequestFacts
from jenga.tables.request import CopyPath
from tests.machines.geometries import cross, embedding, full, geometry

EMBEDDING = 1
VISION = geometry("vision", full(slot_bytes=24, per_large=4), embedding(slot_bytes=96))


def manager_of(num_large_pages=20, *, prefix_caching=True, num_host_large_pages=0):
    return Manager(
        VISION,
        num_large_pages=num_large_pages,
        prefix_caching=prefix_caching,
        hash_tokens=4,
        num_host_large_pages=num_host_large_pages,
    )


def image(start_token, content=b"cat", num_tokens=6):
    return Image(start_token=start_token, num_tokens=num_tokens, content=content)


def start(manager, name, num_tokens, *images):
    facts = RequestFacts(prompt_tokens=40, images=images)
    manager.allocate(name, num_tokens=num_tokens, facts=facts)
    manager.commit(name, [], num_tokens)


def go_on(manager, name, num_tokens, processed):
    manager.commit(name, [], processed)
    manager.allocate(name, num_tokens=num_tokens, num_processed_tokens=processed)
    manager.check()


def test_an_image_that_another_request_has_computed_is_shared_when_it_begins():
    manager = manager_of()
    start(manager, "a", 4, image(8))
    start(manager, "b", 4, image(12))
    assert not manager.is_image_cached(image(12))
    go_on(manager, "a", 10, 4)
    assert not manager.is_image_cached(image(12))  # it is found once its step is committed
    manager.commit("a", [], 10)
    assert manager.is_image_cached(image(12))

    go_on(manager, "b", 14, 4)

    pages = manager.image_pages("b", EMBEDDING, 0)
    assert pages == manager.image_pages("a", EMBEDDING, 0)
    assert len(pages) == 2
    manager.free("a")
    manager.check()
    assert manager.image_pages("b", EMBEDDING, 0) == pages
    manager.free("b")
    manager.check()


def test_an_image_that_only_some_layers_have_is_computed_for_all():
    two = geometry(
        "two", full(slot_bytes=24, per_large=4), embedding(slot_bytes=96), cross(slot_bytes=96)
    )
    manager = Manager(two, num_large_pages=30, prefix_caching=True, hash_tokens=4)
    start(manager, "a", 10, image(0))
    start(manager, "b", 4, image(8))
    manager._tables[2].cache.forget(manager.image_pages("a", 2, 0))

    manager.allocate("b", num_tokens=14, num_processed_tokens=4)

    for index in (1, 2):
        own = set(manager.image_pages("b", index, 0))
        assert own
        assert own.isdisjoint(manager.image_pages("a", index, 0))


def test_images_found_and_images_to_compute_lie_in_their_order():
    manager = manager_of()
    start(manager, "a", 10, image(0))
    cat = manager.image_pages("a", EMBEDDING, 0)
    start(manager, "b", 4, image(6, b"dog"), image(12), image(18, b"bird"), image(24))

    go_on(manager, "b", 30, 4)

    dog, second, bird, fourth = (manager.image_pages("b", EMBEDDING, n) for n in range(4))
    assert second == fourth == cat
    assert len({*dog, *cat, *bird}) == 6
    assert all(dog)
    assert all(bird)
    manager.free("b")
    manager.free("a")
    manager.check()


def test_a_refused_step_leaves_the_images_that_it_found():
    manager = manager_of(num_large_pages=8)
    start(manager, "a", 10, image(0))
    start(manager, "b", 4, image(6), image(14, b"dog", num_tokens=24))
    manager.free("a")
    before = manager.memory()

    with pytest.raises(OutOfPagesError):
        manager.allocate("b", num_tokens=40, num_processed_tokens=4)

    manager.check()
    assert manager.memory() == before
    assert manager.image_pages("b", EMBEDDING, 0) == []
    assert manager.is_image_cached(image(6))
    go_on(manager, "b", 8, 4)
    assert all(manager.image_pages("b", EMBEDDING, 0))


def test_consumed_pages_are_found_until_they_are_evicted():
    manager = manager_of()
    start(manager, "a", 10, image(0))
    pages = manager.image_pages("a", EMBEDDING, 0)

    go_on(manager, "a", 12, 5)
    assert manager.image_pages("a", EMBEDDING, 0) == [0, pages[1]]
    go_on(manager, "a", 16, 12)
    assert manager.image_pages("a", EMBEDDING, 0) == [0, 0]
    assert manager.is_image_cached(image(0))

    start(manager, "b", 4, image(8))
    go_on(manager, "b", 10, 4)
    assert manager.image_pages("b", EMBEDDING, 0) == pages


def test_an_image_is_found_from_the_step_on_that_begins_it_wherever_it_begins():
    manager = manager_of()
    start(manager, "a", 4, image(5))

    go_on(manager, "a", 6, 4)
    manager.commit("a", [], 6)

    assert manager.is_image_cached(image(0))


def test_images_that_were_forgotten_are_not_found():
    manager = manager_of()
    start(manager, "a", 10, image(0))
    go_on(manager, "a", 12, 5)  # one page is given up, one is in use
    start(manager, "b", 4, image(4))

    manager.forget_images()

    manager.check()
    assert not manager.is_image_cached(image(0))
    go_on(manager, "b", 8, 4)
    assert not {*manager.image_pages("b", EMBEDDING, 0)} & {*manager.image_pages("a", EMBEDDING, 0)}
    for name in ("a", "b"):
        manager.free(name)
        manager.check()


def test_pages_that_were_found_and_forgotten_become_empty():
    manager = manager_of()
    start(manager, "a", 10, image(0))
    manager.free("a")
    facts = RequestFacts(prompt_tokens=40, images=(image(0),))
    manager.allocate("b", num_tokens=4, hit=manager.lookup([], max_tokens=39, facts=facts))
    assert all(manager.image_pages("b", EMBEDDING, 0))

    manager.forget_images()
    manager.free("b")

    manager.check()
    assert not manager.is_image_cached(image(0))


def test_without_prefix_caching_nothing_is_found():
    manager = manager_of(prefix_caching=False)
    start(manager, "a", 10, image(0))
    start(manager, "b", 4, image(6))

    assert not manager.is_image_cached(image(0))
    go_on(manager, "b", 10, 4)
    assert not {*manager.image_pages("b", EMBEDDING, 0)} & {*manager.image_pages("a", EMBEDDING, 0)}


@pytest.mark.parametrize(
    ("table_index", "number", "message"),
    [(0, 0, "of images, got 0"), (1, 1, "less than the 1 images of request 'a', got 1")],
)
def test_pages_of_no_image_are_refused(table_index, number, message):
    manager = manager_of()
    start(manager, "a", 10, image(0))

    for ask in (manager.image_pages, manager.is_image_filled):
        with pytest.raises(ValueError, match=message):
            ask("a", table_index, number)


# Host memory


def evicted_image(num_host_large_pages=10, **options):
    """Get a manager whose arena has lost the image `cat`, and in whose host memory it is."""
    manager = manager_of(num_host_large_pages=num_host_large_pages, **options)
    start(manager, "a", 10, image(0))
    manager.free("a")
    tree = manager.prefix_cache.tree
    tree.evict(tree.image(manager._tables[EMBEDDING], b"cat"))
    assert [copy.path for copy in manager.take_copies()] == [CopyPath.TO_HOST] * 2
    manager.new_step()
    manager.check()
    return manager


def loads_of(manager):
    return [copy for copy in manager.take_copies() if copy.path == CopyPath.FROM_HOST]


def test_an_image_that_a_request_has_not_begun_is_not_held():
    manager = evicted_image()
    start(manager, "b", 4, image(8))

    assert not manager.is_image_filled("b", EMBEDDING, 0)


def test_an_image_in_host_memory_is_loaded_when_a_running_request_begins_it():
    manager = evicted_image()
    start(manager, "b", 4, image(8))
    assert manager.is_image_cached(image(8))

    go_on(manager, "b", 10, 4)

    pages = manager.image_pages("b", EMBEDDING, 0)
    assert [copy.target for copy in loads_of(manager)] == pages
    assert manager.is_image_filled("b", EMBEDDING, 0)
    manager.new_step()
    manager.commit("b", [], 10)
    start(manager, "c", 4, image(8))
    go_on(manager, "c", 10, 4)
    assert manager.image_pages("c", EMBEDDING, 0) == pages
    assert loads_of(manager) == []


def test_an_image_in_host_memory_is_loaded_once_for_each_place_where_a_prompt_shows_it():
    manager = evicted_image()
    start(manager, "b", 4, image(6), image(14, b"dog"), image(22))

    go_on(manager, "b", 30, 4)

    first, _, second = (manager.image_pages("b", EMBEDDING, number) for number in range(3))
    loads = loads_of(manager)
    assert [copy.target for copy in loads] == [*first, *second]
    assert [copy.source for copy in loads[:2]] == [copy.source for copy in loads[2:]]
    assert [manager.is_image_filled("b", EMBEDDING, n) for n in range(3)] == [True, False, True]
    manager.free("b")
    manager.check()


def test_an_admission_loads_the_images_of_its_first_step_and_counts_their_bytes_alone():
    manager = evicted_image()
    facts = RequestFacts(prompt_tokens=40, images=(image(2), image(20)))
    hit = manager.lookup([], max_tokens=39, facts=facts)
    assert len(hit.host_pages[EMBEDDING]) == 4

    manager.allocate("b", num_tokens=10, hit=hit)

    assert [copy.target for copy in loads_of(manager)] == manager.image_pages("b", EMBEDDING, 0)
    assert manager.host_report().loaded_bytes == 2 * VISION.page_tables[EMBEDDING].small_page_bytes
    assert manager.is_image_filled("b", EMBEDDING, 0)
    manager.commit("b", [], 10)
    manager.allocate("b", num_tokens=30, num_processed_tokens=10)
    assert manager.is_image_filled("b", EMBEDDING, 1)
    assert loads_of(manager) == []  # the image is in the arena now
    manager.check()


def test_an_image_of_which_host_memory_has_lost_a_page_is_not_found():
    manager = evicted_image()
    manager.prefix_cache.host.drop(manager._tables[EMBEDDING], (b"cat", 1))

    assert not manager.is_image_cached(image(8))
    start(manager, "b", 4, image(8))
    go_on(manager, "b", 10, 4)
    assert loads_of(manager) == []
    assert not manager.is_image_filled("b", EMBEDDING, 0)


def test_a_refused_step_leaves_images_in_host_memory():
    manager = evicted_image(num_large_pages=8)
    start(manager, "b", 4, image(6), image(14, b"dog", num_tokens=24))
    before = manager.memory(), manager.host_report()

    with pytest.raises(OutOfPagesError):
        manager.allocate("b", num_tokens=40, num_processed_tokens=4)

    assert (manager.memory(), manager.host_report()) == before
    assert loads_of(manager) == []
    go_on(manager, "b", 8, 4)
    assert [copy.target for copy in loads_of(manager)] == manager.image_pages("b", EMBEDDING, 0)


def test_images_that_were_forgotten_are_not_found_in_host_memory():
    manager = evicted_image()

    manager.forget_images()

    manager.check()
    assert manager.host_report().cached_bytes == 0
    assert not manager.is_image_cached(image(8))
