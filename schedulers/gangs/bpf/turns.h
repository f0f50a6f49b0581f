/* SPDX-License-Identifier: GPL-2.0-only */
/* Turns, with one timer per cache. */
#pragma once
#include "account.h"
#include "rescue.h"

/* Every waiting task of a gang gets a part of the turn; a gang larger than its number of CPUs divides the turn. */
static u64 slice_within(u64 turn_ns, u32 waiting, u32 cpus)
{
	u64 slice_ns = waiting > cpus ? turn_ns * cpus / waiting : turn_ns;
	if (slice_ns > LONGEST_SLICE_NS)
		slice_ns = LONGEST_SLICE_NS;
	return slice_ns < SHORTEST_SLICE_NS ? SHORTEST_SLICE_NS : slice_ns;
}

/* Switches to the next gang that has a waiting task. Returns the length of its turn. */
static u64 take_turn(u32 id, struct cache *cache, struct rotation *rotation, u64 now_generation, u32 cpus)
{
	u32 n = rotation->turns, at, from = cache->position;
	bool fresh = cache->generation != now_generation;
	s32 i;

	cache->generation = now_generation;
	if (!n || n > MAX_GANGS) {
		cache->gang = NOBODY;
		cache->may_fill = 0;
		return NO_PLAN_TURN_NS;
	}
	if (fresh || from >= n)
		from = n - 1;
	at = from;
	bpf_for(i, 1, MAX_GANGS + 1) {
		u32 next = from + i;
		if (next >= n)
			next -= n;
		barrier_var(next); /* the verifier does not see the bounds that clang infers */
		if (i > (s32)n || next >= MAX_GANGS)
			break;
		if (scx_bpf_dsq_nr_queued(QUEUE(id, rotation->turn[next].gang)) > 0) {
			at = next;
			break;
		}
	}
	barrier_var(at);
	if (at >= MAX_GANGS)
		at = 0;
	struct turn *turn = &rotation->turn[at];
	if (cache->gang != turn->gang)
		cache->turns++;
	cache->position = at;
	cache->gang = turn->gang;
	cache->may_fill = turn->may_fill;
	cache->slice_ns = slice_within(turn->length_ns, scx_bpf_dsq_nr_queued(QUEUE(id, turn->gang)), cpus);
	return turn->length_ns;
}

/* Reclaims CPUs that run a task that may not run now; those of fillers only as far as the gang needs them. */
static void hand_over(u32 id, struct cache *cache, s32 wanted)
{
	s32 i, n = cpu_count();

	bpf_for(i, 0, n) {
		struct cpu *cpu = cpu_of(i);
		if (!cpu || cpu->cache != id || cpu->gang == cache->gang || cpu->gang == UNPLANNED)
			continue;
		bool fills = cpu->gang != NOBODY && (cache->may_fill & (1u << (cpu->gang & 31)));
		if (fills && wanted <= 0)
			continue;
		wanted--;
		scx_bpf_kick_cpu(i, cpu->gang == NOBODY ? SCX_KICK_IDLE : SCX_KICK_PREEMPT);
		cache->kicks++;
	}
}

static u32 cpus_at(u32 id)
{
	s32 i, n = cpu_count();
	u32 here = unknown_zero();

	bpf_for(i, 0, n) {
		struct cpu *cpu = cpu_of(i);
		here += cpu && cpu->cache == id;
	}
	return here ? here : 1;
}

static int on_turn(void *map, u32 *key, struct turn_timer *timer)
{
	u32 id = *key;
	u64 now_ns = bpf_ktime_get_ns(), now_generation = current_generation();
	struct cache *cache = cache_of(id);
	struct rotation *rotation = id < MAX_CACHES ? rotation_of(id, now_generation) : NULL;

	if (!cache || !rotation)
		return 0;
	if (now_ns > cache->next_ns && now_ns - cache->next_ns > cache->latest_ns)
		cache->latest_ns = now_ns - cache->next_ns;
	account(id, now_ns);
	cache->rescue_due = 1;
	u64 length_ns = take_turn(id, cache, rotation, now_generation, cpus_at(id));
	hand_over(id, cache, scx_bpf_dsq_nr_queued(QUEUE(id, cache->gang & 31)));
	cache->next_ns += length_ns;
	if (cache->next_ns <= now_ns)
		cache->next_ns = now_ns + length_ns;
	bpf_timer_start(&timer->timer, cache->next_ns, BPF_F_TIMER_ABS);
	return 0;
}

static s32 start_turns(u32 id)
{
	struct turn_timer *timer = bpf_map_lookup_elem(&timers, &id);
	struct cache *cache = cache_of(id);

	if (!timer || !cache)
		return -ENOENT;
	cache->gang = NOBODY;
	cache->generation = ~0ULL;
	cache->slice_ns = LONGEST_SLICE_NS;
	cache->next_ns = bpf_ktime_get_ns() + MS;
	bpf_timer_init(&timer->timer, &timers, CLOCK_MONOTONIC);
	bpf_timer_set_callback(&timer->timer, on_turn);
	return bpf_timer_start(&timer->timer, cache->next_ns, BPF_F_TIMER_ABS);
}
