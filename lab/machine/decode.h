/* SPDX-License-Identifier: GPL-2.0-or-later
 * The few x86-64 instructions that the machine answers, or that no memory callback tells of. */
#ifndef DECODE_H
#define DECODE_H
#include <stddef.h>
#include <stdint.h>

enum instruction {
	OTHER_INSTRUCTION,
	READ_TSC,    /* RDTSC, RDTSCP */
	CPUID,
	READ_MSR,
	WRITE_MSR,
	READ_PMC,
	TRANSLATION, /* MOV to a control register, INVLPG, INVPCID: virtual lines may lie elsewhere now */
	FLUSH_LINE,  /* CLFLUSH, CLFLUSHOPT */
	PREFETCH,
	SPIN_HINT,   /* PAUSE */
	PORT,	     /* IN, OUT and their string forms */
	WRITE_FS,    /* WRFSBASE: in the kernel, a switch to another task */
};

/* An address: displacement + register base + register index << scale; -1 = no register. Numbered as x86 does it. */
struct operand {
	int8_t base, index, scale;
	int64_t displacement;
};

/* `next` is the address of the instruction that follows; `operand` is filled for FLUSH_LINE and PREFETCH. */
enum instruction decode(const uint8_t *bytes, size_t size, uint64_t next, struct operand *operand);
#endif
