/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "model.h"

#include <string.h>

const char *const count_names[COUNTS] = {
	"accesses",    "l1_misses",	"l2_misses",	"l3_misses",	   "cold",	    "own",
	"others",      "coherent",	"transfers_same", "transfers_other", "invalidations", "read_lines",
	"written_lines", "prefetches", "prefetch_misses", "stall_cycles", "bandwidth_cycles",
};

void model_set_class(struct model *m, unsigned cpu, unsigned class_of_service, unsigned monitor)
{
	m->cpu[cpu].class_of_service = class_of_service & (CLASSES_AT_MOST - 1);
	m->cpu[cpu].monitor = monitor & (MONITORS_AT_MOST - 1);
}

static uint64_t counted(const struct cpu *c, enum count what)
{
	return c->count[what] + (what == ACCESSES ? c->recent.accesses : 0);
}

static void fold(struct model *m, struct cpu *c)
{
	for (unsigned i = 0; i < COUNTS; i++) {
		m->task_count[c->task][i] += counted(c, i) - c->count_at_switch[i];
		c->count_at_switch[i] = counted(c, i);
	}
}

void model_set_task(struct model *m, unsigned cpu, unsigned task)
{
	struct cpu *c = &m->cpu[cpu];
	fold(m, c);
	c->task = task < NEIGHBOR_TASK ? task : 0;
}

static void release_hurt(struct model *m, unsigned task)
{
	for (unsigned i = 0; i < TASKS_AT_MOST; i++) {
		m->hurt[EVICTED_TASKS][i] += m->hurt[task][i];
		m->hurt[task][i] = 0;
	}
	for (unsigned i = 0; i < TASKS_AT_MOST; i++) {
		m->hurt[i][EVICTED_TASKS] += m->hurt[i][task];
		m->hurt[i][task] = 0;
	}
}

void model_release_tasks(struct model *m, const bool released[TASKS_AT_MOST])
{
	size_t ways = ((size_t)m->l3_slices << m->l3_sets_log2) * m->l3_ways;
	for (unsigned task = 0; task < TASKS_AT_MOST; task++)
		if (released[task]) {
			memset(m->task_count[task], 0, sizeof m->task_count[task]);
			release_hurt(m, task);
		}
	for (unsigned l3 = 0; l3 < m->l3s; l3++) {
		struct l3 *c = &m->l3[l3];
		for (size_t at = 0; at < ways; at++)
			if (released[c->task[at]])
				c->task[at] = EVICTED_TASKS;
		for (unsigned task = 0; task < TASKS_AT_MOST; task++)
			if (released[task]) {
				c->task_lines[EVICTED_TASKS] += c->task_lines[task];
				c->task_lines[task] = 0;
			}
	}
	for (size_t line = 0; line < (size_t)m->lines + m->neighbor_lines; line++)
		if (released[m->line[line].displaced_by])
			m->line[line].displaced_by = EVICTED_TASKS;
}

void model_set_mask(struct model *m, unsigned l3, unsigned class_of_service, uint32_t ways)
{
	ways &= (uint32_t)((1ull << m->l3_ways) - 1);
	if (ways)
		m->l3[l3].mask[class_of_service & (CLASSES_AT_MOST - 1)] = ways;
}

uint32_t model_mask(const struct model *m, unsigned l3, unsigned class_of_service)
{
	return m->l3[l3].mask[class_of_service & (CLASSES_AT_MOST - 1)];
}

uint64_t model_count(const struct model *m, unsigned cpu, enum count what)
{
	return counted(&m->cpu[cpu], what);
}

uint64_t model_task_count(struct model *m, unsigned task, enum count what)
{
	uint64_t running = 0;
	for (unsigned i = 0; i < m->config.cpus; i++)
		if (m->cpu[i].task == task)
			running += counted(&m->cpu[i], what) - m->cpu[i].count_at_switch[what];
	return m->task_count[task][what] + running;
}

unsigned model_l3_of(const struct model *m, unsigned cpu)
{
	return m->cpu[cpu].l3;
}

unsigned model_l3s(const struct model *m)
{
	return m->l3s;
}

uint64_t model_monitor_lines(const struct model *m, unsigned l3, unsigned monitor)
{
	return m->l3[l3].monitor_lines[monitor & (MONITORS_AT_MOST - 1)];
}

uint64_t model_monitor_traffic(const struct model *m, unsigned l3, unsigned monitor)
{
	return m->l3[l3].monitor_traffic[monitor & (MONITORS_AT_MOST - 1)];
}

uint64_t model_monitor_remote(const struct model *m, unsigned l3, unsigned monitor)
{
	return m->l3[l3].monitor_remote[monitor & (MONITORS_AT_MOST - 1)];
}

void model_set_throttle(struct model *m, unsigned l3, unsigned class_of_service, unsigned percent)
{
	m->l3[l3].throttle[class_of_service & (CLASSES_AT_MOST - 1)] = (uint8_t)(percent < MAX_THROTTLE ? percent : MAX_THROTTLE);
}

unsigned model_throttle(const struct model *m, unsigned l3, unsigned class_of_service)
{
	return m->l3[l3].throttle[class_of_service & (CLASSES_AT_MOST - 1)];
}

uint64_t model_task_lines(const struct model *m, unsigned l3, unsigned task)
{
	return m->l3[l3].task_lines[task];
}

uint32_t model_hurt(const struct model *m, unsigned victim, unsigned by)
{
	return m->hurt[victim][by];
}
