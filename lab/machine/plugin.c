/* SPDX-License-Identifier: GPL-2.0-or-later
 * The machine as a QEMU plugin: preloaded into qemu-system-x86_64 and given as -plugin (README.md). What it watches of
 * each block of instructions, and what it answers in the place of the emulator. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cache.h"
#include "clock.h"
#include "config.h"
#include "decode.h"
#include "guest.h"
#include "qemu_plugin.h"
#include "registers.h"
#include "shim.h"
#include "truth.h"

#define EXPORTED __attribute__((visibility("default")))
EXPORTED int qemu_plugin_version = QEMU_PLUGIN_VERSION_USED;

enum { RAX, RCX, RDX, RBX, GENERAL_REGISTERS = 16 };
enum {
	TSC_CYCLES = 20,
	PAUSE_CYCLES = 40,
	FLUSH_CYCLES = 100,
	SWITCH_LOOKS = 16, /* blocks within which the kernel notes its next task after WRFSBASE */
	LOOK_NS = 1000000, /* between two looks without a switch: exec gives a task another name */
	FAILED = 3,
};
/* Where q35 has devices and firmware instead of memory. */
#define HOLE_BEGIN 0x80000000ull
#define HOLE_END 0x100000000ull

struct counters_of_vcpu { /* QEMU adds to these inline */
	uint64_t run, user_instructions, kernel_instructions;
};

/* A page of memory that the CPU used: virtual page below the generation in which it was entered. */
enum { PAGE_SHIFT = 12, TRANSLATIONS = 2048, GENERATION_SHIFT = 64 - PAGE_SHIFT, GENERATIONS = 1 << PAGE_SHIFT };
struct translation {
	uint64_t virtual_page, physical_page;
};

struct vcpu {
	struct counters_of_vcpu *counted;
	struct registers registers;
	struct qemu_plugin_register *general[GENERAL_REGISTERS], *gs_base, *kernel_gs_base;
	GByteArray *bytes;
	vcpu_cb after;	   /* at the next block, where an answered instruction is the last of its own */
	bool out_of_order; /* see clock_sync: the model is not told */
	uint64_t tsc, answer;
	bool answers;
	uint32_t leaf, subleaf, apic_id;
	uint64_t task_pointer;
	unsigned switch_looks;
	uint64_t next_look;
	struct translation translations[TRANSLATIONS];
	uint64_t translation_generation;
};

static struct config config;
static struct model *model;
static struct vcpu *vcpus[CPUS_AT_MOST];
static struct recent *recents[CPUS_AT_MOST];
static struct qemu_plugin_scoreboard *scoreboard;
static qemu_plugin_u64 run_word, user_word, kernel_word;
static volatile bool model_on;
static uint64_t facts[GUEST_FACTS];
static uint64_t host_start_ns, host_start_cpu_ns;

static _Noreturn void fail(const char *what)
{
	fprintf(stderr, "lab: %s\n", what);
	fflush(NULL);
	_exit(FAILED);
}

static void stall(struct vcpu *v, uint64_t cycles)
{
	clock_stall(v->registers.cpu, cycles);
}

static uint64_t instructions_of(unsigned cpu, unsigned levels)
{
	const struct vcpu *v = vcpus[cpu];
	if (!v)
		return 0;
	return (levels & USER_MODE ? v->counted->user_instructions : 0) +
	       (levels & KERNEL_MODE ? v->counted->kernel_instructions : 0);
}

static struct truth_cpu totals_of(unsigned cpu)
{
	return (struct truth_cpu){ .cycles = clock_worked(cpu),
				   .instructions = instructions_of(cpu, USER_MODE | KERNEL_MODE),
				   .user_instructions = instructions_of(cpu, USER_MODE) };
}

static uint64_t get(struct vcpu *v, struct qemu_plugin_register *reg)
{
	uint64_t value = 0;
	g_byte_array_set_size(v->bytes, 0);
	qemu_plugin_read_register(reg, v->bytes);
	memcpy(&value, v->bytes->data, v->bytes->len < sizeof value ? v->bytes->len : sizeof value);
	return value;
}

static void set(struct vcpu *v, unsigned reg, uint64_t value)
{
	g_byte_array_set_size(v->bytes, 0);
	g_byte_array_append(v->bytes, &value, sizeof value);
	qemu_plugin_write_register(v->general[reg], v->bytes);
}

static void set_edx_eax(struct vcpu *v, uint64_t value)
{
	set(v, RAX, value & UINT32_MAX);
	set(v, RDX, value >> 32);
}

/* ---- memory ---- */

/* False: no memory there. Beyond what the model covers every figure would be wrong without a word. */
static bool line_of(uint64_t physical, uint32_t *line)
{
	if (physical >= HOLE_BEGIN && physical < HOLE_END)
		return false;
	if (physical >= config.memory_bytes) {
		char said[160];
		snprintf(said, sizeof said, "the guest used address %#llx, the model covers %#llx bytes (memory_bytes)",
			 (unsigned long long)physical, (unsigned long long)config.memory_bytes);
		fail(said);
	}
	*line = (uint32_t)(physical >> LINE_SHIFT);
	return true;
}

static inline uint64_t virtual_page_key(const struct vcpu *v, uint64_t vaddr)
{
	return vaddr >> PAGE_SHIFT | v->translation_generation << GENERATION_SHIFT;
}

/* False: the access goes to no memory. The emulator is asked once for each page and generation. */
static bool accessed_line(struct vcpu *v, qemu_plugin_meminfo_t info, uint64_t vaddr, uint32_t *line)
{
	uint64_t key = virtual_page_key(v, vaddr), lines_of_page_mask = (1u << (PAGE_SHIFT - LINE_SHIFT)) - 1;
	struct translation *t = &v->translations[(vaddr >> PAGE_SHIFT) % TRANSLATIONS];
	if (t->virtual_page != key) {
		struct qemu_plugin_hwaddr *where = qemu_plugin_get_hwaddr(info, vaddr);
		if (!where)
			return false;
		if (qemu_plugin_hwaddr_is_io(where)) {
			stall(v, config.io_cycles);
			return false;
		}
		uint64_t physical = qemu_plugin_hwaddr_phys_addr(where);
		if (!line_of(physical, line))
			return false;
		*t = (struct translation){ key, physical >> PAGE_SHIFT };
	}
	*line = (uint32_t)(t->physical_page << (PAGE_SHIFT - LINE_SHIFT) | (vaddr >> LINE_SHIFT & lines_of_page_mask));
	return true;
}

static __attribute__((noinline)) void beyond_recent(unsigned cpu, qemu_plugin_meminfo_t info, uint64_t vaddr, void *ip, bool store)
{
	struct vcpu *v = vcpus[cpu];
	uint32_t line;
	if (!model_on || v->out_of_order || !accessed_line(v, info, vaddr, &line))
		return;
	struct outcome o = model_access(model, cpu, line, store, clock_now(cpu));
	stall(v, o.cycles);
	model_touched(model, cpu, vaddr >> LINE_SHIFT, store, o.moving);
	if (v->registers.sampling.by_access)
		stall(v, samples_access(&v->registers, &(struct access){ (uint64_t)ip, vaddr, o.cycles, o.source, store }));
	if (v->registers.sampling.may_overflow && o.source > FROM_L2)
		registers_poll(&v->registers);
	if (o.coherent)
		clock_line_moved(cpu);
	if (o.coherent || o.moving)
		clock_order(cpu, AHEAD_SHARED);
}

/* The emulator calls one of these at each access, so most accesses must be over after a comparison. */
static void on_load(unsigned cpu, qemu_plugin_meminfo_t info, uint64_t vaddr, void *ip)
{
	if (!recent_access(recents[cpu], vaddr >> LINE_SHIFT, false))
		beyond_recent(cpu, info, vaddr, ip, false);
}

static void on_store(unsigned cpu, qemu_plugin_meminfo_t info, uint64_t vaddr, void *ip)
{
	if (!recent_access(recents[cpu], vaddr >> LINE_SHIFT, true))
		beyond_recent(cpu, info, vaddr, ip, true);
}

static void on_sampled(unsigned cpu, qemu_plugin_meminfo_t info, uint64_t vaddr, void *ip)
{
	struct vcpu *v = vcpus[cpu];
	bool store = qemu_plugin_mem_is_store(info);
	if (!recent_access(recents[cpu], vaddr >> LINE_SHIFT, store))
		beyond_recent(cpu, info, vaddr, ip, store);
	else if (v->registers.sampling.by_access)
		stall(v, samples_access(&v->registers, &(struct access){ (uint64_t)ip, vaddr, 0, FROM_L1, store }));
}

static void forget_translations(unsigned cpu)
{
	struct vcpu *v = vcpus[cpu];
	model_forget(model, cpu);
	if (++v->translation_generation == GENERATIONS) {
		memset(v->translations, 0, sizeof v->translations);
		v->translation_generation = 1;
	}
}

static bool operand_line(struct vcpu *v, const struct operand *o, uint32_t *line)
{
	uint64_t address = (uint64_t)o->displacement, physical;
	if (o->base >= 0)
		address += get(v, v->general[o->base]);
	if (o->index >= 0)
		address += get(v, v->general[o->index]) << o->scale;
	return qemu_plugin_translate_vaddr(address, &physical) && line_of(physical, line);
}

static void on_flush(unsigned cpu, void *operand)
{
	uint32_t line;
	if (!model_on || !operand_line(vcpus[cpu], operand, &line))
		return;
	stall(vcpus[cpu], FLUSH_CYCLES);
	model_flush(model, line);
}

static void on_prefetch(unsigned cpu, void *operand)
{
	uint32_t line;
	if (model_on && !vcpus[cpu]->out_of_order && operand_line(vcpus[cpu], operand, &line))
		model_prefetch(model, cpu, line, clock_now(cpu));
}

static void on_translation(unsigned cpu, void *unused)
{
	(void)unused;
	forget_translations(cpu);
}

/* ---- who runs ---- */

static bool read_memory(struct vcpu *v, uint64_t address, void *to, size_t size)
{
	g_byte_array_set_size(v->bytes, 0);
	if (!qemu_plugin_read_memory_vaddr(address, v->bytes, size) || v->bytes->len < size)
		return false;
	memcpy(to, v->bytes->data, size);
	return true;
}

static void look_who_runs(unsigned cpu, bool again)
{
	struct vcpu *v = vcpus[cpu];
	struct truth_task task = { 0 };
	uint64_t pointer, base;
	if (!facts[CURRENT_TASK])
		return;
	base = get(v, v->gs_base);
	if (!(base >> 63)) /* a program's own: the kernel's is put aside */
		base = get(v, v->kernel_gs_base);
	if (!read_memory(v, base + facts[CURRENT_TASK], &pointer, sizeof pointer))
		return;
	if (pointer == v->task_pointer && !again) {
		v->switch_looks -= v->switch_looks > 0;
		return;
	}
	v->switch_looks = 0;
	v->next_look = clock_now(cpu) + clock_cycles(&config, LOOK_NS);
	if (!read_memory(v, pointer + facts[TASK_TID], &task.tid, sizeof task.tid) ||
	    !read_memory(v, pointer + facts[TASK_PID], &task.pid, sizeof task.pid) ||
	    !read_memory(v, pointer + facts[TASK_NAME], task.name, sizeof task.name - 1))
		return;
	v->task_pointer = pointer;
	for (char *c = task.name; *c; c++)
		if (*c < ' ')
			*c = '?';
	truth_runs(cpu, &task, totals_of(cpu));
}

static void on_write_fs(unsigned cpu, void *unused)
{
	(void)unused;
	if (!facts[CURRENT_TASK])
		return;
	vcpus[cpu]->switch_looks = SWITCH_LOOKS;
	clock_stop_soon(cpu);
}

static void tell_truth(uint64_t now)
{
	struct truth_cpu cpus[CPUS_AT_MOST] = { 0 };
	for (unsigned i = 0; i < config.cpus; i++)
		if (vcpus[i])
			cpus[i] = totals_of(i);
	truth_entry(now, cpus);
}

/* ---- time ---- */

static void on_limit(unsigned cpu, void *unused)
{
	(void)unused;
	struct vcpu *v = vcpus[cpu];
	if (v->after) {
		vcpu_cb after = v->after;
		v->after = NULL;
		after(cpu, NULL);
	}
	bool again = clock_now(cpu) >= v->next_look;
	if (v->switch_looks || again)
		look_who_runs(cpu, again);
	if (v->registers.sampling.may_overflow)
		registers_poll(&v->registers);
	v->out_of_order = clock_sync(cpu);
	if (v->switch_looks && !v->out_of_order)
		clock_stop_soon(cpu);
	if (truth_is_due(clock_now(cpu)))
		tell_truth(clock_now(cpu));
}

static void on_pause(unsigned cpu, void *unused)
{
	(void)unused;
	if (model_on)
		clock_order(cpu, AHEAD_PAUSE);
}

static void on_tsc(unsigned cpu, void *unused)
{
	(void)unused;
	stall(vcpus[cpu], TSC_CYCLES);
	if (model_on)
		clock_order(cpu, AHEAD_TSC);
	vcpus[cpu]->tsc = clock_now(cpu);
}

static void after_tsc(unsigned cpu, void *unused)
{
	(void)unused;
	set_edx_eax(vcpus[cpu], vcpus[cpu]->tsc);
}

/* ---- registers ---- */

static bool read_guest(unsigned cpu, uint64_t address, void *to, size_t size)
{
	return read_memory(vcpus[cpu], address, to, size);
}

static bool write_guest(unsigned cpu, uint64_t address, const void *from, size_t size)
{
	GByteArray *bytes = vcpus[cpu]->bytes;
	g_byte_array_set_size(bytes, 0);
	g_byte_array_append(bytes, from, (unsigned)size);
	return qemu_plugin_write_memory_vaddr(address, bytes);
}

/* A message-signaled interrupt (Intel SDM, volume 3, chapter 11) to this CPU's own local APIC; the CPU takes it at the end of
 * the block. */
static void interrupt_guest(unsigned cpu)
{
	enum { LOCAL_APICS = 0xfee00000, DESTINATION_SHIFT = 12, NON_MASKABLE = 4 << 8 };
	uint32_t message = NON_MASKABLE;
	GByteArray *bytes = vcpus[cpu]->bytes;
	g_byte_array_set_size(bytes, 0);
	g_byte_array_append(bytes, &message, sizeof message);
	if (qemu_plugin_write_memory_hwaddr(LOCAL_APICS | (uint64_t)vcpus[cpu]->apic_id << DESTINATION_SHIFT, bytes))
		fail("the emulator refused a message-signaled interrupt");
}

static void on_write_msr(unsigned cpu, void *unused)
{
	(void)unused;
	struct vcpu *v = vcpus[cpu];
	uint64_t value = (get(v, v->general[RAX]) & UINT32_MAX) | get(v, v->general[RDX]) << 32;
	registers_write(&v->registers, (uint32_t)get(v, v->general[RCX]), value);
}

static void on_read_msr(unsigned cpu, void *unused)
{
	(void)unused;
	struct vcpu *v = vcpus[cpu];
	v->answers = registers_read(&v->registers, (uint32_t)get(v, v->general[RCX]), &v->answer);
}

static void after_read_msr(unsigned cpu, void *unused)
{
	(void)unused;
	struct vcpu *v = vcpus[cpu];
	if (v->answers)
		set_edx_eax(v, v->answer);
	v->answers = false;
}

/* The emulator would fault: its processor has no counters. So the instruction is left out. */
static void on_read_pmc(unsigned cpu, void *next)
{
	struct vcpu *v = vcpus[cpu];
	set_edx_eax(v, registers_counter(&v->registers, (uint32_t)get(v, v->general[RCX])));
	qemu_plugin_set_pc((uint64_t)next);
}

static void on_mark(unsigned cpu, unsigned number)
{
	uint64_t now = clock_now(cpu), instructions = 0;
	for (unsigned i = 0; i < config.cpus; i++)
		instructions += instructions_of(i, USER_MODE | KERNEL_MODE);
	tell_truth(now);
	truth_mark(now, number);
	fprintf(stderr, "lab: mark %u guest_ns %llu host_ns %llu host_cpu_ns %llu instructions %llu\n", number,
		(unsigned long long)clock_ns(&config, now),
		(unsigned long long)(shim_host_ns(CLOCK_MONOTONIC) - host_start_ns),
		(unsigned long long)(shim_host_ns(CLOCK_PROCESS_CPUTIME_ID) - host_start_cpu_ns),
		(unsigned long long)instructions);
}

static void on_cpuid(unsigned cpu, void *unused)
{
	(void)unused;
	struct vcpu *v = vcpus[cpu];
	uint64_t rbx = 0, rcx = get(v, v->general[RCX]);
	v->leaf = (uint32_t)get(v, v->general[RAX]);
	v->subleaf = (uint32_t)rcx;
	v->answers = true;
	v->answer = 0;
	switch (v->leaf) {
	case GUEST_COUNT:
		v->answer = rcx < COUNTS ? model_count(model, cpu, (enum count)rcx) : 0;
		break;
	case GUEST_MODEL:
		model_on = rcx != 0;
		for (unsigned i = 0; i < config.cpus; i++) /* nothing is recent while the model is off */
			if (vcpus[i])
				model_forget(model, i);
		break;
	case GUEST_MARK:
		on_mark(cpu, (unsigned)rcx);
		break;
	case GUEST_TELL:
		rbx = get(v, v->general[RBX]);
		if (rbx < GUEST_FACTS)
			facts[rbx] = rcx;
		break;
	case GUEST_LINES:
		rbx = get(v, v->general[RBX]);
		v->answer = rbx < model_l3s(model) ? model_monitor_lines(model, (unsigned)rbx, (unsigned)rcx) : 0;
		break;
	case GUEST_CYCLES:
		v->answer = clock_worked(cpu);
		break;
	case GUEST_PAUSE:
		clock_pause(cpu, clock_cycles(&config, (rcx & UINT32_MAX) * 1000000u));
		break;
	default:
		v->answers = false;
	}
}

static void after_cpuid(unsigned cpu, void *unused)
{
	(void)unused;
	struct vcpu *v = vcpus[cpu];
	if (v->answers) {
		set_edx_eax(v, v->answer);
		set(v, RBX, model_l3_of(model, cpu));
		v->answers = false;
		return;
	}
	static const unsigned order[4] = { RAX, RBX, RCX, RDX };
	uint32_t answer[4];
	for (int i = 0; i < 4; i++)
		answer[i] = (uint32_t)get(v, v->general[order[i]]);
	if (v->leaf == 1)
		v->apic_id = answer[1] >> 24;
	if (registers_cpuid(&v->registers, v->leaf, v->subleaf, answer))
		for (int i = 0; i < 4; i++)
			set(v, order[i], answer[i]);
}

/* ---- translation ---- */

/* A pair of calls: before the instruction, and once it has been executed. Where it is the last of its block, the second
 * one comes at the beginning of the next. */
#define LAST(name)                                                                                                             \
	static void last_##name(unsigned cpu, void *userdata)                                                                  \
	{                                                                                                                      \
		on_##name(cpu, userdata);                                                                                      \
		vcpus[cpu]->after = after_##name;                                                                              \
		clock_stop_soon(cpu);                                                                                          \
	}
LAST(tsc)
LAST(read_msr)
LAST(cpuid)

static vcpu_cb answer(struct qemu_plugin_insn *insn, bool last, int flags, vcpu_cb before, vcpu_cb before_last, vcpu_cb after)
{
	qemu_plugin_register_vcpu_insn_exec_cb(insn, last ? before_last : before, flags, NULL);
	return last ? NULL : after;
}

static void *kept(const struct operand *operand)
{
	struct operand *copy = malloc(sizeof *copy);
	if (!copy)
		fail("out of memory");
	*copy = *operand;
	return copy;
}

static bool is_kernel_address(uint64_t vaddr)
{
	return vaddr >> 63;
}

/* What one instruction needs; what is to be called at the next one. */
static vcpu_cb watch(struct qemu_plugin_insn *insn, bool last)
{
	uint8_t bytes[16] = { 0 };
	struct operand operand;
	size_t size = qemu_plugin_insn_data(insn, bytes, sizeof bytes);
	uint64_t vaddr = qemu_plugin_insn_vaddr(insn), next = vaddr + qemu_plugin_insn_size(insn);
	switch (decode(bytes, size, next, &operand)) {
	case OTHER_INSTRUCTION:
		return NULL;
	case READ_TSC:
		return answer(insn, last, CALL_NO_REGS, on_tsc, last_tsc, after_tsc);
	case READ_MSR:
		return answer(insn, last, CALL_R_REGS, on_read_msr, last_read_msr, after_read_msr);
	case CPUID:
		return answer(insn, last, CALL_R_REGS, on_cpuid, last_cpuid, after_cpuid);
	case WRITE_MSR:
		qemu_plugin_register_vcpu_insn_exec_cb(insn, on_write_msr, CALL_R_REGS, NULL);
		return NULL;
	case READ_PMC:
		if (config.counters)
			qemu_plugin_register_vcpu_insn_exec_cb(insn, on_read_pmc, CALL_RW_REGS_PC, (void *)next);
		return NULL;
	case TRANSLATION:
		qemu_plugin_register_vcpu_insn_exec_cb(insn, on_translation, CALL_NO_REGS, NULL);
		return NULL;
	case FLUSH_LINE:
		qemu_plugin_register_vcpu_insn_exec_cb(insn, on_flush, CALL_R_REGS, kept(&operand));
		return NULL;
	case PREFETCH:
		qemu_plugin_register_vcpu_insn_exec_cb(insn, on_prefetch, CALL_R_REGS, kept(&operand));
		return NULL;
	case SPIN_HINT:
		qemu_plugin_register_vcpu_insn_exec_inline_per_vcpu(insn, INLINE_ADD_U64, run_word, PAUSE_CYCLES);
		qemu_plugin_register_vcpu_insn_exec_cb(insn, on_pause, CALL_NO_REGS, NULL);
		return NULL;
	case PORT:
		qemu_plugin_register_vcpu_insn_exec_inline_per_vcpu(insn, INLINE_ADD_U64, run_word, config.io_cycles);
		return NULL;
	case WRITE_FS:
		if (is_kernel_address(vaddr))
			qemu_plugin_register_vcpu_insn_exec_cb(insn, on_write_fs, CALL_NO_REGS, NULL);
		return NULL;
	}
	return NULL;
}

static void on_translate(struct qemu_plugin_tb *tb, void *unused)
{
	(void)unused;
	size_t count = qemu_plugin_tb_n_insns(tb);
	bool is_kernel = is_kernel_address(qemu_plugin_tb_vaddr(tb));
	vcpu_cb after = NULL;
	qemu_plugin_register_vcpu_tb_exec_cond_cb(tb, on_limit, CALL_RW_REGS, COND_GE, run_word, CLOCK_LIMIT, NULL);
	qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(tb, INLINE_ADD_U64, run_word, count);
	qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(tb, INLINE_ADD_U64, is_kernel ? kernel_word : user_word, count);
	for (size_t i = 0; i < count; i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
		if (after)
			qemu_plugin_register_vcpu_insn_exec_cb(insn, after, CALL_RW_REGS, NULL);
		void *ip = (void *)qemu_plugin_insn_vaddr(insn);
		if (config.sampling) {
			qemu_plugin_register_vcpu_mem_cb(insn, on_sampled, CALL_NO_REGS, MEMORY_RW, ip);
		} else {
			qemu_plugin_register_vcpu_mem_cb(insn, on_load, CALL_NO_REGS, MEMORY_R, ip);
			qemu_plugin_register_vcpu_mem_cb(insn, on_store, CALL_NO_REGS, MEMORY_W, ip);
		}
		after = watch(insn, i + 1 == count);
	}
}

/* ---- begin and end ---- */

static void find_registers(struct vcpu *v)
{
	static const char *const names[GENERAL_REGISTERS] = { "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi",
							      "r8",  "r9",  "r10", "r11", "r12", "r13", "r14", "r15" };
	GArray *all = qemu_plugin_get_registers();
	for (unsigned i = 0; i < all->len; i++) {
		qemu_plugin_reg_descriptor *found = (qemu_plugin_reg_descriptor *)(void *)all->data + i;
		for (unsigned k = 0; k < GENERAL_REGISTERS; k++)
			if (!strcmp(found->name, names[k]))
				v->general[k] = found->handle;
		if (!strcmp(found->name, "gs_base"))
			v->gs_base = found->handle;
		if (!strcmp(found->name, "k_gs_base"))
			v->kernel_gs_base = found->handle;
	}
	for (unsigned k = 0; k < GENERAL_REGISTERS; k++)
		if (!v->general[k] || !v->gs_base || !v->kernel_gs_base)
			fail("the emulator does not offer the general registers and gs_base, k_gs_base to plugins");
}

static void on_vcpu_init(unsigned cpu, void *unused)
{
	(void)unused;
	struct vcpu *v = calloc(1, sizeof *v);
	if (!v)
		fail("out of memory");
	if (cpu >= config.cpus)
		fail("the emulator has more CPUs than the machine (cpus)");
	v->bytes = g_byte_array_new();
	v->counted = qemu_plugin_scoreboard_find(scoreboard, cpu);
	v->translation_generation = 1;
	recents[cpu] = model_recent(model, cpu);
	v->registers = (struct registers){
		.config = &config, .model = model, .cpu = cpu, .instructions = instructions_of, .cycles = clock_worked,
		.read = read_guest, .write = write_guest, .interrupt = interrupt_guest
	};
	find_registers(v);
	vcpus[cpu] = v;
	shim_vcpu_thread(cpu);
	clock_add(cpu, &v->counted->run);
}

static void on_vcpu_idle(unsigned cpu, void *unused)
{
	(void)unused;
	clock_idle(cpu);
}

static void on_vcpu_resume(unsigned cpu, void *unused)
{
	(void)unused;
	clock_resume(cpu);
}

static void report_samples(unsigned cpu, const struct sampling *s)
{
	uint64_t mean_ns = s->handled ? clock_ns(&config, s->handling_cycles / s->handled) : 0;
	fprintf(stderr, "lab: modeled PEBS, cpu %u: records %llu lost %llu interrupts %llu handled %llu handler_ns %llu\n", cpu,
		(unsigned long long)s->records, (unsigned long long)s->lost_records, (unsigned long long)s->interrupts,
		(unsigned long long)s->handled, (unsigned long long)mean_ns);
}

static void on_end(void *unused)
{
	(void)unused;
	struct clock_figures f = clock_figures();
	uint64_t now = clock_main_now();
	tell_truth(now);
	truth_end();
	on_mark(0, 0);
	for (unsigned i = 0; config.sampling && i < config.cpus; i++)
		if (vcpus[i])
			report_samples(i, &vcpus[i]->registers.sampling);
	if (config.verbose)
		fprintf(stderr, "lab: syncs %llu switches %llu stuck %llu starved %llu jumps %llu main_kicks %llu main_late %llu\n",
			(unsigned long long)f.syncs, (unsigned long long)f.switches, (unsigned long long)f.stuck,
			(unsigned long long)f.starved, (unsigned long long)f.jumps, (unsigned long long)f.main_kicks, (unsigned long long)f.main_late);
}

static void settings(int argc, char **argv)
{
	config_defaults(&config);
	for (int i = 0; i < argc; i++) {
		char *value = strchr(argv[i], '=');
		const char *wrong = "expected name=value";
		if (value) {
			*value++ = 0;
			wrong = strcmp(argv[i], "config") ? config_set(&config, argv[i], value) : config_read(&config, value);
		}
		if (wrong)
			fail(wrong);
	}
	const char *wrong = config_check(&config);
	if (wrong)
		fail(wrong);
}

EXPORTED int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc, char **argv)
{
	if (info->version.cur != QEMU_PLUGIN_VERSION_USED || !info->system_emulation)
		fail("expected a system emulator with version 7 of the plugin interface (QEMU 11.1)");
	if (!shim_is_preloaded())
		fail("expected to be preloaded as well (LD_PRELOAD, or --preload of ld.so)");
	settings(argc, argv);
	if (info->system.max_vcpus > (int)config.cpus)
		fail("the emulator has more CPUs than the machine (cpus)");
	model = model_new(&config);
	if (!model)
		fail("out of memory");
	const char *wrong = truth_start(&config, model);
	if (wrong) {
		fprintf(stderr, "lab: %s: ", config.truth_file);
		fail(wrong);
	}
	scoreboard = qemu_plugin_scoreboard_new(sizeof(struct counters_of_vcpu));
	run_word = (qemu_plugin_u64){ scoreboard, offsetof(struct counters_of_vcpu, run) };
	user_word = (qemu_plugin_u64){ scoreboard, offsetof(struct counters_of_vcpu, user_instructions) };
	kernel_word = (qemu_plugin_u64){ scoreboard, offsetof(struct counters_of_vcpu, kernel_instructions) };
	model_on = config.model_on;
	shim_start(&config);
	host_start_ns = shim_host_ns(CLOCK_MONOTONIC);
	host_start_cpu_ns = shim_host_ns(CLOCK_PROCESS_CPUTIME_ID);
	qemu_plugin_register_vcpu_init_cb(id, on_vcpu_init, NULL);
	qemu_plugin_register_vcpu_idle_cb(id, on_vcpu_idle, NULL);
	qemu_plugin_register_vcpu_resume_cb(id, on_vcpu_resume, NULL);
	qemu_plugin_register_vcpu_tb_trans_cb(id, on_translate, NULL);
	qemu_plugin_register_atexit_cb(id, on_end, NULL);
	return 0;
}
