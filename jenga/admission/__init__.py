"""Admission: the wait queue, the reserve for the cache, and the allocation of pages for a step."""
