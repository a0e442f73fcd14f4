"""Memory management for serving hybrid large language models.

The floors, each importing only from below: `spec`, `geometry`, then `allocator`, `prefix_cache` and
`policies`, then `manager`, and on top the engines that use it, `vllm_plugin` and `sim`.
"""
