/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "model.h"
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* Numbered as cachemate's simulator does it: the slice by a hash of the whole line address, the set by its low bits. */
static inline size_t l3_set(const struct model *m, uint32_t line)
{
	size_t set = line & ((1u << m->l3_sets_log2) - 1);
	if (m->l3_slices > 1) {
		uint64_t h = line; /* splitmix64's finalizer */
		h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9ull;
		h = (h ^ h >> 27) * 0x94D049BB133111EBull;
		h ^= h >> 31;
		set += (size_t)(((unsigned __int128)h * m->l3_slices) >> 64) << m->l3_sets_log2;
	}
	return set;
}

static inline int find_tag(const uint32_t *tags, unsigned ways, uint32_t tag)
{
	unsigned i = 0;
#ifdef __SSE2__
	__m128i wanted = _mm_set1_epi32((int)tag);
	for (; i + 4 <= ways; i += 4) {
		__m128i same = _mm_cmpeq_epi32(_mm_loadu_si128((const __m128i *)(tags + i)), wanted);
		int which = _mm_movemask_ps(_mm_castsi128_ps(same));
		if (which)
			return (int)i + __builtin_ctz((unsigned)which);
	}
#endif
	for (; i < ways; i++)
		if (tags[i] == tag)
			return (int)i;
	return -1;
}

static uint32_t *used_of(struct bandwidth *b, uint64_t slot)
{
	unsigned at = slot % SLOTS;
	if (b->slot[at] != slot) {
		b->slot[at] = slot;
		b->used[at] = 0;
	}
	return &b->used[at];
}

unsigned memory_of(const struct model *m, unsigned l3, uint32_t line)
{
	if (!m->config.remote_memory_cycles || line >= m->lines) /* the neighbor's lines are local everywhere */
		return l3;
	return (unsigned)((uint64_t)line * m->l3s / m->lines);
}

uint64_t wait_for_memory(struct model *m, unsigned memory, uint64_t now)
{
	uint32_t need = (uint32_t)m->config.memory_cycles_per_line;
	if (!need)
		return 0;
	struct bandwidth *b = &m->bandwidth[m->config.memory_per_l3 ? memory : 0];
	uint64_t slot = now / SLOT_CYCLES;
	for (unsigned tries = 0; tries < SLOTS_AHEAD; tries++, slot++) {
		uint32_t *used = used_of(b, slot);
		if (*used >= SLOT_CYCLES)
			continue;
		*used += need;
		if (*used > SLOT_CYCLES) { /* the line's last cycles lie in the next slot */
			*used_of(b, slot + 1) += *used - SLOT_CYCLES;
			*used = SLOT_CYCLES;
		}
		break;
	}
	return slot * SLOT_CYCLES > now ? slot * SLOT_CYCLES - now : 0;
}

static void take_out(struct model *m, unsigned l3, size_t at)
{
	struct l3 *c = &m->l3[l3];
	m->line[c->tag[at] - 1].l3s &= (uint8_t)~(1u << l3);
	c->monitor_lines[c->monitor[at]]--;
	c->task_lines[c->task[at]]--;
	c->tag[at] = 0;
}

static void displace(struct model *m, struct cpu *by, unsigned l3, size_t at, uint64_t now)
{
	struct l3 *c = &m->l3[l3];
	uint32_t line = c->tag[at] - 1;
	struct line *known = &m->line[line];
	known->displaced_by = (uint16_t)by->task;
	known->displaced_from = (l3 + 1) & 15;
	known->lost &= (uint8_t)~(1u << l3);
	if (known->dirty && !(known->owner && holds(m, &m->cpu[known->owner - 1], line))) {
		known->dirty = 0;
		by->count[WRITTEN_LINES]++;
		unsigned memory = memory_of(m, l3, line);
		c->monitor_traffic[c->monitor[at]]++;
		c->monitor_remote[c->monitor[at]] += memory != l3;
		wait_for_memory(m, memory, now); /* takes memory's time, and nobody waits for it */
	}
	take_out(m, l3, at);
}

void l3_prepare(const struct model *m, unsigned l3, uint32_t line)
{
	const struct l3 *c = &m->l3[l3];
	size_t set = l3_set(m, line), base = set * m->l3_ways;
	__builtin_prefetch(c->tag + base);
	__builtin_prefetch(c->stamp + base);
	__builtin_prefetch(c->clock + set);
}

bool l3_touch(struct model *m, struct cpu *by, unsigned l3, uint32_t line, uint64_t now)
{
	struct l3 *c = &m->l3[l3];
	size_t set = l3_set(m, line), base = set * m->l3_ways;
	uint32_t stamp = ++c->clock[set];
	int at = find_tag(c->tag + base, m->l3_ways, line + 1);
	if (at >= 0) {
		c->stamp[base + (unsigned)at] = stamp;
		return true;
	}
	uint32_t mask = c->mask[by->class_of_service], oldest = 0;
	unsigned victim = 0;
	for (unsigned i = 0; i < m->l3_ways; i++) {
		if (!(mask >> i & 1))
			continue;
		uint32_t age = c->tag[base + i] ? stamp - c->stamp[base + i] : UINT32_MAX;
		if (age > oldest) {
			oldest = age;
			victim = i;
		}
	}
	size_t place = base + victim;
	if (c->tag[place])
		displace(m, by, l3, place, now);
	c->tag[place] = line + 1;
	c->stamp[place] = stamp;
	c->monitor[place] = (uint16_t)by->monitor;
	c->task[place] = (uint16_t)by->task;
	c->monitor_lines[by->monitor]++;
	c->task_lines[by->task]++;
	m->line[line].l3s |= (uint8_t)(1u << l3);
	return false;
}

/* A stream of its own through as many lines as two L3s have. It takes none of the guest's bandwidth: that is another
 * matter, and can be set. */
void neighbor_goes_on(struct model *m, unsigned l3, uint64_t now)
{
	struct l3 *c = &m->l3[l3];
	uint64_t half = clock_cycles(&m->config, m->config.neighbor_half_period_ns), from = c->neighbor_until;
	uint64_t cycles_per_us = m->config.hertz / 1000000;
	if (now < from + cycles_per_us)
		return;
	uint64_t us = (now - from) / cycles_per_us;
	c->neighbor_until = from + us * cycles_per_us;
	if (half && now / half % 2)
		return;
	uint64_t lines = us * m->config.neighbor_lines_per_us;
	lines = lines < m->neighbor_lines ? lines : m->neighbor_lines; /* more would change nothing */
	for (; lines; lines--) {
		l3_touch(m, &m->neighbor, l3, m->lines + c->neighbor_next, now);
		c->neighbor_next = (c->neighbor_next + 1) % m->neighbor_lines;
	}
}

void l3_remove(struct model *m, unsigned l3, uint32_t line)
{
	size_t base = l3_set(m, line) * m->l3_ways;
	int at = find_tag(m->l3[l3].tag + base, m->l3_ways, line + 1);
	if (at >= 0)
		take_out(m, l3, base + (unsigned)at);
}

void lose_elsewhere(struct model *m, unsigned l3, uint32_t line)
{
	struct line *known = &m->line[line];
	uint8_t others = known->l3s & (uint8_t)~(1u << l3);
	known->lost &= (uint8_t)~(1u << l3);
	for (unsigned i = 0; others; i++, others >>= 1)
		if (others & 1) {
			l3_remove(m, i, line);
			known->lost |= (uint8_t)(1u << i);
		}
}
