/* SPDX-License-Identifier: GPL-2.0-or-later
 * How programs in the guest speak with the machine: CPUID of leaves that no processor has. RBX and RCX go in. */
#ifndef GUEST_H
#define GUEST_H

enum guest_leaf {
	/* RCX: an enum count; out: RDX:RAX of this CPU since the start, RBX its L3. */
	GUEST_COUNT = 0x4c414230,
	GUEST_MODEL,  /* RCX: 1 on, 0 off */
	GUEST_MARK,   /* RCX: a number for the truth file */
	GUEST_TELL,   /* RBX: an enum guest_fact, RCX: its value */
	GUEST_LINES,  /* RBX: L3, RCX: monitor; out: RDX:RAX lines that it holds */
	GUEST_CYCLES, /* out: RDX:RAX of this CPU */
	GUEST_PAUSE,  /* RCX: milliseconds in which no CPU runs, as if a hypervisor had paused the guest */
};
/* Where the guest's kernel keeps who runs: /proc/kallsyms and /sys/kernel/btf/vmlinux say so. */
enum guest_fact { CURRENT_TASK, TASK_TID, TASK_PID, TASK_NAME, GUEST_FACTS };
#endif
