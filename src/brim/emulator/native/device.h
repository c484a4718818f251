/* Properties and memory of the emulated card. The names in this file are not exported, so that they cannot clash with names of a program. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define MIB ((size_t)1 << 20)
#define PAGE ((size_t)4096)
#define GRANULARITY (2 * MIB) /* cudaMalloc takes memory from a card in multiples of this */
enum { DEVICES = 16, PROCESSES = 128 };

typedef struct { /* one card; all cards of a session are alike (BRIM_CARD) */
    char name[256];
    int major, minor, sms, sm_threads, sm_blocks, sm_registers, l2_bytes, bus_bits, watts;
    size_t sm_shared, block_shared, shared_unit, reserved_shared; /* bytes */
    size_t memory;                                                /* `total` of cudaMemGetInfo */
} Card;

#pragma GCC visibility push(hidden)
const Card *card(void);
int card_compute(void);     /* BRIM_CARD_COMPUTE: copies of any size are made */
int physical_count(void);   /* BRIM_CARD_COUNT */
int visible_count(void);    /* of the cards in CUDA_VISIBLE_DEVICES */
int physical_device(int device);
void card_uuid(int physical, unsigned char uuid[16]);

int current_device(void);
int set_current_device(int device); /* -1: no such device */

/* take and make_context return -1 if the card has not enough free memory. The memory of all processes of the session counts (BRIM_CARD_SHARED). */
int take(int device, size_t bytes);
void give_back(int device, size_t bytes);
int make_context(int device);
int has_context(int device);
size_t bytes_in_use(int device);      /* by this process, without its context */
size_t most_bytes_in_use(int device); /* the peak so far */
size_t bytes_held(int physical);      /* by all processes, contexts included */
int holders(int physical, int *pids, size_t *bytes, int room); /* processes that hold memory of a card: returns how many, writes at most `room` */

void *device_malloc(int device, size_t bytes); /* NULL: out of memory */
int device_free(void *pointer);                /* -1: not an allocation of the card */
int device_of(const void *pointer);            /* -1: not an address of a card */
int allocation_of(const void *pointer, char **start, size_t *bytes); /* the allocation or reservation that contains the address; -1: none */
void *reserve_addresses(int device, size_t bytes);
void free_addresses(void *pointer);
void discard(void *pointer, size_t bytes);     /* reads as zeros again; the pages go back to the host */
void copy(void *to, const void *from, size_t bytes);
void fill(void *to, int value, size_t bytes);

void *session_memory(size_t *bytes);           /* memory that the processes of the session share, for collectives; NULL without a session */
void lock_session(void);
void unlock_session(void);
int is_running(int pid);

void refuse_feature(const char *name, const char *advice); /* record an unsupported feature, and print it to stderr once */

extern int tracing;
void trace_line(const char *format, ...) __attribute__((format(printf, 1, 2)));
#pragma GCC visibility pop
#define trace(...) do { if (tracing) trace_line(__VA_ARGS__); } while (0)
