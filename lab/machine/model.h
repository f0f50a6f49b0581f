/* SPDX-License-Identifier: GPL-2.0-or-later
 * The caches from inside: for cache.c (private caches, coherence, the streamer), l3.c (L3s and memory) and account.c
 * (classes, tasks, counters). */
#ifndef MODEL_H
#define MODEL_H
#include "cache.h"

/* An entry of an L1 or L2: line + 1 above two flags; 0 = free. Of each set the most recently used comes first. */
enum { EXCLUSIVE = 1, MOVING = 2, FLAGS = 3 };
typedef uint32_t entry;

/* What is known of a line, wherever it is. `holders` are CPUs that may still hold it. */
struct line {
	uint16_t holders;
	uint16_t displaced_by; /* the task that drove it out of an L3 last */
	uint8_t owner;	       /* CPU + 1 that may hold it alone, and may have changed it */
	uint8_t l3s;	       /* that hold it */
	uint8_t lost;	       /* L3s that lost it to a store elsewhere */
	uint8_t displaced_from : 4, /* L3 + 1 */
		moves : 2, dirty : 1;
};
_Static_assert(sizeof(struct line) == 8, "a line's record must stay small: there is one for each line of memory");

enum { CLASSES_AT_MOST = 16, MONITORS_AT_MOST = 256 };
enum { STREAMS_AT_MOST = 32, IN_FLIGHT = 64, LINES_OF_A_PAGE_LOG2 = 6 };

/* Misses of the L1 that follow each other upwards; `ahead` is the last line asked for in advance. */
struct stream {
	uint32_t last, ahead;
	bool sure;
};

/* A line that was asked for in advance, and when it is there. */
struct in_flight {
	uint32_t line;
	uint64_t ready;
};

struct cpu {
	entry l1[L1_SETS * WAYS_AT_MOST];
	entry *l2;
	unsigned l2_ways, l2_sets, l2_cycles;
	struct recent recent;
	struct stream streams[STREAMS_AT_MOST];
	unsigned next_stream;
	struct in_flight in_flight[IN_FLIGHT];
	unsigned l3, class_of_service, monitor, task;
	uint64_t count[COUNTS], count_at_switch[COUNTS];
};

struct l3 {
	uint32_t *tag; /* line + 1; 0 = free */
	uint32_t *stamp;
	uint32_t *clock; /* of each set: grows with every touch */
	uint16_t *task;
	uint16_t *monitor;
	uint32_t mask[CLASSES_AT_MOST + 1]; /* the last one: the neighbor's */
	uint8_t throttle[CLASSES_AT_MOST + 1]; /* percent */
	uint64_t monitor_lines[MONITORS_AT_MOST + 1], monitor_traffic[MONITORS_AT_MOST + 1], task_lines[TASKS_AT_MOST];
	uint64_t monitor_remote[MONITORS_AT_MOST + 1]; /* the part of the traffic with other L3s' memories */
	uint64_t neighbor_until; /* what the neighbor has brought in so far, as a time */
	uint32_t neighbor_next;
};

/* Memory's turn: slots of SLOT_CYCLES, each taken for as many cycles as lines were moved in it. */
enum { SLOTS = 1 << 14, SLOT_CYCLES = 256, SLOTS_AHEAD = 2000 };
struct bandwidth {
	uint64_t slot[SLOTS];
	uint32_t used[SLOTS];
};

/* Slots for the times at which lines last moved between CPUs, by the low bits of the line. */
enum { MOVE_TIMES = 1 << 16 };

struct model {
	struct config config;
	unsigned l3s, l1_ways, l3_ways, l3_sets_log2, l3_slices;
	uint32_t lines;
	struct cpu *cpu;
	struct l3 l3[L3S_AT_MOST];
	struct line *line;
	struct bandwidth bandwidth[L3S_AT_MOST];
	struct cpu neighbor; /* lines of its own lie beyond the guest's memory */
	uint32_t neighbor_lines;
	uint64_t last_move[MOVE_TIMES], settled_cycles; /* a line that has not moved for longer is ordered as any other */
	uint64_t task_count[TASKS_AT_MOST][COUNTS];
	uint32_t hurt[TASKS_AT_MOST][TASKS_AT_MOST];
};

static inline entry key_of(uint32_t line)
{
	return (line + 1) << 2;
}

static inline entry *l1_set(struct cpu *c, uint32_t line)
{
	return c->l1 + (size_t)(line & (L1_SETS - 1)) * WAYS_AT_MOST;
}

static inline entry *l2_set(struct cpu *c, uint32_t line)
{
	return c->l2 + (size_t)(line & (c->l2_sets - 1)) * c->l2_ways;
}

static inline int find(const entry *set, unsigned ways, uint32_t line)
{
	entry key = key_of(line);
	for (unsigned i = 0; i < ways; i++)
		if ((set[i] & ~(entry)FLAGS) == key)
			return (int)i;
	return -1;
}

/* Whether a CPU's L1 or L2 has the line. */
static inline bool holds(const struct model *m, struct cpu *c, uint32_t line)
{
	return find(l1_set(c, line), m->l1_ways, line) >= 0 || find(l2_set(c, line), c->l2_ways, line) >= 0;
}

/* Whether the L3 has it; if not it is put in, into a way of the class's mask. */
bool l3_touch(struct model *, struct cpu *by, unsigned l3, uint32_t line, uint64_t now);
/* Fetches the L3's records of the line into the host's cache, while the private caches are searched. */
void l3_prepare(const struct model *, unsigned l3, uint32_t line);
void l3_remove(struct model *, unsigned l3, uint32_t line);
/* A store takes the line out of all L3s but one. */
void lose_elsewhere(struct model *, unsigned l3, uint32_t line);
/* The memory, by the number of its L3, that an L3 gets a line from. */
unsigned memory_of(const struct model *, unsigned l3, uint32_t line);
/* Takes that memory's time for one line; cycles until its turn. */
uint64_t wait_for_memory(struct model *, unsigned memory, uint64_t now);
/* Brings in what the neighbor outside the guest has used since it was asked last. */
void neighbor_goes_on(struct model *, unsigned l3, uint64_t now);
#endif
