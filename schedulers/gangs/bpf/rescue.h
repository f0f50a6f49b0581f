/* SPDX-License-Identifier: GPL-2.0-only */
/* The bound on waits: two rotations and 100 ms. */
#pragma once
#include "place.h"

static struct rotation *rotation_of(u32 cache, u64 now_generation)
{
	u32 key = (now_generation & 1) * MAX_CACHES + cache;
	return bpf_map_lookup_elem(&rotations, &key);
}

static bool in_rotation(struct rotation *rotation, u32 gang)
{
	s32 i;
	bpf_for(i, 0, MAX_GANGS) {
		if (i >= (s32)rotation->turns)
			break;
		if (rotation->turn[i].gang == gang)
			return true;
	}
	return false;
}

/* A task that waited longer than a rotation, or waits for a turn that no longer exists, is served before all others.
 * Each turn requests the search, and the first CPU that looks for a task does it, because a timer's program must not
 * walk queues if it was armed by one that may sleep. */
static void rescue(u32 id, struct cache *cache)
{
	struct rotation *rotation = rotation_of(id, current_generation());
	u64 now_ns = bpf_ktime_get_ns();
	struct task_struct *p;
	s32 gang;

	if (!rotation || !__sync_lock_test_and_set(&cache->rescue_due, 0))
		return;
	bpf_for(gang, 0, MAX_GANGS) {
		u64 queue = QUEUE(id, gang);
		if (scx_bpf_dsq_nr_queued(queue) <= 0)
			continue;
		u64 patience_ns = in_rotation(rotation, gang) ? rotation->length_ns : 0;
		bpf_for_each(scx_dsq, p, queue, 0) {
			struct task *t = bpf_task_storage_get(&tasks, p, NULL, 0);
			if (!t || !t->waits_since_ns || now_ns < t->waits_since_ns + patience_ns)
				continue;
			scx_bpf_dsq_move_set_slice(&___it, RESCUE_SLICE_NS);
			if (scx_bpf_dsq_move(&___it, p, QUEUE(id, RESCUE), 0))
				cache->rescued++;
		}
	}
}
