/* A pointer chaser: every load needs the one before it. chase KIB STEPS walks one random cycle through KIB of lines. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct line {
    struct line *next;
    char rest[64 - sizeof(struct line *)];
};

static uint64_t state = 1;
static uint64_t random64(void) { /* splitmix64 */
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

int main(int argc, char **argv) {
    size_t lines = (argc > 1 ? strtoull(argv[1], 0, 10) : 1024) * 1024 / sizeof(struct line);
    uint64_t steps = argc > 2 ? strtoull(argv[2], 0, 10) : 1000000;
    struct line *all = aligned_alloc(64, lines * sizeof *all);
    size_t *order = malloc(lines * sizeof *order);
    if (lines < 2 || !all || !order) return 1;
    for (size_t i = 0; i < lines; i++) order[i] = i;
    for (size_t i = lines - 1; i > 0; i--) {
        size_t j = random64() % (i + 1), t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
    for (size_t i = 0; i < lines; i++) all[order[i]].next = &all[order[(i + 1) % lines]];
    struct line *at = all;
    while (steps--) at = at->next;
    printf("%zu\n", (size_t)(at - all));
    return 0;
}
