/* A CUDA driver without a GPU: its memory is files in the folder FAKE_CUDA.

   It has the semantics of CUDA IPC. A handle is valid while the process that allocated the memory
   lives, in other processes only, and once in each. Memory is not cleared when it is allocated.
   FAKE_CUDA_BYTES is the most bytes of one allocation. There are two GPUs.

   It is compiled with NVIDIA's own cuda.h, so the parameters are those of the real functions. */

#define _GNU_SOURCE
#include <cuda.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define NUM_DEVICES 2
#define MAX_MAPPED 16
#define GARBAGE_BYTES (64ull << 20)

static int is_initialised;
static __thread CUcontext current;

static struct mapped {
    CUdeviceptr address;
    size_t bytes;
    char name[sizeof(CUipcMemHandle)];
    int descriptor;
    int is_own;
} all_mapped[MAX_MAPPED];
static int num_mapped;

static const char *path_of(const char *name) {
    static char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("FAKE_CUDA"), name);
    return path;
}

static struct mapped *map(const char *name, int descriptor, size_t bytes, int is_own) {
    if (num_mapped == MAX_MAPPED) abort();
    struct mapped *new = &all_mapped[num_mapped++];
    void *start = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (start == MAP_FAILED) abort();
    *new = (struct mapped){(CUdeviceptr)start, bytes, "", descriptor, is_own};
    strncpy(new->name, name, sizeof new->name - 1);
    return new;
}

static struct mapped *around(CUdeviceptr address) {
    for (int i = 0; i < num_mapped; i++)
        if (all_mapped[i].address <= address && address < all_mapped[i].address + all_mapped[i].bytes)
            return &all_mapped[i];
    return 0;
}

CUresult cuInit(unsigned int flags) {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    is_initialised = 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (!is_initialised) return CUDA_ERROR_NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= NUM_DEVICES) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    memset(uuid->bytes, 0xa0 + device, sizeof uuid->bytes);
    uuid->bytes[3] = 0; /* no text: it may have zeros */
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)(0x7f0000000000 + device + 1); /* needs all 64 bits */
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    if ((size_t)context >> 40 != 0x7f) return CUDA_ERROR_INVALID_CONTEXT;
    current = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) { return current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }

CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes) {
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    const char *most = getenv("FAKE_CUDA_BYTES");
    if (most && bytes > strtoull(most, 0, 10)) return CUDA_ERROR_OUT_OF_MEMORY;
    char name[sizeof(CUipcMemHandle)];
    snprintf(name, sizeof name, "%d-%d", (int)getpid(), num_mapped);
    int descriptor = open(path_of(name), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (descriptor < 0 || ftruncate(descriptor, bytes) || flock(descriptor, LOCK_EX)) abort();
    *address = map(name, descriptor, bytes, 1)->address;
    memset((void *)*address, 0xab, bytes < GARBAGE_BYTES ? bytes : GARBAGE_BYTES);
    return CUDA_SUCCESS;
}

CUresult cuMemsetD8(CUdeviceptr address, unsigned char value, size_t bytes) {
    struct mapped *to = around(address);
    if (!current || !to || address + bytes > to->address + to->bytes) return CUDA_ERROR_INVALID_VALUE;
    if (value)
        memset((void *)address, value, bytes);
    else if (fallocate(to->descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                       address - to->address, bytes))
        abort();
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr *first, size_t *bytes, CUdeviceptr address) {
    struct mapped *found = around(address);
    if (!current || !found) return CUDA_ERROR_NOT_FOUND;
    *first = found->address;
    *bytes = found->bytes;
    return CUDA_SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    struct mapped *found = around(address);
    if (!current || !found || !found->is_own) return CUDA_ERROR_INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    handle->reserved[0] = 0; /* no text: it may begin with zeros */
    strcpy(handle->reserved + 1, found->name);
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
    const char *name = handle.reserved + 1;
    for (int i = 0; i < num_mapped; i++)
        if (!strcmp(all_mapped[i].name, name))
            return all_mapped[i].is_own ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_ALREADY_MAPPED;
    int descriptor = *name ? open(path_of(name), O_RDWR | O_CLOEXEC) : -1;
    if (descriptor < 0) return CUDA_ERROR_INVALID_HANDLE;
    if (!flock(descriptor, LOCK_EX | LOCK_NB)) { /* nobody who allocated it lives */
        close(descriptor);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    struct stat status;
    if (fstat(descriptor, &status)) abort();
    *address = map(name, descriptor, status.st_size, 0)->address;
    return CUDA_SUCCESS;
}

#define NAMED(code) \
    case code: \
        *text = #code; \
        return CUDA_SUCCESS;

CUresult cuGetErrorName(CUresult error, const char **text) {
    switch (error) {
        NAMED(CUDA_ERROR_INVALID_VALUE)
        NAMED(CUDA_ERROR_OUT_OF_MEMORY)
        NAMED(CUDA_ERROR_NOT_INITIALIZED)
        NAMED(CUDA_ERROR_INVALID_DEVICE)
        NAMED(CUDA_ERROR_INVALID_CONTEXT)
        NAMED(CUDA_ERROR_ALREADY_MAPPED)
        NAMED(CUDA_ERROR_INVALID_HANDLE)
        NAMED(CUDA_ERROR_NOT_FOUND)
    default:
        *text = 0;
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    (void)error;
    *text = "says the fake driver";
    return CUDA_SUCCESS;
}
