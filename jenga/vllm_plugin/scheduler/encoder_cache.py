"""Image embeddings of requests in the scheduler: which are there, and which are to be computed.

A request gets pages for an image together with the pages of its keys and values, in the step that
begins the image. So a step that lacks pages is refused as a whole, and vLLM preempts a request.
vLLM's scheduler asks its encoder cache before and after that. `ArenaEncoderCache` is this cache to
it. It answers from an `ImageBook`, which belongs to the cache manager.
"""

from typing import TYPE_CHECKING

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager

from jenga.manager import Manager
from jenga.page_ids import SmallPageId
from jenga.tables.request import MISSING, PrefixHit
from jenga.vllm_plugin.orders.step_images import HostedStepImages, StepImages
from jenga.vllm_plugin.scheduler.encoder_hits import image_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


class ImageBook:
    """Records which embeddings the pages of running requests hold.

    An input of a request is *held* from the step on that writes it, loads it from host memory or
    shares pages in which it was found. It is held until all its tokens are processed. Only held
    pages are read. A step that ends before an input has no pages for it. If vLLM has the encoder
    run nevertheless, the input is not held, and is encoded again.
    """

    __slots__ = (
        "_encoding",
        "_granted",
        "_held",
        "_hit",
        "_manager",
        "_owners",
        "_promised",
        "_step",
        "_table_index",
        "_written",
    )

    def __init__(self, manager: Manager, table_index: int) -> None:
        """Start without requests.

        Args:
            manager: Manager of the arena.
            table_index: Page table of image embeddings.
        """
        self._manager = manager
        self._table_index = table_index
        self._held: dict[str, set[int]] = {}
        self._owners: dict[str, Request] = {}  # requests of `_held`
        # The last lookup, for a request that may be admitted: its id, and the hit.
        self._hit: tuple[str, PrefixHit] | None = None
        # The following describe the step that is being scheduled.
        self._promised: set[tuple[str, int]] = set()  # inputs that vLLM was told are cached
        self._encoding: dict[str, str] = {}  # identifier -> request that encodes it
        self._granted: list[str] = []  # requests that got images that vLLM was told are cached
        self._written: list[tuple[str, int]] = []  # inputs whose pages the encoder fills
        self._step: dict[str, tuple[Request, int, int]] = {}  # its requests, first and end token

    # From the cache manager

    def step_starts(self) -> list["Request"]:
        """Forget the step before. Promises of it that led nowhere end here.

        Returns:
            Requests that have encoded images or got cached ones in the step before, and still run.
            Their images can be committed, because the next step reads them after that step has
            written or loaded them.
        """
        names = dict.fromkeys([*(request_id for request_id, _ in self._written), *self._granted])
        encoded = [self._step[name][0] for name in names if name in self._step]
        self._promised.clear()
        self._encoding.clear()
        self._granted.clear()
        self._written.clear()
        self._step.clear()
        self._hit = None
        return encoded

    def record_hit(self, request: "Request", hit: PrefixHit) -> None:
        """Record the hit with which a request may be admitted."""
        self._hit = (request.request_id, hit)

    def grant(self, request: "Request", start_token: int, end_token: int) -> bool:
        """Record that a request was given pages for a step.

        Args:
            request: The request.
            start_token: First token that the step computes.
            end_token: One past the last one.

        Returns:
            Whether the pages hold all images that vLLM was told are cached. If not, the step must
            be refused: the encoder would not run.
        """
        name = request.request_id
        promised = [number for owner, number in self._promised if owner == name]
        # The step may end before an image that vLLM asked for.
        promised = [number for number in promised if self._pages(name, number)]
        if not all(
            self._manager.is_image_filled(name, self._table_index, number) for number in promised
        ):
            return False
        if promised:
            self._granted.append(name)
        self._owners[name] = request
        self._held.setdefault(name, set()).update(promised)
        self._promised = {each for each in self._promised if each[0] != name}
        self._step[name] = (request, start_token, end_token)
        return True

    def forget(self, request_id: str) -> None:
        """Record that a request ended, is preempted, or was not admitted."""
        self._held.pop(request_id, None)
        self._owners.pop(request_id, None)
        self._step.pop(request_id, None)
        self._promised = {each for each in self._promised if each[0] != request_id}
        self._written = [each for each in self._written if each[0] != request_id]
        for identifier in [key for key, name in self._encoding.items() if name == request_id]:
            del self._encoding[identifier]

    def lacks(self, request: "Request") -> bool:
        """Whether a running request has more inputs than it was admitted with."""
        num_known = self._manager.num_images(request.request_id)
        return num_known < len(request.mm_features)

    # From vLLM's scheduler

    def has(self, request: "Request", number: int) -> bool:
        """Whether an input of a request need not be encoded.

        This is so if its pages hold it, or if it is cached. In the second case, the step must share
        the cached pages (`grant`).
        """
        name, identifier = request.request_id, request.mm_features[number].identifier
        if number in self._held.get(name, ()):
            return True
        if not self._manager.is_running(name):
            # Running requests come first in a step, and no request is preempted after them. So a
            # hit may lie in pages that the same step writes.
            is_cached = self._is_in_hit(name, number)
        elif identifier in self._encoding:
            # vLLM asks again after an allocation for inputs that occur twice in a step.
            if self._encoding[identifier] != name or not self._has_place(name, number):
                return False
            self._add(name, number)
            return True
        else:
            # Pages that were taken early, for drafted tokens, hold nothing yet.
            is_cached = not self._pages(name, number) and self._manager.is_image_cached(
                image_of(request.mm_features[number])
            )
        if is_cached:
            self._promised.add((name, number))
        return is_cached

    def _is_in_hit(self, request_id: str, number: int) -> bool:
        """Whether the last lookup found all pages of an image that its request would still read."""
        if self._hit is None or self._hit[0] != request_id:
            return False
        hit = self._hit[1]
        wanted = self._manager.image_numbers(hit, self._table_index, number)
        found, on_host = hit.pages[self._table_index], hit.host_pages[self._table_index]
        return wanted.stop <= len(found) and all(
            found[page] != MISSING or page in on_host for page in wanted
        )

    def may_encode(self, request: "Request", number: int) -> bool:
        """Whether the step may encode an input of a request.

        It waits for the next step if another request of this step encodes the same image.
        """
        return request.mm_features[number].identifier not in self._encoding

    def encode(self, request: "Request", number: int) -> None:
        """Record that the step encodes an input of a request."""
        name = request.request_id
        self._encoding[request.mm_features[number].identifier] = name
        if self._has_place(name, number):
            self._add(name, number)
        else:
            self._written.append((name, number))

    def _has_place(self, request_id: str, number: int) -> bool:
        """Whether a request of the step has memory for an input."""
        return bool(self._pages(request_id, number))

    def _add(self, request_id: str, number: int) -> None:
        self._held.setdefault(request_id, set()).add(number)
        self._written.append((request_id, number))

    def num_embeds(self, identifier: str) -> int | None:
        """Get the number of rows of an image that a request holds. None if none holds it."""
        for name, numbers in self._held.items():
            for number in numbers:
                feature = self._owners[name].mm_features[number]
                if feature.identifier == identifier:
                    return feature.mm_position.get_num_embeds()
        return None

    def held(self, request_id: str) -> set[int]:
        """Get the numbers of a request's inputs that its pages hold."""
        return self._held.get(request_id, set())

    def consumed(self, request_id: str, number: int) -> None:
        """Record that all tokens of an input are processed."""
        held = self._held.get(request_id)
        if held is not None:
            held.discard(number)

    def orders(self) -> StepImages | HostedStepImages | None:
        """Get the pages of all images that the step reads or writes. None if there are none."""
        from vllm.multimodal.utils import get_mm_features_in_window

        reads: dict[str, list[SmallPageId]] = {}
        for name, (request, start_token, end_token) in self._step.items():
            held = self._held.get(name)
            if not held:
                continue
            low, high = get_mm_features_in_window(
                request.mm_features, start=start_token, end=end_token
            )
            for number in sorted(held.intersection(range(low, high))):
                identifier = request.mm_features[number].identifier
                pages = self._pages(name, number)
                known = reads.setdefault(identifier, pages)
                # Pages with the same number have the same content, in whichever request.
                reads[identifier] = [
                    page or other for page, other in zip(known, pages, strict=True)
                ]
        writes: dict[str, list[list[SmallPageId]]] = {}
        for name, number in self._written:
            identifier = self._step[name][0].mm_features[number].identifier
            places, pages = writes.setdefault(identifier, []), self._pages(name, number)
            if pages:
                places.append(pages)
        return StepImages(reads=reads, writes=writes) if reads or writes else None

    def _pages(self, request_id: str, number: int) -> list[SmallPageId]:
        return self._manager.image_pages(request_id, self._table_index, number)


class ArenaEncoderCache(EncoderCacheManager):
    """The interface of vLLM's encoder cache, served by the `ImageBook` of a cache manager."""

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: "VllmConfig") -> EncoderCacheManager:
        """Make the encoder cache of a scheduler, before its cache manager.

        Args:
            cache_size: vLLM's limit in embeddings. Here the arena is the limit.
            vllm_config: Configuration of the engine.
        """
        if vllm_config.model_config.is_encoder_decoder:
            return EncoderDecoderCacheManager.create_manager(
                cache_size=cache_size, vllm_config=vllm_config
            )
        return cls(cache_size=cache_size)

    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size=cache_size)
        self._book: ImageBook | None = None
        self._manager: Manager | None = None

    def open(self, manager: Manager, book: ImageBook) -> None:
        """Answer from a book from now on. The scheduler's cache manager is made after this."""
        self._manager, self._book = manager, book

    def _opened(self) -> ImageBook:
        if self._book is None:
            msg = "the encoder cache was asked before the cache manager was made"
            raise RuntimeError(msg)
        return self._book

    def reset(self) -> None:
        """Forget all embeddings, because the encoder's weights have changed."""
        if self._manager is not None:
            self._manager.forget_images()

    def check_and_update_cache(self, request: "Request", input_id: int) -> bool:
        """See `ImageBook.has`."""
        return self._opened().has(request, input_id)

    def get_cached_num_encoder_embeds(self, request: "Request", input_id: int) -> int | None:
        """Get the number of embeddings known under the identifier of an input."""
        return self._opened().num_embeds(request.mm_features[input_id].identifier)

    def can_allocate(
        self,
        request: "Request",
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
    ) -> bool:
        """Whether the step may encode an input. Its pages are taken later, with all others."""
        num_embeds = request.get_num_encoder_embeds(input_id)
        return num_embeds <= encoder_compute_budget and self._opened().may_encode(request, input_id)

    def allocate(self, request: "Request", input_id: int) -> None:
        """See `ImageBook.encode`."""
        self._opened().encode(request, input_id)

    def get_cached_input_ids(self, request: "Request") -> set[int]:
        """See `ImageBook.held`."""
        return self._book.held(request.request_id) if self._book is not None else set()

    def free_encoder_input(self, request: "Request", input_id: int) -> None:
        """See `ImageBook.consumed`."""
        self._opened().consumed(request.request_id, input_id)

    def free(self, request: "Request") -> None:
        """See `ImageBook.forget`."""
        if self._book is not None:
            self._book.forget(request.request_id)

    def get_freed_mm_hashes(self) -> list[str]:
        """Get images that workers should drop: none, since they keep no images between steps."""
        return []

    def get_manager_metadata(self) -> StepImages | HostedStepImages | None:
        """See `ImageBook.orders`."""
        return self._book.orders() if self._book is not None else None
