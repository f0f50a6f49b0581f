/* SPDX-License-Identifier: GPL-2.0-only */
/* Only the types and functions of the kernel that are used. Fields are resolved by name when the object is loaded
 * (CO-RE), so that no header of the kernel or of another scheduler is needed. Sources: Linux 6.18,
 * include/linux/sched/ext.h and kernel/sched/ext_internal.h. */
#pragma once

typedef unsigned char __u8;
typedef signed char __s8;
typedef unsigned short __u16;
typedef short __s16;
typedef unsigned int __u32;
typedef int __s32;
typedef unsigned long long __u64;
typedef long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;
typedef __u32 u32;
typedef __s32 s32;
typedef __u64 u64;
typedef __s64 s64;
typedef _Bool bool;
#define true 1
#define false 0
#define NULL ((void *)0)

/* enum bpf_map_type and flags of include/uapi/linux/bpf.h */
#define BPF_MAP_TYPE_HASH 1
#define BPF_MAP_TYPE_ARRAY 2
#define BPF_MAP_TYPE_TASK_STORAGE 29
#define BPF_F_NO_PREALLOC 1
#define BPF_LOCAL_STORAGE_GET_F_CREATE 1
#define BPF_F_TIMER_ABS 1
#define CLOCK_MONOTONIC 1
#define EEXIST 17
#define EBUSY 16
#define ENOENT 2
#define ENOMEM 12

struct bpf_timer {
	__u64 opaque[2];
} __attribute__((aligned(8)));
struct bpf_iter_num {
	__u64 opaque[1];
} __attribute__((aligned(8)));
struct bpf_iter_scx_dsq {
	__u64 opaque[6];
} __attribute__((aligned(8)));

#define FOUND_BY_NAME __attribute__((preserve_access_index))

struct sched_ext_entity {
	u64 slice;
	u32 flags;
} FOUND_BY_NAME;

struct task_struct {
	unsigned int flags;
	int nr_cpus_allowed;
	s32 pid;
	s32 tgid;
	struct sched_ext_entity scx;
} FOUND_BY_NAME;

enum scx_exit_kind { SCX_EXIT_NONE = 0 };
struct scx_exit_info {
	enum scx_exit_kind kind;
	s64 exit_code;
} FOUND_BY_NAME;

struct scx_init_task_args {
	bool fork;
} FOUND_BY_NAME;
struct scx_cpu_acquire_args;
struct scx_cpu_release_args;

/* Members are matched with the kernel's by name and size; members that are not set here may be omitted. */
struct sched_ext_ops {
	s32 (*select_cpu)(struct task_struct *p, s32 prev_cpu, u64 wake_flags);
	void (*enqueue)(struct task_struct *p, u64 enq_flags);
	void (*dispatch)(s32 cpu, struct task_struct *prev);
	void (*running)(struct task_struct *p);
	void (*stopping)(struct task_struct *p, bool runnable);
	void (*cpu_acquire)(s32 cpu, struct scx_cpu_acquire_args *args);
	void (*cpu_release)(s32 cpu, struct scx_cpu_release_args *args);
	s32 (*init_task)(struct task_struct *p, struct scx_init_task_args *args);
	void (*enable)(struct task_struct *p);
	s32 (*init)(void);
	void (*exit)(struct scx_exit_info *info);
	u64 flags;
	u32 timeout_ms;
	char name[128];
};

#define SCX_DSQ_LOCAL ((1ULL << 63) | 2)
#define SCX_OPS_ENQ_LAST (1ULL << 1)
#define SCX_OPS_SWITCH_PARTIAL (1ULL << 3)
#define SCX_OPS_ENQ_MIGRATION_DISABLED (1ULL << 4)
#define SCX_KICK_IDLE (1ULL << 0)
#define SCX_KICK_PREEMPT (1ULL << 1)
#define SCX_TASK_QUEUED (1U << 0)
#define PF_KTHREAD 0x00200000

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

s32 scx_bpf_create_dsq(u64 dsq_id, s32 node) __ksym;
void scx_bpf_kick_cpu(s32 cpu, u64 flags) __ksym;
s32 scx_bpf_dsq_nr_queued(u64 dsq_id) __ksym;
s32 scx_bpf_select_cpu_dfl(struct task_struct *p, s32 prev_cpu, u64 wake_flags, bool *is_idle) __ksym;
bool scx_bpf_test_and_clear_cpu_idle(s32 cpu) __ksym;
s32 scx_bpf_task_cpu(const struct task_struct *p) __ksym;
void scx_bpf_dsq_insert(struct task_struct *p, u64 dsq_id, u64 slice, u64 enq_flags) __ksym;
void scx_bpf_dsq_insert_vtime(struct task_struct *p, u64 dsq_id, u64 slice, u64 vtime, u64 enq_flags) __ksym;
bool scx_bpf_dsq_move(struct bpf_iter_scx_dsq *it__iter, struct task_struct *p, u64 dsq_id, u64 enq_flags) __ksym;
void scx_bpf_dsq_move_set_slice(struct bpf_iter_scx_dsq *it__iter, u64 slice) __ksym;
int bpf_iter_scx_dsq_new(struct bpf_iter_scx_dsq *it, u64 dsq_id, u64 flags) __ksym;
struct task_struct *bpf_iter_scx_dsq_next(struct bpf_iter_scx_dsq *it) __ksym;
void bpf_iter_scx_dsq_destroy(struct bpf_iter_scx_dsq *it) __ksym;
u32 scx_bpf_reenqueue_local(void) __ksym;

/* From 7.1 on, the second form takes the flags of the move; the first one may be removed. */
bool scx_bpf_dsq_move_to_local(u64 dsq_id) __ksym __weak;
bool scx_bpf_dsq_move_to_local___v2___flags(u64 dsq_id, u64 enq_flags) __ksym __weak;

static bool move_to_local(u64 dsq_id)
{
	if (bpf_ksym_exists(scx_bpf_dsq_move_to_local___v2___flags))
		return scx_bpf_dsq_move_to_local___v2___flags(dsq_id, 0);
	if (bpf_ksym_exists(scx_bpf_dsq_move_to_local))
		return scx_bpf_dsq_move_to_local(dsq_id);
	return false;
}
