/* SPDX-License-Identifier: GPL-2.0-or-later
 * The guest's own time: every virtual CPU has a clock of its own, in cycles, and a misses' cycles are added to it.
 *
 * A clock is `base + pace x *run`. QEMU adds each block's instructions to `*run` inline; where it reaches CLOCK_LIMIT the CPU
 * calls clock_sync. So only one CPU runs at a time, the holder of the token, and it may be a quantum ahead of the slowest
 * one that wants to run; then that one gets the token. The emulator's main thread sees the minimum of all. Where
 * everybody sleeps, time jumps to the next timer. Knows nothing of QEMU: threads call it, a test's or QEMU's. */
#ifndef CLOCK_H
#define CLOCK_H
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "config.h"

#define CLOCK_LIMIT (1ull << 40)
#define CLOCK_NEVER UINT64_MAX
#define CLOCK_MAIN (-1)

/* The calls of the C library that lie under the shim, and the host's clock. */
struct clock_host {
	int (*wait)(pthread_cond_t *, pthread_mutex_t *);
	int (*timedwait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
	int (*signal)(pthread_cond_t *);
	int (*broadcast)(pthread_cond_t *);
	int (*gettime)(clockid_t, struct timespec *);
	void (*wake_main)(void); /* interrupts the main thread's wait for files and timers */
	bool (*is_ready)(int cpu); /* whether that CPU's thread, or CLOCK_MAIN's, has work and no processor; may be NULL */
};

enum ahead { AHEAD_SHARED, AHEAD_PAUSE, AHEAD_TSC };

void clock_start(const struct config *, const struct clock_host *);
/* A virtual CPU's thread begins; `run` is its counter. */
void clock_add(unsigned cpu, uint64_t *run);
uint64_t clock_now(unsigned cpu);
/* The CPU waits, for memory or by an instruction's own cost. */
void clock_stall(unsigned cpu, uint64_t cycles);
/* Its time without pauses. */
uint64_t clock_worked(unsigned cpu);
/* No CPU runs for so many cycles, and time passes: the guest is paused from outside. */
void clock_pause(unsigned cpu, uint64_t cycles);
/* At the limit. True: the CPU runs on because the token's holder is stuck on the host; what it does now is out of order,
 * and the model must not see it. */
bool clock_sync(unsigned cpu);
/* The next block calls clock_sync. */
void clock_stop_soon(unsigned cpu);
/* Lets others catch up, where the order of accesses matters. */
void clock_order(unsigned cpu, enum ahead);
/* A line moved: whoever spun for it has what he waited for. */
void clock_line_moved(unsigned cpu);
/* The CPU halts; the CPU goes on. */
void clock_idle(unsigned cpu);
void clock_resume(unsigned cpu);

/* For the shim. */
bool clock_is_running(unsigned cpu);
void clock_waits_on(unsigned cpu, pthread_cond_t *); /* what a halted CPU waits on */
void clock_woken(pthread_cond_t *);
uint64_t clock_main_now(void);
/* The main thread waits until `deadline` (cycles). Between begin and end: whether it is due, or (once no CPU wants to
 * run) jumped to. */
void clock_main_begin(uint64_t deadline);
void clock_main_end(void);
bool clock_main_due(uint64_t deadline);
bool clock_all_sleep(void);
bool clock_jump(uint64_t deadline);

struct clock_figures {
	uint64_t syncs, switches, stuck, starved, jumps, main_kicks, main_late;
};
struct clock_figures clock_figures(void);
#endif
