/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "clock.h"

#include <string.h>
#include <time.h>

enum {
	NOBODY = -1,
	STUCK_US = 3000,      /* the holder does not come back: one block of the waiting CPU may run */
	STUCK_NS = 2500000,
	PATIENCE = 300,	      /* waits for a thread that only lacks a processor of the host */
	MAIN_US = 2000,	      /* for the main thread to take a timer that is due */
	MAIN_TRIES = 4,
	WAKING_US = 500,      /* for a CPU that is just being woken */
	WAKING_TRIES = 2,
	RESUME_NS = 250,      /* an interrupt's way to a sleeping CPU */
	SPINS_PER_DOUBLING = 8,
};

struct vcpu {
	uint64_t *run; /* in instructions' times: `pace` cycles each */
	uint64_t base, pace;
	volatile bool there, runnable, idle, waking, pauses;
	pthread_cond_t *waits_on;
	pthread_cond_t turn;
	unsigned backoff, spins;
};

static struct config config;
static struct clock_host host;
static uint64_t quantum, ahead_cycles[3], resume_cycles;
static struct vcpu vcpus[CPUS_AT_MOST];
static unsigned count;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t main_event = PTHREAD_COND_INITIALIZER;
static volatile int holder = NOBODY;
static volatile uint64_t floor_cycles; /* time that has passed for everybody */
static volatile uint64_t paused_cycles;
static volatile bool main_waits;
static volatile uint64_t main_deadline = CLOCK_NEVER;
static struct clock_figures figures;

static inline uint64_t now_of(const struct vcpu *v)
{
	return v->base + v->pace * *(volatile uint64_t *)v->run;
}

static inline void allow(struct vcpu *v, uint64_t now, uint64_t cycles)
{
	uint64_t run = CLOCK_LIMIT - (cycles + v->pace - 1) / v->pace;
	v->base = now - v->pace * run;
	*(volatile uint64_t *)v->run = run;
}

void clock_start(const struct config *c, const struct clock_host *h)
{
	config = *c;
	host = *h;
	quantum = clock_cycles(c, c->quantum_ns);
	ahead_cycles[AHEAD_SHARED] = clock_cycles(c, c->shared_ahead_ns);
	ahead_cycles[AHEAD_PAUSE] = clock_cycles(c, c->pause_ahead_ns);
	ahead_cycles[AHEAD_TSC] = clock_cycles(c, c->tsc_ahead_ns);
	resume_cycles = clock_cycles(c, RESUME_NS);
}

void clock_add(unsigned cpu, uint64_t *run)
{
	struct vcpu *v = &vcpus[cpu];
	pthread_mutex_lock(&lock);
	pthread_cond_init(&v->turn, NULL);
	v->run = run;
	v->pace = config_core(&config, cpu).instruction_cycles;
	allow(v, floor_cycles, 0);
	v->there = true;
	if (cpu >= count)
		count = cpu + 1;
	pthread_mutex_unlock(&lock);
}

uint64_t clock_now(unsigned cpu)
{
	return now_of(&vcpus[cpu]);
}

void clock_stall(unsigned cpu, uint64_t cycles)
{
	struct vcpu *v = &vcpus[cpu];
	if (v->pace > 1) {
		v->base += cycles % v->pace;
		cycles /= v->pace;
	}
	*(volatile uint64_t *)v->run += cycles;
}

uint64_t clock_worked(unsigned cpu)
{
	return clock_now(cpu) - paused_cycles;
}

bool clock_is_running(unsigned cpu)
{
	return vcpus[cpu].runnable;
}

static void wait_us(pthread_cond_t *on, unsigned us)
{
	struct timespec until;
	host.gettime(CLOCK_REALTIME, &until);
	until.tv_nsec += us * 1000L;
	if (until.tv_nsec >= 1000000000) {
		until.tv_nsec -= 1000000000;
		until.tv_sec++;
	}
	host.timedwait(on, &lock, &until);
}

static uint64_t host_ns(void)
{
	struct timespec t;
	host.gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Whether a thread that somebody waited for in vain would go on if the host had a processor for it. */
static bool only_starved(int cpu, unsigned *waits)
{
	if (!host.is_ready || ++*waits > PATIENCE || !host.is_ready(cpu))
		return false;
	figures.starved++;
	return true;
}

/* The runnable CPU, other than this one, that is farthest behind. */
static int slowest_but(int self, uint64_t *its_time)
{
	int found = NOBODY;
	*its_time = CLOCK_NEVER;
	for (int i = 0; i < (int)count; i++) {
		struct vcpu *v = &vcpus[i];
		if (i == self || !v->runnable)
			continue;
		uint64_t now = now_of(v);
		if (now < *its_time) {
			*its_time = now;
			found = i;
		}
	}
	return found;
}

static int who_is_waking(void)
{
	for (unsigned i = 0; i < count; i++)
		if (vcpus[i].waking)
			return (int)i;
	return NOBODY;
}

/* The holder waits for another thread of the emulator, and will come back by itself. */
static void pause_us(struct vcpu *v, unsigned us)
{
	v->pauses = true;
	wait_us(&main_event, us);
	v->pauses = false;
}

/* The token's holder: true = it goes on with a new allowance, false = the token went to somebody else. */
static bool hold(unsigned cpu, uint64_t now)
{
	struct vcpu *v = &vcpus[cpu];
	for (unsigned tries = 0, main_tries = 0, waits = 0;;) {
		uint64_t behind;
		int waking = who_is_waking();
		if (waking != NOBODY && (tries++ < WAKING_TRIES || only_starved(waking, &waits))) {
			pause_us(v, WAKING_US);
			continue;
		}
		int next = slowest_but((int)cpu, &behind);
		if (next != NOBODY && behind < now) {
			holder = next;
			figures.switches++;
			host.signal(&vcpus[next].turn);
			return false;
		}
		if (main_waits && now >= main_deadline &&
		    (main_tries++ < MAIN_TRIES || only_starved(CLOCK_MAIN, &waits))) {
			figures.main_kicks++;
			host.wake_main();
			pause_us(v, MAIN_US);
			figures.main_late += main_waits && now >= main_deadline;
			continue;
		}
		uint64_t until = now + quantum;
		if (behind != CLOCK_NEVER && behind + quantum < until)
			until = behind + quantum;
		if (main_waits && main_deadline > now && main_deadline < until)
			until = main_deadline;
		allow(v, now, until > now ? until - now : 1);
		return true;
	}
}

bool clock_sync(unsigned cpu)
{
	struct vcpu *v = &vcpus[cpu];
	pthread_mutex_lock(&lock);
	figures.syncs++;
	v->runnable = true;
	for (unsigned waits = 0;;) {
		if (holder == NOBODY)
			holder = (int)cpu;
		if (holder == (int)cpu && hold(cpu, now_of(v))) {
			pthread_mutex_unlock(&lock);
			return false;
		}
		while (holder != (int)cpu && holder != NOBODY) {
			uint64_t since = host_ns();
			wait_us(&v->turn, STUCK_US);
			if (holder == (int)cpu || holder == NOBODY || vcpus[holder].pauses)
				continue;
			if (host_ns() - since > STUCK_NS && !only_starved(holder, &waits)) {
				figures.stuck++;
				allow(v, now_of(v), 0); /* a pause may have moved it */
				pthread_mutex_unlock(&lock);
				return true;
			}
		}
	}
}

void clock_stop_soon(unsigned cpu)
{
	allow(&vcpus[cpu], clock_now(cpu), 0);
}

void clock_pause(unsigned cpu, uint64_t cycles)
{
	pthread_mutex_lock(&lock);
	for (unsigned i = 0; i < count; i++)
		vcpus[i].base += cycles;
	floor_cycles += cycles;
	paused_cycles += cycles;
	pthread_mutex_unlock(&lock);
	clock_stop_soon(cpu);
	host.wake_main();
}

void clock_order(unsigned cpu, enum ahead kind)
{
	struct vcpu *v = &vcpus[cpu];
	uint64_t now = now_of(v), ahead = ahead_cycles[kind] << v->backoff;
	for (unsigned i = 0; i < count; i++) {
		struct vcpu *other = &vcpus[i];
		if (i == cpu || !((other->runnable && now_of(other) + ahead < now) || other->waking))
			continue;
		if (!(++v->spins % SPINS_PER_DOUBLING) && v->backoff < config.backoff_doublings)
			v->backoff++;
		clock_sync(cpu);
		return;
	}
}

void clock_line_moved(unsigned cpu)
{
	vcpus[cpu].backoff = vcpus[cpu].spins = 0;
}

void clock_idle(unsigned cpu)
{
	struct vcpu *v = &vcpus[cpu];
	uint64_t behind;
	if (!v->there)
		return;
	pthread_mutex_lock(&lock);
	uint64_t now = now_of(v);
	v->runnable = v->waking = false;
	v->idle = true;
	int next = slowest_but((int)cpu, &behind);
	if (next == NOBODY && now > floor_cycles)
		floor_cycles = now;
	if (holder == (int)cpu) {
		holder = next;
		if (next != NOBODY)
			host.signal(&vcpus[next].turn);
	}
	allow(v, now, 0);
	pthread_mutex_unlock(&lock);
	if (next == NOBODY)
		host.wake_main();
}

void clock_resume(unsigned cpu)
{
	struct vcpu *v = &vcpus[cpu];
	if (!v->there)
		return;
	pthread_mutex_lock(&lock);
	uint64_t own = now_of(v), others = holder != NOBODY ? now_of(&vcpus[holder]) : floor_cycles;
	allow(v, (own > others ? own : others) + resume_cycles, 0);
	v->idle = v->waking = false;
	v->runnable = true;
	if (holder == NOBODY)
		holder = (int)cpu;
	host.broadcast(&main_event);
	pthread_mutex_unlock(&lock);
}

/* ---- the main thread ---- */

void clock_waits_on(unsigned cpu, pthread_cond_t *on)
{
	struct vcpu *v = &vcpus[cpu];
	if (!v->idle)
		return;
	pthread_mutex_lock(&lock);
	v->waits_on = on;
	v->waking = false;
	pthread_mutex_unlock(&lock);
	host.wake_main();
}

void clock_woken(pthread_cond_t *on)
{
	for (unsigned i = 0; i < count; i++)
		if (vcpus[i].idle && vcpus[i].waits_on == on)
			vcpus[i].waking = true;
}

uint64_t clock_main_now(void)
{
	uint64_t least;
	if (slowest_but(NOBODY, &least) != NOBODY && least > floor_cycles)
		floor_cycles = least;
	return floor_cycles;
}

void clock_main_begin(uint64_t deadline)
{
	pthread_mutex_lock(&lock);
	main_deadline = deadline;
	main_waits = true;
	host.broadcast(&main_event);
	pthread_mutex_unlock(&lock);
}

void clock_main_end(void)
{
	pthread_mutex_lock(&lock);
	main_waits = false;
	pthread_mutex_unlock(&lock);
}

bool clock_main_due(uint64_t deadline)
{
	pthread_mutex_lock(&lock);
	bool due = clock_main_now() >= deadline;
	pthread_mutex_unlock(&lock);
	return due;
}

static bool all_sleep(void)
{
	for (unsigned i = 0; i < count; i++)
		if (vcpus[i].there && (vcpus[i].runnable || vcpus[i].waking))
			return false;
	return true;
}

bool clock_all_sleep(void)
{
	pthread_mutex_lock(&lock);
	bool sleep = all_sleep();
	pthread_mutex_unlock(&lock);
	return sleep;
}

bool clock_jump(uint64_t deadline)
{
	pthread_mutex_lock(&lock);
	bool jump = all_sleep() && deadline != CLOCK_NEVER;
	if (jump) {
		floor_cycles = deadline > floor_cycles ? deadline : floor_cycles;
		figures.jumps++;
	}
	pthread_mutex_unlock(&lock);
	return jump;
}

struct clock_figures clock_figures(void)
{
	return figures;
}
