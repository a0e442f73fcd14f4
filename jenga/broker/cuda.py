"""The calls of the CUDA driver that a shared arena needs: memory of a GPU, and handles of it (IPC).

They go to the driver's library. A process that makes them needs neither torch nor a CUDA toolkit.
"""

import ctypes

_LIBRARY = "libcuda.so.1"

_SUCCESS = 0

_OPEN_FLAGS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only value that opening a handle takes."""

HANDLE_BYTES = 64
"""Bytes of a handle."""


class _Uuid(ctypes.Structure):
    _fields_ = (("octets", ctypes.c_ubyte * 16),)


class _Handle(ctypes.Structure):
    _fields_ = (("octets", ctypes.c_ubyte * HANDLE_BYTES),)


_Address = ctypes.c_uint64

_PARAMETERS = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetUuid_v2": (ctypes.POINTER(_Uuid), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (ctypes.POINTER(_Address), ctypes.c_size_t),
    "cuMemsetD8_v2": (_Address, ctypes.c_ubyte, ctypes.c_size_t),
    "cuMemGetAddressRange_v2": (
        ctypes.POINTER(_Address),
        ctypes.POINTER(ctypes.c_size_t),
        _Address,
    ),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _Address),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_Address), _Handle, ctypes.c_uint),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}
"""Functions of the library under their exported names, with their parameters as in `cuda.h`."""


class CudaError(RuntimeError):
    """There is no CUDA driver, or it refuses a call. The message has the call and its error."""


class Gpu:
    """One GPU, as this process sees it. The calls use the context that torch uses too.

    Attributes:
        uuid: Its UUID, or that of the MIG instance. It is the same in every process.
    """

    def __init__(self, ordinal: int) -> None:
        """Connect to a GPU, and make its context that of this thread.

        Args:
            ordinal: Number of the GPU among those that this process sees.

        Raises:
            CudaError: There is no such GPU, or no driver.
        """
        try:
            self._library = ctypes.CDLL(_LIBRARY)
            for name, parameters in _PARAMETERS.items():
                getattr(self._library, name).argtypes = parameters
        except (OSError, AttributeError) as error:
            msg = f"the CUDA driver cannot be used: {error}"
            raise CudaError(msg) from error
        device, context, uuid = ctypes.c_int(), ctypes.c_void_p(), _Uuid()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self.uuid: str = bytes(uuid.octets).hex()

    def allocate(self, num_bytes: int) -> int:
        """Allocate memory of this process, filled with zeros, and return its address.

        Raises:
            CudaError: The memory is not there.
        """
        address = _Address()
        self._call("cuMemAlloc_v2", ctypes.byref(address), num_bytes)
        self._call("cuMemsetD8_v2", address, 0, num_bytes)
        self._call("cuCtxSynchronize")
        return address.value

    def export(self, address: int) -> bytes:
        """Return the handle of an allocation. It is valid while this process lives."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.octets)

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process, and return its address in this one.

        A process opens a handle once. The mapping ends with the process.

        Raises:
            CudaError: The other process has ended, or the driver does not let both share memory.
        """
        address = _Address()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            _OPEN_FLAGS,
        )
        return address.value

    def allocation(self, address: int) -> tuple[int, int]:
        """Return the first address and the number of bytes of the allocation around an address."""
        first, num_bytes = _Address(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(first), ctypes.byref(num_bytes), address)
        return first.value, num_bytes.value

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != _SUCCESS:
            texts: list[str] = []
            for look_up in (self._library.cuGetErrorName, self._library.cuGetErrorString):
                text = ctypes.c_char_p()
                look_up(code, ctypes.byref(text))
                texts.append((text.value or b"unknown").decode())
            msg = f"{name} failed: {texts[0]} ({texts[1]})"
            raise CudaError(msg)
