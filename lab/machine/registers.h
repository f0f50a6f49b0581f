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
#include "samples.h"

#define COUNTER_BITS 48
#define COUNTER_MASK ((1ull << COUNTER_BITS) - 1)
enum { GENERAL_COUNTERS = 4, FIXED_COUNTERS = 3, ALL_COUNTERS = GENERAL_COUNTERS + FIXED_COUNTERS };

/* Privilege levels, as the fixed counters' control has them. */
enum { KERNEL_MODE = 1, USER_MODE = 2 };

struct perf_counter {
	uint64_t value, counted_from, select;
	bool on, by_access; /* counted access by access (samples.h) instead of from the model's totals */
	int event;
	unsigned levels; /* at which instructions count; other totals are of both levels */
};

struct registers {
	const struct config *config;
	struct model *model;
	unsigned cpu;
	/* Instructions at these levels, and cycles so far: what the cache model does not know. */
	uint64_t (*instructions)(unsigned cpu, unsigned levels);
	uint64_t (*cycles)(unsigned cpu);
	struct perf_counter counter[ALL_COUNTERS];
	uint64_t global_control, fixed_control;
	uint64_t event_select; /* IA32_QM_EVTSEL */
	unsigned class_of_service, monitor;
	struct sampling sampling;
	/* The guest's memory at virtual addresses, and its interrupt for counters. */
	bool (*read)(unsigned cpu, uint64_t address, void *to, size_t size);
	bool (*write)(unsigned cpu, uint64_t address, const void *from, size_t size);
	void (*interrupt)(unsigned cpu);
};

/* False: not a register of ours, or not one that this machine has. */
bool registers_read(struct registers *, uint32_t msr, uint64_t *value);
bool registers_write(struct registers *, uint32_t msr, uint64_t value);
uint64_t registers_counter(struct registers *, uint32_t index); /* RDPMC */
/* Looks for an overflow if `sampling.may_overflow`. */
void registers_poll(struct registers *);
/* EAX, EBX, ECX, EDX as the emulator answers; true = changed to what the model has. */
bool registers_cpuid(const struct registers *, uint32_t leaf, uint32_t subleaf, uint32_t answer[4]);
#endif
