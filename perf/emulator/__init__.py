"""A GPU in software: it runs the PTX that Triton compiles, on tensors in this machine's memory.

Triton's interpreter runs the Python code of a kernel. The emulator runs the compiler's output:
layouts, shared memory and its barriers, asynchronous copies, matrix instructions and 16-bit
arithmetic. It shows whether a kernel is correct on a GPU, and not how fast it is there.

    from perf.emulator.driver import EmulatedGpu
    from triton.runtime import driver

    driver.set_active(EmulatedGpu(90))  # launches on CPU tensors run from here on

Undefined behaviour becomes visible. Registers and shared memory hold garbage until they are
written, and targets of asynchronous copies until a wait. An `EmulationError` is raised for:

- a load or store outside of every tensor;
- accesses of two threads to one address of shared memory, one of them a store, without a barrier
  between them;
- such accesses of two warps to one address of a tensor;
- tensor cores that read shared memory or registers without the fences and waits that PTX requires.

Warps of a program may be specialised, that is, run different code. They then meet at numbered
barriers, wait for barriers in shared memory (mbarriers) and for boxes that the copy engine brings,
and exchange registers. Vector clocks track which accesses of other warps a warp can rely on. A
waiting warp goes on as late as possible. If no warp can go on, an error names what each waits for.

Words that the modules share:

- Program: a thread block, as in Triton.
- Wave: programs of a launch that are emulated in step.
- Lane: one thread of a wave, counted over all its programs.
- Step: function that carries out one instruction for some lanes.
- Party: origin of an access to global memory, that is, a program, a time and a warp in one number.

Source: PTX ISA 8.7 with its memory consistency model. CUTLASS `cute/arch/mma_sm90_desc.hpp` for
descriptors of matrices. CUDA's `cuTensorMapEncodeTiled` for descriptors of tensors.
"""
