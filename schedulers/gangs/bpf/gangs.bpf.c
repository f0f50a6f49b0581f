// SPDX-License-Identifier: GPL-2.0-only
// A gang scheduler on sched_ext. The tasks of one gang run at the same time on the CPUs of one last-level cache; gangs
// that disturb each other take turns. Each cache has one queue per gang, and a timer that ends turns.
#include "turns.h"

char _license[] SEC("license") = "GPL";

SEC("struct_ops/select_cpu")
s32 BPF_PROG(gangs_select_cpu, struct task_struct *p, s32 prev_cpu, u64 wake_flags)
{
	bool idle = false;
	struct task *t = task_of(p);
	s32 cpu = scx_bpf_select_cpu_dfl(p, prev_cpu, wake_flags, &idle);
	u32 id = cache_id(cpu);
	struct cache *cache = cache_of(id);

	if (idle && t && cache && may_run(&t->place, id, cache)) {
		t->waits_since_ns = bpf_ktime_get_ns();
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, t->place.gang == UNPLANNED ? UNPLANNED_SLICE_NS : cache->slice_ns, 0);
	}
	return cpu;
}

/* Wakes an idle CPU of the cache, or else reclaims one that fills the gang's own turn. */
static void wake_cpu(u32 id, struct cache *cache, u32 gang)
{
	s32 i, n = cpu_count();

	bpf_for(i, 0, n) {
		struct cpu *cpu = cpu_of(i);
		if (cpu && cpu->cache == id && scx_bpf_test_and_clear_cpu_idle(i)) {
			scx_bpf_kick_cpu(i, SCX_KICK_IDLE);
			return;
		}
	}
	if (gang != cache->gang)
		return;
	bpf_for(i, 0, n) {
		struct cpu *cpu = cpu_of(i);
		if (cpu && cpu->cache == id && cpu->gang < MAX_GANGS && cpu->gang != gang) {
			scx_bpf_kick_cpu(i, SCX_KICK_PREEMPT);
			return;
		}
	}
}

SEC("struct_ops/enqueue")
void BPF_PROG(gangs_enqueue, struct task_struct *p, u64 enq_flags)
{
	struct task *t = task_of(p);
	u32 id = cache_id(scx_bpf_task_cpu(p)), gang = UNPLANNED;
	u64 slice_ns = UNPLANNED_SLICE_NS, vtime = 0;

	if (t) {
		gang = t->place.gang;
		if (!t->waits_since_ns)
			t->waits_since_ns = bpf_ktime_get_ns();
	}
	if (gang == UNPLANNED && ((p->flags & PF_KTHREAD) || p->nr_cpus_allowed == 1)) {
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, slice_ns, enq_flags);
		return;
	}
	if (t)
		id = home(p, &t->place);
	u32 key = QUEUE(id, gang);
	struct queue *queue = bpf_map_lookup_elem(&queues, &key);
	struct cache *cache = cache_of(id);
	if (!cache)
		return;
	if (gang != UNPLANNED)
		slice_ns = cache->slice_ns;
	if (t && queue) {
		/* A task that slept keeps a lead of at most one slice. */
		if ((s64)(t->vtime + slice_ns - queue->vtime) < 0)
			t->vtime = queue->vtime - slice_ns;
		vtime = t->vtime;
	}
	scx_bpf_dsq_insert_vtime(p, QUEUE(id, gang), slice_ns, vtime, enq_flags);
	if (t && may_run(&t->place, id, cache))
		wake_cpu(id, cache, gang);
}

/* Continues the task that ran, if it still may run. */
static bool go_on(struct task_struct *prev, u32 id, struct cache *cache, bool fill)
{
	if (!prev || !(prev->scx.flags & SCX_TASK_QUEUED))
		return false;
	struct task *t = task_of(prev);
	if (!t || !may_run(&t->place, id, cache) || (!fill && t->place.gang != cache->gang))
		return false;
	prev->scx.slice = t->place.gang == UNPLANNED ? UNPLANNED_SLICE_NS : cache->slice_ns;
	return true;
}

static bool fill(u32 id, struct cache *cache)
{
	s32 gang;

	bpf_for(gang, 0, MAX_GANGS) {
		if (!(cache->may_fill & (1u << (gang & 31))) || gang == (s32)cache->gang)
			continue;
		if (move_to_local(QUEUE(id, gang))) {
			__sync_fetch_and_add(&cache->fills, 1);
			return true;
		}
	}
	return false;
}

/* First a task that waited too long; then, on every other pick, an unplanned task; then a task of the gang whose turn it
 * is; on the other picks then an unplanned task; then a task that may fill. No other task: with SCX_OPS_ENQ_LAST the CPU
 * idles rather than run a task out of turn. */
SEC("struct_ops/dispatch")
void BPF_PROG(gangs_dispatch, s32 cpu, struct task_struct *prev)
{
	u32 id = cache_id(cpu);
	struct cache *cache = cache_of(id);
	struct cpu *here = cpu_of(cpu);
	bool unplanned_ran;

	if (!cache || !here)
		return;
	rescue(id, cache);
	if (move_to_local(QUEUE(id, RESCUE)))
		return;
	unplanned_ran = here->last == UNPLANNED;
	if (!unplanned_ran && move_to_local(QUEUE(id, UNPLANNED)))
		return;
	if (cache->gang < MAX_GANGS && move_to_local(QUEUE(id, cache->gang)))
		return;
	if (go_on(prev, id, cache, false))
		return;
	if (unplanned_ran && move_to_local(QUEUE(id, UNPLANNED)))
		return;
	if (!fill(id, cache))
		go_on(prev, id, cache, true);
}

SEC("struct_ops/running")
void BPF_PROG(gangs_running, struct task_struct *p)
{
	s32 cpu = scx_bpf_task_cpu(p);
	u64 now_ns = bpf_ktime_get_ns();
	struct cpu *here = cpu_of(cpu);
	struct task *t = task_of(p);

	if (!here || !t)
		return;
	account(here->cache, now_ns);
	here->gang = here->last = t->place.gang;
	struct cache *cache = cache_of(here->cache);
	u64 wait_ns = t->waits_since_ns && now_ns > t->waits_since_ns ? now_ns - t->waits_since_ns : 0;
	if (cache && t->place.gang != UNPLANNED && wait_ns > cache->longest_wait_ns)
		cache->longest_wait_ns = wait_ns;
	t->waits_since_ns = 0;
	t->runs_since_ns = now_ns;
	u32 key = QUEUE(here->cache, t->place.gang);
	struct queue *queue = bpf_map_lookup_elem(&queues, &key);
	if (queue && (s64)(t->vtime - queue->vtime) > 0)
		queue->vtime = t->vtime;
}

SEC("struct_ops/stopping")
void BPF_PROG(gangs_stopping, struct task_struct *p, bool runnable)
{
	s32 cpu = scx_bpf_task_cpu(p);
	u64 now_ns = bpf_ktime_get_ns();
	struct cpu *here = cpu_of(cpu);
	struct task *t = task_of(p);

	if (!here || !t)
		return;
	account(here->cache, now_ns);
	here->gang = NOBODY;
	if (t->runs_since_ns && now_ns > t->runs_since_ns)
		t->vtime += (now_ns - t->runs_since_ns) * 100 / (t->place.weight ? t->place.weight : 100);
	t->runs_since_ns = 0;
	t->waits_since_ns = runnable ? now_ns : 0;
}

/* A higher class takes the CPU: tasks that wait only for this CPU may go elsewhere. Without
 * SCX_OPS_ENQ_MIGRATION_DISABLED the kernel would requeue the task that was just preempted at once, because this program
 * disables its migration. */
SEC("struct_ops/cpu_release")
void BPF_PROG(gangs_cpu_release, s32 cpu, struct scx_cpu_release_args *args)
{
	struct cpu *here = cpu_of(cpu);

	if (here && !here->taken_at_ns)
		here->taken_at_ns = bpf_ktime_get_ns();
	scx_bpf_reenqueue_local();
}

SEC("struct_ops/cpu_acquire")
void BPF_PROG(gangs_cpu_acquire, s32 cpu, struct scx_cpu_acquire_args *args)
{
	struct cpu *here = cpu_of(cpu);

	if (!here || !here->taken_at_ns)
		return;
	here->taken_ns += bpf_ktime_get_ns() - here->taken_at_ns;
	here->taken_at_ns = 0;
}

SEC("struct_ops.s/init_task")
s32 BPF_PROG(gangs_init_task, struct task_struct *p, struct scx_init_task_args *args)
{
	return adopt(p, args->fork);
}

/* A task is adopted: it has not waited here before. */
SEC("struct_ops/enable")
void BPF_PROG(gangs_enable, struct task_struct *p)
{
	struct task *t = task_of(p);

	if (t)
		t->waits_since_ns = t->runs_since_ns = 0;
}

SEC("struct_ops.s/init")
s32 BPF_PROG(gangs_init)
{
	struct machine *m = the_machine();
	s32 cpu, cache, queue, error;

	if (!m)
		return -ENOENT;
	bpf_for(cpu, 0, m->cpus) {
		struct cpu *c = cpu_of(cpu);
		if (c)
			c->gang = c->last = NOBODY;
	}
	bpf_for(cache, 0, m->caches) {
		bpf_for(queue, 0, QUEUES) {
			error = scx_bpf_create_dsq(QUEUE(cache, queue), -1);
			if (error)
				return error;
		}
		error = start_turns(cache);
		if (error)
			return error;
	}
	return 0;
}

SEC("struct_ops/exit")
void BPF_PROG(gangs_exit, struct scx_exit_info *info)
{
	struct machine *m = the_machine();

	if (!m)
		return;
	m->exit_code = info->exit_code;
	m->exit_kind = info->kind;
}

/* Without cpu_online and cpu_offline, the kernel ends the scheduler at a hotplug, and the loader restarts it. */
#define OPERATIONS(more_flags)                                                                    \
	{                                                                                         \
		.select_cpu = (void *)gangs_select_cpu, .enqueue = (void *)gangs_enqueue,         \
		.dispatch = (void *)gangs_dispatch, .running = (void *)gangs_running,             \
		.stopping = (void *)gangs_stopping, .cpu_acquire = (void *)gangs_cpu_acquire,     \
		.cpu_release = (void *)gangs_cpu_release, .init_task = (void *)gangs_init_task,   \
		.enable = (void *)gangs_enable, .init = (void *)gangs_init, .exit = (void *)gangs_exit,                           \
		.flags = SCX_OPS_ENQ_LAST | SCX_OPS_ENQ_MIGRATION_DISABLED | (more_flags),        \
		.timeout_ms = 10000, .name = "gangs",                                             \
	}

/* The loader attaches one of the two: only tasks of policy 7, or all tasks. */
SEC(".struct_ops.link")
struct sched_ext_ops gangs_managed = OPERATIONS(SCX_OPS_SWITCH_PARTIAL);
SEC(".struct_ops.link")
struct sched_ext_ops gangs_all = OPERATIONS(0);
