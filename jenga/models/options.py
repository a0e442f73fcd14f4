"""Options of a run that decide the size of a token or a state: shards and formats."""

from dataclasses import dataclass
from enum import Enum

from jenga.spec import ELEMENT_BYTES, check_positive

_SCALE_BYTES = 4
_INT4_ROW_ELEMENTS = 32
"""A 4-bit vector must have a multiple of this many elements, so that 16 bytes load at once."""

_NVFP4_GROUP_ELEMENTS = 16

DRAFTED_HISTORY_TOKENS = 16
"""Least tokens of a history that an engine keeps by itself, which it does with drafts."""

_DS_MLA_GROUP_ELEMENTS = 128


class KvFormat(Enum):
    """How keys and values are stored.

    - `MODEL` is the model's dtype.
    - `FP8` has one scale per tensor, which is stored outside the cache.
    - The per-token-head formats store a float32 scale beside each head's vector.
    - `NVFP4` stores one byte of scale per 16 elements.
    - `DS_MLA` is DeepSeek's layout of a latent: float8 with a float32 scale per 128 elements, and
      the rotary part in bfloat16.

    Source: page sizes of vLLM 0.33.
    """

    MODEL = "model"
    FP8 = "fp8"
    FP8_PER_TOKEN_HEAD = "fp8_per_token_head"
    INT8_PER_TOKEN_HEAD = "int8_per_token_head"
    INT4_PER_TOKEN_HEAD = "int4_per_token_head"
    NVFP4 = "nvfp4"
    DS_MLA = "ds_mla"


def default_history_tokens(draft_tokens: int) -> int:
    """Return the tokens of the histories that an engine keeps if no length is asked for.

    Without drafts there are none. With drafts one state and a history take less memory than a state
    for each drafted token.
    """
    return max(DRAFTED_HISTORY_TOKENS, 2 * (1 + draft_tokens)) if draft_tokens else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options of a run that a configuration file does not contain.

    Attributes:
        tensor_parallel: Number of ranks that share every layer. All bytes are those of one rank.
        kv_format: Format of keys and values.
        model_dtype: Dtype of activations, convolution states and image embeddings; a key of
            `jenga.spec.ELEMENT_BYTES`.
        state_dtype: Dtype of recurrent states; None takes the architecture's own default.
        embeddings_in_kv_pages: Whether image embeddings lie in the full-attention pages of their
            tokens until the KV is written there. Otherwise they have pages of their own.
        draft_tokens: Tokens drafted for a step. A recurrent layer without a history needs one more
            state for each.
        history_tokens: Recent tokens whose inputs a Mamba-2 or gated delta layer keeps beside its
            state, so that it seldom writes the state. Such a layer needs no more states for
            drafted tokens. 0 means no history. Otherwise at least twice the tokens of a step, and
            at most 64 for gated delta layers.
        head_extra_bytes: Bytes that a slot holds beside the key and the value of each KV head.
    """

    tensor_parallel: int = 1
    kv_format: KvFormat = KvFormat.MODEL
    model_dtype: str = "bfloat16"
    state_dtype: str | None = None
    embeddings_in_kv_pages: bool = False
    draft_tokens: int = 0
    history_tokens: int = 0
    head_extra_bytes: int = 0

    def __post_init__(self) -> None:
        check_positive("options", "tensor_parallel", self.tensor_parallel)
        if self.draft_tokens < 0:
            msg = f"options: draft_tokens must be at least 0, got {self.draft_tokens}"
            raise ValueError(msg)
        if self.history_tokens != 0 and self.history_tokens < 2 * (1 + self.draft_tokens):
            msg = (
                f"options: history_tokens must be 0 or at least {2 * (1 + self.draft_tokens)}, "
                f"twice the tokens of a step, got {self.history_tokens}"
            )
            raise ValueError(msg)
        for field in ("model_dtype", "state_dtype"):
            dtype = getattr(self, field)
            if dtype not in ELEMENT_BYTES and (dtype is not None or field == "model_dtype"):
                msg = f"options: {field} must be one of {sorted(ELEMENT_BYTES)}, got {dtype!r}"
                raise ValueError(msg)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element in the model's dtype."""
        return ELEMENT_BYTES[self.model_dtype]

    def shard(self, what: str, total: int) -> int:
        """Return this rank's part of a number that the ranks share evenly.

        Args:
            what: Name of the things, for the error message.
            total: Their number in the whole model.

        Raises:
            ValueError: The ranks do not divide the number.
        """
        if total % self.tensor_parallel:
            msg = f"tensor_parallel must divide the {total} {what}, got {self.tensor_parallel}"
            raise ValueError(msg)
        return total // self.tensor_parallel

    def shard_kv_heads(self, num_kv_heads: int) -> int:
        """Return this rank's number of KV heads: a part of them, or one copied to several ranks.

        Raises:
            ValueError: Neither the heads nor the ranks divide the other.
        """
        if num_kv_heads < self.tensor_parallel and self.tensor_parallel % num_kv_heads == 0:
            return 1
        return self.shard("key-value heads", num_kv_heads)

    def kv_slot_bytes(
        self, num_kv_heads: int, head_dim: int, *, value_dim: int | None = None
    ) -> int:
        """Bytes of one token's keys and values in one layer, on this rank.

        Args:
            num_kv_heads: Number of KV heads of the whole model.
            head_dim: Elements of a head's key.
            value_dim: Elements of a head's value; None means as many as the key has.

        Raises:
            ValueError: The ranks cannot divide the heads, or the format does not take such heads.
        """
        value_dim = head_dim if value_dim is None else value_dim
        head_bytes = self._row_bytes(head_dim) + self._row_bytes(value_dim) + self.head_extra_bytes
        return self.shard_kv_heads(num_kv_heads) * head_bytes

    def _row_bytes(self, num_elements: int) -> int:
        """Bytes of one head's key, or of its value."""
        match self.kv_format:
            case KvFormat.MODEL:
                return num_elements * self.element_bytes
            case KvFormat.FP8:
                return num_elements
            case KvFormat.FP8_PER_TOKEN_HEAD | KvFormat.INT8_PER_TOKEN_HEAD:
                return num_elements + _SCALE_BYTES
            case KvFormat.INT4_PER_TOKEN_HEAD:
                if num_elements % _INT4_ROW_ELEMENTS:
                    msg = (
                        f"options: kv_format {self.kv_format.value!r} needs heads of a multiple of "
                        f"{_INT4_ROW_ELEMENTS} elements, got {num_elements}"
                    )
                    raise ValueError(msg)
                return num_elements // 2 + _SCALE_BYTES
            case KvFormat.NVFP4:
                return num_elements // 2 + num_elements // _NVFP4_GROUP_ELEMENTS
            case KvFormat.DS_MLA:
                msg = "options: kv_format 'ds_mla' is for models with latent attention only"
                raise ValueError(msg)

    def latent_slot_bytes(self, latent_dim: int, rotary_dim: int) -> int:
        """Bytes of one token's latent and rotary key in one layer; every rank stores all of it.

        Raises:
            ValueError: The format does not exist for latents.
        """
        match self.kv_format:
            case KvFormat.MODEL:
                return (latent_dim + rotary_dim) * self.element_bytes
            case KvFormat.FP8:
                return latent_dim + rotary_dim
            case KvFormat.DS_MLA:
                scale_bytes = latent_dim // _DS_MLA_GROUP_ELEMENTS * _SCALE_BYTES
                return latent_dim + scale_bytes + 2 * rotary_dim
            case _:
                msg = (
                    "options: kv_format of a model with latent attention must be model, fp8 or "
                    f"ds_mla, got {self.kv_format.value!r}"
                )
                raise ValueError(msg)
