"""Memory of the emulated GPU, and what orders accesses to it: clocks, barriers and waits."""
