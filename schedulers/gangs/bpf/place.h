/* SPDX-License-Identifier: GPL-2.0-only */
/* The gang of a task, and the cache at which it waits. */
#pragma once
#include "state.h"

static struct place *planned(u64 now_generation, u32 kind, u32 id)
{
	struct place_key key = { .kind = kind, .id = id };
	if (now_generation & 1)
		return bpf_map_lookup_elem(&places_odd, &key);
	return bpf_map_lookup_elem(&places_even, &key);
}

/* A thread's own place, or its process's, or that of the process it descends from. Cached until the plan changes. */
static void refresh(struct task_struct *p, struct task *t, u64 now_generation)
{
	struct place *found = planned(now_generation, 0, p->pid);
	if (!found)
		found = planned(now_generation, 1, p->tgid);
	if (!found && t->heir_of) {
		found = planned(now_generation, 1, t->heir_of);
		if (found && !found->children)
			found = NULL;
	}
	if (found && found->gang < MAX_GANGS && found->weight) {
		t->place = *found;
	} else {
		t->place.gang = UNPLANNED;
		t->place.caches = ~0u;
		t->place.weight = 100;
		t->place.children = 0;
	}
	t->generation = now_generation;
}

static struct task *task_of(struct task_struct *p)
{
	struct task *t = bpf_task_storage_get(&tasks, p, NULL, 0);
	u64 now_generation = current_generation();
	if (t && t->generation != now_generation)
		refresh(p, t, now_generation);
	return t;
}

/* May a task of this place run now on this cache? */
static bool may_run(const struct place *place, u32 id, const struct cache *cache)
{
	if (place->gang == UNPLANNED)
		return true;
	if (!(place->caches & (1u << (id & 31))))
		return false;
	return place->gang == cache->gang || (cache->may_fill & (1u << (place->gang & 31)));
}

/* The cache at which a task waits: its current one if the plan allows it, else the planned one with the shortest queue.
 * A task that may not run everywhere stays where it is, because the planned cache may have none of its CPUs. */
static u32 home(struct task_struct *p, const struct place *place)
{
	struct machine *m = the_machine();
	u32 here = cache_id(scx_bpf_task_cpu(p)), best = here;
	s32 fewest = 0x7fffffff, i;

	if (!m || (u32)p->nr_cpus_allowed < m->cpus || (place->caches & (1u << (here & 31))))
		return here;
	bpf_for(i, 0, MAX_CACHES) {
		if (i >= (s32)m->caches)
			break;
		if (!(place->caches & (1u << (i & 31))))
			continue;
		s32 queued = scx_bpf_dsq_nr_queued(QUEUE(i, place->gang));
		if (queued < fewest) {
			fewest = queued;
			best = i;
		}
	}
	return best;
}

/* A child takes the place of the process that it descends from, if that place extends to children. */
static s32 adopt(struct task_struct *p, bool forked)
{
	struct task *t = bpf_task_storage_get(&tasks, p, NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!t)
		return -ENOMEM;
	t->generation = ~0ULL;
	if (forked) {
		struct task_struct *current = bpf_get_current_task_btf();
		struct task *parent = bpf_task_storage_get(&tasks, current, NULL, 0);
		u32 process = current->tgid;
		/* The nearest planned ancestor, over any number of forks. */
		t->heir_of = process;
		if (parent && parent->heir_of && !planned(current_generation(), 1, process))
			t->heir_of = parent->heir_of;
	}
	return 0;
}
