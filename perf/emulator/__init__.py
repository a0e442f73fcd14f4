"""A GPU in software: it runs the PTX that Triton compiles, on tensors in this machine's memory.

The interpreter of Triton runs a kernel's Python; this runs what the compiler made of it: layouts,
shared memory and its barriers, copies that land late, matrix instructions, 16-bit arithmetic. It
tells whether a kernel is right on a GPU, not how fast it is there.

    from perf.emulator.driver import EmulatedGpu
    from triton.runtime import driver

    driver.set_active(EmulatedGpu(90))  # launches on CPU tensors run from here on

What a GPU leaves undefined is made to show. Registers, shared memory and copies that are not waited
for hold garbage. An `EmulationError` is: a load or store outside every tensor; two threads at one
address of shared memory, or two warps at one of a tensor, without a barrier between them; what
tensor cores read, of shared memory or registers, without the fences and waits that PTX asks for.

Warps of a program may go ways of their own: meet at barriers with numbers, wait for barriers in
shared memory and for the boxes that the copy engine brings, trade registers. What one may then know
of another's accesses is followed with vector clocks. Who waits goes on as late as possible; where
nobody can go on it is an error that says who waits for what.

Source: PTX ISA 8.7, also its memory consistency model; CUTLASS `cute/arch/mma_sm90_desc.hpp` for
descriptors of matrices; CUDA's `cuTensorMapEncodeTiled` for those of tensors.
"""
