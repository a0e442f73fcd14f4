"""Llama 3.2 Vision for vLLM: a decoder whose layers attend to text or to images.

vLLM had this model until 0.10.2, as an encoder-decoder. Here it is an ordinary decoder. An image is
one token of the prompt. Its keys and values in layers of cross attention are stored once, in pages
of their own.

Source: Llama 3 (arXiv 2407.21783), section 7; the checkpoints' names of weights.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.models.mllama.modeling_mllama import MllamaVisionModel
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaMLP
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY

from jenga.vllm_plugin.config import is_selected
from jenga.vllm_plugin.layers.attention.image_attention import (
    ImageAttention,
    reads_any_image,
    reads_images_of,
)
from jenga.vllm_plugin.models.mllama_processor import (
    MOST_IMAGES,
    MllamaDummyInputsBuilder,
    MllamaMultiModalProcessor,
    MllamaProcessingInfo,
    most_image_tokens,
)
from jenga.vllm_plugin.models.prompt_scores import is_scoring_prompts
from jenga.vllm_plugin.settings.environment import BACKEND_NAME
from jenga.vllm_plugin.specs.image_features import IMAGE_TOKENS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sequence import IntermediateTensors

SPECIAL_EMBEDDINGS = 8
"""Rows of the embeddings behind the vocabulary. The first is the token of an image."""


class MllamaCrossAttention(nn.Module):
    """Attention of text to images, without positions. Queries and keys are normalised."""

    def __init__(self, vllm_config: "VllmConfig", prefix: str) -> None:
        super().__init__()
        config, quant = vllm_config.model_config.hf_config, vllm_config.quant_config
        text, multimodal = config.text_config, vllm_config.model_config.multimodal_config
        tp_size = get_tensor_model_parallel_world_size()
        if text.num_key_value_heads % tp_size:
            msg = (
                f"--tensor-parallel-size must divide the {text.num_key_value_heads} KV heads of "
                f"layers that attend to images, got {tp_size}"
            )
            raise ValueError(msg)
        hidden, num_heads = text.hidden_size, text.num_attention_heads
        num_kv_heads = text.num_key_value_heads
        self.head_dim = hidden // num_heads
        q_size, kv_size = num_heads * self.head_dim, num_kv_heads * self.head_dim

        def column(size: int, name: str) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                hidden, size, bias=False, quant_config=quant, prefix=f"{prefix}.{name}"
            )

        self.q_proj = column(q_size, "q_proj")
        self.k_proj = column(kv_size, "k_proj")
        self.v_proj = column(kv_size, "v_proj")
        self.o_proj = RowParallelLinear(
            q_size, hidden, bias=False, quant_config=quant, prefix=f"{prefix}.o_proj"
        )
        self.q_norm = RMSNorm(self.head_dim, eps=text.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=text.rms_norm_eps)
        limit = MOST_IMAGES if multimodal is None else multimodal.get_limit_per_prompt("image")
        self.attn = ImageAttention(
            num_heads // tp_size,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=num_kv_heads // tp_size,
            cache_config=vllm_config.cache_config,
            quant_config=quant,
            prefix=f"{prefix}.attn",
            most_image_tokens=most_image_tokens(config.vision_config),
            most_images=max(1, min(MOST_IMAGES, limit)),
        )

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))

    def _normed(self, norm: RMSNorm, projected: torch.Tensor) -> torch.Tensor:
        """Normalise each head in plain PyTorch: vLLM's kernel rounds so as to change tokens."""
        normed = norm.forward_native(self._heads(projected))
        return cast("torch.Tensor", normed)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Attend to the images of the step's metadata. Rows without images get 0."""
        q, _ = self.q_proj(hidden_states)
        q = self._normed(self.q_norm, q).flatten(-2)
        output, _ = self.o_proj(self.attn(q, None, None))
        return output

    def store(self, states: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the keys and values of images.

        Args:
            states: Projected outputs of the vision model, [num_tokens, hidden_size].
            slots: i64[num_tokens].
        """
        k, _ = self.k_proj(states)
        v, _ = self.v_proj(states)
        self.attn.store(self._normed(self.k_norm, k), self._heads(v), slots)


class MllamaCrossLayer(nn.Module):
    """A layer that attends to images. Rows without images pass it unchanged."""

    def __init__(self, vllm_config: "VllmConfig", prefix: str) -> None:
        super().__init__()
        text = vllm_config.model_config.hf_config.text_config
        self.cross_attn = MllamaCrossAttention(vllm_config, f"{prefix}.cross_attn")
        self.mlp = LlamaMLP(
            text.hidden_size,
            text.intermediate_size,
            text.hidden_act,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.mlp",
        )
        self.input_layernorm = RMSNorm(text.hidden_size, eps=text.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(text.hidden_size, eps=text.rms_norm_eps)
        self.cross_attn_attn_gate = nn.Parameter(torch.zeros(1))
        self.cross_attn_mlp_gate = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run the layer on hidden states, [num_tokens, hidden_size].

        As in Meta's code, rows before any image get nothing from either part. Their hidden states,
        and so their keys and values in later layers, then do not depend on an image that follows.
        """
        name = self.cross_attn.attn.layer_name
        if not reads_any_image(name):
            return hidden_states
        attended = self.cross_attn(self.input_layernorm(hidden_states))
        hidden_states = hidden_states + self.cross_attn_attn_gate.tanh() * attended
        further = self.mlp(self.post_attention_layernorm(hidden_states))
        reads = reads_images_of(name)
        if reads is not None:
            further = torch.where(reads, further, 0)
        return hidden_states + self.cross_attn_mlp_gate.tanh() * further


class MllamaTextModel(nn.Module):
    """The layers of the language model."""

    def __init__(self, vllm_config: "VllmConfig", prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config.text_config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size + SPECIAL_EMBEDDINGS, config.hidden_size
        )
        cross_layers = frozenset(config.cross_attention_layers)
        self.layers = nn.ModuleList(
            MllamaCrossLayer(vllm_config, f"{prefix}.layers.{index}")
            if index in cross_layers
            else LlamaDecoderLayer(vllm_config, f"{prefix}.layers.{index}", config=config)
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run all layers on embeddings, [num_tokens, hidden_size]."""
        residual: torch.Tensor | None = None
        for layer in self.layers:
            if isinstance(layer, MllamaCrossLayer):
                if residual is not None:
                    hidden_states, residual = hidden_states + residual, None
                hidden_states = layer(hidden_states)
            else:
                hidden_states, residual = layer(positions, hidden_states, residual)
        if residual is None:
            return self.norm(hidden_states)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class MllamaForCausalLM(nn.Module):
    """The language model with its head."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".self_attn.q_proj": (".self_attn.qkv_proj", "q"),
            ".self_attn.k_proj": (".self_attn.qkv_proj", "k"),
            ".self_attn.v_proj": (".self_attn.qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
    )

    def __init__(self, vllm_config: "VllmConfig", prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config.text_config
        self.model = MllamaTextModel(vllm_config, maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Get embeddings of tokens, those of images included."""
        return self.model.embed_tokens(input_ids)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights by the names of published checkpoints."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


@MULTIMODAL_REGISTRY.register_processor(
    MllamaMultiModalProcessor, info=MllamaProcessingInfo, dummy_inputs=MllamaDummyInputsBuilder
)
class MllamaForConditionalGeneration(nn.Module, SupportsMultiModal):
    """Llama 3.2 Vision."""

    # Checkpoints that newer versions of transformers saved have names in another order.
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "model.vision_model.": "vision_model.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "model.language_model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
        }
    )
    packed_modules_mapping = {  # noqa: RUF012 (vLLM's)
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """Get the text that stands for an image in a prompt."""
        if modality.startswith("image"):
            return "<|image|>"
        msg = f"modality must be image, got {modality}"
        raise ValueError(msg)

    def __init__(self, *, vllm_config: "VllmConfig", prefix: str = "") -> None:
        super().__init__()
        if not is_selected(vllm_config):
            msg = f"Llama 3.2 Vision needs the attention backend {BACKEND_NAME}"
            raise ValueError(msg)
        config = vllm_config.model_config.hf_config
        self.config = config
        with self._mark_tower_model(vllm_config, "image"):
            # Each rank has the whole vision model.
            self.vision_model = MllamaVisionModel(config.vision_config)
            self.multi_modal_projector = nn.Linear(
                config.vision_config.vision_output_dim, config.text_config.hidden_size
            )
        with self._mark_language_model(vllm_config):
            self.language_model = MllamaForCausalLM(
                vllm_config, maybe_prefix(prefix, "language_model")
            )

    @staticmethod
    def get_model_state_cls() -> type[Any]:
        """Get the class through which vLLM's second model runner encodes and stores images."""
        from jenga.vllm_plugin.models.mllama_state import MllamaState

        return MllamaState

    def embed_multimodal(self, **kwargs: Any) -> list[torch.Tensor]:  # noqa: ANN401
        """Encode images.

        Args:
            kwargs: Fields of the processor, with one row for each image.

        Returns:
            For each image, [num_tokens, hidden_size]. Tiles that only fill up are left out.
        """
        if "pixel_values" not in kwargs:
            return []
        names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", IMAGE_TOKENS)
        fields = (kwargs[name] for name in names)
        return [self._encode(*image) for image in zip(*fields, strict=True)]

    def _encode(
        self,
        pixels: torch.Tensor,
        ratio_id: torch.Tensor,
        mask: torch.Tensor,
        num_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Encode one image.

        Args:
            pixels: Tiles, [max_tiles, channels, height, width].
            ratio_id: Number of its aspect ratio.
            mask: Whether it has each tile, [max_tiles]. Its tiles are the first.
            num_tokens: Number of tokens of these tiles, on the host.
        """
        output = self.vision_model(
            pixel_values=pixels[None, None],
            aspect_ratio_ids=ratio_id.reshape(1, 1),
            aspect_ratio_mask=mask[None, None],
        )
        states = output.last_hidden_state[0, 0].flatten(0, 1)
        return self.multi_modal_projector(states[: int(num_tokens)])

    def store_images(
        self, states: torch.Tensor, slots: torch.Tensor, layer_names: Sequence[str]
    ) -> None:
        """Write the keys and values of encoded images in layers of cross attention.

        Args:
            states: Outputs of `embed_multimodal`, one after another, [num_tokens, hidden_size].
            slots: i64[num_tokens].
            layer_names: Names of the attention layers to write.
        """
        for layer in self.language_model.model.layers:
            if isinstance(layer, MllamaCrossLayer):
                attention = layer.cross_attn
                if attention.attn.layer_name in layer_names:
                    attention.store(states, slots)

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Any = None,  # noqa: ANN401
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Get embeddings of tokens. Images are not among them."""
        return self.language_model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: "IntermediateTensors | None" = None,
        inputs_embeds: torch.Tensor | None = None,
        **_kwargs: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        """Run the language model, and get hidden states, [num_tokens, hidden_size]."""
        if inputs_embeds is None:
            if input_ids is None:
                msg = "input_ids must be given where inputs_embeds are not"
                raise ValueError(msg)
            inputs_embeds = self.embed_input_ids(input_ids)
        return self.language_model.model(positions, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Get logits, [num_tokens, vocab_size].

        Where prompts are scored, further columns of -inf stand for the tokens behind the
        vocabulary, which are never generated.
        """
        head = self.language_model
        logits = head.logits_processor(head.lm_head, hidden_states)
        if logits is None or not is_scoring_prompts():
            return logits
        return pad(logits, (0, SPECIAL_EMBEDDINGS), value=float("-inf"))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights by the names of published checkpoints, or those of newer ones."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

    def get_mm_mapping(self) -> MultiModelKeys:
        """Get the names of the model's parts."""
        return MultiModelKeys.from_string_field(
            language_model="language_model",
            connector="multi_modal_projector",
            tower_model="vision_model",
        )
