#include "kernels.h"
#include "device.h"
#include "cuda_api.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct { const void *function; const char *name; void *module; int dynamic_shared; } Registered;

static Registered *table; /* open addressing, by address of the host function */
static size_t used, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Registered *slot_of(Registered *slots, size_t size, const void *function) {
    size_t i = ((uintptr_t)function >> 4) * 0x9e3779b97f4a7c15u >> 20 & (size - 1);
    while (slots[i].function && slots[i].function != function) i = (i + 1) & (size - 1);
    return &slots[i];
}
static void grow(void) {
    size_t wider = room ? 2 * room : 1 << 16;
    Registered *slots = calloc(wider, sizeof *slots);
    for (size_t i = 0; i < room; i++)
        if (table[i].function) *slot_of(slots, wider, table[i].function) = table[i];
    free(table);
    table = slots;
    room = wider;
}
static Registered *find(const void *function) { return room ? slot_of(table, room, function) : NULL; }

void **__cudaRegisterFatBinary(void *binary) { void **handle = calloc(1, sizeof *handle); *handle = binary; return handle; }
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
char __cudaInitModule(void **handle) { (void)handle; return 1; }
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext, size_t size, int constant, int global) {
    (void)handle; (void)host; (void)device; (void)name; (void)ext; (void)size; (void)constant; (void)global;
}
void __cudaRegisterManagedVar(void **handle, void **pointer, char *device, const char *name, int ext, size_t size, int constant, int global) {
    (void)handle; (void)pointer; (void)device; (void)name; (void)ext; (void)size; (void)constant; (void)global;
}
void __cudaRegisterFunction(void **handle, const char *function, char *device_function, const char *name, int threads, Dim3 *tid, Dim3 *bid, Dim3 *block,
                            Dim3 *grid, int *warp) {
    (void)device_function; (void)threads; (void)tid; (void)bid; (void)block; (void)grid; (void)warp;
    pthread_mutex_lock(&lock);
    if (2 * used >= room) grow();
    Registered *slot = find(function);
    if (!slot->function) used++;
    *slot = (Registered){function, name, *handle, -1};
    pthread_mutex_unlock(&lock);
}

const void *load_image(const void *image) { return image; }
const void *image_function(const void *module, const char *name) { (void)name; return module; }

const char *kernel_name(const void *function) {
    Registered *slot = find(function);
    return slot && slot->function ? slot->name : "?";
}

Kernel kernel_attributes(const void *function) {
    (void)function;
    return (Kernel){32, 0, 48 << 10, 1024, 0, 0, card()->major * 10 + card()->minor};
}

int kernel_set_attribute(const void *function, int attribute, int value) {
    (void)function; (void)attribute; (void)value;
    return 0;
}

static int at_most(int blocks, size_t limit) { return limit < (size_t)blocks ? (int)limit : blocks; }

/* NVIDIA's published formula (the occupancy calculator, cuda_occupancy.h): the scarcest of block slots, warp slots, registers, which are
 * given to warps in units of 256 by four partitions of the multiprocessor, and shared memory. */
int occupancy(const Kernel *kernel, int threads, size_t dynamic_shared) {
    enum { WARP = 32, REGISTER_UNIT = 256, PARTITIONS = 4, MOST_REGISTERS = 256 };
    const Card *c = card();
    if (threads < 1 || threads > 1024 || threads > kernel->max_threads || kernel->registers > MOST_REGISTERS) return 0;
    size_t warps = ((size_t)threads + WARP - 1) / WARP;
    int blocks = at_most(c->sm_blocks, (size_t)c->sm_threads / WARP / warps);
    size_t warp_registers = ((size_t)kernel->registers * WARP + REGISTER_UNIT - 1) / REGISTER_UNIT * REGISTER_UNIT;
    if (warp_registers) {
        size_t checked = (warps + PARTITIONS - 1) / PARTITIONS * PARTITIONS * warp_registers; /* the hardware checks whole partitions */
        if (checked > (size_t)c->sm_registers) return 0;
        blocks = at_most(blocks, (size_t)c->sm_registers / PARTITIONS / warp_registers * PARTITIONS / warps);
    }
    size_t shared = (size_t)kernel->static_shared + dynamic_shared;
    if (shared > c->block_shared) return 0;
    shared = (shared + c->reserved_shared + c->shared_unit - 1) / c->shared_unit * c->shared_unit;
    return shared ? at_most(blocks, c->sm_shared / shared) : blocks;
}
