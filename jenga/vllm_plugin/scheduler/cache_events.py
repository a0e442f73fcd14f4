"""vLLM's cache events, which tell routers and gateways how the prefix cache changes.

- A page that can be hit is reported as a stored block of its page table's group.
- A kept state is reported as a block of the last tokens before it. The block size is the number of
  tokens that one hash covers, and the parent is the hash before.
- Encoder outputs are not reported: these events name tokens, and encoder outputs have none.
- A page in host memory is reported by its hash alone, as by stock vLLM's offloading. It has no
  request any more, and its tokens were reported when it was stored in the arena.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from jenga.errors import InvariantError
from jenga.manager import Manager
from jenga.spec import CrossAttention, ImageEmbedding
from jenga.tables.content_index import CacheChange
from jenga.tables.request import PrefixHit

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from jenga.vllm_plugin.arena.layout import JengaKVCacheConfig


class CacheEvents:
    """Collects changes of the prefix cache as vLLM's cache events."""

    __slots__ = (
        "_block_tokens",
        "_events",
        "_hash_tokens",
        "_is_told",
        "_kinds",
        "_lookahead_tokens",
        "_manager",
    )

    def __init__(
        self,
        manager: Manager,
        config: "JengaKVCacheConfig",
        *,
        hash_tokens: int,
        lookahead_tokens: int = 0,
    ) -> None:
        """Start without events.

        Args:
            manager: Manager that records the changes.
            config: Configuration with vLLM's group of each page table.
            hash_tokens: Number of tokens that each further hash of a request covers.
            lookahead_tokens: Number of tokens after its block that a hash covers too.

        Raises:
            ValueError: A page holds fewer tokens than a hash covers, so no hash would name it.
        """
        self._manager = manager
        self._hash_tokens = hash_tokens
        self._lookahead_tokens = lookahead_tokens
        tables = manager.geometry.page_tables
        self._block_tokens = [
            hash_tokens if table.is_state else table.tokens_per_page for table in tables
        ]
        if min(self._block_tokens) < hash_tokens:
            msg = (
                f"tokens per page must be at least the {hash_tokens} of a hash where cache events "
                f"are on, got {min(self._block_tokens)}"
            )
            raise ValueError(msg)
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self._kinds = [
            (get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec))
            for spec in specs
        ]
        self._is_told = [
            not isinstance(table.layer_type, CrossAttention | ImageEmbedding) for table in tables
        ]
        self._events: list[KVCacheEvent] = []

    def note(self, request: "Request") -> None:
        """Record the changes since pages or states of a request were committed."""
        for change in self._manager.take_changes():
            self._add(change, request)

    def record_hit(self, request: "Request", hit: PrefixHit) -> None:
        """Report the pages of a hit as stored once more.

        It serves requests that ask for events of all pages that they read.
        """
        for index, table in enumerate(self._manager.geometry.page_tables):
            if not self._is_told[index]:
                continue
            pages, block_tokens = hit.pages[index], self._block_tokens[index]
            if table.is_state:
                if pages and pages[0] > 0:
                    start_tokens = hit.num_tokens - block_tokens
                    self._events.append(self._stored(request, index, start_tokens, hit.num_tokens))
                continue
            end_tokens = 0
            for is_read, run in groupby(pages, lambda page: page > 0):
                start_tokens = end_tokens
                end_tokens += len(list(run)) * block_tokens
                if is_read:
                    self._events.append(self._stored(request, index, start_tokens, end_tokens))

    def cleared(self) -> None:
        """Record that the cache was reset. One event stands for all blocks of the arena."""
        self._drain(is_cleared=True)
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVCacheEvent]:
        """Return the events since the last call, in order."""
        self._drain()
        events, self._events = self._events, []
        return events

    def _drain(self, *, is_cleared: bool = False) -> None:
        """Record changes that need no request, such as evictions.

        Args:
            is_cleared: Whether to leave out removals from the arena, because one event stands for
                all of them.
        """
        for change in self._manager.take_changes():
            if not is_cleared or change.is_found or change.is_on_host:
                self._add(change, None)

    def _add(self, change: CacheChange, request: "Request | None") -> None:
        if not self._is_told[change.table_index]:
            return
        if not change.is_found:
            self._events.append(
                BlockRemoved(
                    block_hashes=[_named(key) for key in change.keys],
                    medium=MEDIUM_CPU if change.is_on_host else MEDIUM_GPU,
                    group_idx=change.table_index,
                )
            )
            return
        if change.is_on_host:
            self._events += (_stored_on_host(change.table_index, key) for key in change.keys)
            return
        if request is None:
            msg = f"content was entered for no request in page table {change.table_index}"
            raise InvariantError(msg)
        block_tokens = self._block_tokens[change.table_index]
        last = _last_index(request.block_hashes, change.keys[0])
        start_tokens = (last + 1) * self._hash_tokens - block_tokens
        end_tokens = start_tokens + len(change.keys) * block_tokens
        self._events.append(self._stored(request, change.table_index, start_tokens, end_tokens))

    def _stored(
        self, request: "Request", table_index: int, start_tokens: int, end_tokens: int
    ) -> BlockStored:
        """Make the event of consecutive blocks of a request.

        Args:
            request: The request.
            table_index: Page table of the blocks.
            start_tokens: Number of tokens before the first block.
            end_tokens: Number of tokens up to the end of the last block.
        """
        block_tokens, hash_tokens = self._block_tokens[table_index], self._hash_tokens
        hashes = request.block_hashes
        ends = range(start_tokens + block_tokens, end_tokens + 1, block_tokens)
        parent = hashes[start_tokens // hash_tokens - 1] if start_tokens else None
        kind, window_tokens = self._kinds[table_index]
        lora = request.lora_request
        lookahead: dict[str, Any] = {}  # vLLM 0.32 lacks this field
        if self._lookahead_tokens:
            tokens = request.all_token_ids
            lookahead["lookahead_token_ids"] = [
                list(tokens[end : end + self._lookahead_tokens]) for end in ends
            ]
        return BlockStored(
            block_hashes=[_named(hashes[end // hash_tokens - 1]) for end in ends],
            parent_block_hash=None if parent is None else _named(parent),
            token_ids=list(request.all_token_ids[start_tokens:end_tokens]),
            block_size=block_tokens,
            lora_id=lora.adapter_id if lora is not None else None,
            medium=MEDIUM_GPU,
            lora_name=lora.name if lora is not None else None,
            extra_keys=to_event_extra_keys(self._extra_keys(request, ends, block_tokens)),
            group_idx=table_index,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window_tokens,
            session_id=request.session_id,
            **lookahead,
        )

    def _extra_keys(
        self, request: "Request", ends: Iterable[int], block_tokens: int
    ) -> Iterator[tuple[Any, ...] | None]:
        """Yield the inputs of each block's hash other than its tokens."""
        image_index = 0
        for end in ends:
            keys, next_image_index = generate_block_hash_extra_keys(
                request, end - block_tokens, end + self._lookahead_tokens, image_index
            )
            if not self._lookahead_tokens:  # else the next block may hold the same image
                image_index = next_image_index
            yield keys


def _stored_on_host(table_index: int, key: Hashable) -> BlockStored:
    """Make the event of a block that was written to host memory.

    Source: `OffloadingEventsTracker._placeholder_stored` of vLLM 0.32.
    """
    return BlockStored(
        block_hashes=[_named(key)],
        parent_block_hash=None,
        token_ids=[],
        block_size=0,
        lora_id=None,
        medium=MEDIUM_CPU,
        lora_name=None,
        group_idx=table_index,
    )


def _named(key: Hashable) -> Any:  # noqa: ANN401 (bytes or an integer, as vLLM is set)
    """Get the name of a block in events, which vLLM derives from its hash.

    Raises:
        InvariantError: The key is not a hash.
    """
    if not isinstance(key, bytes):
        msg = f"content must be named by a hash, got {key!r}"
        raise InvariantError(msg)
    return maybe_convert_block_hash(key)  # pyright: ignore[reportArgumentType] (its own name)


def _last_index(hashes: Sequence[bytes], key: Hashable) -> int:
    """Find the index of a hash. The search begins at the end, because committed content is new.

    Raises:
        InvariantError: The hash is not there.
    """
    for index in range(len(hashes) - 1, -1, -1):
        if hashes[index] == key:
            return index
    msg = f"content must be of its request, got {key!r}"
    raise InvariantError(msg)
