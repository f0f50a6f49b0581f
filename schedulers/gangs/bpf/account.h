/* SPDX-License-Identifier: GPL-2.0-only */
/* Time of the CPUs of a cache: in turn, mixed, out of turn, idle. */
#pragma once
#include "state.h"

/* Accounts for the time since the last event, before the event changes which task runs. All CPUs of the cache may call
 * it concurrently: each takes its own piece of time with one exchange. */
static void account(u32 id, u64 now_ns)
{
	struct cache *cache = cache_of(id);
	u32 zero = unknown_zero();
	u32 first = NOBODY - zero, here = zero, idle = zero, mixed = zero, off = zero;
	s32 i, n = cpu_count();

	if (!cache)
		return;
	u64 before_ns = __sync_lock_test_and_set(&cache->accounted_ns, now_ns);
	if (!before_ns || before_ns >= now_ns)
		return;
	bpf_for(i, 0, n) {
		struct cpu *cpu = cpu_of(i);
		if (!cpu || cpu->cache != id)
			continue;
		u32 gang = cpu->gang;
		here++;
		if (gang == NOBODY) {
			idle++;
			continue;
		}
		off += gang != cache->gang;
		if (first == NOBODY)
			first = gang;
		else if (gang != first)
			mixed = 1;
	}
	u64 ns = now_ns - before_ns;
	if (idle == here)
		__sync_fetch_and_add(&cache->idle_ns, ns);
	else if (mixed)
		__sync_fetch_and_add(&cache->mixed_ns, ns);
	else if (off)
		__sync_fetch_and_add(&cache->off_turn_ns, ns);
	else if (idle)
		__sync_fetch_and_add(&cache->partly_idle_ns, ns);
	else
		__sync_fetch_and_add(&cache->turn_ns, ns);
}
