/* SPDX-License-Identifier: GPL-2.0-or-later
 * Modeled sampling of accesses (Intel SDM, volume 3, chapter 21: PEBS, load latency): counters that count access by
 * access, records in the guest's own memory, and an interrupt at the guest's threshold. The guest configures it by
 * model-specific registers, as on a processor. */
#ifndef SAMPLES_H
#define SAMPLES_H
#include <stdbool.h>
#include <stdint.h>

struct registers;

/* One access; `cycles` are those beyond an L1 hit. */
struct access {
	uint64_t ip, address;
	uint32_t cycles;
	uint8_t source; /* enum data_source */
	bool store;
};

enum { KEPT_MSRS = 3 };

struct sampling {
	uint64_t pebs_enable, debug_store, latency_threshold, kept[KEPT_MSRS];
	uint64_t global_status;
	uint64_t untagged_loads, tag_state; /* loads until the next tagged one, and the generator of these intervals */
	uint64_t records, lost_records, interrupts;
	uint64_t raised_at, handled, handling_cycles; /* from an interrupt until the kernel reads the status */
	bool by_access;	   /* a counter counts access by access */
	bool may_overflow; /* another counter is close to its end and interrupts */
};

/* Whether a counter with this selection counts access by access. */
bool samples_by_access(const struct registers *, unsigned counter, uint64_t select);
/* Counts one access if `by_access`; cycles that the processor spends on records. */
uint32_t samples_access(struct registers *, const struct access *);
/* Sets a bit of the global status, and interrupts the guest unless it has not handled the last interrupt yet. */
void samples_overflow(struct registers *, unsigned bit, bool interrupt);
/* The kernel reads the global status. */
uint64_t samples_status(struct registers *);
/* Model-specific registers of sampling; false = not one of them. */
bool samples_write(struct registers *, uint32_t msr, uint64_t value);
bool samples_read(const struct registers *, uint32_t msr, uint64_t *value);
#endif
