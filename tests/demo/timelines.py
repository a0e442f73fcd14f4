"""Memory logs and timelines written by hand, small enough to check on paper."""

import json

from jenga.demo.memory import Step, StoredLayer, StoredTable, Timeline

TOKEN_BYTES = 2 * 64 * 4  # a key and a value of 64 float32 elements


def table(layer_type, num_layers, *, window_tokens=None, state_bytes=None, first_layer=0):
    """Make a page table of `num_layers` layers, 16 tokens or one state a page."""
    slot_bytes = state_bytes or TOKEN_BYTES
    tokens_per_page = 1 if state_bytes else 16
    return StoredTable(
        name=layer_type,
        layer_type=layer_type,
        layers=tuple(
            StoredLayer(name=f"layers.{first_layer + index}", slot_bytes=slot_bytes)
            for index in range(num_layers)
        ),
        window_tokens=window_tokens,
        is_state=state_bytes is not None,
        tokens_per_page=tokens_per_page,
        small_page_bytes=slot_bytes * tokens_per_page * num_layers,
        padding_bytes=0,
        small_pages_per_large_page=1,
    )


def timeline(tables, request_tokens):
    """Make a timeline in which nothing but the requests' lengths matters."""
    nothing = {t.layer_type: 0 for t in tables}
    return Timeline(
        geometry_name="planned",
        large_page_bytes=max(t.small_page_bytes for t in tables),
        tables=tuple(tables),
        steps=tuple(
            Step(request_tokens=tokens, needed_bytes=nothing, held_bytes=nothing)
            for tokens in request_tokens
        ),
    )


def write_log(path, *, steps=2):
    """Write a log as the plugin writes it: a state type cut into two tables, and full attention."""
    tables = [
        {
            "name": name,
            "layer_type": layer_type,
            "layer_names": names,
            "slot_bytes": [slot_bytes] * len(names),
            "window_tokens": None,
            "is_state": layer_type == "mamba2",
            "tokens_per_page": tokens_per_page,
            "small_page_bytes": slot_bytes * tokens_per_page * len(names),
            "padding_bytes": 0,
            "small_pages_per_large_page": 2,
        }
        for name, layer_type, names, slot_bytes, tokens_per_page in (
            ("mamba2[0:1]", "mamba2", ["m0"], 1000, 1),
            ("mamba2[1:2]", "mamba2", ["m1"], 1000, 1),
            ("full", "full", ["a0", "a1"], 10, 16),
        )
    ]
    geometry = {"name": "planned", "large_page_bytes": 2000, "page_tables": tables}
    lines = [{"geometry": geometry}]
    lines += [
        {
            "step": step,
            "tokens": {"a": 16 * step} if step else {},
            "memory": {
                "tables": [
                    {
                        "name": name,
                        "used_bytes": 100 * step,
                        "useless_bytes": 20 * step,
                        "evictable_bytes": 3 * step,
                        "empty_bytes": 4 * step,
                    }
                    for name in ("mamba2[0:1]", "mamba2[1:2]", "full")
                ],
                "empty_large_bytes": 0,
                "null_bytes": 2000,
            },
        }
        for step in range(steps)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
