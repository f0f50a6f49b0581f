/* SPDX-License-Identifier: GPL-2.0-or-later
 * The modeled machine, as `cachemate lab config` prints it: lines of "name value", '#' begins a comment. */
#ifndef CONFIG_H
#define CONFIG_H
#include <stddef.h>
#include <stdint.h>

enum { CPUS_AT_MOST = 16, L3S_AT_MOST = 8, WAYS_AT_MOST = 32, LINE_SHIFT = 6, LINE_BYTES = 64 };

struct config {
	char name[64];
	char truth_file[512]; /* empty = nothing is written */
	uint64_t hertz;
	uint64_t cpus, cpus_per_l3;
	uint64_t l1_bytes, l1_ways, l2_bytes, l2_ways, l3_bytes, l3_ways, l3_slices;
	/* Beyond the cycles of an instruction. */
	uint64_t l2_cycles, l3_cycles, memory_cycles;
	/* The last CPUs are cores of another type: each instruction takes so many cycles (of `hertz`), and the L2 is their own. */
	uint64_t small_cpus, small_instruction_cycles, small_l2_bytes, small_l2_ways, small_l2_cycles;
	uint64_t prefetch_streams, prefetch_degree; /* of each L2's streamer; 0 = there is none */
	uint64_t same_l3_cycles, other_l3_cycles; /* a line out of another CPU's cache */
	uint64_t io_cycles;
	uint64_t memory_cycles_per_line; /* a memory's bandwidth; 0 = unlimited */
	uint64_t memory_per_l3;		 /* 1 = each L3 has a memory of its own (a socket), 0 = all share one */
	/* Latency of the other L3s' memories; 0 = all memory is local. Memory i is the i-th equal part of all lines. */
	uint64_t remote_memory_cycles;
	/* Somebody outside the guest who brings lines into every L3, as on a shared host; 0 = nobody. */
	uint64_t neighbor_lines_per_us;
	uint64_t neighbor_half_period_ns; /* there and away for so long in turns; 0 = always there */
	uint64_t classes, monitors;	 /* of RDT: 0 = the processor has none */
	uint64_t throttling;		 /* 1 = bandwidth allocation (MBA) */
	uint64_t counters;		 /* performance counters: 0 = there is no PMU */
	uint64_t sampling;		 /* 1 = they interrupt, and write samples of accesses (modeled PEBS) */
	uint64_t sample_cycles;		 /* cost of one record */
	uint64_t load_tag_interval;	 /* mean loads per load whose latency is measured; 1 = each */
	uint64_t l1_hit_cycles;		 /* latency of an L1 hit in a sample */
	uint64_t memory_bytes;		 /* what the model covers; an access beyond it ends the run */
	uint64_t quantum_ns;		 /* how far a CPU may run ahead of the slowest one */
	uint64_t shared_ahead_ns;	 /* the same on lines that move between CPUs, */
	uint64_t pause_ahead_ns;	 /* at a PAUSE, */
	uint64_t tsc_ahead_ns;		 /* and at an RDTSC */
	uint64_t backoff_doublings;	 /* of these three during a long spin */
	uint64_t settled_ns;		 /* time since its last move after which a line is ordered as any other */
	uint64_t truth_ns;		 /* between two entries of the truth */
	uint64_t model_on;		 /* from the first instruction; 0 = once the guest asks for it */
	uint64_t verbose;
};

static inline uint64_t clock_ns(const struct config *c, uint64_t cycles)
{
	return (uint64_t)((unsigned __int128)cycles * 1000000000u / c->hertz);
}
static inline uint64_t clock_cycles(const struct config *c, uint64_t ns)
{
	return (uint64_t)((unsigned __int128)ns * c->hertz / 1000000000u);
}

/* What differs between types of cores. */
struct core_type {
	uint64_t instruction_cycles, l2_bytes, l2_ways, l2_cycles;
};
static inline struct core_type config_core(const struct config *c, uint64_t cpu)
{
	if (cpu + c->small_cpus < c->cpus)
		return (struct core_type){ 1, c->l2_bytes, c->l2_ways, c->l2_cycles };
	return (struct core_type){ c->small_instruction_cycles, c->small_l2_bytes, c->small_l2_ways, c->small_l2_cycles };
}

void config_defaults(struct config *);
/* One setting; NULL, or what is wrong with it (static storage). */
const char *config_set(struct config *, const char *name, const char *value);
/* A whole file; NULL, or what is wrong and where. */
const char *config_read(struct config *, const char *path);
/* Whether the settings fit each other; NULL, or what does not. */
const char *config_check(const struct config *);
#endif
