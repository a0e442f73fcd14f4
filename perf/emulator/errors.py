"""What goes wrong in an emulated GPU."""


class EmulationError(RuntimeError):
    """A kernel does what a GPU would not, or what nobody taught the emulator."""
