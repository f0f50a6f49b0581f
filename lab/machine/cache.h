/* SPDX-License-Identifier: GPL-2.0-or-later
 * The caches: an L1 and an L2 for each CPU, L3s shared by some of them with way masks, one memory with a bandwidth.
 *
 * Physical lines; least recently used; nothing is inclusive of anything. Lines are kept coherent by a directory: a store
 * takes the line from everybody else, and a line that another CPU has modified comes out of that CPU's cache. Knows
 * nothing of QEMU, of clocks or of the host: who calls says what time it is, and is told what the access costs. */
#ifndef CACHE_H
#define CACHE_H
#include <stdbool.h>
#include <stdint.h>

#include "config.h"

/* The last task is the neighbor outside the guest (config.h); the one before it has the lines of released tasks. */
enum { TASKS_AT_MOST = 1024, NEIGHBOR_TASK = TASKS_AT_MOST - 1, EVICTED_TASKS = NEIGHBOR_TASK - 1 };
enum { L1_SETS = 64 };

/* Counted for each CPU; names in count_names. A miss of the L3 has exactly one cause. */
enum count {
	ACCESSES,
	L1_MISSES,
	L2_MISSES,
	L3_MISSES,
	COLD,	  /* misses of the L3: the line was not there before, */
	OWN,	  /* this task displaced it itself, */
	OTHERS,	  /* another task did (who: model_hurt), */
	COHERENT, /* a store on another L3 took it away */
	TRANSFERS_SAME,
	TRANSFERS_OTHER, /* lines out of another CPU's cache, on this L3 and on another */
	INVALIDATIONS,	 /* stores that took lines from others */
	READ_LINES,
	WRITTEN_LINES, /* memory traffic */
	PREFETCHES,    /* lines that the streamer asked for beyond the L2, */
	PREFETCH_MISSES, /* and of these, out of memory */
	STALL_CYCLES,
	BANDWIDTH_CYCLES, /* of these, waiting for memory's turn */
	COUNTS
};
extern const char *const count_names[COUNTS];

/* Place from which an access got its line; CPU_OF_SAME_L3 and OTHER_L3 held it modified. */
enum data_source { FROM_L1, FROM_L2, FROM_L3, FROM_CPU_OF_SAME_L3, FROM_OTHER_L3, FROM_MEMORY };

struct outcome {
	uint32_t cycles;
	uint8_t source; /* enum data_source */
	bool coherent; /* the line moved between CPUs */
	bool moving;   /* it has moved more than once lately: order matters to the nanosecond */
};

struct model;
struct model *model_new(const struct config *);
void model_free(struct model *);

/* One access by a CPU at its time. Lines from model_lines on are not covered: the caller must not ask for them. */
struct outcome model_access(struct model *, unsigned cpu, uint32_t line, bool store, uint64_t now_cycles);
/* Out of all caches (CLFLUSH). */
void model_flush(struct model *, uint32_t line);
/* Brings a line in as a load does, and nobody waits (PREFETCH). */
void model_prefetch(struct model *, unsigned cpu, uint32_t line, uint64_t now_cycles);
uint32_t model_lines(const struct model *);

/* The line that a CPU accessed last in each set of its L1, by virtual line: another access to it changes nothing, and needs
 * no look at the model. `model_touched` enters a line after its access, unless it is moving between CPUs; a change of
 * translations calls `model_forget`. */
enum { RECENT = L1_SETS };
struct recent {
	uint64_t reads[RECENT], writes[RECENT]; /* virtual line + 1 */
	uint64_t accesses;			/* answered here, and not yet counted in the model */
};
struct recent *model_recent(struct model *, unsigned cpu);
static inline bool recent_access(struct recent *r, uint64_t virtual_line, bool store)
{
	if ((store ? r->writes : r->reads)[virtual_line % RECENT] != virtual_line + 1)
		return false;
	r->accesses++;
	return true;
}
void model_touched(struct model *, unsigned cpu, uint64_t virtual_line, bool store, bool moving);
void model_forget(struct model *, unsigned cpu);

/* Who runs on a CPU from now on: its class and monitor (RDT), its task (for the truth). */
void model_set_class(struct model *, unsigned cpu, unsigned class_of_service, unsigned monitor);
void model_set_task(struct model *, unsigned cpu, unsigned task);
/* Tasks that run on no CPU give up their numbers: counts are 0 again, and their lines belong to EVICTED_TASKS. */
void model_release_tasks(struct model *, const bool released[TASKS_AT_MOST]);
/* Ways that a class may fill. At least one. */
void model_set_mask(struct model *, unsigned l3, unsigned class_of_service, uint32_t ways);
uint32_t model_mask(const struct model *, unsigned l3, unsigned class_of_service);

/* Percent by which a class's requests to memory are throttled (MBA), at most MAX_THROTTLE. */
enum { MAX_THROTTLE = 90 };
void model_set_throttle(struct model *, unsigned l3, unsigned class_of_service, unsigned percent);
unsigned model_throttle(const struct model *, unsigned l3, unsigned class_of_service);

/* Counters since the start; of a task, what its CPUs counted while it ran. */
uint64_t model_count(const struct model *, unsigned cpu, enum count);
uint64_t model_task_count(struct model *, unsigned task, enum count);
unsigned model_l3_of(const struct model *, unsigned cpu);
unsigned model_l3s(const struct model *);
/* Lines that a monitor, or a task, holds in an L3 now; lines that a monitor moved between an L3 and memory. */
uint64_t model_monitor_lines(const struct model *, unsigned l3, unsigned monitor);
uint64_t model_monitor_traffic(const struct model *, unsigned l3, unsigned monitor);
/* The part of it with other L3s' memories. */
uint64_t model_monitor_remote(const struct model *, unsigned l3, unsigned monitor);
uint64_t model_task_lines(const struct model *, unsigned l3, unsigned task);
/* Misses of `victim` for lines that `by` displaced. */
uint32_t model_hurt(const struct model *, unsigned victim, unsigned by);
#endif
