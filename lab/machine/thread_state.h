/* SPDX-License-Identifier: GPL-2.0-or-later */
#ifndef THREAD_STATE_H
#define THREAD_STATE_H
#include <stdbool.h>
#include <sys/types.h>

/* Whether a thread of this process runs, or would if the host had a processor for it; false: it sleeps, or is gone. */
bool thread_is_ready(pid_t thread);
#endif
