/* Kernels are stored in fat binaries: containers with one image (a cubin, an ELF file) for each architecture, most of them compressed. An image
 * is read when a program first queries one of its kernels. */
#define _GNU_SOURCE
#include "kernels.h"
#include "cuda_api.h"
#include "device.h"
#include <dlfcn.h>
#include <elf.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WRAPPER = 0x466243b1, CONTAINER = 0xba55ed50u, CUBIN = 2, LZ4 = 0x2000, ZSTD = 0x8000 };
enum { ASSUMED_REGISTERS = 32 }; /* if an image cannot be read */
enum { DEFAULT_SHARED = 48 << 10 };

typedef struct { uint32_t magic, version; const void *data, *rest; } Wrapper;
typedef struct { uint32_t magic; uint16_t version, header; uint64_t bytes; } Container;
typedef struct { /* of one image; `bytes` with padding, `packed` without */
    uint16_t kind, version;
    uint32_t header;
    uint64_t bytes;
    uint32_t packed, options;
    uint16_t minor, major;
    uint32_t arch, name, name_bytes;
    uint64_t flags, zero, unpacked;
} Image;

typedef struct { char *name; Kernel kernel; } Entry;
typedef struct Module { const void *source; int read; Entry *entries; size_t count; struct Module *next; } Module;
typedef struct { const void *function; const char *name; Module *module; int dynamic_shared, known; Kernel kernel; } Registered; /* dynamic_shared -1: the default */

static Registered *table; /* a hash table with open addressing; the key is the address of the host's function */
static size_t used, room;
static Module *modules;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- the table of functions */
static Registered *slot_of(Registered *slots, size_t size, const void *function) {
    size_t i = ((uintptr_t)function >> 4) * 0x9e3779b97f4a7c15u >> 20 & (size - 1);
    while (slots[i].function && slots[i].function != function) i = (i + 1) & (size - 1);
    return &slots[i];
}
static Registered *find(const void *function) {
    Registered *slot = room ? slot_of(table, room, function) : NULL;
    return slot && slot->function ? slot : NULL;
}
static void add(const void *function, const char *name, Module *module) { /* with the lock held */
    if (2 * used >= room) {
        size_t wider = room ? 2 * room : 1 << 16;
        Registered *slots = calloc(wider, sizeof *slots);
        for (size_t i = 0; i < room; i++)
            if (table[i].function) *slot_of(slots, wider, table[i].function) = table[i];
        free(table);
        table = slots;
        room = wider;
    }
    Registered *slot = slot_of(table, room, function);
    if (!slot->function) used++;
    *slot = (Registered){.function = function, .name = name, .module = module, .dynamic_shared = -1};
}
static Module *add_module(const void *source) {
    Module *module = calloc(1, sizeof *module);
    module->source = source;
    pthread_mutex_lock(&lock);
    module->next = modules;
    modules = module;
    pthread_mutex_unlock(&lock);
    return module;
}

/* ---- registration: called by code that nvcc generates, when a library is loaded */
void **__cudaRegisterFatBinary(void *wrapper) {
    void **handle = calloc(1, sizeof *handle);
    *handle = add_module(wrapper);
    return handle;
}
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
    add(function, name, *handle);
    pthread_mutex_unlock(&lock);
}

/* ---- images */
static size_t unpack_lz4(const unsigned char *in, size_t in_bytes, unsigned char *out, size_t room_bytes) { /* one block of the LZ4 format */
    const unsigned char *end = in + in_bytes;
    size_t done = 0;
    while (in < end) {
        unsigned token = *in++;
        size_t length = token >> 4;
        if (length == 15) do { if (in >= end) return 0; length += *in; } while (*in++ == 255);
        if (length > (size_t)(end - in) || done + length > room_bytes) return 0;
        memcpy(out + done, in, length);
        in += length;
        done += length;
        if (end - in < 2) break; /* the last sequence has literals only */
        size_t back = in[0] | (size_t)in[1] << 8;
        in += 2;
        length = (token & 15) + 4;
        if (length == 19) do { if (in >= end) return 0; length += *in; } while (*in++ == 255);
        if (!back || back > done || done + length > room_bytes) return 0;
        for (; length; length--, done++) out[done] = out[done - back];
    }
    return done;
}

static size_t unpack_zstd(const void *in, size_t in_bytes, void *out, size_t room_bytes) {
    static size_t (*decompress)(void *, size_t, const void *, size_t);
    static unsigned (*is_error)(size_t);
    static int tried;
    if (!tried) {
        void *library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library) { *(void **)&decompress = dlsym(library, "ZSTD_decompress"); *(void **)&is_error = dlsym(library, "ZSTD_isError"); }
        else fprintf(stderr, "brim: libzstd.so.1 is missing. The registers of kernels are unknown and taken as %d, so temporary buffers of reductions may differ. "
                             "Install libzstd1.\n", ASSUMED_REGISTERS);
        tried = 1;
    }
    if (!decompress || !is_error) return 0;
    size_t bytes = decompress(out, room_bytes, in, in_bytes);
    return is_error(bytes) ? 0 : bytes;
}

static const Image *best_image(const Container *container) { /* machine code for the newest capability that the card can run */
    int capability = card()->major * 10 + card()->minor;
    const Image *best = NULL;
    if (!container || container->magic != CONTAINER) return NULL;
    const char *at = (const char *)container + container->header, *end = at + container->bytes;
    while (at + sizeof(Image) <= end) {
        const Image *image = (const Image *)at;
        int arch = (int)image->arch;
        if (!image->header) break;
        if (image->kind == CUBIN && arch / 10 == card()->major && arch <= capability && (!best || arch > (int)best->arch)) best = image;
        at += image->header + image->bytes;
    }
    return best;
}

/* ---- cubins */
static Kernel default_kernel(int arch) { return (Kernel){ASSUMED_REGISTERS, 0, DEFAULT_SHARED, 1024, 0, 0, arch}; }

/* Calls `visit` for the attributes with a size of a .nv.info section. */
static void each_attribute(const unsigned char *info, size_t bytes, void (*visit)(int, const uint32_t *, size_t, void *), void *data) {
    enum { SIZED = 4 };
    for (size_t at = 0; at + 4 <= bytes;) {
        size_t size = info[at + 2] | (size_t)info[at + 3] << 8;
        if (info[at] == SIZED && at + 4 + size <= bytes) visit(info[at + 1], (const uint32_t *)(info + at + 4), size / 4, data);
        at += info[at] == SIZED ? 4 + size : 4;
    }
}

typedef struct { const Elf64_Shdr *sections; const Elf64_Sym *symbols; size_t symbol_count; Kernel *kernels; int count; } Cubin;

static void read_registers(int attribute, const uint32_t *words, size_t n, void *data) { /* from .nv.info: the symbol of a kernel, and a value */
    enum { FRAME_SIZE = 0x11, REGISTER_COUNT = 0x2f };
    Cubin *cubin = data;
    if (n < 2 || words[0] >= cubin->symbol_count || cubin->symbols[words[0]].st_shndx >= cubin->count) return;
    Kernel *kernel = &cubin->kernels[cubin->symbols[words[0]].st_shndx];
    if (attribute == REGISTER_COUNT) kernel->registers = (int)words[1];
    if (attribute == FRAME_SIZE) kernel->local = (int)words[1];
}
static void read_launch_bounds(int attribute, const uint32_t *words, size_t n, void *data) { /* from .nv.info.NAME */
    enum { MAX_THREADS = 5 };
    Kernel *kernel = data;
    if (attribute != MAX_THREADS || n < 3) return;
    uint64_t threads = (uint64_t)words[0] * words[1] * words[2];
    if (threads && threads < (uint64_t)kernel->max_threads) kernel->max_threads = (int)threads;
}
static int starts(const char *name, const char *prefix) { return !strncmp(name, prefix, strlen(prefix)); }

/* The sections of a kernel refer to its code section, .text.NAME, by sh_info. */
static void read_cubin(Module *module, const unsigned char *file, size_t bytes) {
    const Elf64_Ehdr *elf = (const Elf64_Ehdr *)file;
    if (bytes < sizeof *elf || memcmp(file, ELFMAG, SELFMAG) || elf->e_shoff + (size_t)elf->e_shnum * sizeof(Elf64_Shdr) > bytes) return;
    Cubin cubin = {(const Elf64_Shdr *)(file + elf->e_shoff), NULL, 0, NULL, elf->e_shnum};
    const char *names = (const char *)file + cubin.sections[elf->e_shstrndx].sh_offset;
    cubin.kernels = malloc((size_t)cubin.count * sizeof(Kernel));
    size_t reserved = 0; /* from capability 9.0 on, the shared memory that the system reserves is part of every kernel's section */
    for (int i = 0; i < cubin.count; i++) {
        if (starts(names + cubin.sections[i].sh_name, ".nv.shared.reserved.")) reserved = card()->reserved_shared;
        cubin.kernels[i] = default_kernel((int)(elf->e_flags >> 8 & 0xff));
        if (cubin.sections[i].sh_type != SHT_SYMTAB) continue;
        cubin.symbols = (const Elf64_Sym *)(file + cubin.sections[i].sh_offset);
        cubin.symbol_count = cubin.sections[i].sh_size / sizeof(Elf64_Sym);
    }
    for (int i = 0; i < cubin.count; i++) {
        const Elf64_Shdr *section = &cubin.sections[i];
        const char *name = names + section->sh_name;
        if (section->sh_type != SHT_NOBITS && section->sh_offset + section->sh_size > bytes) continue;
        if (!strcmp(name, ".nv.info")) { each_attribute(file + section->sh_offset, section->sh_size, read_registers, &cubin); continue; }
        Kernel *kernel = (int)section->sh_info < cubin.count ? &cubin.kernels[section->sh_info] : NULL;
        if (!kernel) continue;
        if (starts(name, ".nv.info.")) each_attribute(file + section->sh_offset, section->sh_size, read_launch_bounds, kernel);
        else if (starts(name, ".nv.shared.")) kernel->static_shared = (int)(section->sh_size > reserved ? section->sh_size - reserved : 0);
        else if (starts(name, ".nv.constant0.")) kernel->constant = (int)section->sh_size;
    }
    module->entries = malloc((size_t)cubin.count * sizeof(Entry));
    for (int i = 0; i < cubin.count; i++)
        if (starts(names + cubin.sections[i].sh_name, ".text."))
            module->entries[module->count++] = (Entry){strdup(names + cubin.sections[i].sh_name + strlen(".text.")), cubin.kernels[i]};
    free(cubin.kernels);
}

static void read_module(Module *module) { /* with the lock held */
    module->read = 1;
    if (!memcmp(module->source, ELFMAG, SELFMAG)) { /* compiled at run time: a plain cubin; its length follows from its headers */
        const Elf64_Ehdr *elf = module->source;
        read_cubin(module, module->source, elf->e_shoff + (size_t)elf->e_shnum * sizeof(Elf64_Shdr));
        return;
    }
    const Wrapper *wrapper = module->source;
    const Image *image = best_image(wrapper->magic == WRAPPER ? wrapper->data : module->source);
    if (!image) return;
    const unsigned char *data = (const unsigned char *)image + image->header;
    if (!(image->flags & (LZ4 | ZSTD))) { read_cubin(module, data, image->bytes); return; }
    unsigned char *file = malloc(image->unpacked);
    size_t bytes = image->flags & ZSTD ? unpack_zstd(data, image->packed, file, image->unpacked) : unpack_lz4(data, image->packed, file, image->unpacked);
    read_cubin(module, file, bytes);
    free(file);
    trace("image for %d: %zu bytes, %zu kernels", (int)image->arch, bytes, module->count);
}

const void *load_image(const void *image) { return image ? add_module(image) : NULL; }

const void *image_function(const void *module, const char *name) {
    char *kept = strdup(name); /* its address serves as the address of the function */
    pthread_mutex_lock(&lock);
    add(kept, kept, (Module *)module);
    pthread_mutex_unlock(&lock);
    return kept;
}

/* ---- queries */
const char *kernel_name(const void *function) {
    Registered *slot = find(function);
    return slot ? slot->name : "?";
}

static int threads_that_fit(int registers) { /* a block must fit into the registers of one multiprocessor */
    size_t warp = ((size_t)registers * 32 + 255) / 256 * 256;
    size_t warps = warp ? (size_t)card()->sm_registers / 4 / warp * 4 : 32;
    return warps >= 32 ? 1024 : (int)warps * 32;
}

Kernel kernel_attributes(const void *function) {
    Kernel kernel = default_kernel(card()->major * 10 + card()->minor);
    pthread_mutex_lock(&lock);
    Registered *slot = find(function);
    if (slot && slot->module && !slot->known) {
        if (!slot->module->read) read_module(slot->module);
        slot->kernel = kernel;
        slot->known = 1;
        for (size_t i = 0; i < slot->module->count; i++)
            if (!strcmp(slot->module->entries[i].name, slot->name)) slot->kernel = slot->module->entries[i].kernel;
    }
    if (slot && slot->known) kernel = slot->kernel;
    kernel.dynamic_shared = slot && slot->dynamic_shared >= 0 ? slot->dynamic_shared : DEFAULT_SHARED - kernel.static_shared;
    pthread_mutex_unlock(&lock);
    int most = threads_that_fit(kernel.registers);
    if (kernel.max_threads > most) kernel.max_threads = most;
    return kernel;
}

int kernel_set_attribute(const void *function, int attribute, int value) {
    enum { MAX_DYNAMIC_SHARED = 8 };
    if (attribute != MAX_DYNAMIC_SHARED) return 0;
    Kernel kernel = kernel_attributes(function);
    if (value < 0 || (size_t)kernel.static_shared + (size_t)value > card()->block_shared) return -1;
    pthread_mutex_lock(&lock);
    Registered *slot = find(function);
    if (slot) slot->dynamic_shared = value;
    pthread_mutex_unlock(&lock);
    return 0;
}

static int at_most(int blocks, size_t limit) { return limit < (size_t)blocks ? (int)limit : blocks; }

/* NVIDIA's published formula (the occupancy calculator, cuda_occupancy.h): the minimum over block slots, warp slots, registers and shared memory.
 * Each of the four partitions of a multiprocessor allocates registers to warps in units of 256. */
int occupancy(const Kernel *kernel, int threads, size_t dynamic_shared) {
    enum { WARP = 32, REGISTER_UNIT = 256, PARTITIONS = 4, MOST_REGISTERS = 256 };
    const Card *c = card();
    if (threads < 1 || threads > 1024 || kernel->registers > MOST_REGISTERS) return 0;
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
int brim_card_occupancy(const Kernel *kernel, int threads, size_t dynamic_shared) { return occupancy(kernel, threads, dynamic_shared); } /* called by tests */
