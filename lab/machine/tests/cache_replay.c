/* SPDX-License-Identifier: GPL-2.0-or-later
 * The cache model without QEMU: accesses from files, counters to standard output as "name value" lines.
 *   cache_replay CONFIG COMMAND...
 * Commands, in order:
 *   replay CPU FILE        loads of a raw trace (64-bit little-endian byte addresses) on a CPU
 *   store CPU FILE         the same as stores
 *   together CPU FILE CPU FILE   two traces in turns, one access each, until both end
 *   class CPU CLASS MONITOR      task CPU TASK        mask L3 CLASS WAYS(hex)
 *   trace-misses CPU FILE  from here on the lines that missed this CPU's L2 go to FILE, as a raw trace
 *   show CPU               counters of a CPU;   monitor L3 MONITOR   occupancy and traffic;   tasks A B   lines, hurt */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../cache.h"

static struct model *model;
static struct config config;
static FILE *misses[CPUS_AT_MOST];
static uint64_t now;

static _Noreturn void fail(const char *what, const char *where)
{
	fprintf(stderr, "cache_replay: %s: %s\n", where, what);
	exit(2);
}

static FILE *file(const char *path, const char *mode)
{
	FILE *f = fopen(path, mode);
	if (!f)
		fail("cannot be opened", path);
	return f;
}

static bool step(unsigned cpu, FILE *from, bool store)
{
	uint64_t address;
	if (fread(&address, sizeof address, 1, from) != 1)
		return false;
	uint64_t line = address >> LINE_SHIFT, before = model_count(model, cpu, L2_MISSES);
	if (line >= model_lines(model))
		fail("an address beyond memory_bytes", "trace");
	if (recent_access(model_recent(model, cpu), line, store)) {
		now++;
		return true;
	}
	struct outcome o = model_access(model, cpu, (uint32_t)line, store, now);
	model_touched(model, cpu, line, store, o.moving);
	now += 1 + o.cycles;
	if (misses[cpu] && model_count(model, cpu, L2_MISSES) > before)
		fwrite(&address, sizeof address, 1, misses[cpu]);
	return true;
}

static unsigned number(char ***at, int base)
{
	if (!**at)
		fail("a number is missing", "command line");
	char *end;
	unsigned long found = strtoul(**at, &end, base);
	if (*end)
		fail("expected a number", **at);
	++*at;
	return (unsigned)found;
}

static const char *path(char ***at)
{
	if (!**at)
		fail("a file is missing", "command line");
	return *(*at)++;
}

static unsigned cpu_of(char ***at)
{
	unsigned cpu = number(at, 10);
	if (cpu >= config.cpus)
		fail("no such CPU", "command line");
	return cpu;
}

static void together(char ***at)
{
	unsigned a = cpu_of(at);
	FILE *fa = file(path(at), "rb");
	unsigned b = cpu_of(at);
	FILE *fb = file(path(at), "rb");
	bool more_a = true, more_b = true;
	while (more_a || more_b) {
		more_a = more_a && step(a, fa, false);
		more_b = more_b && step(b, fb, false);
	}
	fclose(fa);
	fclose(fb);
}

static void show(unsigned cpu)
{
	for (unsigned i = 0; i < COUNTS; i++)
		printf("%s %llu\n", count_names[i], (unsigned long long)model_count(model, cpu, i));
}

static void command(const char *name, char ***at)
{
	if (!strcmp(name, "replay") || !strcmp(name, "store")) {
		unsigned cpu = cpu_of(at);
		FILE *f = file(path(at), "rb");
		while (step(cpu, f, *name == 's'))
			;
		fclose(f);
	} else if (!strcmp(name, "together")) {
		together(at);
	} else if (!strcmp(name, "class")) {
		unsigned cpu = cpu_of(at), class_of_service = number(at, 10), monitor = number(at, 10);
		model_set_class(model, cpu, class_of_service, monitor);
	} else if (!strcmp(name, "task")) {
		unsigned cpu = cpu_of(at), task = number(at, 10);
		model_set_task(model, cpu, task);
	} else if (!strcmp(name, "mask")) {
		unsigned l3 = number(at, 10), class_of_service = number(at, 10), ways = number(at, 16);
		model_set_mask(model, l3, class_of_service, ways);
	} else if (!strcmp(name, "trace-misses")) {
		unsigned cpu = cpu_of(at);
		misses[cpu] = file(path(at), "wb");
	} else if (!strcmp(name, "show")) {
		show(cpu_of(at));
	} else if (!strcmp(name, "monitor")) {
		unsigned l3 = number(at, 10), monitor = number(at, 10);
		printf("lines %llu\ntraffic %llu\n", (unsigned long long)model_monitor_lines(model, l3, monitor),
		       (unsigned long long)model_monitor_traffic(model, l3, monitor));
	} else if (!strcmp(name, "tasks")) {
		unsigned a = number(at, 10), b = number(at, 10);
		printf("lines_a %llu\nlines_b %llu\na_by_b %u\nb_by_a %u\n",
		       (unsigned long long)model_task_lines(model, 0, a), (unsigned long long)model_task_lines(model, 0, b),
		       model_hurt(model, a, b), model_hurt(model, b, a));
	} else {
		fail("no such command", name);
	}
}

int main(int argc, char **argv)
{
	if (argc < 3)
		fail("expected CONFIG COMMAND...", "command line");
	config_defaults(&config);
	const char *wrong = config_read(&config, argv[1]);
	if (!wrong)
		wrong = config_check(&config);
	if (wrong)
		fail(wrong, argv[1]);
	model = model_new(&config);
	if (!model)
		fail("out of memory", argv[1]);
	for (char **at = argv + 2; *at;) {
		const char *name = *at++;
		command(name, &at);
	}
	for (unsigned i = 0; i < CPUS_AT_MOST; i++)
		if (misses[i])
			fclose(misses[i]);
	model_free(model);
	return 0;
}
