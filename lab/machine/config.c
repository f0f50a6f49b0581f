/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "config.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct setting {
	const char *name;
	size_t offset;
	uint64_t standard, least, most;
};

#define SETTING(field, standard, least, most) { #field, offsetof(struct config, field), standard, least, most }
static const struct setting settings[] = {
	SETTING(hertz, 2000000000, 1000000, 100000000000),
	SETTING(cpus, 4, 1, CPUS_AT_MOST),
	SETTING(cpus_per_l3, 2, 1, CPUS_AT_MOST),
	SETTING(l1_bytes, 32 << 10, 4096, 1 << 20),
	SETTING(l1_ways, 8, 1, WAYS_AT_MOST),
	SETTING(l2_bytes, 256 << 10, 0, 64 << 20),
	SETTING(l2_ways, 8, 1, WAYS_AT_MOST),
	SETTING(l3_bytes, 16 << 20, 4096, 1 << 30),
	SETTING(l3_ways, 16, 1, WAYS_AT_MOST),
	SETTING(l3_slices, 1, 1, 1 << 16),
	SETTING(l2_cycles, 14, 0, 1 << 20),
	SETTING(l3_cycles, 50, 0, 1 << 20),
	SETTING(memory_cycles, 250, 0, 1 << 20),
	SETTING(small_cpus, 0, 0, CPUS_AT_MOST),
	SETTING(small_instruction_cycles, 1, 1, 16),
	SETTING(small_l2_bytes, 256 << 10, 0, 64 << 20),
	SETTING(small_l2_ways, 8, 1, WAYS_AT_MOST),
	SETTING(small_l2_cycles, 14, 0, 1 << 20),
	SETTING(prefetch_streams, 8, 0, 32),
	SETTING(prefetch_degree, 16, 0, 32),
	SETTING(same_l3_cycles, 120, 0, 1 << 20),
	SETTING(other_l3_cycles, 600, 0, 1 << 20),
	SETTING(io_cycles, 2000, 0, 1 << 20),
	SETTING(memory_cycles_per_line, 6, 0, 256),
	SETTING(remote_memory_cycles, 0, 0, 1 << 20),
	SETTING(memory_per_l3, 0, 0, 1),
	SETTING(neighbor_lines_per_us, 0, 0, 10000),
	SETTING(neighbor_half_period_ns, 0, 0, 1ull << 40),
	SETTING(classes, 8, 0, 16),
	SETTING(monitors, 16, 0, 256),
	SETTING(throttling, 0, 0, 1),
	SETTING(counters, 4, 0, 4),
	SETTING(sampling, 0, 0, 1),
	SETTING(sample_cycles, 500, 0, 1 << 20),
	SETTING(load_tag_interval, 1, 1, 1 << 20),
	SETTING(l1_hit_cycles, 4, 0, 1 << 10),
	SETTING(memory_bytes, 1 << 30, 1 << 20, 1ull << 36),
	SETTING(quantum_ns, 20000, 100, 10000000),
	SETTING(shared_ahead_ns, 50, 1, 10000000),
	SETTING(pause_ahead_ns, 200, 1, 10000000),
	SETTING(tsc_ahead_ns, 1000, 1, 10000000),
	SETTING(backoff_doublings, 6, 0, 20),
	SETTING(settled_ns, 200000, 0, 1000000000),
	SETTING(truth_ns, 100000000, 1000000, 1ull << 60),
	SETTING(model_on, 1, 0, 1),
	SETTING(verbose, 0, 0, 2),
};
enum { SETTINGS = sizeof settings / sizeof *settings };

static char said[700];

static uint64_t *place(struct config *c, const struct setting *s) { return (uint64_t *)((char *)c + s->offset); }

void config_defaults(struct config *c)
{
	memset(c, 0, sizeof *c);
	for (int i = 0; i < SETTINGS; i++)
		*place(c, &settings[i]) = settings[i].standard;
}

static const char *text(char *to, size_t size, const char *name, const char *value)
{
	if (strlen(value) >= size) {
		snprintf(said, sizeof said, "%s: found %zu bytes, expected fewer than %zu", name, strlen(value), size);
		return said;
	}
	strcpy(to, value);
	return NULL;
}

const char *config_set(struct config *c, const char *name, const char *value)
{
	if (!strcmp(name, "name"))
		return text(c->name, sizeof c->name, name, value);
	if (!strcmp(name, "truth_file"))
		return text(c->truth_file, sizeof c->truth_file, name, value);
	for (int i = 0; i < SETTINGS; i++) {
		const struct setting *s = &settings[i];
		if (strcmp(s->name, name))
			continue;
		char *end;
		errno = 0;
		uint64_t found = strtoull(value, &end, 10);
		if (errno || end == value || *end || *value == '-' || found < s->least || found > s->most) {
			snprintf(said, sizeof said, "%s: found '%.60s', expected %llu to %llu", name, value,
				 (unsigned long long)s->least, (unsigned long long)s->most);
			return said;
		}
		*place(c, s) = found;
		return NULL;
	}
	snprintf(said, sizeof said, "found the setting '%.60s', expected one that the machine has", name);
	return said;
}

const char *config_read(struct config *c, const char *path)
{
	static char at[1300];
	char line[800], name[64], value[600], more[2];
	FILE *file = fopen(path, "r");
	if (!file) {
		snprintf(at, sizeof at, "%.500s: %s", path, strerror(errno));
		return at;
	}
	for (int number = 1; fgets(line, sizeof line, file); number++) {
		line[strcspn(line, "#\n")] = 0;
		int fields = sscanf(line, "%63s %599s %1s", name, value, more);
		if (fields <= 0)
			continue;
		const char *wrong = fields == 2 ? config_set(c, name, value) : "expected a name and a value";
		if (wrong) {
			snprintf(at, sizeof at, "%.500s, line %d: %s", path, number, wrong);
			fclose(file);
			return at;
		}
	}
	fclose(file);
	return NULL;
}

static const char *sets(const char *name, uint64_t bytes, uint64_t ways, uint64_t slices)
{
	uint64_t row = ways * LINE_BYTES * slices, count = bytes / row;
	if (bytes % row || !count || (count & (count - 1))) {
		snprintf(said, sizeof said, "%s: found %llu bytes, expected a power of two of sets of %llu bytes", name,
			 (unsigned long long)bytes, (unsigned long long)row);
		return said;
	}
	return NULL;
}

const char *config_check(const struct config *c)
{
	const char *wrong = sets("l1_bytes", c->l1_bytes, c->l1_ways, 1);
	if (!wrong && c->l2_bytes) /* without an L2 the L1s lie before the shared cache */
		wrong = sets("l2_bytes", c->l2_bytes, c->l2_ways, 1);
	if (!wrong && c->small_l2_bytes)
		wrong = sets("small_l2_bytes", c->small_l2_bytes, c->small_l2_ways, 1);
	if (!wrong && c->small_cpus > c->cpus)
		wrong = "small_cpus: expected at most cpus";
	if (!wrong)
		wrong = sets("l3_bytes", c->l3_bytes, c->l3_ways, c->l3_slices);
	if (!wrong && (c->cpus % c->cpus_per_l3 || c->cpus / c->cpus_per_l3 > L3S_AT_MOST))
		wrong = "cpus_per_l3: expected a divisor of cpus, and 8 L3s at most";
	if (!wrong && c->remote_memory_cycles && !c->memory_per_l3)
		wrong = "remote_memory_cycles: expected 0, as all L3s share one memory (memory_per_l3)";
	if (!wrong && c->prefetch_degree && (!c->l2_bytes || (c->small_cpus && !c->small_l2_bytes)))
		wrong = "prefetch_degree: expected 0, as there is no L2 to prefetch into";
	if (!wrong && c->l1_bytes / c->l1_ways != 4096)
		wrong = "l1_bytes: expected 64 sets, so that pages do not change which line lies in which";
	return wrong;
}
