"""What the tests ask of the workers of a pipeline, each in a process of its own."""

import torch


class RankOfPipeline:
    """Added to vLLM's class of workers by `worker_extension_cls`."""

    def make_intermediate_tensors(self):
        """Let vLLM's first model runner receive on a CPU what the rank before computed.

        It does so into tensors that a GPU's worker makes as it measures memory. A CPU's measures
        none, and stops at the first step, whatever the backend.
        """
        runner = self.model_runner
        if getattr(runner, "intermediate_tensors", 0) is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )

    def fill_arena(self, value):
        """Set every byte of the rank's arena; get how many there are."""
        from jenga.vllm_plugin.worker.page_copies import arena_of

        arena = arena_of(self.model_runner.kv_caches)
        arena.view(torch.uint8).fill_(value)
        return arena.numel()
