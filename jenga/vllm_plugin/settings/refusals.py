"""All refused features, each with the reason and with an alternative.

All checks of configurations, layers and requests take their messages from here. The table of
refusals in docs/features.md has the same texts, and a test compares the two.
"""

from enum import Enum

from jenga.models import unserved
from jenga.models.unserved import Words
from jenga.vllm_plugin.settings.environment import BACKEND_NAME


class Refusal(Enum):
    """A feature of vLLM that the backend does not serve."""

    VERSION = Words(
        feature="a version of vLLM other than 0.32 and 0.33",
        reason="the plugin replaces functions of vLLM, and knows their signatures only in these",
        instead="one of these versions",
    )

    PLATFORM = Words(
        feature="a platform other than CUDA and, for tests, CPU",
        reason="the kernels were never run on GPUs of other vendors",
        instead="an NVIDIA GPU, or stock vLLM",
    )

    # Several devices
    EXTERNAL_LAUNCHER = Words(
        feature="pipeline parallelism with --distributed-executor-backend external_launcher",
        reason="each rank would plan and schedule separately, from its own layers only",
        instead="--distributed-executor-backend mp or ray",
    )
    DECODE_CONTEXT_PARALLELISM = Words(
        feature="decode context parallelism (--decode-context-parallel-size)",
        reason="the page tables of each rank cover all tokens of a request",
        instead="--tensor-parallel-size or --data-parallel-size",
    )
    PREFILL_CONTEXT_PARALLELISM = Words(
        feature="prefill context parallelism (--prefill-context-parallel-size)",
        reason="the page tables of each rank cover all tokens of a request",
        instead="--tensor-parallel-size or --data-parallel-size",
    )
    MICROBATCHES = Words(
        feature="steps that are split into overlapping parts (--enable-dbo, --ubatch-size)",
        reason="copies of pages and states are ordered for a whole step",
        instead="leave the options out",
    )
    KV_CONNECTORS = Words(
        feature="KV connectors (--kv-transfer-config)",
        reason="they give a block one id for all layers, but every layer type has its own page ids",
        instead="--kv-offloading-size for host memory",
    )
    ENCODER_CACHE_CONNECTORS = Words(
        feature="encoder cache connectors (--ec-transfer-config)",
        reason="they copy vLLM's encoder cache, but embeddings are in pages of the arena",
        instead="leave the option out",
    )

    # Contents of the cache
    CACHE_DTYPE = unserved.CACHE_DTYPE
    BLOCK_SIZE = Words(
        feature="a --block-size that is not a multiple of 16",
        reason="the kernels read pages in steps of 16 tokens",
        instead="leave it out, or give a multiple of 16",
    )
    BLOCKS_OVERRIDE = Words(
        feature="a --num-gpu-blocks-override too small for one request",
        reason="it counts large pages, and a request of --max-model-len needs more of them",
        instead="a larger number, or a smaller --max-model-len",
    )
    SHARED_ARENA = Words(
        feature="an arena that engines share (JENGA_SHARED_ARENA) with this option",
        reason="each engine has one rank, and the arena's broker decides on all of its memory",
        instead="an arena of its own, or leave the option out",
    )
    ONE_CACHE_GROUP = Words(
        feature="--disable-hybrid-kv-cache-manager",
        reason="it gives all layers one page table and keeps every token in each layer",
        instead="leave the option out",
    )
    OFFLOADING_BACKEND = Words(
        feature="--kv-offloading-backend other than native",
        reason="the other backends are KV connectors",
        instead="--kv-offloading-size alone",
    )
    OFFLOADING_SIZE = Words(
        feature="a --kv-offloading-size that is not positive, or has room for too few pages",
        reason="every layer type needs at least one large page of host memory",
        instead="a larger size, or leave the option out",
    )
    OFFLOADING_WITHOUT_CACHING = Words(
        feature="--kv-offloading-size with --no-enable-prefix-caching",
        reason="host memory keeps nothing but cached prefixes",
        instead="prefix caching, or leave the size out",
    )
    CACHE_METRICS = Words(
        feature="metrics of how long blocks live (--kv-cache-metrics)",
        reason="vLLM counts them in its own block pool, which is not used",
        instead="JENGA_MEMORY_LOG or KV events (--kv-events-config)",
    )
    ROUTED_EXPERTS = Words(
        feature="--enable-return-routed-experts",
        reason="vLLM stores them outside the cache, in one row for each slot of its blocks",
        instead="stock vLLM",
    )
    KV_SHARING_FAST_PREFILL = Words(
        feature="--kv-sharing-fast-prefill",
        reason="the work of a step is planned for all of its tokens in every layer",
        instead="leave it out; layers that share keys and values are served",
    )
    HISPARSE = Words(
        feature="HiSparse (hisparse_config)",
        reason="it keeps pages of sparse attention in host memory, with its own block ids",
        instead="stock vLLM",
    )

    # Attention layers
    BACKEND_PER_KIND = Words(
        feature="other attention backends for some layers (backend_per_kind)",
        reason="other kernels do not read pages of the arena",
        instead="this backend for all layers",
    )
    ATTENTION_LAYER = Words(
        feature="an attention layer of this model",
        reason=(
            "the kernels compute a decoder's attention to its own tokens or to those of an "
            "encoder, from a cache, with heads of 64 to 512 elements in steps of 16 or latents of "
            "256 or 512 elements; BERT and EmbeddingGemma have no cache"
        ),
        instead="stock vLLM",
    )
    CACHE_LAYOUT = Words(
        feature="a layer with another layout of its cache",
        reason=(
            "the kernels read rows of keys and values, latents and states, in pages that are "
            "exactly as long as their tokens need"
        ),
        instead="stock vLLM",
    )
    OWN_KERNELS = Words(
        feature="a model whose layers have their own kernels (MiniMax M3, Inkling, Kimi K3)",
        reason=(
            "only recurrent layers and vLLM's Attention and MLAAttention with this backend are "
            "served; other kernels were never tried on pages of the arena"
        ),
        instead="stock vLLM",
    )
    SPARSE_LATENTS = unserved.SPARSE_LATENTS
    LATENT_FEATURES = Words(
        feature="latent attention with ALiBi, sliding windows or soft caps",
        reason="no model in vLLM has it",
        instead="stock vLLM",
    )
    QUERY_QUANTIZATION = Words(
        feature="use_prefill_query_quantization with multi-head latent attention",
        reason="the keys that vLLM computes for long prompts would have to be float8 too",
        instead="leave the option out",
    )
    QUANTISED_OUTPUT = Words(
        feature="attention whose output is quantised (fuse_attn_quant)",
        reason="the kernels write results in the dtype of the queries",
        instead="leave the fusion out",
    )
    IMAGE_REACH = Words(
        feature="a page table in which some layers read whole images and others a window of them",
        reason="the image tokens that a step reads are listed once per page table",
        instead="stock vLLM",
    )
    IMAGE_ATTENTION = Words(
        feature="an option that is not served with cross attention to images (Llama 3.2 Vision)",
        reason=(
            "images are stored for steps without drafts, from pixels that the engine process sees, "
            "in elements of at least 8 bits"
        ),
        instead="leave the option out",
    )
    EMBEDDINGS_IN_KV_PAGES = Words(
        feature="embeddings in pages of keys and values (JENGA_EMBEDDINGS_IN_KV_PAGES) here",
        reason=(
            "an embedding must fit into its token's slot of full attention, on every rank, until "
            "the step of that token reads it"
        ),
        instead="leave the variable unset",
    )
    TOKEN_BUDGETS = Words(
        feature="an option that is not served with token budgets of layers (kv_token_budgets)",
        reason=(
            "prompts of text shrink on one rank, in pages of the model's own dtype, and a step has "
            "room for all queries that choose the kept tokens"
        ),
        instead="leave the option out",
    )
    PROMPT_SCRATCH = Words(
        feature="an option with which a scratch for prompts (JENGA_PROMPT_SCRATCH_BYTES) is unused",
        reason=(
            "it holds copies of quantised keys and values, and a prompt may use it in one step and "
            "not in another"
        ),
        instead="leave the variable unset",
    )
    DIFFUSION = unserved.DIFFUSION
    ENCODER_ALONE = Words(
        feature="an engine with only the encoder (--mm-encoder-only)",
        reason="it has no cache",
        instead="stock vLLM for that engine",
    )
    INVARIANT_STATES = Words(
        feature="batch invariance (VLLM_BATCH_INVARIANT) of recurrent layers",
        reason="prompts are scanned in chunks whose boundaries depend on where a step begins",
        instead="a model without recurrent layers, or leave the variable unset",
    )
    INVARIANT_SPECIALIZED = Words(
        feature="batch invariance (VLLM_BATCH_INVARIANT) with JENGA_SPECIALIZED_PREFILL=1",
        reason="the sums of that kernel depend on where a prompt is cut into steps",
        instead="leave JENGA_SPECIALIZED_PREFILL unset",
    )

    # Recurrent layers
    STOCHASTIC_ROUNDING = Words(
        feature="--enable-mamba-cache-stochastic-rounding",
        reason="the kernels round states to nearest",
        instead="--mamba-ssm-cache-dtype bfloat16 or float32",
    )
    HYMBA = unserved.HYMBA
    STATE_ALIGNMENT = Words(
        feature="a recurrent layer whose first state does not end at a multiple of 16 bytes",
        reason="the next state is loaded 16 bytes at a time",
        instead="stock vLLM",
    )
    HISTORIES = Words(
        feature="these histories of states (--use-replayssm, JENGA_HISTORY_TOKENS)",
        reason=(
            "only Mamba-2 layers and gated delta nets can keep a history, of at least two steps "
            "and, in gated delta nets, at most 64 tokens; its rows must be multiples of 16 bytes; "
            "and both options must give the same length"
        ),
        instead="another length, or none",
    )

    # Drafts
    DRAFT_METHOD = Words(
        feature="this method of speculative decoding",
        reason="its drafts come from layers or kernels that do not read pages of the arena",
        instead="ngram, draft_model, eagle, eagle3 or mtp",
    )
    DRAFT_MTP_LAYERS = Words(
        feature="speculative decoding with these layers that predict further tokens (MTP)",
        reason=(
            "only those of DeepSeek-V3, GLM-4.5, MiMo-V2, Nemotron-H, Qwen3-Next, Qwen3.5 and "
            "Gemma 4 are served"
        ),
        instead="ngram, draft_model, eagle or eagle3",
    )
    DRAFT_SEVERAL_MTP_LAYERS = Words(
        feature="speculative decoding with several layers that predict further tokens (MTP)",
        reason="each would have its own page table, but vLLM gives drafts only one",
        instead="only the first such layer of the model (num_nextn_predict_layers of 1)",
    )
    DRAFT_WITH_STATES = Words(
        feature="speculative decoding with a draft model that has recurrent layers",
        reason="the changes of its states by rejected drafts would have to be undone",
        instead="a draft model of attention layers, or ngram",
    )
    DRAFT_LAYER_TYPES = Words(
        feature="a draft model with several layer types",
        reason="vLLM gives all layers of a draft model one page table",
        instead="a draft model whose layers all have full attention, or all the same window",
    )
    DRAFT_BACKEND = Words(
        feature="speculative decoding with another attention backend for the draft model",
        reason="other kernels do not read pages of the arena",
        instead="leave its attention_backend out",
    )
    DRAFT_STATES_OF_TARGET = Words(
        feature="speculative decoding with recurrent layers that run on vLLM's own kernels",
        reason="these kernels write states into blocks in vLLM's own order",
        instead="no speculative decoding",
    )
    DRAFT_ENCODER_DECODER = Words(
        feature="speculative decoding of an encoder-decoder model",
        reason="drafters do not receive the output of the encoder",
        instead="no speculative decoding",
    )
    DRAFT_PIPELINE = Words(
        feature="speculative decoding with pipeline parallelism",
        reason="stock vLLM 0.32 fails with it too",
        instead="--tensor-parallel-size",
    )
    DRAFT_PARALLEL = Words(
        feature="speculative decoding with parallel drafting",
        reason="its drafts need slots that requests do not allocate",
        instead="drafts one after another",
    )

    def text(self, met: str = "") -> str:
        """Get the refused feature, the reason and the alternative as one text.

        Args:
            met: Value or layer that was found. Empty means that none is named.
        """
        return self.value.text(met)

    def error(self, met: str = "") -> ValueError:
        """Make the error that refuses the feature; see `text`."""
        return ValueError(f"{BACKEND_NAME} does not support {self.text(met)}")


def check_refusals(found: dict[Refusal, str | bool]) -> None:
    """Refuse all features that were found, in one error.

    Args:
        found: For each refusal, the value that was found, or whether the feature was found. False
            and the empty string mean that it was not.

    Raises:
        ValueError: A feature was found. The message names all that were.
    """
    texts = [
        refusal.text(met if isinstance(met, str) else "") for refusal, met in found.items() if met
    ]
    if texts:
        msg = f"{BACKEND_NAME} does not support: {'; '.join(texts)}"
        raise ValueError(msg)
