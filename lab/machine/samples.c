/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "samples.h"

#include "cache.h"
#include "registers.h"

enum {
	IA32_MISC_ENABLE = 0x1a0,
	OFFCORE_RSP_0 = 0x1a6,
	OFFCORE_RSP_1 = 0x1a7,
	IA32_PERF_CAPABILITIES = 0x345,
	IA32_PERF_GLOBAL_OVF_CTRL = 0x390,
	IA32_PEBS_ENABLE = 0x3f1,
	PEBS_LD_LAT = 0x3f6,
	PEBS_FRONTEND = 0x3f7,
	IA32_DS_AREA = 0x600,
};
/* Bits of an event's selection, and of the global status. */
enum { COUNTS_USER = 1 << 16, COUNTS_KERNEL = 1 << 17, SELECT_INTERRUPT = 20, STATUS_BUFFER = 62 };

/* Event and unit mask, as on Skylake servers. */
enum {
	LOAD_LATENCY = 0x01cd,
	ALL_LOADS = 0x81d0,
	ALL_STORES = 0x82d0,
	L1_HIT = 0x01d1,
	L2_HIT = 0x02d1,
	L3_HIT = 0x04d1,
	L1_MISS = 0x08d1,
	L2_MISS = 0x10d1,
	L3_MISS = 0x20d1,
	SAME_L3_MODIFIED = 0x04d2,
	OTHER_L3_MODIFIED = 0x04d3,
};

static uint32_t event_number(uint64_t select)
{
	return (uint32_t)select & 0xffff;
}

bool samples_by_access(const struct registers *r, unsigned counter, uint64_t select)
{
	switch (event_number(select)) {
	case LOAD_LATENCY:
	case ALL_LOADS:
	case ALL_STORES:
	case L1_HIT:
	case L2_HIT:
	case L3_HIT:
	case L1_MISS:
	case L2_MISS:
	case L3_MISS:
		return true;
	case SAME_L3_MODIFIED: /* counted from the model's totals unless sampled */
	case OTHER_L3_MODIFIED:
		return r->sampling.pebs_enable >> counter & 1;
	}
	return false;
}

static uint32_t latency(const struct registers *r, const struct access *a)
{
	return (uint32_t)r->config->l1_hit_cycles + a->cycles;
}

static bool is_user(const struct access *a)
{
	return !(a->ip >> 63);
}

/* A processor measures the latency of some loads only, and only these count as load-latency events. Random intervals keep a
 * period that divides a program's loop from sampling the same load every time. */
static bool is_tagged(struct registers *r)
{
	struct sampling *s = &r->sampling;
	uint64_t mean = r->config->load_tag_interval;
	if (s->untagged_loads) {
		s->untagged_loads--;
		return false;
	}
	if (mean > 1) {
		s->tag_state = s->tag_state ? s->tag_state : 88172645463325252u + r->cpu;
		s->tag_state ^= s->tag_state << 13;
		s->tag_state ^= s->tag_state >> 7;
		s->tag_state ^= s->tag_state << 17;
		s->untagged_loads = s->tag_state % (2 * mean - 1);
	}
	return true;
}

static bool is_event(const struct registers *r, uint64_t select, const struct access *a, bool tagged)
{
	if (!(select & (is_user(a) ? COUNTS_USER : COUNTS_KERNEL)))
		return false;
	if (event_number(select) == ALL_STORES)
		return a->store;
	if (a->store)
		return false;
	switch (event_number(select)) {
	case LOAD_LATENCY:
		return tagged && latency(r, a) > r->sampling.latency_threshold;
	case ALL_LOADS:
		return true;
	case L1_HIT:
		return a->source == FROM_L1;
	case L2_HIT:
		return a->source == FROM_L2;
	case L3_HIT:
		return a->source == FROM_L3 || a->source == FROM_CPU_OF_SAME_L3;
	case L1_MISS:
		return a->source != FROM_L1;
	case L2_MISS:
		return a->source > FROM_L2;
	case L3_MISS:
		return a->source == FROM_MEMORY || a->source == FROM_OTHER_L3;
	case SAME_L3_MODIFIED:
		return a->source == FROM_CPU_OF_SAME_L3;
	case OTHER_L3_MODIFIED:
		return a->source == FROM_OTHER_L3;
	}
	return false;
}

void samples_overflow(struct registers *r, unsigned bit, bool interrupt)
{
	struct sampling *s = &r->sampling;
	bool is_pending = s->global_status;
	s->global_status |= 1ull << bit;
	if (interrupt && !is_pending) {
		s->interrupts++;
		s->raised_at = r->cycles(r->cpu);
		r->interrupt(r->cpu);
	}
}

uint64_t samples_status(struct registers *r)
{
	struct sampling *s = &r->sampling;
	if (s->raised_at) {
		s->handled++;
		s->handling_cycles += r->cycles(r->cpu) - s->raised_at;
		s->raised_at = 0;
	}
	return s->global_status;
}

/* The part of the guest's debug store that belongs to PEBS. */
enum { STORE_PEBS = 32, STORE_INDEX = 40 };
struct pebs_store {
	uint64_t base, index, maximum, threshold, reset[GENERAL_COUNTERS];
};
/* A record of format 3. */
struct pebs_record {
	uint64_t flags, ip, general[16], status, address, source, latency, real_ip, transactions, tsc;
};

/* Encodings of load sources on Skylake servers. */
static const uint8_t source_codes[] = {
	[FROM_L1] = 1, [FROM_L2] = 3, [FROM_L3] = 4, [FROM_CPU_OF_SAME_L3] = 7, [FROM_OTHER_L3] = 13, [FROM_MEMORY] = 10
};

static uint32_t write_record(struct registers *r, unsigned counter, const struct access *a)
{
	struct sampling *s = &r->sampling;
	struct pebs_store store;
	if (!s->debug_store || !r->read(r->cpu, s->debug_store + STORE_PEBS, &store, sizeof store)) {
		s->lost_records++;
		return 0;
	}
	r->counter[counter].value = store.reset[counter] & COUNTER_MASK;
	struct pebs_record record = {
		.flags = 0x202, /* interrupts enabled, and the bit that is always set */
		.ip = a->ip,
		.real_ip = a->ip,
		.status = 1ull << counter,
		.address = a->address,
		.source = a->store ? a->source == FROM_L1 : source_codes[a->source],
		.latency = latency(r, a),
		.tsc = r->cycles(r->cpu),
	};
	bool has_room = store.index >= store.base && store.index < store.maximum && store.maximum - store.index >= sizeof record;
	if (!has_room || !r->write(r->cpu, store.index, &record, sizeof record)) {
		s->lost_records++;
		return 0;
	}
	s->records++;
	store.index += sizeof record;
	r->write(r->cpu, s->debug_store + STORE_INDEX, &store.index, sizeof store.index);
	if (store.index >= store.threshold)
		samples_overflow(r, STATUS_BUFFER, true);
	return (uint32_t)r->config->sample_cycles;
}

uint32_t samples_access(struct registers *r, const struct access *a)
{
	uint32_t cycles = 0;
	bool tagged = !a->store && is_tagged(r);
	for (unsigned i = 0; i < GENERAL_COUNTERS; i++) {
		struct perf_counter *c = &r->counter[i];
		if (!c->on || !c->by_access || !is_event(r, c->select, a, tagged))
			continue;
		c->value = (c->value + 1) & COUNTER_MASK;
		if (c->value)
			continue;
		if (r->sampling.pebs_enable >> i & 1)
			cycles += write_record(r, i, a);
		else
			samples_overflow(r, i, c->select >> SELECT_INTERRUPT & 1);
	}
	return cycles;
}

/* Registers whose values the model stores but does not use; -1 = another one. */
static int kept_index(uint32_t msr)
{
	switch (msr) {
	case OFFCORE_RSP_0:
		return 0;
	case OFFCORE_RSP_1:
		return 1;
	case PEBS_FRONTEND:
		return 2;
	}
	return -1;
}

bool samples_write(struct registers *r, uint32_t msr, uint64_t value)
{
	struct sampling *s = &r->sampling;
	if (msr == IA32_PERF_GLOBAL_OVF_CTRL)
		s->global_status &= ~value;
	else if (msr == IA32_PEBS_ENABLE)
		s->pebs_enable = value;
	else if (msr == IA32_DS_AREA)
		s->debug_store = value;
	else if (msr == PEBS_LD_LAT)
		s->latency_threshold = value;
	else if (kept_index(msr) >= 0)
		s->kept[kept_index(msr)] = value;
	else
		return false;
	return true;
}

bool samples_read(const struct registers *r, uint32_t msr, uint64_t *value)
{
	const struct sampling *s = &r->sampling;
	if (msr == IA32_PERF_CAPABILITIES)
		*value = 1 << 13 | 3 << 8 | 1 << 7 | 1 << 6; /* counters of full width; PEBS of format 3, a trap, with registers */
	else if (msr == IA32_MISC_ENABLE)
		*value = 1 | 1 << 7 | 1 << 11; /* fast strings, counters, no branch trace store; bit 12 clear: PEBS */
	else if (msr == IA32_PERF_GLOBAL_OVF_CTRL)
		*value = 0;
	else if (msr == IA32_PEBS_ENABLE)
		*value = s->pebs_enable;
	else if (msr == IA32_DS_AREA)
		*value = s->debug_store;
	else if (msr == PEBS_LD_LAT)
		*value = s->latency_threshold;
	else if (kept_index(msr) >= 0)
		*value = s->kept[kept_index(msr)];
	else
		return false;
	return true;
}
