/* What runs in the lab's guest besides busybox and cachemate: programs of known behavior, and the guest's side of the
 * machine (lab/machine/guest.h). Results go to standard output as "name<TAB>value" pairs, one line for each program. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/perf_event.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../machine/guest.h"
#include "../../packaging/cachemate-progress.h"

enum { LINE = 64, STEPS_AT_ONCE = 4096 };
/* Of the machine's counts (lab/machine/cache.h). */
enum { L2_MISSES = 2, L3_MISSES = 3, TRANSFERS_OTHER = 9, PREFETCH_MISSES = 14 };

static _Noreturn void fail(const char *what)
{
	fprintf(stderr, "lab-program: %s: %s\n", what, strerror(errno));
	exit(2);
}

static double now_s(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double own_cpu_s(void)
{
	struct timespec t;
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* -1 = anywhere */
static void stay_on(int cpu)
{
	cpu_set_t set;
	if (cpu < 0)
		return;
	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof set, &set))
		fail("sched_setaffinity");
}

/* ---- the machine ---- */

static uint64_t ask(uint64_t leaf, uint64_t rbx, uint64_t rcx, uint64_t *l3)
{
	uint64_t rax = leaf, rdx;
	__asm__ volatile("cpuid" : "+a"(rax), "+b"(rbx), "+c"(rcx), "=d"(rdx));
	if (l3)
		*l3 = (uint32_t)rbx;
	return rdx << 32 | (uint32_t)rax;
}

static uint64_t symbol(const char *wanted)
{
	char line[512], name[256];
	unsigned long long address, found = 0;
	FILE *f = fopen("/proc/kallsyms", "r");
	if (!f)
		fail("/proc/kallsyms");
	while (!found && fgets(line, sizeof line, f))
		if (sscanf(line, "%llx %*c %255s", &address, name) == 2 && !strcmp(name, wanted))
			found = address;
	fclose(f);
	return found;
}

/* The kernel's own description of its types (Documentation/bpf/btf.rst). */
struct btf_header {
	uint16_t magic;
	uint8_t version, flags;
	uint32_t header_bytes, types_at, types_bytes, strings_at, strings_bytes;
};
struct btf_type {
	uint32_t name, info, size_or_type;
};
struct btf_member {
	uint32_t name, type, offset;
};

static size_t after_type(uint32_t info)
{
	static const size_t each[20] = { [3] = 12, [4] = 12, [5] = 12, [6] = 8, [13] = 8, [15] = 12, [19] = 12 };
	uint32_t kind = info >> 24 & 31, count = info & 0xffff;
	if (kind == 3)
		return 12; /* an array: one record */
	if (kind == 1 || kind == 14 || kind == 17)
		return 4; /* an integer, a variable, a tag */
	return kind < 20 ? each[kind] * count : 0;
}

/* Byte offsets of members of task_struct. */
static void task_members(uint64_t offsets[GUEST_FACTS])
{
	static const char *const names[GUEST_FACTS] = { [TASK_TID] = "pid", [TASK_PID] = "tgid", [TASK_NAME] = "comm" };
	struct stat size;
	int fd = open("/sys/kernel/btf/vmlinux", O_RDONLY);
	if (fd < 0 || fstat(fd, &size))
		fail("/sys/kernel/btf/vmlinux");
	char *file = malloc((size_t)size.st_size);
	for (off_t got = 0; got < size.st_size;) {
		ssize_t n = read(fd, file + got, (size_t)(size.st_size - got));
		if (n <= 0)
			fail("/sys/kernel/btf/vmlinux");
		got += n;
	}
	const struct btf_header *header = (void *)file;
	const char *strings = file + header->header_bytes + header->strings_at;
	char *at = file + header->header_bytes + header->types_at, *end = at + header->types_bytes;
	while (at < end) {
		const struct btf_type *type = (void *)at;
		const struct btf_member *member = (void *)(at + sizeof *type);
		uint32_t kind = type->info >> 24 & 31, count = type->info & 0xffff;
		at += sizeof *type + after_type(type->info);
		if (kind != 4 || !count || strcmp(strings + type->name, "task_struct"))
			continue;
		for (uint32_t i = 0; i < count; i++)
			for (int fact = TASK_TID; fact < GUEST_FACTS; fact++)
				if (!strcmp(strings + member[i].name, names[fact]))
					offsets[fact] = (member[i].offset & (type->info >> 31 ? 0xffffff : UINT32_MAX)) / 8;
	}
	free(file);
	close(fd);
}

/* Tells the machine where the kernel keeps who runs. */
static void tell_kernel(void)
{
	uint64_t facts[GUEST_FACTS] = { 0 };
	task_members(facts);
	facts[CURRENT_TASK] = symbol("current_task");
	for (int fact = 0; fact < GUEST_FACTS; fact++)
		if (!facts[fact]) {
			errno = ENOENT;
			fail("task_struct or current_task");
		}
	for (int fact = GUEST_FACTS; fact-- > 0;)
		ask(GUEST_TELL, (uint64_t)fact, facts[fact], NULL);
}

/* ---- loads ---- */

/* Eight bytes that say how much was done, where the environment names a file (docs/measurement.md). */
static volatile uint64_t *progress(void)
{
	static uint64_t nowhere;
	const char *path = getenv("LAB_PROGRESS");
	char name[256];
	if (!path)
		return &nowhere;
	snprintf(name, sizeof name, "%s/%d", path, getpid());
	int fd = open(name, O_RDWR | O_CREAT, 0644);
	if (fd < 0 || ftruncate(fd, 8))
		fail(name);
	void *map = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		fail(name);
	return map;
}

/* One cycle through all lines: in a random order (Sattolo), or one line after the other. */
static void **linked(size_t lines, int random)
{
	uint64_t state = 88172645463325252u;
	char *memory = mmap(NULL, lines * LINE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	uint32_t *order = malloc(lines * sizeof *order);
	if (memory == MAP_FAILED || !order)
		fail("memory");
	for (size_t i = 0; i < lines; i++)
		order[i] = (uint32_t)i;
	for (size_t i = lines - 1; random && i > 0; i--) {
		state ^= state << 13;
		state ^= state >> 7;
		state ^= state << 17;
		size_t j = state % i;
		uint32_t t = order[i];
		order[i] = order[j];
		order[j] = t;
	}
	for (size_t i = 0; i < lines; i++)
		*(void **)(memory + order[i] * (size_t)LINE) = memory + order[(i + 1) % lines] * (size_t)LINE;
	free(order);
	return (void **)memory;
}

/* Keeps the CPU for about so many cycles without a look at memory. */
static void think(uint64_t cycles)
{
	uint64_t turns = cycles / 2;
	if (turns)
		__asm__ volatile("1: dec %0\n\tjnz 1b" : "+r"(turns)::"cc");
}

/* Dependent loads. Three instructions each (load, count, branch) whatever the compiler, as closed forms assume. */
static void **chase(void **at, uint64_t loads)
{
	__asm__ volatile("1: mov (%0), %0\n\tdec %1\n\tjnz 1b" : "+r"(at), "+r"(loads)::"cc", "memory");
	return at;
}

/* Loads any of so many lines, each as likely as the others. */
static void any(volatile char *memory, size_t lines, int times, uint64_t *state)
{
	for (int i = 0; i < times; i++) {
		*state ^= *state << 13;
		*state ^= *state >> 7;
		*state ^= *state << 17;
		(void)memory[*state % lines * LINE];
	}
}

/* Reports the count to a daemon, once one listens where the environment says. */
static void report(uint64_t count)
{
	static volatile uint64_t *work;
	static time_t tried;
	time_t now = work || !getenv("CACHEMATE_SOCKET") ? tried : time(NULL);
	if (now != tried) {
		tried = now;
		work = cachemate_progress();
	}
	if (work)
		*work = count;
}

/* load chase|stream|uniform[:CYCLES] NAME CPU KIB MS [STEP_MS]: dependent loads, with so many cycles of computation before each; ns of
 * CPU time for an access, over all of it and step by step, and the misses that the machine counted on this CPU meanwhile. */
static void load(char **argument)
{
	int random = argument[0][0] == 'c', uniform = argument[0][0] == 'u';
	const char *cycles = strchr(argument[0], ':');
	uint64_t thought = cycles ? strtoull(cycles + 1, NULL, 10) : 0;
	int at_once = thought ? STEPS_AT_ONCE / 16 : STEPS_AT_ONCE;
	const char *name = argument[1];
	size_t lines = (size_t)atol(argument[3]) * 1024 / LINE;
	double seconds = atof(argument[4]) / 1e3, step_s = argument[5] ? atof(argument[5]) / 1e3 : 0;
	static char steps[8192];
	size_t used = 0;
	stay_on(atoi(argument[2]));
	volatile uint64_t *done = progress();
	void **at = linked(lines, random), **start_of = at;
	uint64_t state = 88172645463325252u;
	for (size_t i = 0; i < lines; i++)
		at = *at;
	uint64_t l3, l2_before = ask(GUEST_COUNT, 0, L2_MISSES, NULL), l3_before = ask(GUEST_COUNT, 0, L3_MISSES, NULL);
	uint64_t count = 0, step_count = 0;
	double start = now_s(), cpu_start = own_cpu_s(), step_start = start, step_cpu = cpu_start, now;
	do {
		if (uniform)
			any((char *)start_of, lines, at_once, &state);
		if (!thought && !uniform)
			at = chase(at, (uint64_t)at_once);
		for (int i = 0; i < at_once && thought; i++) {
			think(thought);
			at = *at;
		}
		count += (uint64_t)at_once;
		*done = count;
		report(count);
		now = now_s();
		if (step_s > 0 && now - step_start >= step_s && used < sizeof steps - 32) {
			double cpu = own_cpu_s();
			used += (size_t)snprintf(steps + used, sizeof steps - used, " %.1f",
						 (cpu - step_cpu) * 1e9 / (double)(count - step_count));
			step_start = now;
			step_cpu = cpu;
			step_count = count;
		}
	} while (now - start < seconds);
	double cpu = own_cpu_s() - cpu_start;
	uint64_t l3_misses = ask(GUEST_COUNT, 0, L3_MISSES, &l3) - l3_before;
	printf("%s\tns\t%.2f\tper_s\t%.0f\tl2_misses\t%.4f\tl3_misses\t%.4f\tl3\t%u\tsteps\t%s%s\n", name, cpu * 1e9 / (double)count,
	       (double)count / (now - start), (double)(ask(GUEST_COUNT, 0, L2_MISSES, NULL) - l2_before) / (double)count,
	       (double)l3_misses / (double)count, (unsigned)l3, steps, at ? "" : "!");
}

static struct {
	_Alignas(128) atomic_int value;
} ball;
static int rounds, other_cpu;

static void *returns(void *unused)
{
	(void)unused;
	stay_on(other_cpu);
	for (int i = 0; i < rounds; i++) {
		while (atomic_load_explicit(&ball.value, memory_order_acquire) != 2 * i + 1)
			;
		atomic_store_explicit(&ball.value, 2 * i + 2, memory_order_release);
	}
	return NULL;
}

/* ping-pong CPU CPU ROUNDS: a line to and fro, ns one way. */
static void ping_pong(char **argument)
{
	pthread_t other;
	stay_on(atoi(argument[0]));
	other_cpu = atoi(argument[1]);
	rounds = atoi(argument[2]);
	pthread_create(&other, NULL, returns, NULL);
	usleep(2000);
	double start = 0;
	for (int i = 0; i < rounds; i++) {
		if (i == rounds / 10)
			start = now_s();
		atomic_store_explicit(&ball.value, 2 * i + 1, memory_order_release);
		while (atomic_load_explicit(&ball.value, memory_order_acquire) != 2 * i + 2)
			;
	}
	double seconds = now_s() - start;
	pthread_join(other, NULL);
	printf("ping-pong\tns\t%.1f\n", seconds * 1e9 / (rounds - rounds / 10) / 2);
}

/* ---- threads that share ---- */

enum { THREADS_AT_MOST = 16, SHARED_THINK_CYCLES = 2000 };
static volatile uint64_t *shared_progress;
struct sharer {
	int cpu;
	volatile uint64_t *region;
	uint64_t lines, seed;
};

/* Goes to its CPU, may run anywhere from then on, and reads and writes lines of its group's region in a random order. */
static void *shares(void *argument)
{
	const struct sharer *self = argument;
	uint64_t state = self->seed;
	cpu_set_t all;
	memset(&all, 0xff, sizeof all);
	stay_on(self->cpu);
	if (sched_setaffinity(0, sizeof all, &all))
		fail("sched_setaffinity");
	for (;;) {
		for (int i = 0; i < STEPS_AT_ONCE / 16; i++) {
			state ^= state << 13;
			state ^= state >> 7;
			state ^= state << 17;
			volatile uint64_t *word = self->region + state % self->lines * (LINE / 8);
			if (state >> 40 & 1)
				*word = state;
			else
				(void)*word;
			think(SHARED_THINK_CYCLES);
		}
		__atomic_fetch_add(shared_progress, STEPS_AT_ONCE / 16, __ATOMIC_RELAXED);
	}
	return NULL;
}

/* share NAME KIB CPU,CPU... CPU,CPU...: a group of threads for each list, one thread for each CPU. Group i shares the memory
 * of the file NAME-i, with other processes too. */
static void share(char **argument)
{
	static struct sharer sharers[THREADS_AT_MOST];
	size_t bytes = (size_t)atol(argument[1]) * 1024;
	unsigned threads = 0, group = 0;
	pthread_t thread;
	shared_progress = progress();
	for (char **list = argument + 2; *list; list++, group++) {
		char name[256];
		snprintf(name, sizeof name, "/dev/shm/%s-%u", argument[0], group);
		int fd = open(name, O_RDWR | O_CREAT, 0644);
		if (fd < 0 || ftruncate(fd, (off_t)bytes))
			fail(name);
		void *region = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
		if (region == MAP_FAILED)
			fail(name);
		for (char *cpu = strtok(*list, ","); cpu && threads < THREADS_AT_MOST; cpu = strtok(NULL, ","), threads++) {
			sharers[threads] = (struct sharer){ atoi(cpu), region, bytes / LINE, 88172645463325252u + threads + (uint64_t)getpid() };
			if (pthread_create(&thread, NULL, shares, &sharers[threads]))
				fail("pthread_create");
		}
	}
	while (getenv("CACHEMATE_SOCKET")) {
		report(*shared_progress);
		usleep(20000);
	}
	pthread_join(thread, NULL);
}

/* counted MS CPU CPU...: what the machine counts on these CPUs in a while, and of lines out of other L3s what perf counts there
 * (Skylake's event, lab/machine/registers.c). */
static void counted(char **argument)
{
	static const char *const names[] = { "l3_misses", "prefetch_misses", "transfers_other" };
	static const uint64_t counts[] = { L3_MISSES, PREFETCH_MISSES, TRANSFERS_OTHER };
	uint64_t sum[3] = { 0 }, by_perf = 0, value;
	int files[THREADS_AT_MOST], perf = 1, cpus = 0;
	for (char **cpu = argument + 1; *cpu && cpus < THREADS_AT_MOST; cpu++, cpus++) {
		struct perf_event_attr event = { .size = sizeof event, .type = PERF_TYPE_RAW, .config = 0x04d3 };
		files[cpus] = (int)syscall(SYS_perf_event_open, &event, -1, atoi(*cpu), -1, 0);
		perf &= files[cpus] >= 0;
	}
	double start = 0;
	for (int after = 0; after < 2; after++) {
		for (int i = 0; i < cpus; i++) {
			stay_on(atoi(argument[1 + i]));
			for (int k = 0; k < 3; k++) {
				value = ask(GUEST_COUNT, 0, counts[k], NULL);
				sum[k] += after ? value : -value;
			}
			if (perf && read(files[i], &value, sizeof value) == sizeof value)
				by_perf += after ? value : -value;
		}
		if (!after) {
			start = now_s();
			usleep((useconds_t)(atof(argument[0]) * 1e3));
		}
	}
	double seconds = now_s() - start;
	for (int k = 0; k < 3; k++)
		printf("%s\t%.0f\t", names[k], (double)sum[k] / seconds);
	printf("perf\t");
	if (perf)
		printf("%.0f\n", (double)by_perf / seconds);
	else
		printf("-\n");
}

/* mpki MS CPU: misses of the L3 that the machine counts on that CPU for each thousand instructions that perf counts. */
static void mpki(char **argument)
{
	uint64_t misses = 0, instructions = 0, value;
	struct perf_event_attr event = { .size = sizeof event, .type = PERF_TYPE_HARDWARE, .config = PERF_COUNT_HW_INSTRUCTIONS };
	int file = (int)syscall(SYS_perf_event_open, &event, -1, atoi(argument[1]), -1, 0);
	stay_on(atoi(argument[1]));
	for (int after = 0; after < 2; after++) {
		if (file < 0 || read(file, &value, sizeof value) != sizeof value)
			fail("perf_event_open");
		instructions += after ? value : -value;
		value = ask(GUEST_COUNT, 0, L3_MISSES, NULL);
		misses += after ? value : -value;
		if (!after)
			usleep((useconds_t)(atof(argument[0]) * 1e3));
	}
	printf("mpki\t%.3f\n", 1000.0 * (double)misses / (double)instructions);
}

/* counters KIB LOADS: what perf counts of random loads, and the machine of the same CPU. */
static void counters(char **argument)
{
	static const uint64_t events[3] = { PERF_COUNT_HW_INSTRUCTIONS, PERF_COUNT_HW_CPU_CYCLES, PERF_COUNT_HW_CACHE_MISSES };
	size_t lines = (size_t)atol(argument[0]) * 1024 / LINE, loads = (size_t)atol(argument[1]);
	uint64_t counted[3] = { 0 }, sum = 0;
	int files[3];
	stay_on(0);
	void **memory = linked(lines, 1);
	for (int i = 0; i < 3; i++) {
		struct perf_event_attr event = { .size = sizeof event, .type = PERF_TYPE_HARDWARE, .config = events[i] };
		files[i] = (int)syscall(SYS_perf_event_open, &event, 0, -1, -1, 0);
		if (files[i] < 0)
			fail("perf_event_open");
	}
	uint64_t misses = ask(GUEST_COUNT, 0, L3_MISSES, NULL), cycles = ask(GUEST_CYCLES, 0, 0, NULL);
	memory = chase(memory, loads);
	sum = (uintptr_t)memory;
	cycles = ask(GUEST_CYCLES, 0, 0, NULL) - cycles;
	misses = ask(GUEST_COUNT, 0, L3_MISSES, NULL) - misses;
	for (int i = 0; i < 3; i++)
		if (read(files[i], &counted[i], sizeof counted[i]) != sizeof counted[i])
			fail("read");
	printf("counters\tinstructions\t%llu\tcycles\t%llu\tmodel_cycles\t%llu\tmisses\t%llu\tmodel_misses\t%llu%s\n",
	       (unsigned long long)counted[0], (unsigned long long)counted[1], (unsigned long long)cycles,
	       (unsigned long long)counted[2], (unsigned long long)misses, sum ? "" : "!");
}

/* One task in its gang's turn, or out of it: stopped, or at idle priority. */
static void turn(int pid, int idle, int on)
{
	struct sched_param none = { 0 };
	if (!idle)
		kill(pid, on ? SIGCONT : SIGSTOP);
	else if (sched_setscheduler(pid, on ? SCHED_OTHER : SCHED_IDLE, &none) && errno != ESRCH)
		fail("sched_setscheduler");
}

/* turns stop|idle SLICE_MS SECONDS PID,PID PID,PID...: gangs written by hand: all but one group are stopped, or at idle
 * priority, in turns. */
static void turns(char **argument)
{
	int pids[8][8], sizes[8] = { 0 }, groups = 0, idle = !strcmp(argument[0], "idle");
	double end = now_s() + atof(argument[2]);
	useconds_t slice = (useconds_t)(atof(argument[1]) * 1e3);
	for (char **group = argument + 3; *group && groups < 8; group++, groups++)
		for (char *pid = strtok(*group, ","); pid && sizes[groups] < 8; pid = strtok(NULL, ","))
			pids[groups][sizes[groups]++] = atoi(pid);
	for (int now = 0; now_s() < end; now = (now + 1) % groups) {
		for (int i = 0; i < groups; i++)
			for (int k = 0; k < sizes[i]; k++)
				turn(pids[i][k], idle, i == now);
		usleep(slice);
	}
	for (int i = 0; i < groups; i++)
		for (int k = 0; k < sizes[i]; k++)
			turn(pids[i][k], idle, 1);
}

static int ascending(const void *a, const void *b)
{
	return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

/* wakes MS: sleeps of 2 ms for so long; how late it runs again, us: the median and the most. */
static void wakes(char **argument)
{
	static double late[4096];
	struct timespec sleep = { 0, 2000000 };
	double end = now_s() + atof(argument[0]) / 1e3;
	size_t count = 0;
	while (now_s() < end && count < 4096) {
		double due = now_s() + 2e-3;
		nanosleep(&sleep, NULL);
		late[count++] = (now_s() - due) * 1e6;
	}
	qsort(late, count, sizeof *late, ascending);
	if (count)
		printf("wakes\tmedian\t%.0f\tmost\t%.0f\n", late[count / 2], late[count - 1]);
}

/* hold KIB: memory that is there and now and then used. */
static void hold(size_t bytes)
{
	volatile char *memory = malloc(bytes);
	for (size_t i = 0;; i = (i + 4096) % bytes) {
		memory[i]++;
		usleep(i ? 100 : 50000);
	}
}

/* progress DIR PID...: what each has counted so far, and the moment. */
static void show_progress(char **argument)
{
	for (char **pid = argument + 1; *pid; pid++) {
		uint64_t count = 0;
		char name[256];
		snprintf(name, sizeof name, "%s/%s", *argument, *pid);
		int fd = open(name, O_RDONLY);
		if (fd < 0 || read(fd, &count, sizeof count) != sizeof count)
			fail(name);
		close(fd);
		printf("%s\t%.6f\t%llu\n", *pid, now_s(), (unsigned long long)count);
	}
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!strcmp(what, "tell-kernel"))
		tell_kernel();
	else if (!strcmp(what, "model") && argc == 3)
		ask(GUEST_MODEL, 0, (uint64_t)atol(argv[2]), NULL);
	else if (!strcmp(what, "pause") && argc == 3)
		ask(GUEST_PAUSE, 0, (uint64_t)(atof(argv[2]) * 1e3), NULL);
	else if (!strcmp(what, "mark") && argc == 3)
		ask(GUEST_MARK, 0, (uint64_t)atol(argv[2]), NULL);
	else if (!strcmp(what, "lines") && argc == 4)
		printf("%llu\n", (unsigned long long)ask(GUEST_LINES, (uint64_t)atol(argv[2]), (uint64_t)atol(argv[3]), NULL));
	else if (!strcmp(what, "load") && argc >= 7)
		load(argv + 2);
	else if (!strcmp(what, "ping-pong") && argc == 5)
		ping_pong(argv + 2);
	else if (!strcmp(what, "mpki") && argc == 4)
		mpki(argv + 2);
	else if (!strcmp(what, "counters") && argc == 4)
		counters(argv + 2);
	else if (!strcmp(what, "share") && argc >= 5)
		share(argv + 2);
	else if (!strcmp(what, "counted") && argc >= 4)
		counted(argv + 2);
	else if (!strcmp(what, "turns") && argc >= 7)
		turns(argv + 2);
	else if (!strcmp(what, "wakes") && argc == 3)
		wakes(argv + 2);
	else if (!strcmp(what, "hold") && argc == 3)
		hold((size_t)atol(argv[2]) * 1024);
	else if (!strcmp(what, "progress") && argc >= 4)
		show_progress(argv + 2);
	else {
		fprintf(stderr, "lab-program: found '%s', expected tell-kernel, model, pause, mark, lines, load, ping-pong, counters, mpki, "
				"share, counted, turns, wakes, hold or progress with their arguments (program.c)\n", what);
		return 2;
	}
	return 0;
}
