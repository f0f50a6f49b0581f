/* SPDX-License-Identifier: GPL-2.0-or-later
 * The caches with programs in the place of a guest: is each figure the one that closed form gives?
 *
 * A program makes one access after the other; the program with the least time is next, as on the clock. Sets in use are at
 * most 75 % or at least 150 % of their share, so that least-recently-used either keeps all of them or none. Prints one line
 * for each figure: id, what, found, closed form, difference in %; ends with 1 where one is off by more than 2 %. */
#include <math.h>
#include <string.h>

#include "../cache.h"
#include "check.h"

enum { INSTRUCTIONS = 3, PAGE_LINES = 64, MIB_LINES = 16384, PROGRAMS_AT_MOST = 8, COLORS = 128 };
static const double BAR = 0.02;

struct program {
	unsigned cpu;
	bool chase; /* in random order, else one line after the other */
	uint32_t lines;
	uint32_t *order;
	uint64_t now, at;
};

static struct config config;
static struct model *model;
static struct program programs[PROGRAMS_AT_MOST];
static unsigned count;
static uint32_t next_line;

static void told(const char *id, const char *what, double found, double expected)
{
	double off = found / expected - 1;
	bool good = fabs(off) <= BAR;
	printf("%s\t%s\t%s\t%.4g\t%.4g\t%+.2f\n", good ? "ok" : "FAIL", id, what, found, expected, 100 * off);
	failures += !good;
}

/* Two L3s of 8 MiB and 16 ways with two CPUs each, and "name=value name=value" besides. */
static void machine(const char *settings)
{
	char copy[200];
	config_defaults(&config);
	config.l3_bytes = 8 << 20;
	const char *wrong = NULL;
	snprintf(copy, sizeof copy, "%s", settings);
	for (char *name = strtok(copy, " "); name && !wrong; name = strtok(NULL, " ")) {
		char *value = strchr(name, '=');
		*value++ = 0;
		wrong = config_set(&config, name, value);
	}
	if (!wrong)
		wrong = config_check(&config);
	if (model)
		model_free(model);
	for (unsigned i = 0; i < count; i++)
		free(programs[i].order);
	model = wrong ? NULL : model_new(&config);
	if (!model) {
		fprintf(stderr, "closed_form: %s\n", wrong ? wrong : "out of memory");
		exit(2);
	}
	count = next_line = 0;
}

/* Lines of pages whose color is below `to` and not below `from`, as the program touches them. */
static struct program *colored(unsigned cpu, bool chase, double mib, unsigned from, unsigned to)
{
	struct program *p = &programs[count];
	uint64_t state = 88172645463325252u + count;
	uint32_t lines = (uint32_t)(mib * MIB_LINES);
	*p = (struct program){ .cpu = cpu, .chase = chase, .lines = lines, .order = malloc(lines * sizeof *p->order) };
	if (!p->order)
		exit(2);
	for (uint32_t i = 0; i < lines; next_line += PAGE_LINES)
		for (uint32_t k = 0; k < PAGE_LINES && i < lines && next_line / PAGE_LINES % COLORS >= from &&
				     next_line / PAGE_LINES % COLORS < to; k++)
			p->order[i++] = next_line + k;
	for (uint32_t i = lines - 1; chase && i > 0; i--) {
		state ^= state << 13;
		state ^= state >> 7;
		state ^= state << 17;
		uint32_t j = (uint32_t)(state % i), other = p->order[j];
		p->order[j] = p->order[i];
		p->order[i] = other;
	}
	model_set_task(model, cpu, ++count);
	return p;
}

static struct program *begin(unsigned cpu, bool chase, double mib)
{
	return colored(cpu, chase, mib, 0, COLORS);
}

static void step(struct program *p)
{
	struct outcome o = model_access(model, p->cpu, p->order[p->at++ % p->lines], false, p->now);
	p->now += INSTRUCTIONS * config_core(&config, p->cpu).instruction_cycles + o.cycles;
}

/* Everybody until this one has been through its lines that often; its cycles for an access. */
static double run(struct program *until, double passes)
{
	uint64_t end = until->at + (uint64_t)(passes * until->lines), began = until->now, from = until->at;
	while (until->at < end) {
		struct program *next = until;
		for (unsigned i = 0; i < count; i++)
			if (programs[i].now < next->now)
				next = &programs[i];
		step(next);
	}
	return (double)(until->now - began) / (double)(until->at - from);
}

static double ns(double cycles)
{
	return cycles * 1e9 / (double)config.hertz;
}

/* One pass to fill and one to settle, before what is measured. */
static double settled_ns(struct program *p)
{
	run(p, 2);
	return ns(run(p, 2));
}

static void latencies(void)
{
	static const struct {
		const char *id, *what;
		double mib;
		unsigned cycles;
	} levels[] = {
		{ "latency-l1", "a chase through 16 KiB, ns a load", 0.015625, 0 },
		{ "latency-l2", "a chase through 128 KiB, ns a load", 0.125, 14 },
		{ "latency-l3", "a chase through 6 of 8 MiB, ns a load", 6, 50 },
		{ "latency-memory", "a chase through 12 MiB, ns a load", 12, 250 },
	};
	for (unsigned i = 0; i < sizeof levels / sizeof *levels; i++) {
		machine("");
		told(levels[i].id, levels[i].what, settled_ns(begin(0, true, levels[i].mib)),
		     ns(INSTRUCTIONS + levels[i].cycles));
	}
}

/* A line to and fro: each waits until it sees the other's number, then stores its own. */
static void ping_pong(const char *id, const char *what, unsigned other, double expected)
{
	enum { ROUNDS = 2000 };
	machine("");
	unsigned cpus[2] = { 0, other };
	uint64_t now[2] = { 0, 0 };
	unsigned value = 0;
	for (unsigned turn = 0; value < 2 * ROUNDS; turn = now[1] < now[0]) {
		bool seen = value % 2 == turn; /* what it looks for, as of when it looks */
		now[turn] += 1 + model_access(model, cpus[turn], 7, false, now[turn]).cycles;
		if (!seen)
			continue;
		value++; /* at once: the other may look while the store is waited for */
		now[turn] += 1 + model_access(model, cpus[turn], 7, true, now[turn]).cycles;
	}
	told(id, what, ns((double)now[0] / (2 * ROUNDS)), expected);
}

static void bandwidth(const char *id, const char *what, const char *settings, double bytes_a_cycle)
{
	machine(settings);
	for (unsigned cpu = 0; cpu < 4; cpu++)
		begin(cpu, false, 32);
	run(&programs[0], 0.5);
	uint64_t began = programs[0].now, lines = 0;
	for (unsigned cpu = 0; cpu < 4; cpu++)
		lines -= model_count(model, cpu, READ_LINES);
	run(&programs[0], 0.5);
	for (unsigned cpu = 0; cpu < 4; cpu++)
		lines += model_count(model, cpu, READ_LINES);
	told(id, what, (double)lines * LINE_BYTES / (double)(programs[0].now - began), bytes_a_cycle);
}

static void beside(const char *id, const char *what, unsigned cpu, unsigned cycles)
{
	machine("");
	struct program *victim = begin(0, true, 6);
	begin(cpu, false, 32);
	told(id, what, settled_ns(victim), ns(INSTRUCTIONS + cycles));
}

static void ways(unsigned own, unsigned cycles)
{
	char id[32], what[96];
	machine("");
	struct program *victim = begin(0, true, 2);
	begin(1, false, 32);
	model_set_class(model, 0, 1, 1);
	model_set_class(model, 1, 2, 2);
	model_set_mask(model, 0, 1, (1u << own) - 1);
	model_set_mask(model, 0, 2, 0xffffu & ~((1u << own) - 1));
	snprintf(id, sizeof id, "ways-%u", own);
	snprintf(what, sizeof what, "2 MiB in %u ways beside a stream in the others, ns a load", own);
	told(id, what, settled_ns(victim), ns(INSTRUCTIONS + cycles));
	snprintf(id, sizeof id, "occupancy-%u", own);
	snprintf(what, sizeof what, "the stream's occupancy in %u ways, bytes", 16 - own);
	told(id, what, (double)model_monitor_lines(model, 0, 2) * LINE_BYTES, (16 - own) * 512.0 * 1024);
}

static void colors(void)
{
	machine("");
	struct program *victim = colored(0, true, 3, 0, COLORS / 2);
	colored(1, false, 32, COLORS / 2, COLORS);
	told("colors", "3 MiB in half of the colors beside a stream in the others, ns a load", settled_ns(victim),
	     ns(INSTRUCTIONS + 50));
	machine("");
	victim = colored(0, true, 6, 0, COLORS / 2);
	told("colors-over", "6 MiB in half of the colors, alone, ns a load", settled_ns(victim), ns(INSTRUCTIONS + 250));
}

/* Memory 0 holds the first half of all lines: a program of the other L3 reads it from afar, at its bandwidth. */
static void nodes(void)
{
	static const char *const settings = "memory_per_l3=1 remote_memory_cycles=400";
	machine(settings);
	told("node-local", "a chase through 12 MiB of its own node, ns a load", settled_ns(begin(0, true, 12)), ns(INSTRUCTIONS + 250));
	machine(settings);
	told("node-remote", "a chase through 12 MiB of the other node, ns a load", settled_ns(begin(2, true, 12)), ns(INSTRUCTIONS + 400));
	machine(settings);
	struct program *p = begin(2, true, 12);
	model_set_class(model, 2, 0, 3);
	run(p, 2);
	told("node-traffic", "its remote traffic, of all", (double)model_monitor_remote(model, 1, 3),
	     (double)model_monitor_traffic(model, 1, 3));
	for (unsigned apart = 0; apart < 2; apart++) {
		machine("memory_per_l3=1 remote_memory_cycles=400 memory_cycles_per_line=24 prefetch_degree=32 prefetch_streams=8");
		begin(0, false, 32);
		next_line = apart ? model_lines(model) / 2 : next_line;
		begin(2, false, 32);
		run(&programs[0], 0.5);
		uint64_t began = programs[0].now, lines = model_count(model, 0, READ_LINES) + model_count(model, 2, READ_LINES);
		run(&programs[0], 0.5);
		lines = model_count(model, 0, READ_LINES) + model_count(model, 2, READ_LINES) - lines;
		told(apart ? "node-bandwidth-apart" : "node-bandwidth",
		     apart ? "two streams from a node each, 24 cycles a line: bytes a cycle" : "two streams from one node: bytes a cycle",
		     (double)lines * LINE_BYTES / (double)(programs[0].now - began), (apart ? 2 : 1) * 64 / 24.0);
	}
}

static void throttles(void)
{
	static const unsigned percents[] = { 0, 20, 50, 90 };
	for (unsigned i = 0; i < sizeof percents / sizeof *percents; i++) {
		char id[32], what[96];
		machine("");
		struct program *p = begin(0, true, 12);
		model_set_class(model, 0, 1, 1);
		model_set_throttle(model, 0, 1, percents[i]);
		model_set_throttle(model, 1, 1, 90);
		snprintf(id, sizeof id, "throttle-%u", percents[i]);
		snprintf(what, sizeof what, "a chase through 12 MiB, throttled by %u %%, ns a load", percents[i]);
		told(id, what, settled_ns(p), ns(INSTRUCTIONS + 250 * 100.0 / (100 - percents[i])));
	}
}

/* Eight L3s of 32 MiB, two CPUs each: every cache is its program's own, whatever the others do. */
static void chiplets(void)
{
	static const char *const settings = "cpus=16 l3_bytes=33554432 l2_bytes=524288 other_l3_cycles=700";
	machine(settings);
	struct program *victim = begin(14, true, 24);
	for (unsigned cpu = 0; cpu < 14; cpu += 2)
		begin(cpu, false, 40);
	run(victim, 1);
	told("chiplets", "24 of 32 MiB, streams on seven other L3s, ns a load", ns(run(victim, 0.25)), ns(INSTRUCTIONS + 50));
	machine(settings);
	victim = begin(14, true, 24);
	begin(15, false, 128);
	run(victim, 1);
	told("chiplets-beside", "24 of 32 MiB beside a stream on the same of eight L3s, ns a load", ns(run(victim, 0.25)), ns(INSTRUCTIONS + 250));
	machine(settings);
	for (unsigned l3 = 0; l3 < 8; l3++)
		model_access(model, 2 * l3, 9, true, 0);
	model_access(model, 0, 9, true, 0);
	told("chiplets-transfer", "a line from the last L3 to the first, cycles", model_access(model, 14, 9, false, 0).cycles, 700);
}

/* Two cores with an L2 of 256 KiB, and two small ones on the other L3 with one of 512 KiB that need two cycles for an
 * instruction: 384 KiB fit into the small cores' L2 only. */
static void core_types(void)
{
	static const struct {
		unsigned cpu;
		double mib;
		unsigned cycles;
	} chases[] = { { 0, 0.015625, 0 }, { 0, 0.375, 50 }, { 0, 12, 250 }, { 2, 0.015625, 0 }, { 2, 0.375, 20 }, { 2, 6, 50 }, { 2, 12, 250 } };
	for (unsigned i = 0; i < sizeof chases / sizeof *chases; i++) {
		char id[40], what[96];
		bool small = chases[i].cpu > 1;
		machine("small_cpus=2 small_instruction_cycles=2 small_l2_bytes=524288 small_l2_ways=16 small_l2_cycles=20");
		snprintf(id, sizeof id, "core-%s-%.0fK", small ? "small" : "large", 1024 * chases[i].mib);
		snprintf(what, sizeof what, "a %s core's chase through %.0f KiB, ns a load", small ? "small" : "large", 1024 * chases[i].mib);
		told(id, what, settled_ns(begin(chases[i].cpu, true, chases[i].mib)), ns(INSTRUCTIONS * (small ? 2 : 1) + chases[i].cycles));
	}
}

/* What the old L2 still has comes from there, the rest from memory; the L1's lines are nearly all in the L2 too. */
static void refill(void)
{
	machine("");
	struct program *p = begin(0, true, 6);
	run(p, 3);
	p->cpu = 2;
	model_set_task(model, 2, 1);
	double in_l2 = (double)config.l2_bytes / LINE_BYTES, found = run(p, 1) * p->lines;
	told("refill", "the first pass through 6 MiB after a migration, ms", ns(found) / 1e6,
	     ns(INSTRUCTIONS * (double)p->lines + in_l2 * 600 + (p->lines - in_l2) * 250) / 1e6);
	told("refilled", "the second pass, ns a load", ns(run(p, 1)), ns(INSTRUCTIONS + 50));
}

/* Far more lines in a pass than the cache has, and far fewer than there is room for. */
static void neighbor(void)
{
	machine("neighbor_lines_per_us=200");
	told("neighbor", "6 MiB of 8 beside a neighbor outside the guest, ns a load", settled_ns(begin(0, true, 6)),
	     ns(INSTRUCTIONS + 250));
	machine("neighbor_lines_per_us=1");
	told("neighbor-small", "4 MiB of 8 beside a neighbor that uses little, ns a load", settled_ns(begin(0, true, 4)),
	     ns(INSTRUCTIONS + 50));
}

/* As many lines as the cache has, beside a stream: no closed form of the hits, but each event has its price. */
static void at_capacity(void)
{
	machine("prefetch_degree=0");
	struct program *victim = begin(0, true, 8);
	begin(1, false, 9);
	run(victim, 3);
	double l2_hits = (double)(model_count(model, 0, L1_MISSES) - model_count(model, 0, L2_MISSES));
	double l3_hits = (double)(model_count(model, 0, L2_MISSES) - model_count(model, 0, L3_MISSES));
	double misses = (double)model_count(model, 0, L3_MISSES), waited = (double)model_count(model, 0, BANDWIDTH_CYCLES);
	told("at-capacity", "8 MiB of 8 beside 9 MiB: events by their latencies, cycles", (double)victim->now,
	     INSTRUCTIONS * (double)victim->at + 14 * l2_hits + 50 * l3_hits + 250 * misses + waited);
	double causes = 0;
	for (enum count cause = COLD; cause <= COHERENT; cause++)
		causes += (double)model_count(model, 0, cause);
	told("causes", "misses by cause, and all of them", causes, misses);
}

int main(void)
{
	latencies();
	ping_pong("ping-pong-same", "a line to the other CPU of this L3, ns one way", 1, 61);
	ping_pong("ping-pong-other", "a line to a CPU of the other L3, ns one way", 2, 301);
	bandwidth("bandwidth", "four streams, 6 cycles a line: bytes a cycle", "memory_cycles_per_line=6", 64 / 6.0);
	bandwidth("bandwidth-half", "four streams, 12 cycles a line: bytes a cycle", "memory_cycles_per_line=12", 64 / 12.0);
	bandwidth("bandwidth-each", "four streams, 24 cycles a line for each of two L3s: bytes a cycle",
		  "memory_cycles_per_line=24 memory_per_l3=1", 2 * 64 / 24.0);
	beside("beside-same", "6 MiB of 8 beside a stream on the same L3, ns a load", 1, 250);
	beside("beside-other", "6 MiB of 8 beside a stream on the other L3, ns a load", 2, 50);
	ways(14, 50);
	ways(12, 50);
	ways(8, 50);
	ways(6, 50);
	ways(2, 250);
	colors();
	nodes();
	throttles();
	chiplets();
	core_types();
	refill();
	neighbor();
	at_capacity();
	return failures != 0;
}
