/* SPDX-License-Identifier: GPL-2.0-or-later
 * Between QEMU and the C library: this object is preloaded, so that the emulator's clock, its main loop's waits and its
 * halted CPUs go by the guest's time (clock.h). Before shim_start, and in other threads, everything is as it was. */
#ifndef SHIM_H
#define SHIM_H
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "clock.h"

/* Called by the main thread; the configuration must stay. */
void shim_start(const struct config *);
/* Called by a virtual CPU's own thread. */
void shim_vcpu_thread(unsigned cpu);
/* Whether our calls are the ones that QEMU makes. */
bool shim_is_preloaded(void);
uint64_t shim_host_ns(clockid_t);
#endif
