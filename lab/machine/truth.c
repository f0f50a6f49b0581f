/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "truth.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "clock.h"

enum { UNKNOWN = 0, OVERFLOWED = NEIGHBOR_TASK - 1, TABLE = 4 * TASKS_AT_MOST };

static struct known {
	struct truth_task task;
	uint64_t instructions, cycles; /* while it ran */
	uint64_t told;		       /* accesses at the last entry */
} known[TASKS_AT_MOST];
static unsigned tasks = 1; /* UNKNOWN: before the guest has said where its kernel keeps the current one */
static uint16_t table[TABLE];

static struct {
	unsigned task;
	uint64_t instructions, cycles; /* since when */
} running[CPUS_AT_MOST];

static const struct config *config;
static struct model *model;
static FILE *file;
static uint64_t next_entry;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

const char *truth_start(const struct config *c, struct model *m)
{
	config = c;
	model = m;
	strcpy(known[UNKNOWN].task.name, "-");
	strcpy(known[OVERFLOWED].task.name, "(others)");
	strcpy(known[NEIGHBOR_TASK].task.name, "(neighbor)");
	if (!*c->truth_file)
		return NULL;
	file = fopen(c->truth_file, "w");
	if (!file)
		return strerror(errno);
	fprintf(file, "ns\ttid\tpid\tname\tinstructions\tcycles");
	for (unsigned i = 0; i < COUNTS; i++)
		fprintf(file, "\t%s", count_names[i]);
	for (unsigned i = 0; i < model_l3s(m); i++)
		fprintf(file, "\tl3_%u_lines", i);
	fputc('\n', file);
	next_entry = clock_cycles(c, c->truth_ns);
	return NULL;
}

static unsigned slot_of(const struct truth_task *task)
{
	uint32_t hash = (uint32_t)task->tid * 2654435761u;
	for (const char *c = task->name; *c; c++)
		hash = (hash ^ (uint8_t)*c) * 16777619u;
	for (unsigned i = hash % TABLE;; i = (i + 1) % TABLE) {
		if (!table[i]) {
			if (tasks >= OVERFLOWED)
				return OVERFLOWED;
			known[tasks].task = *task;
			table[i] = (uint16_t)tasks;
			return tasks++;
		}
		const struct truth_task *there = &known[table[i]].task;
		if (there->tid == task->tid && !strcmp(there->name, task->name))
			return table[i];
	}
}

static void account(unsigned cpu, uint64_t now, uint64_t instructions)
{
	struct known *was = &known[running[cpu].task];
	was->instructions += instructions - running[cpu].instructions;
	was->cycles += now > running[cpu].cycles ? now - running[cpu].cycles : 0;
	running[cpu].instructions = instructions;
	running[cpu].cycles = now;
}

void truth_runs(unsigned cpu, const struct truth_task *task, uint64_t now, uint64_t instructions)
{
	pthread_mutex_lock(&lock);
	account(cpu, now, instructions);
	running[cpu].task = slot_of(task);
	model_set_task(model, cpu, running[cpu].task);
	pthread_mutex_unlock(&lock);
}

bool truth_is_due(uint64_t now)
{
	return file && now >= next_entry;
}

static void tell(uint64_t ns, unsigned slot)
{
	struct known *k = &known[slot];
	fprintf(file, "%llu\t%d\t%d\t%s\t%llu\t%llu", (unsigned long long)ns, k->task.tid, k->task.pid, k->task.name,
		(unsigned long long)k->instructions, (unsigned long long)k->cycles);
	for (unsigned i = 0; i < COUNTS; i++)
		fprintf(file, "\t%llu", (unsigned long long)model_task_count(model, slot, i));
	for (unsigned i = 0; i < model_l3s(model); i++)
		fprintf(file, "\t%llu", (unsigned long long)model_task_lines(model, i, slot));
	fputc('\n', file);
}

void truth_entry(uint64_t now, const uint64_t *cycles, const uint64_t *instructions)
{
	if (!file)
		return;
	pthread_mutex_lock(&lock);
	for (unsigned i = 0; i < config->cpus; i++)
		account(i, cycles[i], instructions[i]);
	for (unsigned i = 0; i < TASKS_AT_MOST; i++) {
		uint64_t accesses = model_task_count(model, i, ACCESSES);
		if (accesses == known[i].told)
			continue;
		known[i].told = accesses;
		tell(clock_ns(config, now), i);
	}
	fflush(file);
	next_entry = now + clock_cycles(config, config->truth_ns);
	pthread_mutex_unlock(&lock);
}

void truth_mark(uint64_t now, unsigned number)
{
	if (!file)
		return;
	pthread_mutex_lock(&lock);
	fprintf(file, "%llu\t-1\t-1\tmark-%u\n", (unsigned long long)clock_ns(config, now), number);
	pthread_mutex_unlock(&lock);
}

void truth_end(void)
{
	char path[sizeof config->truth_file + 8];
	if (!file)
		return;
	fclose(file);
	snprintf(path, sizeof path, "%s.hurt", config->truth_file);
	file = fopen(path, "w");
	if (!file)
		return;
	fprintf(file, "tid\tname\tby_tid\tby_name\tmisses\n");
	for (unsigned a = 0; a < TASKS_AT_MOST; a++)
		for (unsigned b = 0; b < TASKS_AT_MOST; b++)
			if (model_hurt(model, a, b))
				fprintf(file, "%d\t%s\t%d\t%s\t%u\n", known[a].task.tid, known[a].task.name,
					known[b].task.tid, known[b].task.name, model_hurt(model, a, b));
	fclose(file);
	file = NULL;
}
