/* SPDX-License-Identifier: GPL-2.0-or-later
 * What the processor says of itself and what its model-specific registers hold, where the cache model knows it:
 * performance counters (Intel SDM, volume 3, chapter 21: architectural monitoring, version 2), cache allocation, occupancy
 * and traffic (chapter 19: RDT). One instance for each CPU. */
#ifndef REGISTERS_H
#define REGISTERS_H
#include <stdbool.h>
#include <stdint.h>

#include "cache.h"
#include "config.h"

enum { GENERAL_COUNTERS = 4, FIXED_COUNTERS = 3, ALL_COUNTERS = GENERAL_COUNTERS + FIXED_COUNTERS };

struct perf_counter {
	uint64_t value, counted_from, select;
	bool on;
	int event;
};

struct registers {
	const struct config *config;
	struct model *model;
	unsigned cpu;
	/* Instructions and cycles so far: what the cache model does not know. */
	uint64_t (*instructions)(unsigned cpu);
	uint64_t (*cycles)(unsigned cpu);
	struct perf_counter counter[ALL_COUNTERS];
	uint64_t global_control, fixed_control;
	uint64_t event_select; /* IA32_QM_EVTSEL */
	unsigned class_of_service, monitor;
};

/* False: not a register of ours, or not one that this machine has. */
bool registers_read(struct registers *, uint32_t msr, uint64_t *value);
bool registers_write(struct registers *, uint32_t msr, uint64_t value);
uint64_t registers_counter(struct registers *, uint32_t index); /* RDPMC */
/* EAX, EBX, ECX, EDX as the emulator answers; true = changed to what the model has. */
bool registers_cpuid(const struct registers *, uint32_t leaf, uint32_t subleaf, uint32_t answer[4]);
#endif
