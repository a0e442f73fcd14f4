"""Requests replayed against a memory manager, without a GPU: what memory would do."""
