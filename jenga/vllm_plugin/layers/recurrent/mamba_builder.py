"""A step's metadata for recurrent layers: state slots, and states to keep.

With speculative decoding, a decoding request has several tokens in a step, and some of them may be
rejected. The state after each token goes to its own slot, chosen by the number of tokens in the
state. The next step knows how many tokens were accepted, and so which slot to start from. This
needs nothing from vLLM's runners that other attention layers do not need.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.mamba1_attn import Mamba1AttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.mamba_attn import (
    BaseMambaAttentionMetadata,
    BaseMambaAttentionMetadataBuilder,
)

from jenga.errors import InvariantError
from jenga.vllm_plugin.config import is_selected
from jenga.vllm_plugin.layers.cpu_serving import prepare_device
from jenga.vllm_plugin.layers.recurrent.checkpoints import checkpoints_of
from jenga.vllm_plugin.layers.recurrent.replay_counts import Replay, ReplayCounts
from jenga.vllm_plugin.settings.environment import read_settings
from jenga.vllm_plugin.specs.replay_kinds import NUM_STATES
from jenga.vllm_plugin.trials.tried_kernels import KernelChoice
from jenga.vllm_plugin.worker.step_mailbox import StepMailbox
from jenga_kernels.checks.states import NULL_SLOT, Checkpoints
from jenga_kernels.trial_calls import Call

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata


@dataclass
class JengaMambaMetadata(BaseMambaAttentionMetadata):
    """A step's metadata, shared by all layers of a page table of states.

    `state_indices_tensor_d`, i32[num_decodes, slots], has the slots of a request in the order in
    which its next tokens write them. The request starts from the state in the last slot.

    If steps seldom write states (`replay_layout`), `replay_d` and `replay_p` are set if there are
    such requests, and the states of convolutions are ring buffers.

    Attributes:
        initial_slots_p: State slot that each prompt starts from, i32[num_prefills]. It is the null
            slot at the beginning of a prompt.
        longest_prompt_tokens: Largest number of tokens that a prompt has in the step.
        has_portable_scans: Whether the generic kernels scan prompts. None means that they do so
            only if they are faster.
        checkpoints: States to keep in the middle of prompts.
        replay_d: Number of tokens in the states of decoding requests, and their histories.
        replay_p: The same for states that prompts start from. These are brought up to date first.
    """

    initial_slots_p: torch.Tensor | None = None
    longest_prompt_tokens: int | None = None
    has_portable_scans: bool | None = None
    checkpoints: Checkpoints | None = None
    replay_d: Replay | None = None
    replay_p: Replay | None = None


SCAN_CALLS = MappingProxyType(
    {
        "MAMBA2": "jenga.vllm_plugin.layers.recurrent.mamba:scan_call",
        "GDN_ATTN": "jenga.vllm_plugin.layers.recurrent.gated_delta:scan_call",
    }
)
"""vLLM's name of a kind of layers -> function that describes the calls of its scans of prompts.

Other kinds of layers have the same kernel for all GPUs.
"""


class JengaMambaMetadataBuilder(BaseMambaAttentionMetadataBuilder[JengaMambaMetadata]):
    """Builds a step's metadata for the layers of a page table of states.

    Attributes:
        kernels: Choice of the kernels that scan prompts.
        mailbox: Mailbox of the model runner. Before `open_mailbox`, an empty one of the builder.
        ordered_layers: Names of the layers. They write the states that are to be kept.
    """

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
        prepare_device(device)
        self.ordered_layers = tuple(layer_names)
        self.mailbox = StepMailbox(layer_names)
        self._max_query_tokens = self._num_slots = 1 + self.num_spec_tokens
        self._next_columns = torch.arange(1, 1 + self._num_slots, device=device)
        self._kind_name = kv_cache_spec.mamba_type.name
        self._dtype = vllm_config.model_config.dtype
        self._layers = vllm_config.compilation_config.static_forward_context
        asked = read_settings(os.environ).has_specialized_scans
        self.kernels = KernelChoice(device, asked=asked)
        self._replay_counts = None
        if len(kv_cache_spec.shapes) > NUM_STATES:
            self._num_slots = 1
            self._replay_counts = ReplayCounts(
                kv_cache_spec,
                layer_names,
                vllm_config,
                device,
                max_requests=max(
                    vllm_config.scheduler_config.max_num_seqs, self.decode_cudagraph_max_bs
                ),
                max_query_tokens=self._max_query_tokens,
            )

    def calls(self) -> list[Call]:
        """Describe the calls that scan prompts in the layers, for trials."""
        path = SCAN_CALLS.get(self._kind_name)
        if path is None:
            return []
        scan_call = resolve_name(path)
        return [scan_call(self._layers[name], self._dtype) for name in self.ordered_layers]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: "CommonAttentionMetadata",
        fast_build: bool = False,
        **kwargs: Any,  # noqa: ANN401 (accepted tokens: the number of computed tokens includes them)
    ) -> JengaMambaMetadata:
        """Build a step's metadata, and take the states to keep from the mailbox.

        Raises:
            InvariantError: States are to be kept in a step without prompts.
        """
        step, may_reject = common_attn_metadata, None
        if self.use_spec_decode:
            step = self._in_order_of_writing(step)
            may_reject = step.query_start_loc.diff()  # not None: the values are not used
        common = self._compute_common_metadata(step, num_accepted_tokens=may_reject)
        writes = self.mailbox.take_checkpoints(self.ordered_layers)
        slots = common.state_indices_tensor_d
        if self._replay_counts is not None and common.num_decodes and slots is not None:
            replay = self._replay_counts.decode(
                step,
                slots[:, 0],
                common.num_decodes,
                common.query_start_loc_d,
                is_warming_up=self.mailbox.is_warming_up,
            )
            common = replace(common, replay_d=replay)
        starts, goes_on = common.query_start_loc_p, common.has_initial_states_p
        if starts is None or goes_on is None:
            if writes:
                msg = f"states are to be kept in a step that reads no prompt: {writes}"
                raise InvariantError(msg)
            return common
        first, end = common.num_decodes, common.num_decodes + common.num_prefills
        pages = step.block_table_tensor[first:end, : self._num_slots]
        last = (starts.diff() - 1) % self._num_slots
        # At the beginning of a prompt, too, all tokens except the first may be drafts.
        counts = step.query_start_loc_cpu[first : end + 1].diff().tolist()
        few_tokens = {
            row: count for row, count in enumerate(counts) if 1 < count <= self._num_slots
        }
        checkpoints = checkpoints_of(writes, pages, few_tokens) if writes or few_tokens else None
        replay = None
        if self._replay_counts is not None:
            replay = self._replay_counts.read(
                step, pages[:, 0], first, checkpoints, is_warming_up=self.mailbox.is_warming_up
            )
        return replace(
            common,
            state_indices_tensor_p=pages.gather(1, last.long()[:, None])[:, 0],
            initial_slots_p=torch.where(goes_on, pages[:, -1], NULL_SLOT),
            longest_prompt_tokens=max(counts, default=0),
            has_portable_scans=None if self.kernels.own is None else not self.kernels.own,
            checkpoints=checkpoints,
            replay_p=replay,
        )

    def _in_order_of_writing(self, step: "CommonAttentionMetadata") -> "CommonAttentionMetadata":
        """Rotate each request's slots so that the next token writes the first one.

        Requests with few enough tokens are decoded even if the tokens are of a prompt, except at
        the beginning of the prompt. The limit is one token and the drafts. The choice of a CUDA
        graph also depends on the number of tokens alone.

        With a history, a request has only one slot. Then nothing is rotated, and the beginning of a
        prompt may be decoded too.

        Raises:
            InvariantError: The step does not say which requests have prompts, or their lengths.
        """
        num_tokens, num_tokens_cpu = step.query_start_loc.diff(), step.query_start_loc_cpu.diff()
        is_long = num_tokens_cpu > self._max_query_tokens
        if self._replay_counts is not None:
            return step.replace(is_prefilling=is_long)
        num_computed = step.seq_lens[: step.num_reqs] - num_tokens
        columns = (num_computed[:, None] + self._next_columns) % self._num_slots
        is_prefilling, seq_lens_cpu = step.is_prefilling, step.seq_lens_cpu_upper_bound
        if is_prefilling is None or seq_lens_cpu is None:
            msg = "a step must say which requests read prompts, and how long they are"
            raise InvariantError(msg)
        begins = is_prefilling & (seq_lens_cpu[: step.num_reqs] <= num_tokens_cpu)
        return step.replace(
            block_table_tensor=step.block_table_tensor.gather(1, columns),
            is_prefilling=begins | is_long,
        )


def builder_beside(
    stock: type["AttentionMetadataBuilder[Any]"], layer_classes: Callable[[], tuple[type, ...]]
) -> type[JengaMambaMetadataBuilder]:
    """Make the class of metadata builders for a kind of recurrent layers.

    Args:
        stock: vLLM's own class. Its builder is made instead if JENGA_TRITON is not selected, or if
            vLLM's operations serve one of the layers.
        layer_classes: Function that returns the classes of layers served here. An empty tuple means
            all classes.
    """

    class Builder(JengaMambaMetadataBuilder):
        def __new__(
            cls,
            kv_cache_spec: Any,  # noqa: ANN401
            layer_names: list[str],
            vllm_config: "VllmConfig",
            device: torch.device,
        ) -> "AttentionMetadataBuilder[Any]":
            classes = layer_classes()
            layers = vllm_config.compilation_config.static_forward_context
            are_served = not classes or all(
                isinstance(layers.get(name), classes) for name in layer_names
            )
            if is_selected(vllm_config) and are_served:
                return super().__new__(cls)
            return stock(kv_cache_spec, layer_names, vllm_config, device)

    return Builder


class JengaStateBackend(AttentionBackend):
    """Base class of our backends of recurrent layers."""

    @classmethod
    def is_ssm(cls) -> bool:
        """Whether the layers have states: they do."""
        return True


_Mamba1Builder = builder_beside(Mamba1AttentionMetadataBuilder, tuple)
_Mamba2Builder = builder_beside(Mamba2AttentionMetadataBuilder, tuple)


class JengaMamba1Backend(JengaStateBackend):
    """Backend registered instead of vLLM's own for Mamba-1 layers."""

    @staticmethod
    def get_name() -> str:
        """Get the backend's name."""
        return "JENGA_MAMBA1"

    @staticmethod
    def get_builder_cls() -> type["AttentionMetadataBuilder[Any]"]:
        """Get the class that builds a step's metadata."""
        return _Mamba1Builder


class JengaMamba2Backend(JengaStateBackend):
    """Backend registered instead of vLLM's own for Mamba-2 layers."""

    @staticmethod
    def get_name() -> str:
        """Get the backend's name."""
        return "JENGA_MAMBA2"

    @staticmethod
    def get_builder_cls() -> type["AttentionMetadataBuilder[Any]"]:
        """Get the class that builds a step's metadata."""
        return _Mamba2Builder
