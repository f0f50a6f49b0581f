/* SPDX-License-Identifier: GPL-2.0-or-later */
#define _GNU_SOURCE
#include "shim.h"
#include "thread_state.h"

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
enum { FILES_AT_MOST = 63, MAIN_POLL_NS = 100000000 };

static int (*real_gettime)(clockid_t, struct timespec *);
static int (*real_ppoll)(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *);
static struct clock_host host;
static const struct config *config; /* set once the plugin is there: from then on time is the guest's */
static uint64_t start_ns;
static int wake_fd = -1;
static pid_t threads[CPUS_AT_MOST], main_thread;
static __thread int own_cpu = -1;
static __thread bool is_main;

/* cond_wait exists in two versions: the older one has another structure. */
__attribute__((constructor)) static void find_real(void)
{
	if (real_gettime)
		return;
	real_ppoll = dlsym(RTLD_NEXT, "ppoll");
	host.wait = dlvsym(RTLD_NEXT, "pthread_cond_wait", "GLIBC_2.3.2");
	host.timedwait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
	host.signal = dlvsym(RTLD_NEXT, "pthread_cond_signal", "GLIBC_2.3.2");
	host.broadcast = dlvsym(RTLD_NEXT, "pthread_cond_broadcast", "GLIBC_2.3.2");
	real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
	host.gettime = real_gettime;
}

static void wake_main(void)
{
	uint64_t one = 1;
	if (write(wake_fd, &one, sizeof one) < 0) {
		/* full: it will wake anyway */
	}
}

static bool is_ready(int cpu)
{
	return thread_is_ready(cpu == CLOCK_MAIN ? main_thread : threads[cpu]);
}

uint64_t shim_host_ns(clockid_t which)
{
	struct timespec t;
	real_gettime(which, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

bool shim_is_preloaded(void)
{
	return dlsym(RTLD_DEFAULT, "ppoll") == (void *)ppoll;
}

void shim_start(const struct config *c)
{
	find_real();
	wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	host.wake_main = wake_main;
	host.is_ready = is_ready;
	main_thread = gettid();
	start_ns = shim_host_ns(CLOCK_MONOTONIC);
	is_main = true;
	clock_start(c, &host);
	config = c;
}

void shim_vcpu_thread(unsigned cpu)
{
	own_cpu = (int)cpu;
	threads[cpu] = gettid();
}

EXPORTED int clock_gettime(clockid_t id, struct timespec *t)
{
	find_real();
	if (id != CLOCK_MONOTONIC || !config || (own_cpu < 0 && !is_main))
		return real_gettime(id, t);
	bool own = own_cpu >= 0 && clock_is_running((unsigned)own_cpu);
	uint64_t cycles = own ? clock_now((unsigned)own_cpu) : clock_main_now();
	uint64_t ns = start_ns + clock_ns(config, cycles);
	t->tv_sec = (time_t)(ns / 1000000000u);
	t->tv_nsec = (long)(ns % 1000000000u);
	return 0;
}

/* The main loop's wait, until a file is ready or the guest's time has come. */
static int wait_in_guest_time(struct pollfd *files, nfds_t count, uint64_t deadline, const sigset_t *mask)
{
	const struct timespec at_once = { 0, 0 }, a_while = { 0, MAIN_POLL_NS };
	struct pollfd own[FILES_AT_MOST + 1];
	int ready = 0;
	memcpy(own, files, count * sizeof *own);
	own[count].fd = wake_fd;
	own[count].events = POLLIN;
	clock_main_begin(deadline);
	while (!clock_main_due(deadline)) {
		own[count].revents = 0;
		if (clock_all_sleep()) {
			/* Nothing happens before the deadline unless a file is ready. */
			ready = real_ppoll(own, count + 1, deadline == CLOCK_NEVER ? NULL : &at_once, mask);
			if (ready == 0 && clock_jump(deadline))
				break;
		} else {
			ready = real_ppoll(own, count + 1, &a_while, mask);
		}
		if (ready > 0 && own[count].revents) {
			uint64_t kicks;
			if (read(wake_fd, &kicks, sizeof kicks) < 0) {
				/* another thread's kick was taken already */
			}
			ready--;
		}
		if (ready)
			break;
	}
	clock_main_end();
	if (ready > 0)
		memcpy(files, own, count * sizeof *own);
	else
		for (nfds_t i = 0; i < count; i++)
			files[i].revents = 0;
	return ready;
}

EXPORTED int ppoll(struct pollfd *files, nfds_t count, const struct timespec *wait, const sigset_t *mask)
{
	find_real();
	const struct timespec at_once = { 0, 0 };
	bool short_wait = wait && !wait->tv_sec && !wait->tv_nsec;
	if (!config || !is_main || short_wait || count > FILES_AT_MOST)
		return real_ppoll(files, count, wait, mask);
	int ready = real_ppoll(files, count, &at_once, mask);
	if (ready)
		return ready;
	uint64_t deadline = CLOCK_NEVER;
	if (wait)
		deadline = clock_main_now() + 1 +
			   clock_cycles(config, (uint64_t)wait->tv_sec * 1000000000u + (uint64_t)wait->tv_nsec);
	return wait_in_guest_time(files, count, deadline, mask);
}

EXPORTED int __ppoll_chk(struct pollfd *files, nfds_t count, const struct timespec *wait, const sigset_t *mask, size_t size)
{
	(void)size;
	return ppoll(files, count, wait, mask);
}

EXPORTED int pthread_cond_wait(pthread_cond_t *on, pthread_mutex_t *mutex)
{
	find_real();
	if (own_cpu >= 0)
		clock_waits_on((unsigned)own_cpu, on);
	return host.wait(on, mutex);
}

EXPORTED int pthread_cond_broadcast(pthread_cond_t *on)
{
	find_real();
	if (config)
		clock_woken(on);
	return host.broadcast(on);
}
