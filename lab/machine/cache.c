/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "model.h"

#include <stdlib.h>
#include <string.h>

static unsigned log2_of(uint64_t power)
{
	return (unsigned)__builtin_ctzll(power);
}

struct model *model_new(const struct config *config)
{
	struct model *m = calloc(1, sizeof *m);
	if (!m)
		return NULL;
	m->config = *config;
	m->l3s = (unsigned)(config->cpus / config->cpus_per_l3);
	m->l1_ways = (unsigned)config->l1_ways;
	m->l3_ways = (unsigned)config->l3_ways;
	m->l3_slices = (unsigned)config->l3_slices;
	m->l3_sets_log2 = log2_of(config->l3_bytes / config->l3_ways / LINE_BYTES / config->l3_slices);
	m->lines = (uint32_t)(config->memory_bytes >> LINE_SHIFT);
	m->settled_cycles = clock_cycles(config, config->settled_ns);
	m->neighbor_lines = config->neighbor_lines_per_us ? (uint32_t)(2 * config->l3_bytes / LINE_BYTES) : 0;
	m->neighbor = (struct cpu){ .class_of_service = CLASSES_AT_MOST, .monitor = MONITORS_AT_MOST, .task = NEIGHBOR_TASK };
	m->line = calloc((size_t)m->lines + m->neighbor_lines, sizeof *m->line);
	m->cpu = calloc(config->cpus, sizeof *m->cpu);
	size_t sets = (size_t)m->l3_slices << m->l3_sets_log2, ways = sets * m->l3_ways;
	bool complete = m->line && m->cpu;
	for (unsigned i = 0; i < m->l3s; i++) {
		struct l3 *l3 = &m->l3[i];
		l3->tag = aligned_alloc(64, (ways * sizeof *l3->tag + 63) / 64 * 64);
		l3->stamp = calloc(ways, sizeof *l3->stamp);
		l3->clock = calloc(sets, sizeof *l3->clock);
		l3->task = calloc(ways, sizeof *l3->task);
		l3->monitor = calloc(ways, sizeof *l3->monitor);
		complete = complete && l3->tag && l3->stamp && l3->clock && l3->task && l3->monitor;
		if (l3->tag)
			memset(l3->tag, 0, ways * sizeof *l3->tag);
		for (unsigned k = 0; k <= CLASSES_AT_MOST; k++)
			l3->mask[k] = (uint32_t)((1ull << m->l3_ways) - 1);
	}
	for (unsigned i = 0; complete && i < config->cpus; i++) {
		struct cpu *c = &m->cpu[i];
		struct core_type type = config_core(config, i);
		c->l3 = i / (unsigned)config->cpus_per_l3;
		c->l2_ways = type.l2_bytes ? (unsigned)type.l2_ways : 0;
		c->l2_sets = c->l2_ways ? (unsigned)(type.l2_bytes / type.l2_ways / LINE_BYTES) : 1;
		c->l2_cycles = (unsigned)type.l2_cycles;
		c->l2 = calloc((size_t)c->l2_sets * c->l2_ways + 1, sizeof(entry));
		complete = c->l2;
	}
	if (!complete) {
		model_free(m);
		return NULL;
	}
	return m;
}

void model_free(struct model *m)
{
	for (unsigned i = 0; m->cpu && i < m->config.cpus; i++)
		free(m->cpu[i].l2);
	for (unsigned i = 0; i < m->l3s; i++) {
		free(m->l3[i].tag);
		free(m->l3[i].stamp);
		free(m->l3[i].clock);
		free(m->l3[i].task);
		free(m->l3[i].monitor);
	}
	free(m->line);
	free(m->cpu);
	free(m);
}

/* ---- private caches ---- */

/* Makes it the most recently used; what lay there before, or the least recently used, goes. */
static inline void put(entry *set, unsigned ways, entry new)
{
	if (!ways)
		return;
	unsigned at = ways - 1;
	for (unsigned i = 0; i < ways; i++)
		if (!set[i] || (set[i] | FLAGS) == (new | FLAGS)) {
			at = i;
			break;
		}
	for (; at > 0; at--)
		set[at] = set[at - 1];
	set[0] = new;
}

static void remove_at(entry *set, unsigned ways, int at)
{
	for (unsigned i = (unsigned)at; i + 1 < ways; i++)
		set[i] = set[i + 1];
	set[ways - 1] = 0;
}

static void drop(struct model *m, struct cpu *c, uint32_t line)
{
	entry *l1 = l1_set(c, line), *l2 = l2_set(c, line);
	int at = find(l1, m->l1_ways, line);
	if (at >= 0)
		remove_at(l1, m->l1_ways, at);
	at = find(l2, c->l2_ways, line);
	if (at >= 0)
		remove_at(l2, c->l2_ways, at);
	c->recent.reads[line % RECENT] = c->recent.writes[line % RECENT] = 0;
}

static void no_longer_alone(struct model *m, struct cpu *c, uint32_t line)
{
	entry *l1 = l1_set(c, line), *l2 = l2_set(c, line);
	int at = find(l1, m->l1_ways, line);
	if (at >= 0)
		l1[at] &= ~(entry)EXCLUSIVE;
	at = find(l2, c->l2_ways, line);
	if (at >= 0)
		l2[at] &= ~(entry)EXCLUSIVE;
	c->recent.reads[line % RECENT] = c->recent.writes[line % RECENT] = 0;
}

/* ---- misses ---- */

static void count_cause(struct model *m, struct cpu *c, const struct line *known)
{
	if (known->lost >> c->l3 & 1) {
		c->count[COHERENT]++;
	} else if (known->displaced_from != c->l3 + 1) {
		c->count[COLD]++;
	} else if (known->displaced_by == c->task) {
		c->count[OWN]++;
	} else {
		c->count[OTHERS]++;
		m->hurt[c->task][known->displaced_by]++;
	}
}

/* Memory's traffic for one line: cycles until it is there. */
static uint64_t fetch(struct model *m, struct cpu *c, uint32_t line, uint64_t now)
{
	c->count[READ_LINES]++;
	m->l3[c->l3].monitor_traffic[c->monitor]++;
	m->line[line].lost &= (uint8_t)~(1u << c->l3);
	unsigned memory = memory_of(m, c->l3, line), throttle = m->l3[c->l3].throttle[c->class_of_service];
	uint64_t latency = memory == c->l3 ? m->config.memory_cycles : m->config.remote_memory_cycles;
	m->l3[c->l3].monitor_remote[c->monitor] += memory != c->l3;
	/* A throttled class sends requests at the remaining share of the rate that one miss after the other has. */
	uint64_t waited = wait_for_memory(m, memory, now) + latency * throttle / (100 - throttle);
	c->count[BANDWIDTH_CYCLES] += waited;
	return waited + latency;
}

static uint32_t from_memory(struct model *m, struct cpu *c, uint32_t line, uint64_t now)
{
	c->count[L3_MISSES]++;
	count_cause(m, c, &m->line[line]);
	return (uint32_t)fetch(m, c, line, now);
}

/* Changed lines that go to another L3 are written to memory on the way; within an L3 they stay changed. */
static uint32_t transfer_cycles(struct model *m, struct cpu *c, struct line *known, bool same)
{
	c->count[same ? TRANSFERS_SAME : TRANSFERS_OTHER]++;
	if (!same && known->dirty) {
		c->count[WRITTEN_LINES]++;
		known->dirty = 0;
	}
	known->owner = 0;
	return (uint32_t)(same ? m->config.same_l3_cycles : m->config.other_l3_cycles);
}

/* CPUs' clocks differ, so a move may lie in this CPU's future. */
static bool is_settled(const struct model *m, uint32_t line, uint64_t now)
{
	return (int64_t)(now - m->last_move[line % MOVE_TIMES]) > (int64_t)m->settled_cycles;
}

static void moved(struct model *m, uint32_t line, uint64_t now, struct outcome *o)
{
	struct line *known = &m->line[line];
	o->coherent = true;
	if (is_settled(m, line, now))
		known->moves = 0;
	m->last_move[line % MOVE_TIMES] = now;
	if (known->moves < 3)
		known->moves++;
}

/* Neither the L1 nor the L2 has it. */
static void beyond_l2(struct model *m, unsigned cpu, uint32_t line, bool store, uint64_t now, struct outcome *o)
{
	struct cpu *c = &m->cpu[cpu];
	struct line *known = &m->line[line];
	struct cpu *owner = known->owner && known->owner != cpu + 1 ? &m->cpu[known->owner - 1] : NULL;
	c->count[L2_MISSES]++;
	if (m->neighbor_lines)
		neighbor_goes_on(m, c->l3, now);
	if (owner && holds(m, owner, line)) {
		o->cycles += transfer_cycles(m, c, known, owner->l3 == c->l3);
		o->source = owner->l3 == c->l3 ? FROM_CPU_OF_SAME_L3 : FROM_OTHER_L3;
		if (store)
			drop(m, owner, line);
		else
			no_longer_alone(m, owner, line);
		l3_touch(m, c, c->l3, line, now);
		if (!store)
			l3_touch(m, owner, owner->l3, line, now);
		moved(m, line, now, o);
		return;
	}
	if (known->dirty && known->l3s && !(known->l3s >> c->l3 & 1)) {
		/* Its owner has let it go into its own L3, changed. */
		o->cycles += transfer_cycles(m, c, known, false);
		o->source = FROM_OTHER_L3;
		l3_touch(m, c, c->l3, line, now);
		moved(m, line, now, o);
	} else if (l3_touch(m, c, c->l3, line, now)) {
		o->cycles += (uint32_t)m->config.l3_cycles;
		o->source = FROM_L3;
	} else {
		o->source = FROM_MEMORY;
		o->cycles += from_memory(m, c, line, now);
	}
}

/* Takes the line from everybody else; it costs what the farthest of them costs. */
static void take_alone(struct model *m, unsigned cpu, uint32_t line, uint64_t now, struct outcome *o)
{
	struct cpu *c = &m->cpu[cpu];
	struct line *known = &m->line[line];
	unsigned others = known->holders & ~(1u << cpu);
	uint32_t farthest = 0;
	for (unsigned i = 0; others; i++, others >>= 1) {
		if (!(others & 1) || !holds(m, &m->cpu[i], line))
			continue;
		uint64_t cost = m->cpu[i].l3 == c->l3 ? m->config.same_l3_cycles : m->config.other_l3_cycles;
		farthest = cost > farthest ? (uint32_t)cost : farthest;
		drop(m, &m->cpu[i], line);
	}
	if (farthest) {
		c->count[INVALIDATIONS]++;
		moved(m, line, now, o);
	}
	o->cycles = farthest > o->cycles ? farthest : o->cycles;
	if (known->l3s & ~(1u << c->l3))
		lose_elsewhere(m, c->l3, line);
	known->holders = (uint16_t)(1u << cpu);
	known->owner = (uint8_t)(cpu + 1);
	known->dirty = 1;
}

/* A load: alone with it if nobody else has it. */
static entry join(struct model *m, unsigned cpu, uint32_t line)
{
	struct line *known = &m->line[line];
	known->holders |= (uint16_t)(1u << cpu);
	if (known->holders == 1u << cpu) {
		if (known->owner != cpu + 1) {
			known->owner = (uint8_t)(cpu + 1);
			known->dirty = 0;
		}
		return EXCLUSIVE;
	}
	if (known->owner && known->owner != cpu + 1) {
		no_longer_alone(m, &m->cpu[known->owner - 1], line);
		known->owner = 0;
	}
	return 0;
}

/* ---- the streamer ---- */

/* Into the L2, as a load of this CPU would bring it; lines that others have changed are left where they are. */
static void ask_ahead(struct model *m, unsigned cpu, uint32_t line, uint64_t now)
{
	struct cpu *c = &m->cpu[cpu];
	struct line *known = &m->line[line];
	entry *l2 = l2_set(c, line);
	if (find(l2, c->l2_ways, line) >= 0 || (known->dirty && known->owner != cpu + 1))
		return;
	c->count[PREFETCHES]++;
	uint64_t cycles = m->config.l3_cycles;
	if (!l3_touch(m, c, c->l3, line, now)) {
		c->count[PREFETCH_MISSES]++;
		cycles = fetch(m, c, line, now);
	}
	put(l2, c->l2_ways, key_of(line) | join(m, cpu, line));
	c->in_flight[line % IN_FLIGHT] = (struct in_flight){ line, now + cycles };
}

/* Told of every miss of the L1. A stream is sure after its second step, and stays within a page. */
static void follow_streams(struct model *m, unsigned cpu, uint32_t line, uint64_t now)
{
	struct cpu *c = &m->cpu[cpu];
	unsigned streams = (unsigned)m->config.prefetch_streams;
	for (unsigned i = 0; i < streams; i++) {
		struct stream *s = &c->streams[i];
		if (s->last + 1 != line)
			continue;
		s->last = line;
		if (s->sure) {
			uint32_t to = line + (uint32_t)m->config.prefetch_degree, end = line | ((1u << LINES_OF_A_PAGE_LOG2) - 1);
			to = to < end ? to : end;
			to = to < m->lines ? to : m->lines - 1;
			uint32_t from = s->ahead > line ? s->ahead + 1 : line + 1;
			for (uint32_t next = from; next <= to; next++)
				ask_ahead(m, cpu, next, now);
			s->ahead = to > s->ahead ? to : s->ahead;
		}
		s->sure = true;
		return;
	}
	if (streams)
		c->streams[c->next_stream++ % streams] = (struct stream){ line, line, false };
}

/* What is left to wait for a line that was asked for in advance. */
static uint32_t arrival(struct cpu *c, uint32_t line, uint64_t now)
{
	struct in_flight *flight = &c->in_flight[line % IN_FLIGHT];
	if (flight->line != line || flight->ready <= now)
		return 0;
	uint32_t left = (uint32_t)(flight->ready - now);
	flight->ready = 0;
	return left;
}

/* ---- accesses ---- */

/* What the L1 does not settle: a miss, or a store to a line that others may hold too. */
static struct outcome slow(struct model *m, unsigned cpu, uint32_t line, bool store, bool in_l1, uint64_t now)
{
	struct cpu *c = &m->cpu[cpu];
	struct outcome o = { 0 };
	entry *l2 = l2_set(c, line);
	__builtin_prefetch(&m->line[line], 1);
	l3_prepare(m, c->l3, line);
	int at = find(l2, c->l2_ways, line);
	entry flags = at >= 0 ? l2[at] & FLAGS : 0;
	if (!in_l1) {
		c->count[L1_MISSES]++;
		if (at >= 0)
			o = (struct outcome){ .cycles = (uint32_t)c->l2_cycles + arrival(c, line, now), .source = FROM_L2 };
		else
			beyond_l2(m, cpu, line, store, now, &o);
		follow_streams(m, cpu, line, now);
		if (c->l2_ways) /* the streamer may have moved it */
			at = find(l2, c->l2_ways, line);
	}
	if (store && !(flags & EXCLUSIVE)) {
		take_alone(m, cpu, line, now, &o);
		flags = EXCLUSIVE;
	} else if (store) {
		m->line[line].dirty = 1;
	} else if (at < 0) {
		flags = join(m, cpu, line);
	}
	flags &= ~(entry)MOVING;
	if (m->line[line].moves > 1)
		flags |= MOVING;
	if (!in_l1)
		put(l2, c->l2_ways, key_of(line) | flags);
	else if (at >= 0)
		l2[at] = key_of(line) | flags;
	put(l1_set(c, line), m->l1_ways, key_of(line) | flags);
	o.moving = flags & MOVING;
	c->count[STALL_CYCLES] += o.cycles;
	return o;
}

struct outcome model_access(struct model *m, unsigned cpu, uint32_t line, bool store, uint64_t now)
{
	struct cpu *c = &m->cpu[cpu];
	entry *set = l1_set(c, line);
	c->count[ACCESSES]++;
	int at = find(set, m->l1_ways, line);
	if (at < 0)
		return slow(m, cpu, line, store, false, now);
	entry found = set[at];
	if (found & MOVING && is_settled(m, line, now)) {
		m->line[line].moves = 0;
		found &= ~(entry)MOVING;
	}
	for (; at > 0; at--)
		set[at] = set[at - 1];
	set[0] = found;
	if (store && !(found & EXCLUSIVE))
		return slow(m, cpu, line, true, true, now);
	if (store)
		m->line[line].dirty = 1;
	return (struct outcome){ .moving = found & MOVING };
}

void model_prefetch(struct model *m, unsigned cpu, uint32_t line, uint64_t now)
{
	struct cpu *c = &m->cpu[cpu];
	if (find(l1_set(c, line), m->l1_ways, line) >= 0)
		return;
	uint64_t stalled = c->count[STALL_CYCLES];
	slow(m, cpu, line, false, false, now);
	c->count[STALL_CYCLES] = stalled;
}

void model_flush(struct model *m, uint32_t line)
{
	for (unsigned i = 0; i < m->config.cpus; i++)
		drop(m, &m->cpu[i], line);
	for (unsigned i = 0; i < m->l3s; i++)
		l3_remove(m, i, line);
	memset(&m->line[line], 0, sizeof m->line[line]);
}

uint32_t model_lines(const struct model *m)
{
	return m->lines;
}

/* ---- recent lines ---- */

struct recent *model_recent(struct model *m, unsigned cpu)
{
	return &m->cpu[cpu].recent;
}

void model_touched(struct model *m, unsigned cpu, uint64_t line, bool store, bool moving)
{
	struct recent *r = &m->cpu[cpu].recent;
	r->reads[line % RECENT] = moving ? 0 : line + 1;
	r->writes[line % RECENT] = store && !moving ? line + 1 : 0;
}

void model_forget(struct model *m, unsigned cpu)
{
	struct recent *r = &m->cpu[cpu].recent;
	memset(r->reads, 0, sizeof r->reads);
	memset(r->writes, 0, sizeof r->writes);
}
