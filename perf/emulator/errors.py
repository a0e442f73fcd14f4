"""Error of the emulated GPU."""


class EmulationError(RuntimeError):
    """A kernel does something that is an error on a GPU, or that the emulator does not know."""
