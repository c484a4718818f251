/* The kernels that a program registers: names, resources and occupancy. */
#pragma once
#include <stddef.h>

typedef struct {
    int registers, static_shared, dynamic_shared, max_threads, local, constant; /* registers per thread; shared memory in bytes */
    int arch;                                                                   /* of the code: 75, 80, ... */
} Kernel;

#pragma GCC visibility push(hidden)
const void *load_image(const void *image); /* a module that is compiled at run time; NULL: no image */
const void *image_function(const void *module, const char *name);
const char *kernel_name(const void *function);
Kernel kernel_attributes(const void *function);
int kernel_set_attribute(const void *function, int attribute, int value); /* -1: more than the card has */
int occupancy(const Kernel *kernel, int threads, size_t dynamic_shared);  /* resident blocks per multiprocessor */
#pragma GCC visibility pop
