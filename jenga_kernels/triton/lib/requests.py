"""Search for a program's request, when requests have different numbers of tokens."""

import triton.language as tl

from jenga_kernels.triton.lib.device import device_function


@device_function
def find_block(query_starts_ptr, num_requests, block, BLOCK_T: tl.constexpr):
    """Find the request of a block of at most BLOCK_T tokens, and the block's index within it.

    Request r has the blocks from query_starts[r] // BLOCK_T + r on. Not all of them have tokens.
    Blocks before the first request's have a negative index.
    """
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts_ptr + middle) // BLOCK_T + middle <= block:
            low = middle
        else:
            high = middle
    return low, block - (tl.load(query_starts_ptr + low) // BLOCK_T + low)
