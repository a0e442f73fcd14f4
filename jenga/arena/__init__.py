"""The two-level allocator: large pages of one arena, cut into small pages of page tables."""
