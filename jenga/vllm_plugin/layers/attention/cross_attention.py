"""Cross attention: layers that store encoder outputs and attend to them.

vLLM stores encoder outputs for every request whose first token is computed. Here they are stored
only for requests whose encoder ran in the step. The other requests found their encoder outputs in
the cache, and may share those pages with others.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from jenga.errors import InvariantError
from jenga.vllm_plugin.layers.attention.attention_builder import (
    JengaTritonMetadata,
    JengaTritonMetadataBuilder,
)
from jenga.vllm_plugin.layers.attention.backend import JengaTritonBackend, JengaTritonImpl
from jenga.vllm_plugin.worker.step_mailbox import StepMailbox

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheSpec


def encoder_slots(
    page_table: torch.Tensor, num_tokens: Sequence[int], rows: Sequence[int], *, page_tokens: int
) -> torch.Tensor:
    """Get the slots for the encoder outputs of some requests, one request after another.

    Args:
        page_table: i32[num_requests, max_pages].
        num_tokens: For each request of the batch, number of tokens that its encoder makes.
        rows: Rows of the requests in the batch.
        page_tokens: Number of slots in a page.

    Returns:
        i64[sum of their tokens].
    """
    counts = [num_tokens[row] for row in rows]
    positions = np.concatenate([np.arange(count) for count in counts])
    # One copy from pinned memory, so that the host does not wait for earlier steps.
    fields = np.stack([np.repeat(rows, counts), positions // page_tokens, positions % page_tokens])
    table_rows, numbers, offsets = async_tensor_h2d(fields, device=page_table.device)
    return page_table[table_rows, numbers].long() * page_tokens + offsets


@dataclass
class JengaCrossMetadata(JengaTritonMetadata):
    """A step's metadata, shared by all cross attention layers of a page table.

    Attributes:
        encoder_tokens: i32[num_requests] on the host, number of tokens that each request's encoder
            makes.
        mailbox: Mailbox of the model runner. When the layers run, it names the requests whose
            encoder ran.
    """

    encoder_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    mailbox: StepMailbox = field(default_factory=StepMailbox)
    _slots: torch.Tensor | None = None

    def slots_of(self, num_tokens: int) -> torch.Tensor:
        """Get the slots for the encoder outputs of the step. They are computed by the first call.

        Args:
            num_tokens: Number of tokens that were encoded.

        Raises:
            InvariantError: The encoded requests make another number of tokens.
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
    """Builds a step's metadata for the cross attention layers of one page table.

    Attributes:
        mailbox: Mailbox of the model runner.
        ordered_layers: Always empty, because these layers have no states to keep.
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
        """Build a step's metadata and its work lists.

        Every token reads all encoder tokens of its request.

        Raises:
            InvariantError: The step does not have the number of each encoder's tokens.
        """
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
        """Store the encoder outputs of the step, if there are any, then run attention."""
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
    """Paged attention over encoder outputs."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[JengaCrossImpl]:
        """Get the class that runs a layer."""
        return JengaCrossImpl

    @staticmethod
    def get_builder_cls() -> type[JengaCrossMetadataBuilder]:
        """Get the class that builds a step's metadata."""
        return JengaCrossMetadataBuilder
