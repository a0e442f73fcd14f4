"""Sliding-window layers as in section 5.3 of the Jenga paper, as a layer type of one's own."""

from dataclasses import dataclass

import jenga
from jenga.policies import TokenSlots


@dataclass(frozen=True)
class PaperWindowPolicy(TokenSlots):
    window_tokens: int  # tokens that a query reads, its own included

    def update_last_access(self, _facts, num_processed_tokens, num_tokens, /):
        return range(max(0, num_processed_tokens - self.window_tokens + 1), num_tokens)

    def peak_slots(self, _facts, num_tokens, chunk_tokens, /):
        return min(num_tokens, self.window_tokens - 1 + chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperWindow(jenga.LayerType):
    name: str
    layers: tuple[jenga.Layer, ...]
    window_tokens: int
    kind = "paper window"

    @property
    def keeps(self):
        return f"the last {self.window_tokens:,} tokens"

    def policy(self, _page_slots, /):
        return PaperWindowPolicy(self.window_tokens)
