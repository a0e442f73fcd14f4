"""Engines without work that share an arena: they still return what the broker calls for."""

import threading
import weakref
from typing import Any

from jenga.vllm_plugin.arena.joined import wait_for_news
from jenga.vllm_plugin.scheduler.cache_manager import JengaKVCacheManager
from jenga.vllm_plugin.settings.shared_arena import Membership

_WAIT_SECONDS = 1.0
"""Most seconds of a wait, so that the thread notices that its engine is gone."""


def rest(engine_core: Any) -> None:  # noqa: ANN401 (vLLM's engine core)
    """Exchange large pages with the broker, in the thread of an engine that is out of work.

    The first call starts a thread that wakes the engine up when the broker has news. It gives the
    engine core an attribute of ours: an event that is set when the engine has read that news.
    """
    manager = getattr(engine_core.scheduler, "kv_cache_manager", None)
    if not isinstance(manager, JengaKVCacheManager):
        return
    membership = manager.kv_cache_config.shared_arena
    if membership is None:
        return
    has_rested = getattr(engine_core, "jenga_has_rested", None)
    if has_rested is None:
        has_rested = engine_core.jenga_has_rested = threading.Event()
        threading.Thread(
            target=_watch,
            args=(weakref.ref(engine_core), membership, has_rested),
            name="jenga-broker-news",
            daemon=True,
        ).start()
    manager.rest()
    has_rested.set()


def _watch(
    engine_core: "weakref.ref[Any]", membership: Membership, has_rested: threading.Event
) -> None:
    """Wake an engine up when its broker has news, as long as there is an engine."""
    from vllm.v1.engine import EngineCoreRequestType

    while True:
        # An engine at work reads the news in its steps, and comes here once it has none left.
        has_rested.wait()
        has_rested.clear()
        wait_for_news(membership, _WAIT_SECONDS)
        engine = engine_core()
        if engine is None:
            return
        engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
