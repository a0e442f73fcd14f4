"""Run an engine as `engine_process` does, whose other operations ignore the rest of a batch too.

On a GPU vLLM sees to that where VLLM_BATCH_INVARIANT is set; its products of matrices on a CPU sum
in an order that hangs on the number of rows. Usage: invariant_process.py JOB RESULT.
"""

from dataclasses import replace

import torch

from tests.vllm_plugin.programs import engine_process


def multiply_row_by_row():
    """Let vLLM's linear layers on a CPU compute each row by itself."""
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    original = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer, *args, **kwargs):
        original(layer, *args, **kwargs)
        multiply = layer.cpu_linear

        def rows(x, weight, bias=None):
            flat = x.reshape(-1, x.shape[-1])
            if not len(flat):
                return multiply(x, weight, bias)
            out = torch.cat([multiply(row, weight, bias) for row in flat.split(1)])
            return out.view(*x.shape[:-1], -1)

        layer.cpu_linear = rows

    for module in (utils, linear, vocab_parallel_embedding):
        if hasattr(module, "dispatch_cpu_unquantized_gemm"):
            module.dispatch_cpu_unquantized_gemm = dispatch


def leave_the_dispatcher_alone():
    """Keep vLLM's kernels for a GPU out of a CPU's sums and softmaxes, which go row by row."""
    from vllm.model_executor.determinism import batch_invariant

    batch_invariant.enable_batch_invariant_mode = lambda: None


def cut_into_small_tiles():
    """Let the interpreter walk over keys in tiles as short as a GPU's; its own hold all of them."""
    from jenga_kernels.plans import attention_plan

    tiles_of = attention_plan.attention_tiles

    def small(*args, **kwargs):
        tiles = tiles_of(*args, **kwargs)
        decode = replace(tiles.decode, block_n=32)
        prefill = replace(tiles.prefill, block_m=64, block_n=32)
        return replace(tiles, decode=decode, prefill=prefill, num_programs=5)

    attention_plan.attention_tiles = small


if __name__ == "__main__":
    multiply_row_by_row()
    leave_the_dispatcher_alone()
    cut_into_small_tiles()
    engine_process.main()
