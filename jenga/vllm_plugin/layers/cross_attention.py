"""Cross attention: layers that store what an encoder made and read it, of whichever request.

vLLM stores for every request whose first token is computed. Here it is for those whose encoder ran
in the step: others found in the cache what theirs would make, and may share those pages.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from jenga.errors import InvariantError
from jenga.vllm_plugin.layers.attention import JengaTritonBackend, JengaTritonImpl
from jenga.vllm_plugin.layers.attention_builder import (
    JengaTritonMetadata,
    JengaTritonMetadataBuilder,
)
from jenga.vllm_plugin.worker.state_worker import StepMailbox

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheSpec


def encoder_slots(
    page_table: torch.Tensor, num_tokens: Sequence[int], rows: Sequence[int], *, page_tokens: int
) -> torch.Tensor:
    """Get the slots of what encoders made for some requests, one request after another.

    Args:
        page_table: i32[num_requests, max_pages].
        num_tokens: Tokens that each of the requests' encoders make.
        rows: The requests.
        page_tokens: Slots of a page.

    Returns:
        i64[sum of their tokens].
    """
    counts = [num_tokens[row] for row in rows]
    positions = np.concatenate([np.arange(count) for count in counts])
    # From pinned memory, at once: the host does not wait for the steps before.
    fields = np.stack([np.repeat(rows, counts), positions // page_tokens, positions % page_tokens])
    table_rows, numbers, offsets = async_tensor_h2d(fields, device=page_table.device)
    return page_table[table_rows, numbers].long() * page_tokens + offsets


@dataclass
class JengaCrossMetadata(JengaTritonMetadata):
    """What all layers of cross attention of a page table need for a step.

    Attributes:
        encoder_tokens: i32[num_requests] on the host, tokens that each request's encoder makes.
        mailbox: Says for which requests an encoder has run by the time that layers do.
    """

    encoder_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    mailbox: StepMailbox = field(default_factory=StepMailbox)
    _slots: torch.Tensor | None = None

    def slots_of(self, num_tokens: int) -> torch.Tensor:
        """Get the slots for what was encoded for the step; the first of its layers finds them.

        Args:
            num_tokens: How many tokens that is.

        Raises:
            InvariantError: It is not as many as the encoded rows make.
        """
        if self._slots is None:
            rows, counts = self.mailbox.encoded_rows, self.encoder_tokens.tolist()
            if max(rows, default=0) >= len(counts) or sum(counts[r] for r in rows) != num_tokens:
                msg = f"requests {rows} of {counts} tokens cannot have encoded {num_tokens}"
                raise InvariantError(msg)
            page_tokens = self.plan.kind.page_tokens
            self._slots = encoder_slots(self.page_table, counts, rows, page_tokens=page_tokens)
        return self._slots


class JengaCrossMetadataBuilder(JengaTritonMetadataBuilder):
    """Prepares what the layers of cross attention of one page table share in a step.

    Attributes:
        mailbox: Of the model runner.
        ordered_layers: None; no states are kept of these layers.
    """

    ordered_layers: tuple[str, ...] = ()

    def __init__(
        self,
        kv_cache_spec: "KVCacheSpec",
        layer_names: list[str],
        vllm_config: "VllmConfig",
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.mailbox = StepMailbox()

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: "CommonAttentionMetadata",
        fast_build: bool = False,
    ) -> JengaCrossMetadata:
        """Collect a step's tensors and count its work: every token reads all its encoder made."""
        common = copy(common_attn_metadata)
        if common.encoder_seq_lens is None or common.encoder_seq_lens_cpu is None:
            msg = "a step of cross attention must say how many tokens encoders made"
            raise InvariantError(msg)
        common.causal = False
        common.seq_lens = common.encoder_seq_lens
        metadata = super().build(common_prefix_len, common, fast_build)
        return JengaCrossMetadata(
            **vars(metadata), encoder_tokens=common.encoder_seq_lens_cpu, mailbox=self.mailbox
        )


class JengaCrossImpl(JengaTritonImpl):
    """Runs one layer of cross attention."""

    def forward(
        self,
        layer: Any,  # noqa: ANN401
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: JengaTritonMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store what was encoded for the step, if anything was, then attend."""
        is_run = isinstance(attn_metadata, JengaCrossMetadata)
        if is_run and key is not None and value is not None:
            slots = attn_metadata.slots_of(key.shape[0])
            self.do_kv_cache_update(layer, key, value, kv_cache, slots)
        return super().forward(
            layer,
            query,
            key,  # pyright: ignore[reportArgumentType] (not read)
            value,  # pyright: ignore[reportArgumentType]
            kv_cache,
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )


class JengaCrossBackend(JengaTritonBackend):
    """Paged attention over what encoders made."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[JengaCrossImpl]:
        """Get the class that runs a layer."""
        return JengaCrossImpl

    @staticmethod
    def get_builder_cls() -> type[JengaCrossMetadataBuilder]:
        """Get the class that prepares a step."""
        return JengaCrossMetadataBuilder
