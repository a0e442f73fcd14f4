"""Large pages, small pages, offsets and strides: arithmetic only.

The address of layer l of small page p of page table g, from the arena's base, is
`p * small_page_bytes_g + layer_offset_bytes_l`. Because every `small_page_bytes` divides
`large_page_bytes`, the page ids of a page table run over the whole arena and a plain strided view
per layer is all a kernel needs.

Source: Jenga paper, sections 4.1, 4.2 and 4.4.
"""

from dataclasses import dataclass

from jenga.spec import LayerType, State


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """How one layer type, or a run of a state type's layers, is cut into small pages.

    Requests hold one page table of each. A state type may be cut into several: its layers
    `layer_start` to `layer_end` lie in the small pages of this one.

    Attributes:
        layer_type: The layer type stored.
        layer_start: First layer of the type stored here.
        layer_end: One past the last.
        tokens_per_page: Slots of a small page; 1 for a state type.
        small_page_bytes: Distance between two small pages, padding included.
        layer_offset_bytes: Where each stored layer begins within the small page.
        small_pages_per_large_page: Small pages in one large page.
    """

    layer_type: LayerType
    layer_start: int
    layer_end: int
    tokens_per_page: int
    small_page_bytes: int
    layer_offset_bytes: tuple[int, ...]
    small_pages_per_large_page: int

    @property
    def name(self) -> str:
        """The layer type's name, with the range of layers where the type is cut."""
        if self.layer_start == 0 and self.layer_end == len(self.layer_type.layers):
            return self.layer_type.name
        return f"{self.layer_type.name}[{self.layer_start}:{self.layer_end}]"

    @property
    def is_state(self) -> bool:
        """Whether a small page holds one state instead of tokens."""
        return isinstance(self.layer_type, State)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in all layers stored here, without padding."""
        layers = self.layer_type.layers[self.layer_start : self.layer_end]
        return sum(layer.slot_bytes for layer in layers)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a small page that can hold data."""
        return self.slot_bytes * self.tokens_per_page

    @property
    def padding_bytes(self) -> int:
        """Bytes of a small page that never hold data."""
        return self.small_page_bytes - self.payload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """One way to cut the arena for a model.

    Attributes:
        name: The rule that made it: "planned", "lcm", ...
        large_page_bytes: The unit the arena is cut into.
        page_tables: One per layer type, or several where a state type is cut.
    """

    name: str
    large_page_bytes: int
    page_tables: tuple[PageTable, ...]

    def num_large_pages(self, arena_bytes: int) -> int:
        """Large pages that fit in an arena, the null page included."""
        return arena_bytes // self.large_page_bytes
