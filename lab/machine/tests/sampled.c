/* SPDX-License-Identifier: GPL-2.0-or-later
 * Modeled samples of accesses: records, interrupts and registers as a kernel uses them, without a guest. */
#include <string.h>

#include "../cache.h"
#include "../config.h"
#include "../registers.h"
#include "check.h"

enum { PERFEVTSEL0 = 0x186, GLOBAL_STATUS = 0x38e, GLOBAL_CONTROL = 0x38f, OVERFLOW_CONTROL = 0x390, PEBS_ENABLE = 0x3f1 };
enum { LATENCY_THRESHOLD = 0x3f6, DEBUG_STORE_AREA = 0x600, PMC0 = 0x4c1 };
#define USER_LOADS 0x5101cdull /* load latency, user code, with an interrupt, enabled */
#define BUFFER_BIT (1ull << 62)
#define USER_CODE 0x401000ull
#define KERNEL_CODE 0xffffffff81000000ull

/* A guest of one page of debug store and one buffer. */
enum { STORE = 0x1000, BUFFER = 0x2000, RECORD_BYTES = 200, ROOM = 8 };
struct record {
	uint64_t flags, ip, general[16], status, address, source, latency, real_ip, transactions, tsc;
};
static struct {
	uint64_t branch_part[4], base, index, maximum, threshold, reset[4];
} store;
static struct record buffer[ROOM];
static unsigned interrupts;
static uint64_t cycles;
static struct config config;
static struct model *model;

static void *host_address(uint64_t address, size_t size)
{
	if (address >= STORE && address + size <= STORE + sizeof store)
		return (char *)&store + (address - STORE);
	if (address >= BUFFER && address + size <= BUFFER + sizeof buffer)
		return (char *)buffer + (address - BUFFER);
	return NULL;
}

static bool read_guest(unsigned cpu, uint64_t address, void *to, size_t size)
{
	(void)cpu;
	void *from = host_address(address, size);
	return from && memcpy(to, from, size);
}

static bool write_guest(unsigned cpu, uint64_t address, const void *from, size_t size)
{
	(void)cpu;
	void *to = host_address(address, size);
	return to && memcpy(to, from, size);
}

static void interrupt_guest(unsigned cpu)
{
	(void)cpu;
	interrupts++;
}

static uint64_t cycles_of(unsigned cpu)
{
	(void)cpu;
	return cycles;
}

static uint64_t instructions_of(unsigned cpu, unsigned levels)
{
	(void)levels;
	return cycles_of(cpu);
}

static uint64_t msr(struct registers *r, uint32_t number)
{
	uint64_t value = 0;
	HOLDS(registers_read(r, number, &value));
	return value;
}

/* A CPU as a kernel leaves it that samples one in `period` of an event, with an interrupt after `threshold` records. */
static struct registers sampling_cpu(uint64_t select, uint64_t period, unsigned threshold)
{
	struct registers r = { .config = &config, .model = model, .instructions = instructions_of, .cycles = cycles_of,
			       .read = read_guest, .write = write_guest, .interrupt = interrupt_guest };
	interrupts = 0;
	memset(buffer, 0, sizeof buffer);
	store.base = store.index = BUFFER;
	store.maximum = BUFFER + ROOM * RECORD_BYTES;
	store.threshold = BUFFER + threshold * RECORD_BYTES;
	store.reset[0] = -period;
	registers_write(&r, DEBUG_STORE_AREA, STORE);
	registers_write(&r, LATENCY_THRESHOLD, 3);
	registers_write(&r, PEBS_ENABLE, 1);
	registers_write(&r, PERFEVTSEL0, select);
	registers_write(&r, PMC0, -period);
	registers_write(&r, GLOBAL_CONTROL, 1);
	return r;
}

static uint32_t access_at(struct registers *r, uint64_t ip, uint64_t address, enum data_source source, uint32_t beyond_l1, bool is_store)
{
	cycles += 10;
	return samples_access(r, &(struct access){ ip, address, beyond_l1, (uint8_t)source, is_store });
}

static unsigned records(void)
{
	return (unsigned)((store.index - BUFFER) / RECORD_BYTES);
}

static void every_period(void)
{
	ASK("Is every period-th load a record with its address, source and latency, at the cost that is set?");
	struct registers r = sampling_cpu(USER_LOADS, 5, 4);
	HOLDS(r.sampling.by_access);
	uint64_t spent = 0;
	for (unsigned i = 1; i <= 17; i++)
		spent += access_at(&r, USER_CODE + i, 64 * i, FROM_L3, 50, false);
	SAME(records(), 3);
	SAME(spent, 3 * config.sample_cycles);
	for (unsigned i = 0; i < 3; i++) {
		SAME(buffer[i].address, 64 * 5 * (i + 1));
		SAME(buffer[i].ip, USER_CODE + 5 * (i + 1));
		SAME(buffer[i].latency, 50 + config.l1_hit_cycles);
		SAME(buffer[i].source, 4);
		SAME(buffer[i].status, 1);
	}
	SAME(buffer[1].tsc - buffer[0].tsc, 50);
	SAME(msr(&r, PMC0), (1ull << 48) - 3); /* 17 = 3 x 5 + 2 */

	ASK("Does the kernel know a hit in every cache, of another CPU and of memory by the codes of Skylake?");
	static const struct {
		enum data_source source;
		uint64_t code;
	} codes[] = { { FROM_L1, 1 }, { FROM_L2, 3 }, { FROM_L3, 4 }, { FROM_CPU_OF_SAME_L3, 7 }, { FROM_OTHER_L3, 13 }, { FROM_MEMORY, 10 } };
	r = sampling_cpu(USER_LOADS, 1, ROOM);
	for (unsigned i = 0; i < 6; i++)
		access_at(&r, USER_CODE, 64, codes[i].source, 0, false);
	SAME(records(), 6);
	for (unsigned i = 0; i < 6; i++)
		SAME(buffer[i].source, codes[i].code);
}

static void selection(void)
{
	ASK("Are stores, the kernel's loads and loads below the threshold left out of user loads?");
	struct registers r = sampling_cpu(USER_LOADS, 1, ROOM);
	access_at(&r, USER_CODE, 64, FROM_L3, 50, true);
	access_at(&r, KERNEL_CODE, 64, FROM_L3, 50, false);
	registers_write(&r, LATENCY_THRESHOLD, 54);
	access_at(&r, USER_CODE, 64, FROM_L3, 50, false);
	SAME(records(), 0);
	access_at(&r, USER_CODE, 64, FROM_L3, 51, false);
	SAME(records(), 1);

	ASK("Does each event by source take its own loads only?");
	static const struct {
		uint64_t select;
		unsigned taken; /* a bit for each source */
	} events[] = { { 0x81d0, 0x3f }, { 0x01d1, 0x01 }, { 0x02d1, 0x02 }, { 0x04d1, 0x0c }, { 0x08d1, 0x3e },
		       { 0x10d1, 0x3c }, { 0x20d1, 0x30 }, { 0x04d2, 0x08 }, { 0x04d3, 0x10 } };
	for (unsigned i = 0; i < sizeof events / sizeof *events; i++)
		for (unsigned source = FROM_L1; source <= FROM_MEMORY; source++) {
			r = sampling_cpu(0x510000 | events[i].select, 1, ROOM);
			access_at(&r, USER_CODE, 64, (enum data_source)source, 0, false);
			SAME(records(), events[i].taken >> source & 1);
		}
	r = sampling_cpu(0x5182d0, 1, ROOM);
	access_at(&r, USER_CODE, 64, FROM_L1, 0, true);
	access_at(&r, USER_CODE, 64, FROM_L1, 0, false);
	SAME(records(), 1);
}

static void interrupting(void)
{
	ASK("Is there one interrupt at the threshold until the kernel clears the status, and a loss once the buffer is full?");
	struct registers r = sampling_cpu(USER_LOADS, 1, 2);
	access_at(&r, USER_CODE, 64, FROM_L3, 50, false);
	SAME(interrupts, 0);
	for (unsigned i = 0; i < 3; i++)
		access_at(&r, USER_CODE, 64, FROM_L3, 50, false);
	SAME(interrupts, 1);
	SAME(msr(&r, GLOBAL_STATUS), BUFFER_BIT);
	SAME(r.sampling.handled, 1);
	SAME(r.sampling.handling_cycles, 20);
	registers_write(&r, OVERFLOW_CONTROL, BUFFER_BIT);
	SAME(msr(&r, GLOBAL_STATUS), 0);
	for (unsigned i = 0; i < ROOM; i++)
		access_at(&r, USER_CODE, 64, FROM_L3, 50, false);
	SAME(interrupts, 2);
	SAME(records(), ROOM);
	SAME(r.sampling.records, ROOM);
	SAME(r.sampling.lost_records, 4);

	ASK("Does a debug store that the guest does not map lose the record, and a corrupt index write nowhere?");
	r = sampling_cpu(USER_LOADS, 1, 2);
	registers_write(&r, DEBUG_STORE_AREA, 0x700000);
	SAME(access_at(&r, USER_CODE, 64, FROM_L3, 50, false), 0);
	registers_write(&r, DEBUG_STORE_AREA, STORE);
	registers_write(&r, PMC0, -1ull); /* the value to reload could not be read */
	store.index = BUFFER - RECORD_BYTES;
	access_at(&r, USER_CODE, 64, FROM_L3, 50, false);
	store.index = UINT64_MAX - 100;
	access_at(&r, USER_CODE, 64, FROM_L3, 50, false);
	SAME(r.sampling.lost_records, 3);

	ASK("Does a plain counter interrupt where it overflows, and only if it is set to?");
	for (unsigned interrupting = 0; interrupting < 2; interrupting++) {
		r = sampling_cpu(0x43003c | (uint64_t)interrupting << 20, 100, 2); /* cycles */
		registers_write(&r, PEBS_ENABLE, 0);
		registers_write(&r, PMC0, -100ull);
		cycles += 99;
		registers_poll(&r);
		SAME(msr(&r, GLOBAL_STATUS), 0);
		SAME(r.sampling.may_overflow, interrupting);
		cycles += 1;
		registers_poll(&r);
		SAME(msr(&r, GLOBAL_STATUS), 1);
		SAME(interrupts, interrupting);
	}
}

static void traces(void)
{
	ASK("Does a trace have every load that missed the L2 in its order, and a plain counter also those that were lost?");
	enum { L2_MISSES = 0x10d1, LOADS = 3 * ROOM };
	static const enum data_source sources[] = { FROM_L3, FROM_L2, FROM_MEMORY, FROM_L1, FROM_L3, FROM_OTHER_L3 };
	struct registers r = sampling_cpu(0x510000 | L2_MISSES, 1, ROOM);
	registers_write(&r, PERFEVTSEL0 + 1, 0x410000 | L2_MISSES);
	registers_write(&r, GLOBAL_CONTROL, 3);
	uint64_t expected[LOADS];
	unsigned missed = 0;
	for (unsigned i = 0; i < LOADS; i++) {
		uint64_t address = 64 * (i * 7 % LOADS);
		enum data_source source = sources[i % (sizeof sources / sizeof *sources)];
		access_at(&r, USER_CODE, address, source, 50, false);
		if (source > FROM_L2)
			expected[missed++] = address;
	}
	SAME(records(), ROOM);
	for (unsigned i = 0; i < ROOM; i++)
		SAME(buffer[i].address, expected[i]);
	SAME(msr(&r, PMC0 + 1), missed);
	SAME(r.sampling.lost_records, missed - ROOM);
}

static void tagging(void)
{
	ASK("Is one in so many loads tagged, at intervals that no period of a program's loop divides?");
	enum { LOADS = 200000, MEAN = 50 };
	unsigned even = 0, taken = 0;
	config.load_tag_interval = MEAN;
	struct registers r = sampling_cpu(USER_LOADS, 1, ROOM);
	for (unsigned i = 0; i < LOADS; i++) {
		store.index = BUFFER;
		access_at(&r, USER_CODE, 64, FROM_L3, 50, false);
		taken += records();
		even += records() && i % 2 == 0;
	}
	config.load_tag_interval = 1;
	/* Four standard deviations: intervals are uniform, 1 to 2 * MEAN - 1. */
	HOLDS(taken > LOADS / MEAN * 0.96 && taken < LOADS / MEAN * 1.04);
	HOLDS(even > taken * 0.46 && even < taken * 0.54);
}

static void announced(void)
{
	ASK("Are samples offered only where they are modeled, and the processor's name says so?");
	struct registers r = { .config = &config, .model = model, .instructions = instructions_of, .cycles = cycles_of };
	uint32_t features[4] = { 0 }, name[13] = { 0 };
	HOLDS(registers_cpuid(&r, 1, 0, features) && features[2] >> 2 & 1 && features[3] >> 21 & 1);
	SAME(msr(&r, 0x345) >> 8 & 15, 3);
	HOLDS(!(msr(&r, 0x1a0) >> 12 & 1));
	struct config plain = config;
	plain.sampling = 0;
	r.config = &plain;
	uint64_t value;
	memset(features, 0, sizeof features);
	HOLDS(!registers_cpuid(&r, 1, 0, features));
	HOLDS(!registers_read(&r, PEBS_ENABLE, &value) && !registers_write(&r, DEBUG_STORE_AREA, STORE));
	registers_write(&r, PERFEVTSEL0, USER_LOADS);
	registers_write(&r, GLOBAL_CONTROL, 1);
	HOLDS(!r.sampling.by_access);
	for (uint32_t part = 0; part < 3; part++)
		HOLDS(registers_cpuid(&r, 0x80000002 + part, 0, name + 4 * part));
	HOLDS(strstr((char *)name, "modeled") && !strstr((char *)name, "PEBS"));
	r.config = &config;
	for (uint32_t part = 0; part < 3; part++)
		registers_cpuid(&r, 0x80000002 + part, 0, name + 4 * part);
	HOLDS(strstr((char *)name, "modeled") && strstr((char *)name, "PEBS"));
}

static void sources(void)
{
	ASK("Does each access report the place that its cost comes from?");
	struct outcome o = model_access(model, 0, 100000, true, 0);
	SAME(o.source, FROM_MEMORY);
	SAME(model_access(model, 0, 100000, false, 0).source, FROM_L1);
	o = model_access(model, 1, 100000, false, 0);
	SAME(o.source, FROM_CPU_OF_SAME_L3);
	model_access(model, 0, 200000, true, 0);
	o = model_access(model, 2, 200000, false, 0);
	SAME(o.source, FROM_OTHER_L3);
	SAME(o.cycles, config.other_l3_cycles);
	for (uint32_t i = 0; i < 8; i++) /* out of the L1, by its sets */
		model_access(model, 0, 300000 + 64 * i, false, 0);
	model_access(model, 0, 300000 + 64 * 8, false, 0);
	o = model_access(model, 0, 300000, false, 0);
	SAME(o.source, FROM_L2);
	SAME(o.cycles, config.l2_cycles);
}

static void settling(void)
{
	ASK("Is a line that moves ordered to the nanosecond, and as any other once it has not moved for a while?");
	uint64_t settled = clock_cycles(&config, config.settled_ns), now = 10 * settled;
	for (unsigned i = 0; i < 4; i++)
		model_access(model, i % 2, 400000, true, now);
	HOLDS(model_access(model, 1, 400000, true, now + settled).moving);
	HOLDS(!model_access(model, 1, 400000, true, now + settled + 1).moving);
	ASK("Does its next move count as the first?");
	HOLDS(!model_access(model, 0, 400000, true, now + 3 * settled).moving);
	HOLDS(model_access(model, 1, 400000, true, now + 3 * settled).moving);
	ASK("Does a move in this CPU's future keep it ordered?");
	HOLDS(model_access(model, 1, 400000, true, now).moving);
}

int main(void)
{
	config_defaults(&config);
	config.sampling = 1;
	config.prefetch_streams = config.prefetch_degree = 0;
	model = model_new(&config);
	HOLDS(config.cpus > 2 && config.cpus_per_l3 == 2);
	every_period();
	selection();
	interrupting();
	traces();
	tagging();
	announced();
	sources();
	settling();
	model_free(model);
	fprintf(stderr, "%d failures\n", failures);
	return failures != 0;
}
