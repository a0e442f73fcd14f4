"""Eviction policies by name."""

from collections.abc import Callable, Mapping

from jenga.eviction.learned import LearnedReuse
from jenga.eviction.policy import EvictionPolicy, LeastRecentlyUsed

DEFAULT_POLICY = "learned"
"""Name of the default eviction policy."""

EVICTION_POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {
    "learned": LearnedReuse,
    "lru": LeastRecentlyUsed,
}
"""Eviction policies by name."""
