/* SPDX-License-Identifier: GPL-2.0-or-later
 * Decoder, registers, configuration, coherence and the truth file, each on its own. */
#include <string.h>

#include "../cache.h"
#include "../config.h"
#include "../decode.h"
#include "../registers.h"
#include "../truth.h"
#include "check.h"

/* ---- decoder: bytes as an assembler makes them ---- */

static void decoding(void)
{
	static const struct {
		const char *what;
		uint8_t bytes[12];
		uint8_t size;
		enum instruction expected;
		struct operand operand;
	} cases[] = {
		{ "rdtsc", { 0x0f, 0x31 }, 2, READ_TSC, { 0 } },
		{ "rdtscp", { 0x0f, 0x01, 0xf9 }, 3, READ_TSC, { 0 } },
		{ "cpuid", { 0x0f, 0xa2 }, 2, CPUID, { 0 } },
		{ "rdmsr", { 0x0f, 0x32 }, 2, READ_MSR, { 0 } },
		{ "wrmsr", { 0x0f, 0x30 }, 2, WRITE_MSR, { 0 } },
		{ "rdpmc", { 0x0f, 0x33 }, 2, READ_PMC, { 0 } },
		{ "mov %rax,%cr3", { 0x0f, 0x22, 0xd8 }, 3, TRANSLATION, { 0 } },
		{ "mov %r8,%cr3", { 0x41, 0x0f, 0x22, 0xd8 }, 4, TRANSLATION, { 0 } },
		{ "mov %cr3,%rax", { 0x0f, 0x20, 0xd8 }, 3, OTHER_INSTRUCTION, { 0 } },
		{ "invlpg (%rdi)", { 0x0f, 0x01, 0x3f }, 3, TRANSLATION, { 0 } },
		{ "swapgs", { 0x0f, 0x01, 0xf8 }, 3, OTHER_INSTRUCTION, { 0 } },
		{ "invpcid (%rsp),%rax", { 0x66, 0x0f, 0x38, 0x82, 0x04, 0x24 }, 6, TRANSLATION, { 0 } },
		{ "clflush (%rax)", { 0x0f, 0xae, 0x38 }, 3, FLUSH_LINE, { 0, -1, 0, 0 } },
		{ "clflushopt 8(%r13)", { 0x66, 0x41, 0x0f, 0xae, 0x7d, 8 }, 6, FLUSH_LINE, { 13, -1, 0, 8 } },
		{ "clflush -1(%rbx,%r9,4)", { 0x42, 0x0f, 0xae, 0x7c, 0x8b, 0xff }, 6, FLUSH_LINE, { 3, 9, 2, -1 } },
		{ "clflush 0x100(%rsp)", { 0x0f, 0xae, 0xbc, 0x24, 0, 1, 0, 0 }, 8, FLUSH_LINE, { 4, -1, 0, 0x100 } },
		{ "clflush 16(%rip)", { 0x0f, 0xae, 0x3d, 16, 0, 0, 0 }, 7, FLUSH_LINE, { -1, -1, 0, 0x1010 } },
		{ "sfence", { 0x0f, 0xae, 0xf8 }, 3, OTHER_INSTRUCTION, { 0 } },
		{ "prefetcht0 (%rcx)", { 0x0f, 0x18, 0x09 }, 3, PREFETCH, { 1, -1, 0, 0 } },
		{ "prefetchnta (%rcx)", { 0x0f, 0x18, 0x01 }, 3, OTHER_INSTRUCTION, { 0 } },
		{ "pause", { 0xf3, 0x90 }, 2, SPIN_HINT, { 0 } },
		{ "nop", { 0x90 }, 1, OTHER_INSTRUCTION, { 0 } },
		{ "in (%dx),%al", { 0xec }, 1, PORT, { 0 } },
		{ "out %eax,$0x70", { 0xe7, 0x70 }, 2, PORT, { 0 } },
		{ "rep insw", { 0xf3, 0x66, 0x6d }, 3, PORT, { 0 } },
		{ "wrfsbase %rax", { 0xf3, 0x48, 0x0f, 0xae, 0xd0 }, 5, WRITE_FS, { 0 } },
		{ "ldmxcsr (%rax)", { 0x0f, 0xae, 0x10 }, 3, OTHER_INSTRUCTION, { 0 } },
	};
	ASK("Is each instruction recognized, with its operand?");
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct operand found = { 0 };
		enum instruction kind = decode(cases[i].bytes, cases[i].size, 0x1000, &found);
		int before = failures;
		SAME(kind, cases[i].expected);
		if (kind == FLUSH_LINE || kind == PREFETCH)
			HOLDS(!memcmp(&found.base, &cases[i].operand.base, 3) &&
			      found.displacement == cases[i].operand.displacement);
		if (failures > before)
			fprintf(stderr, "    in: %s\n", cases[i].what);
	}
}

/* ---- registers ---- */

static struct config config;
static struct model *model;
static uint64_t instructions, kernel_instructions, cycles;

static uint64_t instructions_of(unsigned cpu, unsigned levels)
{
	(void)cpu;
	return (levels & USER_MODE ? instructions : 0) + (levels & KERNEL_MODE ? kernel_instructions : 0);
}

static uint64_t cycles_of(unsigned cpu)
{
	(void)cpu;
	return cycles;
}

static struct registers registers_of(unsigned cpu)
{
	return (struct registers){
		.config = &config, .model = model, .cpu = cpu, .instructions = instructions_of, .cycles = cycles_of
	};
}

static uint64_t msr(struct registers *r, uint32_t number)
{
	uint64_t value = 0;
	HOLDS(registers_read(r, number, &value));
	return value;
}

static void counters(void)
{
	struct registers r = registers_of(0);
	ASK("Do counters count what they are set to, only while they are on, and wrap at 48 bits?");
	instructions = cycles = 100;
	registers_write(&r, 0x186, 0x4300c0); /* instructions, user and kernel, enabled */
	registers_write(&r, 0x187, 0x43412e); /* misses of the last level */
	registers_write(&r, 0x38d, 0x030);    /* the second fixed one: cycles */
	instructions += 7;
	SAME(msr(&r, 0xc1), 0);
	registers_write(&r, 0x38f, 1ull << 33 | 3);
	instructions += 50;
	cycles += 60;
	for (uint32_t line = 0; line < 5; line++)
		model_access(model, 0, 1000 + 64 * line, false, 0);
	SAME(msr(&r, 0xc1), 50);
	SAME(msr(&r, 0xc2), 5);
	SAME(registers_counter(&r, 1), 5);
	SAME(registers_counter(&r, 1u << 30 | 1), 60);
	registers_write(&r, 0x38f, 0);
	instructions += 9;
	SAME(msr(&r, 0xc1), 50);
	registers_write(&r, 0xc1, 0x80000000); /* the old way to write extends the sign */
	SAME(msr(&r, 0xc1), 0xffff80000000);
	registers_write(&r, 0x4c1, 0xffffffffffff);
	registers_write(&r, 0x38f, 1);
	instructions += 3;
	SAME(msr(&r, 0xc1), 2);
}

static void privilege_levels(void)
{
	struct registers r = registers_of(0);
	ASK("Do general and fixed counters count instructions at the levels that they are set to?");
	registers_write(&r, 0x186, 0x4100c0); /* user */
	registers_write(&r, 0x187, 0x4200c0); /* kernel */
	registers_write(&r, 0x38d, 2);	      /* the first fixed one: instructions, user */
	registers_write(&r, 0x38f, 1ull << 32 | 3);
	instructions += 70;
	kernel_instructions += 20;
	SAME(msr(&r, 0xc1), 70);
	SAME(msr(&r, 0xc2), 20);
	SAME(msr(&r, 0x309), 70);
	registers_write(&r, 0x38d, 3);
	kernel_instructions += 5;
	SAME(msr(&r, 0x309), 75);
	SAME(msr(&r, 0xc1), 70);
}

static void partitions(void)
{
	struct registers first = registers_of(0), other = registers_of(2);
	ASK("Do masks and monitors reach the L3 of the CPU that writes them, and occupancy count its lines?");
	registers_write(&first, 0xc91, 0xf0);
	SAME(msr(&first, 0xc91), 0xf0);
	SAME(msr(&other, 0xc91), 0xffff);
	registers_write(&first, 0xc91, 0);
	SAME(msr(&first, 0xc91), 0xf0); /* an empty mask is none */
	registers_write(&other, 0xc8f, 1ull << 32 | 5);
	SAME(msr(&other, 0xc8f), 1ull << 32 | 5);
	for (uint32_t line = 0; line < 100; line++)
		model_access(model, 2, 50000 + line, false, 0);
	registers_write(&other, 0xc8d, 5ull << 32 | 1);
	uint64_t held = msr(&other, 0xc8e);
	HOLDS(held >= 100); /* and what the streamer asked for */
	registers_write(&other, 0xc8d, 5ull << 32 | 2);
	SAME(msr(&other, 0xc8e), held);
	registers_write(&first, 0xc8d, 5ull << 32 | 1);
	SAME(msr(&first, 0xc8e), 0);
	registers_write(&first, 0xc8d, 200ull << 32 | 1);
	SAME(msr(&first, 0xc8e), 1ull << 63);
	uint64_t none;
	HOLDS(!registers_read(&first, 0xd50, &none)); /* no bandwidth allocation unless it is set */
	struct config throttling = config;
	throttling.throttling = 1;
	first.config = &throttling;
	registers_write(&first, 0xd51, 40);
	SAME(msr(&first, 0xd51), 40);
	SAME(msr(&first, 0xd50), 0);
	other.config = &throttling;
	SAME(msr(&other, 0xd51), 0); /* each L3 has its own */
	other.config = &config;
	registers_write(&first, 0xd51, 100);
	SAME(msr(&first, 0xd51), 90);
	registers_write(&first, 0xd51, 0);
	first.config = &config;
	HOLDS(!registers_read(&first, 0x10, &none));
	HOLDS(!registers_read(&first, 0xc90 + 8, &none)); /* there are eight classes */
}

static void cpuid(void)
{
	struct registers r = registers_of(0);
	ASK("Does CPUID tell of the model's caches, of a small core's own L2, of classes and counters, and of none where there are none?");
	uint32_t l3[4] = { 0x1c163, 0, 0, 4 };
	HOLDS(registers_cpuid(&r, 4, 3, l3));
	SAME(l3[0], 0x1c163); /* who shares it is the emulator's word */
	SAME((l3[1] >> 22) + 1, config.l3_ways);
	SAME((uint64_t)(l3[2] + 1) * config.l3_ways * LINE_BYTES, config.l3_bytes);
	uint32_t classes[4] = { 0 };
	HOLDS(registers_cpuid(&r, 0x10, 1, classes));
	SAME(classes[0], config.l3_ways - 1);
	SAME(classes[3], config.classes - 1);
	uint32_t bandwidth[4] = { 0 };
	HOLDS(!registers_cpuid(&r, 0x10, 3, bandwidth));
	struct config throttling = config;
	throttling.throttling = 1;
	r.config = &throttling;
	HOLDS(registers_cpuid(&r, 0x10, 0, bandwidth) && bandwidth[1] == (2 | 8));
	HOLDS(registers_cpuid(&r, 0x10, 3, bandwidth) && bandwidth[0] == 89 && bandwidth[2] == 4);
	struct config hybrid = config;
	hybrid.small_cpus = 1;
	hybrid.small_l2_bytes = 4 * config.l2_bytes;
	r = registers_of((unsigned)config.cpus - 1);
	r.config = &hybrid;
	uint32_t l2[4] = { 0 };
	HOLDS(registers_cpuid(&r, 4, 2, l2));
	SAME((uint64_t)(l2[2] + 1) * config.small_l2_ways * LINE_BYTES, 4 * config.l2_bytes);
	r.cpu = 0;
	HOLDS(registers_cpuid(&r, 4, 2, l2));
	SAME((uint64_t)(l2[2] + 1) * config.l2_ways * LINE_BYTES, config.l2_bytes);
	r.config = &config;
	uint32_t tsc[4] = { 0 };
	HOLDS(registers_cpuid(&r, 0x15, 0, tsc));
	SAME((uint64_t)tsc[2] * tsc[1] / tsc[0], config.hertz);
	struct config bare = config;
	bare.classes = bare.counters = 0;
	r.config = &bare;
	uint32_t features[4] = { 0 };
	HOLDS(!registers_cpuid(&r, 7, 0, features) && !registers_cpuid(&r, 0xa, 0, features));
	uint64_t none;
	HOLDS(!registers_read(&r, 0xc1, &none) && !registers_read(&r, 0xc8f, &none));
}

/* ---- coherence ---- */

static void coherence(void)
{
	ASK("Does a line that another CPU has changed cost what the distance costs, and a store take it from everybody?");
	uint32_t line = 700000;
	model_access(model, 0, line, true, 0);
	struct outcome o = model_access(model, 1, line, false, 0);
	SAME(o.cycles, config.same_l3_cycles);
	HOLDS(o.coherent);
	o = model_access(model, 2, line, false, 0);
	SAME(o.cycles, config.other_l3_cycles); /* changed, in the other L3 */
	o = model_access(model, 0, line, true, 0);
	SAME(o.cycles, config.other_l3_cycles); /* CPU 2, on the other L3, has to let go of it too */
	o = model_access(model, 2, line, false, 0);
	SAME(o.cycles, config.other_l3_cycles);
	HOLDS(o.moving);
	o = model_access(model, 2, line, false, 0);
	SAME(o.cycles, 0);
	model_flush(model, line);
	o = model_access(model, 2, line, false, 0);
	SAME(o.cycles, config.memory_cycles);

	ASK("Does a changed line that left its CPU come out of the other L3, and not out of memory?");
	line = 800000;
	model_access(model, 0, line, true, 0);
	for (uint32_t other = 1; other <= 32; other++) /* out of the L1 and L2, by their sets */
		model_access(model, 0, line + other * (uint32_t)(config.l2_bytes / config.l2_ways / LINE_BYTES), false, 0);
	o = model_access(model, 2, line, false, 0);
	SAME(o.cycles, config.other_l3_cycles);
}

static void causes(void)
{
	ASK("Does every miss of the L3 have one cause, and the tasks' counts add up to the CPUs'?");
	uint64_t caused = 0, misses = 0, tasks = 0;
	uint32_t lines = (uint32_t)(config.l3_bytes / LINE_BYTES);
	for (unsigned turn = 0; turn < 6; turn++) {
		model_set_task(model, 0, 1 + turn % 2);
		for (uint32_t line = 0; line < lines; line++)
			model_access(model, 0, (turn % 2) * lines + line, line % 3 == 0, 0);
	}
	for (unsigned cpu = 0; cpu < config.cpus; cpu++) {
		misses += model_count(model, cpu, L3_MISSES);
		for (enum count cause = COLD; cause <= COHERENT; cause++)
			caused += model_count(model, cpu, cause);
	}
	for (unsigned task = 0; task < TASKS_AT_MOST; task++)
		tasks += model_task_count(model, task, L3_MISSES);
	SAME(caused, misses);
	SAME(tasks, misses);
	HOLDS(model_hurt(model, 1, 2) > 0 && model_hurt(model, 2, 1) > 0);
}

/* ---- truth ---- */

static struct truth_cpu totals[CPUS_AT_MOST];

/* A task runs on a CPU and reads lines that no task has read before: as many instructions, half of them user code. */
static void work(unsigned cpu, int32_t tid, const char *name, uint32_t accesses)
{
	static uint32_t line;
	struct truth_task task = { .tid = tid, .pid = tid };
	strcpy(task.name, name);
	truth_runs(cpu, &task, totals[cpu]);
	for (uint32_t i = 0; i < accesses; i++)
		model_access(model, cpu, line++, false, 0);
	totals[cpu].instructions += accesses;
	totals[cpu].user_instructions += accesses / 2;
	totals[cpu].cycles += 2 * accesses;
}

/* The task's last entry in the file: its instructions, those of user code, cycles and accesses. */
static bool last_entry(int32_t tid, const char *name, unsigned long long found[4])
{
	char line[1024], there[16];
	bool any = false;
	int id;
	FILE *file = fopen(config.truth_file, "r");
	while (file && fgets(line, sizeof line, file)) {
		unsigned long long entry[4];
		if (sscanf(line, "%*u %d %*d %15s %llu %llu %llu %llu", &id, there, &entry[0], &entry[1], &entry[2],
			   &entry[3]) == 6 && id == tid && !strcmp(there, name)) {
			memcpy(found, entry, sizeof entry);
			any = true;
		}
	}
	if (file)
		fclose(file);
	return any;
}

static void truth(void)
{
	enum { TASKS = 3 * TASKS_AT_MOST, SHORT = 4, LONG = 5000 };
	unsigned long long found[4];
	uint64_t lines = 0;
	strcpy(config.truth_file, "parts.truth.tsv");
	model_free(model);
	model = model_new(&config);
	HOLDS(model && !truth_start(&config, model));
	work(0, 7, "sleeper", LONG);
	work(0, 8, "runner", LONG);
	for (int32_t i = 0; i < TASKS; i++)
		work(1, 1000 + i, "short", SHORT);
	work(0, 7, "sleeper", LONG);
	work(1, 9, "late", LONG);
	truth_entry(totals[1].cycles, totals);

	ASK("Does each of more tasks than slots keep its truth, also one that ran before, during or after the others?");
	HOLDS(last_entry(8, "runner", found) && found[0] == LONG && found[1] == LONG / 2 && found[3] == LONG);
	HOLDS(last_entry(9, "late", found) && found[0] == LONG && found[2] == 2 * LONG && found[3] == LONG);
	for (int32_t i = 0; i < TASKS; i += 13)
		HOLDS(last_entry(1000 + i, "short", found) && found[0] == SHORT && found[1] == SHORT / 2 && found[3] == SHORT);
	ASK("Do the totals of a task without a slot go on if it runs again?");
	HOLDS(last_entry(7, "sleeper", found) && found[0] == 2 * LONG && found[2] == 4 * LONG && found[3] == 2 * LONG);

	ASK("Do the tasks' lines still add up to the monitor's, with those of released tasks?");
	for (unsigned task = 0; task < TASKS_AT_MOST; task++)
		lines += model_task_lines(model, 0, task);
	SAME(lines, model_monitor_lines(model, 0, 0));
	HOLDS(model_task_lines(model, 0, EVICTED_TASKS) > 0);
	truth_end();
	remove("parts.truth.tsv.hurt");
}

static void configuration(void)
{
	struct config c;
	ASK("Is a wrong setting refused with what was found and what was expected?");
	config_defaults(&c);
	HOLDS(!config_check(&c));
	HOLDS(strstr(config_set(&c, "l3_wais", "16"), "l3_wais"));
	HOLDS(strstr(config_set(&c, "l3_ways", "64"), "found '64', expected 1 to 32"));
	HOLDS(strstr(config_set(&c, "l3_ways", "-1"), "expected"));
	HOLDS(strstr(config_set(&c, "hertz", "2GHz"), "found '2GHz'"));
	HOLDS(strstr(config_read(&c, "/nonexistent/lab"), "/nonexistent/lab"));
	c.l3_bytes += LINE_BYTES;
	HOLDS(strstr(config_check(&c), "l3_bytes"));
}

int main(void)
{
	config_defaults(&config);
	config.l3_bytes = 2 << 20;
	config.memory_cycles_per_line = 0;
	model = model_new(&config);
	decoding();
	counters();
	privilege_levels();
	partitions();
	cpuid();
	coherence();
	causes();
	truth();
	configuration();
	model_free(model);
	fprintf(stderr, "%d failures\n", failures);
	return failures != 0;
}
