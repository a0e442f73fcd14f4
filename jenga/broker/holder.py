"""The process that holds the memory of a shared arena on a GPU, until a signal ends it.

The broker starts it: `python -m jenga.broker.holder FILE DEVICE BYTES`. It writes the file that
other processes read (`jenga.broker.memory`), and closes its output. If it cannot have the memory,
it writes why to its output, and ends.
"""

import os
import signal
import sys
from pathlib import Path

from jenga.broker.cuda import CudaError, Gpu
from jenga.broker.memory import DeviceMemory
from jenga.broker.processes import this_process

_UNIT_BYTES = 2 << 20
"""CUDA may put smaller allocations into a common one, and a handle shares that as a whole."""


def main(arguments: list[str]) -> None:
    """Hold memory of a GPU.

    Args:
        arguments: The file to write, the device as `cuda:N`, and the number of bytes.
    """
    path, device, num_bytes = Path(arguments[0]), arguments[1], int(arguments[2])
    try:
        gpu = Gpu(int(device.removeprefix("cuda:")))
        address = gpu.allocate(-(-num_bytes // _UNIT_BYTES) * _UNIT_BYTES)
        handle = gpu.export(address)
    except CudaError as error:
        sys.exit(str(error))
    DeviceMemory(
        path=path,
        device=device,
        uuid=gpu.uuid,
        num_bytes=num_bytes,
        handle=handle,
        holder=this_process(),
    ).write()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (sys.stdout, sys.stderr):
        os.dup2(nowhere, output.fileno())
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
