/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "truth.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UNKNOWN = 0, BUCKETS = 4096, RELEASED_AT_ONCE = TASKS_AT_MOST / 4 };

/* Every task that ever ran keeps its record; only those that ran lately have one of the model's slots. */
struct record {
	struct truth_task task;
	struct truth_cpu worked;	/* while it ran */
	uint64_t released[COUNTS];	/* counted in slots that it no longer has */
	uint64_t reported, last_switch; /* accesses at the last entry; when it ran last */
	unsigned slot;			/* 0: none */
	struct record *next;		/* of its bucket */
};
static struct record unknown = { .task.name = "-" }, evicted = { .task.name = "(others)", .slot = EVICTED_TASKS },
		     neighbor = { .task.name = "(neighbor)", .slot = NEIGHBOR_TASK };
static struct record *buckets[BUCKETS], *in_slot[TASKS_AT_MOST];
static unsigned free_slot; /* no slot below it is free */
static uint64_t switches;

static struct {
	struct record *task;
	struct truth_cpu since;
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
	in_slot[UNKNOWN] = &unknown; /* before the guest has said where its kernel keeps the current one */
	in_slot[EVICTED_TASKS] = &evicted;
	in_slot[NEIGHBOR_TASK] = &neighbor;
	for (unsigned i = 0; i < CPUS_AT_MOST; i++)
		running[i].task = &unknown;
	if (!*c->truth_file)
		return NULL;
	file = fopen(c->truth_file, "w");
	if (!file)
		return strerror(errno);
	fprintf(file, "ns\ttid\tpid\tname\tinstructions\tuser_instructions\tcycles");
	for (unsigned i = 0; i < COUNTS; i++)
		fprintf(file, "\t%s", count_names[i]);
	for (unsigned i = 0; i < model_l3s(m); i++)
		fprintf(file, "\tl3_%u_lines", i);
	fputc('\n', file);
	next_entry = clock_cycles(c, c->truth_ns);
	return NULL;
}

static uint64_t total(const struct record *r, enum count what)
{
	return r->released[what] + model_task_count(model, r->slot, what);
}

/* An entry of a task in a slot, unless its last one still holds. */
static void write_entry(struct record *r, uint64_t now)
{
	uint64_t accesses = total(r, ACCESSES);
	if (!file || accesses == r->reported)
		return;
	r->reported = accesses;
	fprintf(file, "%llu\t%d\t%d\t%s\t%llu\t%llu\t%llu", (unsigned long long)clock_ns(config, now), r->task.tid,
		r->task.pid, r->task.name, (unsigned long long)r->worked.instructions,
		(unsigned long long)r->worked.user_instructions, (unsigned long long)r->worked.cycles);
	for (unsigned i = 0; i < COUNTS; i++)
		fprintf(file, "\t%llu", (unsigned long long)total(r, i));
	for (unsigned i = 0; i < model_l3s(model); i++)
		fprintf(file, "\t%llu", (unsigned long long)model_task_lines(model, i, r->slot));
	fputc('\n', file);
}

static int by_last_switch(const void *a, const void *b)
{
	const struct record *x = *(struct record *const *)a, *y = *(struct record *const *)b;
	return (x->last_switch > y->last_switch) - (x->last_switch < y->last_switch);
}

static bool is_running(const struct record *r)
{
	for (unsigned i = 0; i < config->cpus; i++)
		if (running[i].task == r)
			return true;
	return false;
}

/* Many slots at once, because the model has to search all lines for those of the tasks. */
static void release_slots(uint64_t now)
{
	struct record *oldest[EVICTED_TASKS];
	bool released[TASKS_AT_MOST] = { 0 };
	unsigned count = 0;
	for (unsigned i = UNKNOWN + 1; i < EVICTED_TASKS; i++)
		if (!is_running(in_slot[i]))
			oldest[count++] = in_slot[i];
	qsort(oldest, count, sizeof *oldest, by_last_switch);
	for (unsigned i = 0; i < count && i < RELEASED_AT_ONCE; i++) {
		struct record *r = oldest[i];
		write_entry(r, now);
		for (unsigned k = 0; k < COUNTS; k++)
			r->released[k] = total(r, k);
		released[r->slot] = true;
		in_slot[r->slot] = NULL;
		r->slot = UNKNOWN;
	}
	model_release_tasks(model, released);
	free_slot = UNKNOWN + 1;
}

static void give_slot(struct record *r, uint64_t now)
{
	while (free_slot < EVICTED_TASKS && in_slot[free_slot])
		free_slot++;
	if (free_slot == EVICTED_TASKS) {
		release_slots(now);
		while (in_slot[free_slot])
			free_slot++;
	}
	in_slot[free_slot] = r;
	r->slot = free_slot;
}

static struct record *record_of(const struct truth_task *task)
{
	uint32_t hash = (uint32_t)task->tid * 2654435761u;
	for (const char *c = task->name; *c; c++)
		hash = (hash ^ (uint8_t)*c) * 16777619u;
	struct record **bucket = &buckets[hash % BUCKETS];
	for (struct record *r = *bucket; r; r = r->next)
		if (r->task.tid == task->tid && !strcmp(r->task.name, task->name))
			return r;
	struct record *r = calloc(1, sizeof *r);
	if (!r)
		return &unknown;
	r->task = *task;
	r->next = *bucket;
	return *bucket = r;
}

static void account(unsigned cpu, const struct truth_cpu *now)
{
	struct truth_cpu *worked = &running[cpu].task->worked, *since = &running[cpu].since;
	worked->instructions += now->instructions - since->instructions;
	worked->user_instructions += now->user_instructions - since->user_instructions;
	worked->cycles += now->cycles > since->cycles ? now->cycles - since->cycles : 0;
	*since = *now;
}

void truth_runs(unsigned cpu, const struct truth_task *task, struct truth_cpu now)
{
	pthread_mutex_lock(&lock);
	struct record *r = record_of(task);
	account(cpu, &now);
	r->last_switch = ++switches;
	if (!r->slot && r != &unknown)
		give_slot(r, now.cycles);
	running[cpu].task = r;
	model_set_task(model, cpu, r->slot);
	pthread_mutex_unlock(&lock);
}

bool truth_is_due(uint64_t now)
{
	return file && now >= next_entry;
}

void truth_entry(uint64_t now, const struct truth_cpu *cpus)
{
	if (!file)
		return;
	pthread_mutex_lock(&lock);
	for (unsigned i = 0; i < config->cpus; i++)
		account(i, &cpus[i]);
	for (unsigned i = 0; i < TASKS_AT_MOST; i++)
		if (in_slot[i])
			write_entry(in_slot[i], now);
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
				fprintf(file, "%d\t%s\t%d\t%s\t%u\n", in_slot[a]->task.tid, in_slot[a]->task.name,
					in_slot[b]->task.tid, in_slot[b]->task.name, model_hurt(model, a, b));
	fclose(file);
	file = NULL;
}
