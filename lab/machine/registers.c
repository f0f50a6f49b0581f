/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "registers.h"

#include <string.h>

enum {
	IA32_PMC0 = 0xc1,
	IA32_PERFEVTSEL0 = 0x186,
	IA32_FIXED_CTR0 = 0x309,
	IA32_FIXED_CTR_CTRL = 0x38d,
	IA32_PERF_GLOBAL_STATUS = 0x38e,
	IA32_PERF_GLOBAL_CTRL = 0x38f,
	IA32_A_PMC0 = 0x4c1,
	IA32_QM_EVTSEL = 0xc8d,
	IA32_QM_CTR = 0xc8e,
	IA32_PQR_ASSOC = 0xc8f,
	IA32_L3_MASK_0 = 0xc90,
	IA32_MBA_THROTTLE_0 = 0xd50,
};
enum { OCCUPANCY = 1, TRAFFIC_TOTAL = 2, TRAFFIC_LOCAL = 3 };
#define UNAVAILABLE (1ull << 63)
/* Counters that only count begin 2^47 before their end. */
#define NEAR_END (1ull << 36)

enum event { NOTHING, INSTRUCTIONS, CYCLES, REFERENCES, MISSES, SNOOP_HITS, REMOTE_HITS };

/* Event and unit mask. The last two are Skylake's names for a changed line out of another core's cache, and another L3. */
static enum event event_of(uint64_t select)
{
	switch (select & 0xffff) {
	case 0x00c0:
		return INSTRUCTIONS;
	case 0x003c:
	case 0x013c:
		return CYCLES;
	case 0x4f2e:
		return REFERENCES;
	case 0x412e:
		return MISSES;
	case 0x04d2:
		return SNOOP_HITS; /* mem_load_l3_hit_retired.xsnp_hitm */
	case 0x04d3:
		return REMOTE_HITS; /* mem_load_l3_miss_retired.remote_hitm */
	}
	return NOTHING;
}

/* As on Intel's, references and misses include what the L2's prefetcher asked for. */
static uint64_t event_now(const struct registers *r, const struct perf_counter *c)
{
	const struct model *m = r->model;
	switch (c->event) {
	case INSTRUCTIONS:
		return r->instructions(r->cpu, c->levels);
	case CYCLES:
		return r->cycles(r->cpu);
	case REFERENCES:
		return model_count(m, r->cpu, L2_MISSES) + model_count(m, r->cpu, PREFETCHES);
	case MISSES:
		return model_count(m, r->cpu, L3_MISSES) + model_count(m, r->cpu, PREFETCH_MISSES);
	case SNOOP_HITS:
		return model_count(m, r->cpu, TRANSFERS_SAME);
	case REMOTE_HITS:
		return model_count(m, r->cpu, TRANSFERS_OTHER);
	}
	return 0;
}

/* Whether a counter interrupts when it overflows. */
static bool interrupts(const struct registers *r, unsigned i)
{
	return r->config->sampling &&
	       (i < GENERAL_COUNTERS ? r->counter[i].select >> 20 & 1 : r->fixed_control >> (4 * (i - GENERAL_COUNTERS) + 3) & 1);
}

/* Everything counted so far goes into the counters, and they go on as they are controlled now. */
static void fold(struct registers *r)
{
	static const int fixed_events[FIXED_COUNTERS] = { INSTRUCTIONS, CYCLES, CYCLES };
	r->sampling.by_access = r->sampling.may_overflow = false;
	for (unsigned i = 0; i < ALL_COUNTERS; i++) {
		struct perf_counter *c = &r->counter[i];
		if (c->on && !c->by_access) {
			uint64_t sum = c->value + event_now(r, c) - c->counted_from;
			if (sum >> COUNTER_BITS && r->config->sampling)
				samples_overflow(r, i < GENERAL_COUNTERS ? i : 32 + i - GENERAL_COUNTERS, interrupts(r, i));
			c->value = sum & COUNTER_MASK;
		}
		if (i < GENERAL_COUNTERS) {
			c->on = c->select >> 22 & 1 && r->global_control >> i & 1;
			c->by_access = r->config->sampling && samples_by_access(r, i, c->select);
			c->event = c->by_access ? NOTHING : (int)event_of(c->select);
			c->levels = (c->select >> 17 & 1 ? KERNEL_MODE : 0) | (c->select >> 16 & 1 ? USER_MODE : 0);
		} else {
			unsigned fixed = i - GENERAL_COUNTERS;
			c->levels = r->fixed_control >> 4 * fixed & (KERNEL_MODE | USER_MODE);
			c->on = c->levels && r->global_control >> (32 + fixed) & 1;
			c->event = fixed_events[fixed];
		}
		c->counted_from = event_now(r, c);
		r->sampling.by_access |= c->on && c->by_access;
		r->sampling.may_overflow |= c->on && !c->by_access && interrupts(r, i) && COUNTER_MASK - c->value < NEAR_END;
	}
}

void registers_poll(struct registers *r)
{
	fold(r);
}

static bool is_in(uint32_t msr, uint32_t first, uint32_t count)
{
	return msr >= first && msr < first + count;
}

static bool write_counter(struct registers *r, uint32_t msr, uint64_t value)
{
	fold(r);
	if (is_in(msr, IA32_PMC0, GENERAL_COUNTERS))
		r->counter[msr - IA32_PMC0].value = (uint64_t)(int64_t)(int32_t)value & COUNTER_MASK;
	else if (is_in(msr, IA32_A_PMC0, GENERAL_COUNTERS))
		r->counter[msr - IA32_A_PMC0].value = value & COUNTER_MASK;
	else if (is_in(msr, IA32_PERFEVTSEL0, GENERAL_COUNTERS))
		r->counter[msr - IA32_PERFEVTSEL0].select = value;
	else if (is_in(msr, IA32_FIXED_CTR0, FIXED_COUNTERS))
		r->counter[GENERAL_COUNTERS + msr - IA32_FIXED_CTR0].value = value & COUNTER_MASK;
	else if (msr == IA32_FIXED_CTR_CTRL)
		r->fixed_control = value;
	else if (msr == IA32_PERF_GLOBAL_CTRL)
		r->global_control = value;
	else if (!r->config->sampling || !samples_write(r, msr, value))
		return false;
	fold(r);
	return true;
}

static bool read_counter(struct registers *r, uint32_t msr, uint64_t *value)
{
	fold(r);
	if (is_in(msr, IA32_PMC0, GENERAL_COUNTERS))
		*value = r->counter[msr - IA32_PMC0].value;
	else if (r->config->sampling && is_in(msr, IA32_A_PMC0, GENERAL_COUNTERS))
		*value = r->counter[msr - IA32_A_PMC0].value;
	else if (is_in(msr, IA32_PERFEVTSEL0, GENERAL_COUNTERS))
		*value = r->counter[msr - IA32_PERFEVTSEL0].select;
	else if (is_in(msr, IA32_FIXED_CTR0, FIXED_COUNTERS))
		*value = r->counter[GENERAL_COUNTERS + msr - IA32_FIXED_CTR0].value;
	else if (msr == IA32_FIXED_CTR_CTRL)
		*value = r->fixed_control;
	else if (msr == IA32_PERF_GLOBAL_CTRL)
		*value = r->global_control;
	else if (msr == IA32_PERF_GLOBAL_STATUS)
		*value = r->config->sampling ? samples_status(r) : 0; /* without sampling nothing overflows */
	else
		return r->config->sampling && samples_read(r, msr, value);
	return true;
}

uint64_t registers_counter(struct registers *r, uint32_t index)
{
	fold(r);
	unsigned at = index >> 30 & 1 ? GENERAL_COUNTERS + (index & 3) : index & 3;
	return r->counter[at < ALL_COUNTERS ? at : 0].value;
}

/* IA32_QM_CTR: of the monitor and event that were selected, on this CPU's L3, in units of a line. */
static uint64_t monitored(const struct registers *r)
{
	unsigned l3 = model_l3_of(r->model, r->cpu), monitor = r->event_select >> 32 & 255;
	if (monitor >= r->config->monitors)
		return UNAVAILABLE;
	switch (r->event_select & 255) {
	case OCCUPANCY:
		return model_monitor_lines(r->model, l3, monitor);
	case TRAFFIC_TOTAL:
		return model_monitor_traffic(r->model, l3, monitor);
	case TRAFFIC_LOCAL:
		return model_monitor_traffic(r->model, l3, monitor) - model_monitor_remote(r->model, l3, monitor);
	}
	return UNAVAILABLE;
}

static bool is_throttle(const struct registers *r, uint32_t msr)
{
	return r->config->throttling && is_in(msr, IA32_MBA_THROTTLE_0, (uint32_t)r->config->classes);
}

bool registers_write(struct registers *r, uint32_t msr, uint64_t value)
{
	if (r->config->counters && write_counter(r, msr, value))
		return true;
	if (!r->config->classes)
		return false;
	if (msr == IA32_PQR_ASSOC) {
		r->class_of_service = value >> 32 & 15;
		r->monitor = value & 255;
		model_set_class(r->model, r->cpu, r->class_of_service, r->monitor);
	} else if (is_in(msr, IA32_L3_MASK_0, (uint32_t)r->config->classes)) {
		model_set_mask(r->model, model_l3_of(r->model, r->cpu), msr - IA32_L3_MASK_0, (uint32_t)value);
	} else if (is_throttle(r, msr)) {
		model_set_throttle(r->model, model_l3_of(r->model, r->cpu), msr - IA32_MBA_THROTTLE_0, (unsigned)(value & 0xffff));
	} else if (msr == IA32_QM_EVTSEL) {
		r->event_select = value;
	} else {
		return false;
	}
	return true;
}

bool registers_read(struct registers *r, uint32_t msr, uint64_t *value)
{
	if (r->config->counters && read_counter(r, msr, value))
		return true;
	if (!r->config->classes)
		return false;
	if (msr == IA32_PQR_ASSOC)
		*value = (uint64_t)r->class_of_service << 32 | r->monitor;
	else if (is_in(msr, IA32_L3_MASK_0, (uint32_t)r->config->classes))
		*value = model_mask(r->model, model_l3_of(r->model, r->cpu), msr - IA32_L3_MASK_0);
	else if (is_throttle(r, msr))
		*value = model_throttle(r->model, model_l3_of(r->model, r->cpu), msr - IA32_MBA_THROTTLE_0);
	else if (msr == IA32_QM_EVTSEL)
		*value = r->event_select;
	else if (msr == IA32_QM_CTR)
		*value = monitored(r);
	else
		return false;
	return true;
}

/* ---- CPUID ---- */

enum { A, B, C, D };

static void set(uint32_t answer[4], uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
	answer[A] = a;
	answer[B] = b;
	answer[C] = c;
	answer[D] = d;
}

/* Leaf 4: sizes only; who shares what stays as the emulator says it. */
static bool cache_leaf(const struct registers *r, uint32_t subleaf, uint32_t answer[4])
{
	const struct config *c = r->config;
	struct core_type core = config_core(c, r->cpu);
	/* L1 of data, L1 of instructions (not modeled), L2, L3 */
	uint64_t bytes[4] = { c->l1_bytes, 0, core.l2_bytes, c->l3_bytes }, ways[4] = { c->l1_ways, 0, core.l2_ways, c->l3_ways };
	if (subleaf > 3 || !bytes[subleaf])
		return false;
	answer[B] = (uint32_t)(ways[subleaf] - 1) << 22 | (LINE_BYTES - 1);
	answer[C] = (uint32_t)(bytes[subleaf] / ways[subleaf] / LINE_BYTES) - 1;
	answer[D] = 0;
	return true;
}

static bool rdt_leaf(const struct config *c, uint32_t leaf, uint32_t subleaf, uint32_t answer[4])
{
	uint32_t monitors = (uint32_t)c->monitors - 1;
	if (!c->classes || !c->monitors)
		return false;
	if (leaf == 0x10 && subleaf == 3 && c->throttling) { /* linear */
		set(answer, MAX_THROTTLE - 1, 0, 4, (uint32_t)c->classes - 1);
		return true;
	}
	if (subleaf > 1)
		return false;
	if (leaf == 0xf && subleaf == 0)
		set(answer, 0, monitors, 0, 2);
	else if (leaf == 0xf) /* counters of 24 + 0 bits; occupancy, traffic total and local */
		set(answer, 0, LINE_BYTES, monitors, 7);
	else if (subleaf == 0)
		set(answer, 0, c->throttling ? 2 | 8 : 2, 0, 0);
	else /* any mask, not only contiguous ones */
		set(answer, (uint32_t)c->l3_ways - 1, 0, 8, (uint32_t)c->classes - 1);
	return true;
}

/* The processor's name, so that no output that has it takes a figure for a measured one. */
static void brand(const struct config *c, uint32_t part, uint32_t answer[4])
{
	char name[48] = "cachemate lab: modeled caches";
	if (c->counters)
		strcat(name, c->sampling ? ", counters, PEBS" : ", counters");
	memcpy(answer, name + 16 * part, 16);
}

bool registers_cpuid(const struct registers *r, uint32_t leaf, uint32_t subleaf, uint32_t answer[4])
{
	const struct config *c = r->config;
	uint32_t megahertz = (uint32_t)(c->hertz / 1000000);
	switch (leaf) {
	case 1:
		if (!c->counters || !c->sampling)
			return false;
		answer[C] |= 1u << 2 | 1u << 15; /* debug store of 64 bits, and IA32_PERF_CAPABILITIES */
		answer[D] |= 1u << 21;
		return true;
	case 0:
		if (answer[A] >= 0x16)
			return false;
		answer[A] = 0x16;
		return true;
	case 4:
		return cache_leaf(r, subleaf, answer);
	case 7:
		if (subleaf || !c->classes)
			return false;
		answer[B] |= 1u << 12 | 1u << 15; /* monitoring and allocation */
		return true;
	case 0xa:
		if (!c->counters)
			return false;
		set(answer, 2 | GENERAL_COUNTERS << 8 | COUNTER_BITS << 16 | 7 << 24, 0x60, 0, FIXED_COUNTERS | COUNTER_BITS << 5);
		return true;
	case 0xf:
	case 0x10:
		return rdt_leaf(c, leaf, subleaf, answer);
	case 0x15: /* the local APIC's bus runs at 1 GHz in QEMU, and the kernel takes its frequency from here */
		set(answer, 1000, megahertz, 1000000000, 0);
		return true;
	case 0x16:
		set(answer, megahertz, megahertz, 100, 0);
		return true;
	case 0x80000002:
	case 0x80000003:
	case 0x80000004:
		brand(c, leaf - 0x80000002, answer);
		return true;
	case 0x80000007:
		answer[D] |= 0x100; /* the TSC does not change its pace */
		return true;
	}
	return false;
}
