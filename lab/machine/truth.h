/* SPDX-License-Identifier: GPL-2.0-or-later
 * What really happened, for scripts on the host: who ran, and what the model counted of him.
 *
 * FILE has one line for each task and entry, tab-separated, under a line of names; counts are totals since the start, and a
 * task whose counts did not change since the entry before has no line. FILE.hurt, written at the end, has one line for
 * each pair: misses of one task for lines that the other had displaced. A task is a thread id with a name: a program
 * that another replaces (exec) is another task. Tasks that have not run for longest give up their slot of the model to
 * new ones and keep their totals; in FILE.hurt, and as owners of lines, they are "(others)" from then on. */
#ifndef TRUTH_H
#define TRUTH_H
#include <stdbool.h>
#include <stdint.h>

#include "cache.h"
#include "config.h"

struct truth_task {
	int32_t tid, pid;
	char name[16];
};

/* A CPU's totals at one moment. User code lies in the lower half of the addresses. */
struct truth_cpu {
	uint64_t cycles, instructions, user_instructions;
};

/* NULL, or why the file cannot be written. */
const char *truth_start(const struct config *, struct model *);
/* The task that runs on a CPU from now on. */
void truth_runs(unsigned cpu, const struct truth_task *, struct truth_cpu now);
/* Called often; writes an entry when it is time, with the totals of all CPUs as they are now. */
bool truth_is_due(uint64_t now_cycles);
void truth_entry(uint64_t now_cycles, const struct truth_cpu *cpus);
/* A line that only marks a moment. */
void truth_mark(uint64_t now_cycles, unsigned number);
void truth_end(void);
#endif
