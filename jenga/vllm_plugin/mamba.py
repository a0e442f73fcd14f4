"""Mamba-1 and Mamba-2 layers of vLLM, served by `jenga_kernels` on states in pages.

vLLM's layers keep their weights, projections and norms; what lies between, the convolution and the
recurrence, reads and writes the state slots of the page-layer buffer in place. A step's tokens are
those of decoding requests, one each, then those of prompts.

Where tokens are drafted, a decoding request has a few, of which some may be rejected. The state
after each goes to a slot of its own, chosen by the number of tokens that went into it: the next
step knows how many tokens were accepted by then, and so where to begin. It asks vLLM's runners for
no more than every attention layer does.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.mamba1_attn import Mamba1AttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.mamba_attn import (
    BaseMambaAttentionMetadata,
    BaseMambaAttentionMetadataBuilder,
)

from jenga.errors import InvariantError
from jenga.vllm_plugin.config import is_selected
from jenga.vllm_plugin.state_worker import checkpoints_of, expect_orders, take_writes
from jenga_kernels.causal_conv import causal_conv
from jenga_kernels.conv_update import conv_update
from jenga_kernels.state_scan import state_scan
from jenga_kernels.state_update import state_update
from jenga_kernels.states import NULL_SLOT, Checkpoints
from jenga_kernels.triton.device import skip_overflow_checks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata


@dataclass
class JengaMambaMetadata(BaseMambaAttentionMetadata):
    """What all layers of a page table of states need for a step.

    Attributes:
        initial_slots_p: State slot each prompt goes on from, the null slot at its beginning,
            i32[num_prefills].
        checkpoints: States of prompts to keep on the way.

    `state_indices_tensor_d`, i32[num_decodes, slots], has the slots of a request in the order in
    which its next tokens write them; it goes on from the last one.
    """

    initial_slots_p: torch.Tensor | None = None
    checkpoints: Checkpoints | None = None


class JengaMambaMetadataBuilder(BaseMambaAttentionMetadataBuilder[JengaMambaMetadata]):
    """Prepares what the layers of a page table of states share in a step."""

    metadata_cls = JengaMambaMetadata
    needs_causal_conv1d_metadata = False
    supports_update_block_table = False  # each page table has checkpoints of its own

    def __init__(
        self,
        kv_cache_spec: Any,  # noqa: ANN401 (vLLM's MambaSpec)
        layer_names: list[str],
        vllm_config: "VllmConfig",
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if device.type == "cpu":
            skip_overflow_checks()
        self._layer_names = tuple(layer_names)
        expect_orders(layer_names)
        self._num_slots = 1 + self.num_spec_tokens
        self._next_columns = torch.arange(1, 1 + self._num_slots, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: "CommonAttentionMetadata",
        fast_build: bool = False,
        **kwargs: Any,  # noqa: ANN401 (what was accepted: the number of tokens says it too)
    ) -> JengaMambaMetadata:
        """Collect a step's state slots and the states to keep."""
        step, may_reject = common_attn_metadata, None
        if self.use_spec_decode:
            step = self._in_order_of_writing(step)
            may_reject = step.query_start_loc.diff()  # read for no more than that there may be
        common = self._compute_common_metadata(step, num_accepted_tokens=may_reject)
        writes = take_writes(self._layer_names)
        starts, goes_on = common.query_start_loc_p, common.has_initial_states_p
        if starts is None or goes_on is None:
            if writes:
                msg = f"states are to be kept in a step that reads no prompt: {writes}"
                raise InvariantError(msg)
            return common
        first, end = common.num_decodes, common.num_decodes + common.num_prefills
        pages = step.block_table_tensor[first:end, : self._num_slots]
        last = (starts.diff() - 1) % self._num_slots
        # Of a prompt's beginning, too, all tokens but the first may be drafts.
        counts = enumerate(step.query_start_loc_cpu[first : end + 1].diff().tolist())
        few_tokens = {row: count for row, count in counts if 1 < count <= self._num_slots}
        return replace(
            common,
            state_indices_tensor_p=pages.gather(1, last.long()[:, None])[:, 0],
            initial_slots_p=torch.where(goes_on, pages[:, -1], NULL_SLOT),
            checkpoints=(
                checkpoints_of(writes, pages, few_tokens) if writes or few_tokens else None
            ),
        )

    def _in_order_of_writing(self, step: "CommonAttentionMetadata") -> "CommonAttentionMetadata":
        """Let each request's slots begin with that of the state after its next token.

        Requests of no more tokens than slots are decoded, whether or not they are of a prompt, but
        for a prompt's beginning: CUDA graphs, too, are chosen by the number of tokens.
        """
        num_tokens, num_tokens_cpu = step.query_start_loc.diff(), step.query_start_loc_cpu.diff()
        num_computed = step.seq_lens[: step.num_reqs] - num_tokens
        columns = (num_computed[:, None] + self._next_columns) % self._num_slots
        is_prefilling, seq_lens_cpu = step.is_prefilling, step.seq_lens_cpu_upper_bound
        if is_prefilling is None or seq_lens_cpu is None:
            msg = "a step must say which requests read prompts, and how long they are"
            raise InvariantError(msg)
        begins = is_prefilling & (seq_lens_cpu[: step.num_reqs] <= num_tokens_cpu)
        return step.replace(
            block_table_tensor=step.block_table_tensor.gather(1, columns),
            is_prefilling=begins | (num_tokens_cpu > self._num_slots),
        )


class _JengaMamba1Builder(JengaMambaMetadataBuilder):
    def __new__(
        cls,
        kv_cache_spec: Any,  # noqa: ANN401
        layer_names: list[str],
        vllm_config: "VllmConfig",
        device: torch.device,
    ) -> "AttentionMetadataBuilder[Any]":
        if is_selected(vllm_config):
            return super().__new__(cls)
        return Mamba1AttentionMetadataBuilder(kv_cache_spec, layer_names, vllm_config, device)


class _JengaMamba2Builder(JengaMambaMetadataBuilder):
    def __new__(
        cls,
        kv_cache_spec: Any,  # noqa: ANN401
        layer_names: list[str],
        vllm_config: "VllmConfig",
        device: torch.device,
    ) -> "AttentionMetadataBuilder[Any]":
        if is_selected(vllm_config):
            return super().__new__(cls)
        return Mamba2AttentionMetadataBuilder(kv_cache_spec, layer_names, vllm_config, device)


class JengaStateBackend(AttentionBackend):
    """What our backends of recurrent layers share."""

    @classmethod
    def is_ssm(cls) -> bool:
        """Whether the layers have states: they have."""
        return True


class JengaMamba1Backend(JengaStateBackend):
    """Registered in place of vLLM's backend of Mamba-1 layers."""

    @staticmethod
    def get_name() -> str:
        """Get the backend's name."""
        return "JENGA_MAMBA1"

    @staticmethod
    def get_builder_cls() -> type["AttentionMetadataBuilder[Any]"]:
        """Get the class that prepares a step; vLLM's own where JENGA_TRITON is not selected."""
        return _JengaMamba1Builder


class JengaMamba2Backend(JengaStateBackend):
    """Registered in place of vLLM's backend of Mamba-2 layers."""

    @staticmethod
    def get_name() -> str:
        """Get the backend's name."""
        return "JENGA_MAMBA2"

    @staticmethod
    def get_builder_cls() -> type["AttentionMetadataBuilder[Any]"]:
        """Get the class that prepares a step; vLLM's own where JENGA_TRITON is not selected."""
        return _JengaMamba2Builder


def metadata_of(layer_name: str) -> JengaMambaMetadata | None:
    """Get the metadata of a layer in the step under way.

    Returns:
        None where vLLM measures memory without a cache, or the layer is not served here.
    """
    by_layer = get_forward_context().attn_metadata
    metadata = by_layer.get(layer_name) if isinstance(by_layer, dict) else None
    return metadata if isinstance(metadata, JengaMambaMetadata) else None


def states_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """Get a layer's states: [num_slots, dim, width - 1] and those of the recurrence."""
    conv_states, states = layer.kv_cache
    return conv_states if is_conv_state_dim_first() else conv_states.transpose(1, 2), states


def conv_weight_of(layer: Any) -> torch.Tensor:  # noqa: ANN401
    """Get the weight of a layer's convolution, [dim, width]."""
    # Where vLLM's CPU operations want it in an order of their own, vLLM keeps it here as it was.
    weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", layer.conv1d.weight)
    return weight.view(weight.shape[0], -1)


def decode_slots(
    metadata: JengaMambaMetadata,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Get the state slots of decoding requests: initial_slots, state_slots, query_starts."""
    slots, query_starts = metadata.state_indices_tensor_d, metadata.query_start_loc_d
    if slots is None:
        msg = "a step that decodes must come with the state slots of its requests"
        raise InvariantError(msg)
    if query_starts is None:  # a token each
        slots = slots[: metadata.num_decode_tokens, 0]
        return slots, slots, None
    slots = slots[: len(query_starts) - 1]
    return slots[:, -1], slots, query_starts


def prompts_of(
    metadata: JengaMambaMetadata,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Get where prompts begin and their slots: query_starts, initial_slots, state_slots."""
    query_starts, slots = metadata.query_start_loc_p, metadata.state_indices_tensor_p
    if query_starts is None or slots is None or metadata.initial_slots_p is None:
        msg = "a step that reads prompts must come with their bounds and state slots"
        raise InvariantError(msg)
    return query_starts, metadata.initial_slots_p, slots


def convolve(
    out: torch.Tensor,
    x: torch.Tensor,
    layer: Any,  # noqa: ANN401
    weight: torch.Tensor,
    metadata: JengaMambaMetadata,
) -> None:
    """Convolve a step's tokens.

    Args:
        out: Written in place, [num_tokens, dim].
        x: Inputs, [num_tokens, dim].
        layer: vLLM's layer; its convolution states are written in place.
        weight: [dim, width].
        metadata: Of the step.
    """
    conv_states, _ = states_of(layer)
    bias, silu = layer.conv1d.bias, layer.activation in ("silu", "swish")
    first = metadata.num_decode_tokens
    if first:
        initial_slots, slots, query_starts = decode_slots(metadata)
        conv_update(
            out[:first],
            conv_states,
            x[:first],
            weight,
            initial_slots,
            slots,
            bias=bias,
            silu=silu,
            query_starts=query_starts,
        )
    if metadata.num_prefill_tokens:
        query_starts, initial_slots, slots = prompts_of(metadata)
        causal_conv(
            out[first:],
            conv_states,
            x[first:],
            weight,
            query_starts,
            initial_slots,
            slots,
            bias=bias,
            silu=silu,
            checkpoints=metadata.checkpoints,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """A step's inputs to the recurrence, as `jenga_kernels.state_scan.state_scan` names them."""

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None


def recur(
    out: torch.Tensor, states: torch.Tensor, step: Recurrence, metadata: JengaMambaMetadata
) -> None:
    """Apply a step's tokens to the states.

    Args:
        out: Written in place, [num_tokens, num_heads, head_dim].
        states: Written in place, [num_slots, num_heads, head_dim, d_state].
        step: Inputs.
        metadata: Of the step.
    """
    first = metadata.num_decode_tokens
    if first:
        initial_slots, slots, query_starts = decode_slots(metadata)
        state_update(
            out[:first],
            states,
            step.x[:first],
            step.dt[:first],
            step.A,
            step.B[:first],
            step.C[:first],
            initial_slots,
            slots,
            D=step.D,
            z=None if step.z is None else step.z[:first],
            dt_bias=step.dt_bias,
            query_starts=query_starts,
        )
    if metadata.num_prefill_tokens:
        query_starts, initial_slots, slots = prompts_of(metadata)
        state_scan(
            out[first:],
            states,
            step.x[first:],
            step.dt[first:],
            step.A,
            step.B[first:],
            step.C[first:],
            query_starts,
            initial_slots,
            slots,
            D=step.D,
            z=None if step.z is None else step.z[first:],
            dt_bias=step.dt_bias,
            checkpoints=metadata.checkpoints,
        )


def forward_mamba1(
    layer: Any,  # noqa: ANN401
    hidden_states: torch.Tensor,
    output: torch.Tensor,
    metadata: JengaMambaMetadata,
) -> None:
    """Run a Mamba-1 layer of vLLM.

    Args:
        layer: A `MambaMixer`; its states are written in place.
        hidden_states: [num_tokens or more, hidden].
        output: Written in place for the step's tokens, shape of hidden_states.
        metadata: Of the step.
    """
    num_tokens = metadata.num_decode_tokens + metadata.num_prefill_tokens
    x, gate = layer.in_proj(hidden_states)[0][:num_tokens].chunk(2, dim=-1)
    convolved = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    convolve(convolved, x, layer, conv_weight_of(layer), metadata)
    dt, B, C = layer._ssm_transform(convolved)  # noqa: N806
    scanned = torch.empty_like(convolved)
    # One head of all channels, one group.
    step = Recurrence(
        x=convolved.unsqueeze(1),
        dt=dt.transpose(0, 1).unsqueeze(1),
        A=layer.A.unsqueeze(0),
        B=B.unsqueeze(1),
        C=C.unsqueeze(1),
        D=layer.D.unsqueeze(0),
        z=gate.unsqueeze(1),
        dt_bias=None if layer.dt_proj.bias is None else layer.dt_proj.bias.unsqueeze(0),
    )
    _, states = states_of(layer)
    recur(scanned.unsqueeze(1), states.unsqueeze(1), step, metadata)
    output[:num_tokens] = layer.out_proj(scanned)[0]


def forward_mamba2(
    layer: Any,  # noqa: ANN401
    projected: torch.Tensor,
    output: torch.Tensor,
    metadata: JengaMambaMetadata,
) -> None:
    """Run what lies between the projections of a Mamba-2 layer of vLLM.

    Args:
        layer: A `MambaMixer2`; its states are written in place.
        projected: [num_tokens or more, gate and dim and num_heads].
        output: Written in place for the step's tokens, [num_tokens or more, num_heads * head_dim].
        metadata: Of the step.
    """
    num_tokens = metadata.num_decode_tokens + metadata.num_prefill_tokens
    inner, dim, num_heads = (
        layer.tped_intermediate_size,
        layer.tped_conv_size,
        layer.tped_dt_size,
    )
    _, x, dt = projected[:num_tokens].split([inner, dim, num_heads], dim=-1)
    convolved = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    convolve(convolved, x, layer, layer.conv_weights, metadata)
    x, B, C = layer.split_hidden_states_B_C_fn(convolved)  # noqa: N806
    _, states = states_of(layer)
    step = Recurrence(
        x=x.unflatten(-1, (num_heads, -1)),
        dt=dt,
        A=layer.A,
        B=B.unflatten(-1, (-1, layer.ssm_state_size)),
        C=C.unflatten(-1, (-1, layer.ssm_state_size)),
        D=layer.D,
        z=None,
        dt_bias=layer.dt_bias,
    )
    recur(output[:num_tokens].unflatten(-1, (num_heads, -1)), states, step, metadata)
