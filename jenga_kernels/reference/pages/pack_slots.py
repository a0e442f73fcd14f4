"""Reference of `jenga_kernels.pack_slots`."""

import torch


def pack_slots(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    sources: torch.Tensor,
    num_kept: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Move the kept tokens of each request to its last slots; see the operation."""
    page_tokens, num_kv_heads = k_pages.shape[1:3]
    for row, (count, seq_len) in enumerate(zip(num_kept.tolist(), seq_lens.tolist(), strict=True)):
        targets = torch.arange(seq_len - count, seq_len, device=k_pages.device)
        table = page_table[row].long()
        for head in range(num_kv_heads):
            kept = sources[row, head, :count].long()
            for pages in (k_pages, v_pages):
                moved = pages[table[kept // page_tokens], kept % page_tokens, head]
                pages[table[targets // page_tokens], targets % page_tokens, head] = moved
