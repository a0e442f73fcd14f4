"""The place that a model runner's encoder outputs are kept in: pages of the arena."""

from typing import Any

from jenga.vllm_plugin.arena.layout import JengaKVCacheConfig
from jenga.vllm_plugin.worker.hosted_rows import hosted_embeddings
from jenga.vllm_plugin.worker.image_pages import ArenaEmbeddings, image_pages
from jenga.vllm_plugin.worker.page_copies import arena_of


def open_embeddings(model_runner: Any, config: JengaKVCacheConfig) -> None:  # noqa: ANN401
    """Let a model runner keep encoder outputs in the arena, if that has room for them."""
    if not config.kv_cache_groups:
        return
    embeddings = hosted_embeddings(model_runner, config)
    if embeddings is None:
        pages = image_pages(config, arena_of(model_runner.kv_caches))
        if pages is None:
            return
        embeddings = ArenaEmbeddings(pages)
    model_runner.jenga_embeddings = embeddings
    if hasattr(model_runner.encoder_cache, "encoder_outputs"):  # the second model runner
        model_runner.encoder_cache.encoder_outputs = embeddings
    else:
        model_runner.encoder_cache = embeddings
