/* SPDX-License-Identifier: GPL-2.0-or-later
 * The clock with threads in the place of QEMU's: CPUs that compute, halt and are woken by timers of a main thread. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "../clock.h"
#include "../thread_state.h"
#include "check.h"

enum { CPUS = 4, SMALL_CPUS = 2, SMALL_PACE = 3, BLOCKS = 20000, BLOCK_CYCLES = 700, NAPS = 200, PAUSES = 10, PAUSE_QUANTA = 5 };

static struct config config;
static uint64_t run[CPUS];
static atomic_int running, out_of_order, done;
static atomic_bool woken[CPUS];
static pthread_mutex_t halt = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t halted[CPUS];
static atomic_uint_fast64_t timer[CPUS]; /* when the CPU is to be woken; 0 = not */
static pthread_mutex_t kicks = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t kick = PTHREAD_COND_INITIALIZER;
static int kicked;
static pid_t threads[CPUS], main_thread;

static bool is_ready(int cpu)
{
	return thread_is_ready(cpu == CLOCK_MAIN ? main_thread : threads[cpu]);
}

static void wake_main(void)
{
	pthread_mutex_lock(&kicks);
	kicked = 1;
	pthread_cond_signal(&kick);
	pthread_mutex_unlock(&kicks);
}

static uint64_t draw(uint64_t *state)
{
	*state = *state * 6364136223846793005ull + 1442695040888963407ull;
	return *state >> 33;
}

/* As QEMU's thread does it: idle callback, wait on the CPU's own condition, resume callback. */
static void nap(unsigned cpu, uint64_t cycles)
{
	uint64_t until = clock_now(cpu) + cycles;
	timer[cpu] = until;
	clock_idle(cpu);
	pthread_mutex_lock(&halt);
	while (!woken[cpu]) {
		clock_waits_on(cpu, &halted[cpu]);
		pthread_cond_wait(&halted[cpu], &halt);
	}
	woken[cpu] = false;
	pthread_mutex_unlock(&halt);
	clock_resume(cpu);
	HOLDS(clock_now(cpu) >= until);
	HOLDS(clock_now(cpu) < until + 40 * clock_cycles(&config, config.quantum_ns));
}

static void *vcpu(void *argument)
{
	unsigned cpu = (unsigned)(uintptr_t)argument;
	uint64_t state = cpu + 1, last = 0, quantum = clock_cycles(&config, config.quantum_ns);
	bool alone = true;
	threads[cpu] = gettid();
	clock_add(cpu, &run[cpu]);
	for (unsigned i = 0; i < BLOCKS; i++) {
		if (*(volatile uint64_t *)&run[cpu] >= CLOCK_LIMIT)
			alone = !clock_sync(cpu);
		if (alone) {
			HOLDS(running++ == 0);
			for (unsigned other = 0; other < CPUS; other++)
				if (clock_is_running(other))
					HOLDS(clock_now(cpu) <= clock_now(other) + quantum + SMALL_PACE * BLOCK_CYCLES);
			uint64_t began = clock_now(cpu), block = 1 + draw(&state) % (BLOCK_CYCLES - 100), stalled = draw(&state) % 100;
			*(volatile uint64_t *)&run[cpu] += block;
			clock_stall(cpu, stalled);
			HOLDS(clock_now(cpu) == began + block * (cpu < CPUS - SMALL_CPUS ? 1 : SMALL_PACE) + stalled);
			running--;
		} else {
			out_of_order++;
		}
		HOLDS(clock_now(cpu) >= last);
		last = clock_now(cpu);
		if (cpu == 0 && i % (BLOCKS / PAUSES) == 0) {
			uint64_t worked = clock_worked(cpu);
			clock_pause(cpu, PAUSE_QUANTA * quantum);
			HOLDS(clock_now(cpu) == last + PAUSE_QUANTA * quantum && clock_worked(cpu) == worked);
		}
		if (i % (BLOCKS / NAPS) == BLOCKS / NAPS - 1)
			nap(cpu, draw(&state) % 100000);
	}
	clock_idle(cpu);
	done++;
	wake_main();
	return NULL;
}

static uint64_t nearest_timer(void)
{
	uint64_t nearest = CLOCK_NEVER;
	for (unsigned cpu = 0; cpu < CPUS; cpu++)
		if (timer[cpu] && timer[cpu] < nearest)
			nearest = timer[cpu];
	return nearest;
}

static void fire(void)
{
	for (unsigned cpu = 0; cpu < CPUS; cpu++) {
		if (!timer[cpu] || timer[cpu] > clock_main_now())
			continue;
		timer[cpu] = 0;
		pthread_mutex_lock(&halt);
		woken[cpu] = true;
		clock_woken(&halted[cpu]);
		pthread_cond_broadcast(&halted[cpu]);
		pthread_mutex_unlock(&halt);
	}
}

static void sleep_a_little(void)
{
	struct timespec until;
	pthread_mutex_lock(&kicks);
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_nsec += 10000000;
	if (until.tv_nsec >= 1000000000) {
		until.tv_nsec -= 1000000000;
		until.tv_sec++;
	}
	if (!kicked)
		pthread_cond_timedwait(&kick, &kicks, &until);
	kicked = 0;
	pthread_mutex_unlock(&kicks);
}

int main(void)
{
	static const struct clock_host host = { pthread_cond_wait,	pthread_cond_timedwait, pthread_cond_signal,
						pthread_cond_broadcast, clock_gettime,		wake_main, is_ready };
	pthread_t started[CPUS];
	uint64_t last = 0;
	ASK("Does one CPU run at a time, never more than a quantum ahead; does time only go forward, do timers fire in time, does a pause reach all, and do small cores have their own pace?");
	main_thread = gettid();
	config_defaults(&config);
	config.small_cpus = SMALL_CPUS;
	config.small_instruction_cycles = SMALL_PACE;
	clock_start(&config, &host);
	for (unsigned cpu = 0; cpu < CPUS; cpu++) {
		pthread_cond_init(&halted[cpu], NULL);
		pthread_create(&started[cpu], NULL, vcpu, (void *)(uintptr_t)cpu);
	}
	while (done < CPUS) {
		uint64_t deadline = nearest_timer();
		clock_main_begin(deadline);
		while (done < CPUS && !clock_main_due(deadline) && nearest_timer() >= deadline)
			if (!(clock_all_sleep() && clock_jump(deadline)))
				sleep_a_little();
		clock_main_end();
		HOLDS(clock_main_now() >= last);
		last = clock_main_now();
		fire();
	}
	for (unsigned cpu = 0; cpu < CPUS; cpu++)
		pthread_join(started[cpu], NULL);
	struct clock_figures f = clock_figures();
	fprintf(stderr, "  %llu syncs, %llu switches, %llu jumps, %llu starved, %llu stuck (%d blocks out of order)\n",
		(unsigned long long)f.syncs, (unsigned long long)f.switches, (unsigned long long)f.jumps,
		(unsigned long long)f.starved, (unsigned long long)f.stuck, out_of_order);
	HOLDS(f.switches > CPUS && f.jumps > 0);
	fprintf(stderr, "%d failures\n", failures);
	return failures != 0;
}
