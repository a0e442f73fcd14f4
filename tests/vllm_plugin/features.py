"""Tables of the features and options of vLLM, from which the page docs/features.md is made.

Usage: python -m tests.vllm_plugin.features. It writes the page, which test_features.py compares.
"""

from collections.abc import Iterable
from pathlib import Path

from jenga.vllm_plugin.settings.options import UNUSED_OPTIONS
from jenga.vllm_plugin.settings.refusals import Refusal

PAGE = Path(__file__).parents[2] / "docs" / "features.md"

SERVED = {
    "Layers": {
        "Full and sliding-window attention (Llama, Gemma 3)": (
            "engine/test_engine.py::test_engine_generates_what_stock_vllm_generates"
        ),
        "Chunked local attention (Llama 4)": (
            "attention/test_attention_features.py"
            "::test_chunked_local_attention_generates_what_stock_vllm_generates"
        ),
        "Cross attention (Whisper)": (
            "attention/test_attention_features.py"
            "::test_cross_attention_generates_what_stock_vllm_generates_with_requests_preempted"
        ),
        "Multi-head latent attention (DeepSeek-V3)": (
            "attention/test_latent_attention.py::test_latent_attention_generates_what_stock_vllm_generates"
        ),
        "Mamba-2 hybrids": (
            "states/test_hybrid_engine.py"
            "::test_hybrids_generate_what_stock_vllm_generates_and_find_their_prefixes"
        ),
        "Mamba-1 hybrids": (
            "states/test_hybrid_engine.py"
            "::test_mamba1_hybrid_generates_what_transformers_generates_and_finds_its_prefixes"
        ),
        "Models with only recurrent layers (Mamba-2)": (
            "engine/test_engine_numbers.py::test_models_of_recurrent_layers_alone_find_their_prefixes"
        ),
        "Gated delta nets (Qwen3-Next, Qwen3.5)": (
            "states/test_gated_delta_engine.py"
            "::test_gated_delta_hybrid_generates_what_transformers_generates_and_finds_its_prefixes"
        ),
        "Cross attention to images (Llama 3.2 Vision)": (
            "images/test_mllama.py::test_text_attends_to_the_images_before_it"
        ),
        "Images (Gemma 3)": (
            "images/test_images.py"
            "::test_images_that_are_read_before_and_after_give_what_transformers_gives"
        ),
        "Audio in the place of tokens (Qwen2-Audio)": (
            "images/test_audio_pages.py::test_audio_is_encoded_once_and_read_from_pages_of_the_arena"
        ),
    },
    "Prefix caching": {
        "Automatic prefix caching": (
            "caching/test_prefix_caching.py"
            "::test_a_hit_gives_the_tokens_and_logprobs_of_a_computation_without"
        ),
        "LoRA adapters: hits only of the same adapter": (
            "caching/test_prefix_caching.py::test_adapters_hit_what_was_computed_with_them_alone"
        ),
        "`cache_salt`, `reset_prefix_cache`": (
            "engine/test_engine_numbers.py::test_usage_and_metrics_are_those_of_stock_vllm"
        ),
        "Hits of encoder outputs": (
            "images/test_encoder_hits.py::test_an_encoder_runs_once_for_the_same_audio"
        ),
        "Hits of images behind other text (Llama 3.2 Vision)": (
            "images/test_mllama.py::test_an_image_is_found_again_behind_other_text"
        ),
        "Image embeddings in the arena": (
            "images/test_image_pages.py::test_images_are_encoded_once_and_read_from_pages_of_the_arena"
        ),
        "The same for images whose tokens read each other (Gemma 3, PaliGemma 2)": (
            "images/test_image_pages.py::test_an_image_that_one_step_reads_whole_is_encoded_once"
        ),
        "Image embeddings in pages of keys and values (`JENGA_EMBEDDINGS_IN_KV_PAGES`)": (
            "images/test_hosted_images.py"
            "::test_embeddings_live_in_kv_pages_and_are_encoded_once_for_a_request"
        ),
        "Embeddings in pages of keys and values in an arena that is too small": (
            "images/test_hosted_images.py"
            "::test_requests_whose_images_live_in_kv_pages_are_preempted_in_a_small_arena"
        ),
        "Embeddings in pages of keys and values of images whose tokens read each other": (
            "images/test_hosted_images.py::test_images_that_one_step_reads_whole_live_in_kv_pages"
        ),
        "Embeddings in pages of keys and values with drafts (n-grams, draft models)": (
            "images/test_hosted_images.py::test_drafts_behind_images_in_kv_pages_change_no_token"
        ),
        "Audio embeddings in the arena (Qwen2-Audio)": (
            "images/test_audio_pages.py::test_audio_is_encoded_once_and_read_from_pages_of_the_arena"
        ),
        "Host memory (`--kv-offloading-size`)": (
            "caching/test_host_memory.py::test_models_find_in_host_memory_what_the_arena_lost"
        ),
        "Image embeddings in host memory": (
            "images/test_image_pages.py::test_images_that_a_small_arena_lost_come_back_from_host_memory"
        ),
        "Embeddings in host memory of images whose tokens read each other": (
            "images/test_image_pages.py"
            "::test_images_that_one_step_reads_whole_come_back_from_host_memory"
        ),
        "Audio embeddings in host memory (Qwen2-Audio)": (
            "images/test_audio_pages.py"
            "::test_audio_that_a_small_arena_lost_comes_back_from_host_memory"
        ),
        "Images in host memory that cross attention reads (Llama 3.2 Vision)": (
            "images/test_mllama.py::test_requests_are_preempted_and_images_evicted_in_a_small_arena"
        ),
        "Usage of requests: cached tokens, tokens added to the cache": (
            "engine/test_engine_numbers.py::test_usage_tells_what_the_same_prompt_and_a_longer_one_find"
        ),
        "KV events (`--kv-events-config`)": (
            "engine/test_engine_numbers.py::test_routers_learn_of_the_cache_what_they_learn_of_stock_vllm"
        ),
        "Metadata of cache groups": (
            "engine/test_engine_numbers.py::test_groups_are_described_as_stock_vllm_describes_its_own"
        ),
    },
    "Cache dtypes": {
        "`--kv-cache-dtype` float16 or bfloat16, different from the model's dtype": (
            "attention/test_cache_dtypes.py::test_a_model_in_float32_reads_what_a_cache_of_16_bits_holds"
        ),
        "float8 with one scale for each layer": (
            "attention/test_attention_features.py::"
            "test_a_float8_cache_generates_what_stock_vllm_generates_from_rounded_keys_and_values"
        ),
        "int8, float8 and four bits with one scale for each token and head": (
            "attention/test_attention_features.py::"
            "test_a_cache_with_a_scale_per_token_and_head_generates_what_transformers_generates"
        ),
        "Latents in float8": (
            "attention/test_latent_attention.py::"
            "test_float8_latents_generate_what_transformers_generates_from_rounded_ones"
        ),
        "`--mamba-cache-dtype`, `--mamba-ssm-cache-dtype`": (
            "test_features.py::test_states_have_the_dtypes_that_are_asked_for"
        ),
        "Histories of states (`--use-replayssm`)": (
            "states/test_replayed_states.py::"
            "test_hybrid_generates_what_stock_vllm_generates_and_goes_on_from_its_answers"
        ),
    },
    "Speculative decoding": {
        "n-grams": (
            "drafts/test_speculation.py::test_ngrams_are_drafted_and_accepted_as_by_stock_vllm"
        ),
        "Draft models": (
            "drafts/test_speculation.py::test_a_draft_model_of_wider_pages_is_accepted_as_by_stock_vllm"
        ),
        "EAGLE and EAGLE-3": (
            "drafts/test_speculation.py::"
            "test_an_eagle_head_is_accepted_as_by_stock_vllm_also_after_a_prefix_hit"
        ),
        "Layers that predict further tokens (MTP)": (
            "drafts/test_speculation.py::"
            "test_a_layer_that_predicts_further_tokens_is_accepted_as_by_stock_vllm"
        ),
        "Drafts for hybrids": (
            "drafts/test_speculation_hybrid.py"
            "::test_a_draft_changes_no_token_of_a_hybrid_also_after_a_prefix_hit"
        ),
        "Drafts with tensor parallelism (n-grams, draft models)": (
            "parallel/test_parallel_layers.py::test_drafts_on_two_tensor_parallel_ranks_change_no_token"
        ),
        "Structured outputs (JSON schema, choice, regex) with drafts of EAGLE and MTP": (
            "drafts/test_structured_drafts.py"
            "::test_answers_in_a_form_are_those_of_stock_vllm_whoever_drafts"
        ),
    },
    "Engine": {
        "Priorities, chunked prefill, asynchronous scheduling, custom schedulers": (
            "engine/test_engine_numbers.py::test_an_option_has_the_effect_that_it_has_in_stock_vllm"
        ),
        "Preemption": (
            "engine/test_engine.py::test_engine_preempts_in_a_small_arena_and_loses_nothing"
        ),
        "Tensor parallelism (Mamba-2 hybrids, short convolutions)": (
            "states/test_hybrid_engine.py::test_two_tensor_parallel_workers_generate_what_one_does"
        ),
        "Tensor parallelism of gated delta nets": (
            "states/test_gated_delta_engine.py"
            "::test_two_tensor_parallel_workers_generate_what_transformers_generates"
        ),
        "Tensor parallelism of sliding windows and attention sinks": (
            "parallel/test_parallel_layers.py"
            "::test_windows_on_two_tensor_parallel_ranks_generate_and_find_what_one_does"
        ),
        "Tensor parallelism of models with images (both places for embeddings)": (
            "images/test_hosted_images.py::test_two_tensor_parallel_ranks_have_all_embeddings_each"
        ),
        "Tensor parallelism of cross attention to images (Llama 3.2 Vision)": (
            "images/test_mllama.py"
            "::test_two_tensor_parallel_workers_read_images_and_find_them_again"
        ),
        "Pipeline parallelism (sliding windows, Mamba-1 hybrids, short convolutions)": (
            "parallel/test_pipeline_engine.py::test_two_ranks_generate_and_find_what_one_does"
        ),
        "Pipeline parallelism of Mamba-2 hybrids and gated delta nets": (
            "parallel/test_parallel_layers.py"
            "::test_states_on_two_ranks_of_a_pipeline_generate_and_find_what_one_does"
        ),
        "Data parallelism": (
            "parallel/test_data_parallel.py::test_a_rank_that_waits_for_another_finds_what_it_cached"
        ),
        "Model runner V2": (
            "engine/test_model_runner_v2.py::test_replayed_steps_generate_what_transformers_generates"
        ),
        "Cross attention to images on model runner V2 (Llama 3.2 Vision)": (
            "images/test_mllama.py::test_the_second_model_runner_stores_images_and_finds_them_again"
        ),
        "Embeddings in pages of keys and values on model runner V2": (
            "images/test_hosted_images.py::test_the_second_runner_reads_images_in_kv_pages"
        ),
        "Token budgets of layers on model runner V2": (
            "attention/test_token_budgets.py"
            "::test_the_second_model_runner_keeps_what_a_dense_model_chooses"
        ),
        "`torch.compile`": (
            "engine/test_compiled_engine.py::test_a_compiled_model_generates_what_it_does_step_by_step"
        ),
        "Log-probabilities of prompts with images (`prompt_logprobs`)": (
            "images/test_hosted_images.py::test_prompts_about_images_are_scored_as_by_stock_vllm"
        ),
        "Log-probabilities of prompts with images (Llama 3.2 Vision)": (
            "images/test_mllama.py"
            "::test_the_token_of_an_image_is_impossible_where_prompts_are_scored"
        ),
        "Sleep mode": (
            "engine/test_sleep.py::test_an_engine_that_slept_generates_what_one_does_that_did_not"
        ),
        "Batch invariance of attention (`VLLM_BATCH_INVARIANT`)": (
            "engine/test_batch_invariance.py::test_requests_generate_to_the_last_bit_what_each_does_alone"
        ),
        "OpenAI-compatible server": (
            "engine/test_serve.py::test_server_completes_and_streams_what_transformers_generates"
        ),
        "Prometheus metrics": (
            "engine/test_serve.py::test_metrics_tell_what_requests_asked_and_found_and_what_is_in_use"
        ),
        "OpenTelemetry traces (`--otlp-traces-endpoint`)": (
            "metrics/test_spans.py::test_spans_of_an_engine_are_in_the_trace_of_the_client"
        ),
    },
}
"""Features that are served, each with a test in this folder."""

NOT_TRIED = {
    "Structured outputs with EAGLE-3, draft models or model runner V2": "",
    "Other audio in the place of tokens (Ultravox, Voxtral, Qwen2.5-Omni)": "",
    "Pipeline parallelism of Granite 4.0": "vLLM 0.32 fails to make its layers on two ranks",
    "Pipeline parallelism with images or audio": "",
    "EAGLE and MTP with tensor parallelism": "n-grams and draft models are tested",
    "Expert parallelism (`--enable-expert-parallel`, `--enable-eplb`)": (
        "vLLM's CPU build does not gather the tokens of experts"
    ),
    "Ray (`--distributed-executor-backend ray`)": "",
    "AWQ and bitsandbytes weights": "",
    "Custom logits processors, thinking budgets": "",
}
"""Features that no test runs, each with what is known of it."""

_NUMBERS = "engine/test_engine_numbers.py::test_an_option_has_the_effect_that_it_has_in_stock_vllm"
_REPLAYED = SERVED["Cache dtypes"]["Histories of states (`--use-replayssm`)"]
_STATE_DTYPES = SERVED["Cache dtypes"]["`--mamba-cache-dtype`, `--mamba-ssm-cache-dtype`"]
_HOST_MEMORY = SERVED["Prefix caching"]["Host memory (`--kv-offloading-size`)"]

SERVED_OPTIONS = {
    "cache_config": {
        "block_size": _NUMBERS,
        "prefix_match_unit": _NUMBERS,
        "cache_dtype": (
            "attention/test_cache_dtypes.py::test_a_model_in_float32_reads_what_a_cache_of_16_bits_holds"
        ),
        "num_gpu_blocks_override": _NUMBERS,
        "enable_prefix_caching": _NUMBERS,
        "prefix_caching_hash_algo": _NUMBERS,
        "kv_cache_dtype_skip_layers": (
            "attention/test_attention_features.py"
            "::test_layers_that_keep_the_models_dtype_have_pages_of_their_own_size"
        ),
        "mamba_cache_dtype": _STATE_DTYPES,
        "mamba_ssm_cache_dtype": _STATE_DTYPES,
        "use_replayssm": _REPLAYED,
        "replayssm_buffer_len": _REPLAYED,
        "kv_cache_memory_bytes": _NUMBERS,
        "kv_offloading_size": _HOST_MEMORY,
        "kv_offloading_backend": _HOST_MEMORY,
    },
    "scheduler_config": dict.fromkeys(
        (
            "max_num_batched_tokens",
            "max_num_scheduled_tokens",
            "max_num_seqs",
            "max_num_active_seqs",
            "long_prefill_token_threshold",
            "long_prefill_token_threshold_adaptive",
            "enable_chunked_prefill",
            "policy",
            "scheduler_cls",
            "scheduler_reserve_full_isl",
            "watermark",
            "prefill_schedule_interval",
            "async_scheduling",
        ),
        _NUMBERS,
    )
    | {
        "disable_chunked_mm_input": (
            "images/test_images.py::test_images_that_come_at_once_are_each_read_in_one_step"
        )
    },
    "attention_config": {
        "backend": (
            "settings/test_switch.py::test_a_mapping_of_attention_options_selects_the_backend_before"
            "_plugins_are_loaded"
        ),
    },
    "mamba_config": {},
}
"""Options that are honoured, by their field in vLLM's configurations."""

REFUSED_OPTIONS = {
    "cache_config": {"kv_sharing_fast_prefill": Refusal.KV_SHARING_FAST_PREFILL},
    "scheduler_config": {"disable_hybrid_kv_cache_manager": Refusal.ONE_CACHE_GROUP},
    "attention_config": {
        "backend_per_kind": Refusal.BACKEND_PER_KIND,
        "use_prefill_query_quantization": Refusal.QUERY_QUANTIZATION,
        "hisparse_config": Refusal.HISPARSE,
        "use_non_causal": Refusal.ATTENTION_LAYER,
    },
    "mamba_config": {"enable_stochastic_rounding": Refusal.STOCHASTIC_ROUNDING},
}
"""Options that are refused. The table of refusals also has single values of other options."""

VLLMS_OPTIONS = {
    "cache_config": {"gpu_memory_utilization": "vllm.v1.worker.utils"},
    "scheduler_config": {
        "max_num_queued_reqs": "vllm.v1.engine.async_llm",
        "max_num_queued_tokens": "vllm.v1.engine.async_llm",
        "stream_interval": "vllm.v1.engine.output_processor",
    },
    "attention_config": {
        "flash_attn_version": "vllm.v1.attention.backends.fa_utils",
        "mla_prefill_backend": "vllm.v1.attention.backends.mla.prefill.selector",
        "trtllm_ragged_backend": "vllm.v1.attention.backends.mla.prefill.trtllm_ragged",
    },
    "mamba_config": {},
}
"""Options that vLLM reads in a module in which the plugin replaces nothing.

The last three choose vLLM's kernels for images and for long prompts over latents.
"""

SET_BY_VLLM = {
    "cache_config": {
        "is_attention_free",
        "sliding_window",
        "mamba_page_size_padded",
        "skip_page_size_padded",
    },
    "scheduler_config": {"runner_type", "is_multimodal_model"},
    "attention_config": set(),
    "mamba_config": set(),
}
"""Fields that vLLM sets from the model, for which there is no option."""

_HEAD = """# Features of vLLM

This page lists the features and options of vLLM that the backend `JENGA_TRITON` serves, refuses or
ignores, and those that were not tried. The tests named here are in `tests/vllm_plugin`.
`python -m tests.vllm_plugin.features` writes this page from the tables that the plugin and its
tests use.
"""

_NOT_TRIED = """## Not tried

No test runs these features with the backend, and nothing refuses them.

| feature | what is known |
|---|---|"""

_REFUSED = """## Refused

With one of these features, the engine stops with a message that has the same text. It stops at
start-up, or when it first meets the layer or the step. `settings/test_refusals.py` has a test of
each row.

| feature | reason | use instead |
|---|---|---|"""

_UNUSED = """## Without effect

These options are accepted and have no effect. A warning names those that are in use
(`test_features.py`).

| option | reason |
|---|---|"""

_OPTIONS = """## Options

Every option of vLLM's cache, scheduler, attention and Mamba configurations is honoured, refused or
without effect. The options below are honoured. Values that are not served are refused as above.

| options | test |
|---|---|"""

_LEFT = """vLLM itself reads the options below, in modules in which the plugin replaces nothing:

| options | module |
|---|---|"""

_OVERRIDE = """`--num-gpu-blocks-override` counts large pages, each of which is cut into small
pages of one page table. A warning reminds of this. `--kv-cache-memory-bytes` sets the size of the
cache in bytes instead."""


def rows(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Write rows of a table, one for all pairs with the same second text.

    Args:
        pairs: Texts of both columns.
    """
    of_second: dict[str, list[str]] = {}
    for first, second in pairs:
        of_second.setdefault(second, []).append(first)
    return [f"| {', '.join(firsts)} | {second} |" for second, firsts in of_second.items()]


def page() -> str:
    """Write the page."""
    lines = [_HEAD, "## Served", ""]
    for title, features in SERVED.items():
        lines += [f"| {title} | test |", "|---|---|"]
        lines += [f"| {feature} | `{test}` |" for feature, test in features.items()]
        lines.append("")
    lines.append(_NOT_TRIED)
    lines += [f"| {feature} | {known} |" for feature, known in NOT_TRIED.items()]
    lines += ["", _REFUSED]
    for words in (refusal.value for refusal in Refusal):
        lines.append(f"| {words.feature} | {words.reason} | {words.instead} |")
    lines += ["", _UNUSED]
    lines += rows((f"`{option.flag}`", option.reason) for option in UNUSED_OPTIONS)
    lines += ["", _OPTIONS]
    lines += rows(
        (f"`{section}.{field}`", f"`{test}`")
        for section, options in SERVED_OPTIONS.items()
        for field, test in options.items()
    )
    lines += ["", _LEFT]
    lines += rows(
        (f"`{section}.{field}`", f"`{module}`")
        for section, options in VLLMS_OPTIONS.items()
        for field, module in options.items()
    )
    lines += ["", _OVERRIDE, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
