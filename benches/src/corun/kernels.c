/* Kernels of the co-run bench, each with a fixed amount of work: KIND BYTES UNITS [FILE]. The units that are done are
   counted in the first eight bytes of FILE, if one is given. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static uint64_t uncounted;
static volatile uint64_t *done_units = &uncounted;
/* Units between two counts. */
enum { COUNTED = 1024 };

static uint64_t state = 88172645463325252u;
static uint64_t draw(uint64_t bound) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint64_t)(((__uint128_t)state * bound) >> 64);
}
static void *memory(size_t bytes) {
    void *block = calloc(bytes / 64 + 2, 64);
    if (!block) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    /* Pages that nobody has written are all the same page of zeros, which stays in the first cache. */
    for (size_t at = 0; at < bytes; at += 4096) ((volatile char *)block)[at] = 0;
    return block;
}
/* One random cycle through all lines (Sattolo). */
static uint64_t chase(size_t bytes, uint64_t units) {
    size_t lines = bytes / 64;
    uint64_t *next = memory(bytes), at = 0;
    uint32_t *order = memory(lines * sizeof *order);
    for (size_t i = 0; i < lines; i++) order[i] = (uint32_t)i;
    for (size_t i = lines - 1; i > 0; i--) {
        size_t j = draw(i);
        uint32_t swapped = order[i];
        order[i] = order[j];
        order[j] = swapped;
    }
    for (size_t i = 0; i < lines; i++) next[8 * order[i]] = 8 * (uint64_t)order[(i + 1) % lines];
    free(order);
    for (uint64_t step = 0; step < units; step++) {
        at = next[at];
        if (step % COUNTED == 0) *done_units = step;
    }
    return at;
}
/* The triad of STREAM; a unit is a line of each array. */
static uint64_t stream(size_t bytes, uint64_t units) {
    size_t words = bytes / 24 / 8 * 8;
    double *a = memory(words * 8), *b = memory(words * 8), *c = memory(words * 8);
    for (uint64_t done = 0; done < units; done += words / 8)
        for (size_t start = 0; start < words; start += 8 * COUNTED) {
            size_t end = start + 8 * COUNTED < words ? start + 8 * COUNTED : words;
            for (size_t i = start; i < end; i++) a[i] = b[i] + 3.0 * c[i];
            *done_units = done + end / 8;
        }
    return (uint64_t)a[words / 2];
}
/* A unit is one counted value. */
static uint64_t histogram(size_t bytes, uint64_t units) {
    size_t bins = bytes / 4;
    uint32_t *counts = memory(bytes);
    for (uint64_t unit = 0; unit < units; unit++) {
        counts[draw(bins)]++;
        if (unit % COUNTED == 0) *done_units = unit;
    }
    return counts[bins / 2];
}
/* Build and probe of an open-addressing table; a unit is a probe. */
static uint64_t hash_join(size_t bytes, uint64_t units) {
    size_t slots = 1, found = 0;
    while (slots * 2 * 16 <= bytes) slots *= 2;
    uint64_t *table = memory(slots * 16);
    uint64_t keys = slots / 2;
    for (uint64_t key = 1; key <= keys; key++) {
        size_t slot = (key * 0x9E3779B97F4A7C15u) >> 11 & (slots - 1);
        while (table[2 * slot]) slot = (slot + 1) & (slots - 1);
        table[2 * slot] = key;
        table[2 * slot + 1] = ~key;
    }
    for (uint64_t unit = 0; unit < units; unit++) {
        uint64_t key = 1 + draw(2 * keys);
        size_t slot = (key * 0x9E3779B97F4A7C15u) >> 11 & (slots - 1);
        while (table[2 * slot] && table[2 * slot] != key) slot = (slot + 1) & (slots - 1);
        found += table[2 * slot + 1] & 1;
        if (unit % COUNTED == 0) *done_units = unit;
    }
    return found;
}
/* Breadth-first search of a random graph of degree 8; a unit is an edge. */
static uint64_t bfs(size_t bytes, uint64_t units) {
    size_t nodes = bytes / 40;
    uint32_t *edges = memory(nodes * 32), *level = memory(nodes * 4), *queue = memory(nodes * 4);
    for (size_t i = 0; i < nodes * 8; i++) edges[i] = (uint32_t)draw(nodes);
    uint64_t visited = 0, round = 1;
    while (visited < units) {
        size_t head = 0, tail = 0, root = draw(nodes);
        queue[tail++] = (uint32_t)root;
        level[root] = (uint32_t)round;
        while (head < tail && visited < units) {
            uint32_t *out = edges + 8 * (size_t)queue[head++];
            if (head % (COUNTED / 8) == 0) *done_units = visited;
            for (int i = 0; i < 8; i++) {
                visited++;
                if (level[out[i]] != round) {
                    level[out[i]] = (uint32_t)round;
                    queue[tail++] = out[i];
                }
            }
        }
        round++;
    }
    return round;
}
/* Product of square matrices; a unit is a row of the result. */
static uint64_t matrix(size_t bytes, uint64_t units) {
    size_t n = 16;
    while (3 * (n + 16) * (n + 16) * 8 <= bytes) n += 16;
    double *a = memory(n * n * 8), *b = memory(n * n * 8), *c = memory(n * n * 8);
    for (size_t i = 0; i < n * n; i++) a[i] = b[i] = (double)(i % 7);
    for (uint64_t unit = 0; unit < units; unit++) {
        size_t i = unit % n;
        for (size_t k = 0; k < n; k++)
            for (size_t j = 0; j < n; j++) c[i * n + j] += a[i * n + k] * b[k * n + j];
        *done_units = unit;
    }
    return (uint64_t)c[n];
}
/* Sparse matrix times vector; a unit is a nonzero, of which a row has 16. */
static uint64_t sparse(size_t bytes, uint64_t units) {
    size_t rows = bytes / (16 * 12 + 16);
    uint32_t *columns = memory(rows * 64);
    double *values = memory(rows * 128), *x = memory(rows * 8), *y = memory(rows * 8);
    for (size_t i = 0; i < rows * 16; i++) columns[i] = (uint32_t)draw(rows), values[i] = 1.0;
    for (uint64_t done = 0; done < units; done += rows * 16)
        for (size_t row = 0; row < rows && done + row * 16 < units; row++) {
            double sum = 0;
            for (int i = 0; i < 16; i++) sum += values[row * 16 + i] * x[columns[row * 16 + i]];
            y[row] = sum + 1;
            if (row % (COUNTED / 16) == 0) *done_units = done + row * 16;
        }
    return (uint64_t)y[0];
}
/* Arithmetic without memory: what a program runs beside to be alone with the caches. */
static uint64_t spin(size_t bytes, uint64_t units) {
    (void)bytes;
    uint64_t sum = 0;
    for (uint64_t unit = 0; unit < units; unit++) {
        sum += draw(units);
        if (unit % COUNTED == 0) *done_units = unit;
    }
    return sum;
}
int main(int count, char **words) {
    static const struct {
        const char *name;
        uint64_t (*run)(size_t, uint64_t);
    } kinds[] = {{"chase", chase}, {"stream", stream}, {"histogram", histogram}, {"hash-join", hash_join},
                 {"bfs", bfs},     {"matrix", matrix}, {"sparse", sparse},       {"spin", spin}};
    int file = count == 5 ? open(words[4], O_RDWR) : -1;
    if (file >= 0) {
        void *mapped = mmap(0, sizeof *done_units, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (mapped != MAP_FAILED) done_units = mapped;
    }
    for (size_t i = 0; count >= 4 && i < sizeof kinds / sizeof *kinds; i++)
        if (!strcmp(words[1], kinds[i].name)) {
            size_t bytes = strtoull(words[2], 0, 10);
            uint64_t result = kinds[i].run(bytes < 65536 ? 65536 : bytes, strtoull(words[3], 0, 10));
            printf("%llu\n", (unsigned long long)result);
            return 0;
        }
    fprintf(stderr, "usage: KIND BYTES UNITS [FILE]\n");
    return 1;
}
