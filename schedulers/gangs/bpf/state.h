/* SPDX-License-Identifier: GPL-2.0-only */
/* The maps, which the loader writes and reads back. src/maps.rs has the same layouts. */
#pragma once
#include "kernel.h"

#define MAX_CPUS 512
#define MAX_CACHES 32
#define QUEUES 32		  /* of one cache */
#define MAX_GANGS 30		  /* gangs have the numbers below */
#define UNPLANNED 30		  /* tasks that no plan names */
#define RESCUE 31		  /* tasks that waited too long; served before all others */
#define NOBODY 0xffffffffu
#define QUEUE(cache, gang) ((u64)(cache) * QUEUES + (gang))

#define MS 1000000ULL
#define RESCUE_SLICE_NS (1 * MS)
#define UNPLANNED_SLICE_NS (2 * MS)
#define LONGEST_SLICE_NS (5 * MS)
#define SHORTEST_SLICE_NS (MS / 2)
#define NO_PLAN_TURN_NS (20 * MS)

/* One array of one type: the only entries that are not per task. */
#define ARRAY(name, value_type, entries)           \
	struct {                                   \
		__uint(type, BPF_MAP_TYPE_ARRAY);  \
		__uint(max_entries, entries);      \
		__type(key, u32);                  \
		__type(value, value_type);         \
	} name SEC(".maps")

/* Written before attaching. */
struct machine {
	u32 cpus;
	u32 caches;
	u32 exit_kind; /* by the kernel at the end */
	u32 zero; /* always 0, which the verifier must not see: see unknown_zero() */
	s64 exit_code;
};
ARRAY(machine, struct machine, 1);

/* The generation in force. Its lowest bit selects the half of the plan in force: the loader fills the other half and
 * then writes this one word. */
ARRAY(generation, u64, 1);

struct place_key {
	u32 kind; /* 0 a thread, 1 a process */
	u32 id;
};
struct place {
	u32 gang;
	u32 caches; /* one bit each */
	u32 weight;
	u32 children;
};
#define PLACES(name)                                      \
	struct {                                          \
		__uint(type, BPF_MAP_TYPE_HASH);          \
		__uint(map_flags, BPF_F_NO_PREALLOC);     \
		__uint(max_entries, 65536);               \
		__type(key, struct place_key);            \
		__type(value, struct place);              \
	} name SEC(".maps")
PLACES(places_even);
PLACES(places_odd);

struct turn {
	u64 length_ns;
	u32 gang;
	u32 may_fill; /* gangs that may use CPUs that this one leaves idle, one bit each */
};
struct rotation {
	u32 turns;
	u32 pad;
	u64 length_ns;
	struct turn turn[MAX_GANGS];
};
ARRAY(rotations, struct rotation, 2 * MAX_CACHES);

struct cpu {
	u32 cache; /* written before attaching */
	u32 gang;  /* the one that runs now */
	u32 last;  /* the one that ran last */
	u32 pad;
	u64 taken_at_ns; /* time since which a higher class has it; 0 if none has */
	u64 taken_ns;
};
ARRAY(cpus, struct cpu, MAX_CPUS);

struct cache {
	u32 gang; /* whose turn it is */
	u32 may_fill;
	u32 position; /* in the rotation */
	u32 rescue_due;
	u64 generation; /* of the rotation that contains the turn */
	u64 slice_ns;	/* within the turn */
	u64 next_ns;	/* when the turn ends */
	u64 accounted_ns;
	u64 turns, kicks, rescued, fills;
	u64 latest_ns; /* maximum delay of the timer */
	u64 longest_wait_ns;
	u64 turn_ns, mixed_ns, off_turn_ns, partly_idle_ns, idle_ns;
};
ARRAY(caches, struct cache, MAX_CACHES);

struct queue {
	u64 vtime;
};
ARRAY(queues, struct queue, MAX_CACHES *QUEUES);

struct task {
	u64 generation; /* of the plan that gave the place */
	struct place place;
	u32 heir_of; /* the process whose place it takes if it has none of its own */
	u32 pad;
	u64 vtime;
	u64 waits_since_ns;
	u64 runs_since_ns;
};
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct task);
} tasks SEC(".maps");

struct turn_timer {
	struct bpf_timer timer;
};
ARRAY(timers, struct turn_timer, MAX_CACHES);

static struct machine *the_machine(void)
{
	u32 zero = 0;
	return bpf_map_lookup_elem(&machine, &zero);
}
static u32 cpu_count(void)
{
	struct machine *m = the_machine();
	return m ? m->cpus : 0;
}
/* Initial value of loop counters. From a known 0, the verifier would follow each of their values separately, for every
 * CPU, and give up after a million instructions. */
static u32 unknown_zero(void)
{
	struct machine *m = the_machine();
	return m ? m->zero : 0;
}
static u64 current_generation(void)
{
	u32 zero = 0;
	u64 *g = bpf_map_lookup_elem(&generation, &zero);
	return g ? *g : 0;
}
static struct cpu *cpu_of(u32 cpu)
{
	return bpf_map_lookup_elem(&cpus, &cpu);
}
static struct cache *cache_of(u32 cache)
{
	return bpf_map_lookup_elem(&caches, &cache);
}
static u32 cache_id(s32 cpu)
{
	struct cpu *c = cpu_of(cpu);
	return c && c->cache < MAX_CACHES ? c->cache : 0;
}
