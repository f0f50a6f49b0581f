/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "thread_state.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The letter after the name in /proc/self/task/TID/stat (proc(5)): R runs or waits for a processor, D for the disk. */
bool thread_is_ready(pid_t thread)
{
	char path[64], stat[128];
	snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)thread);
	int file = thread ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	ssize_t size = file < 0 ? -1 : read(file, stat, sizeof stat - 1);
	if (file >= 0)
		close(file);
	if (size <= 0)
		return false;
	stat[size] = 0;
	const char *name_end = strrchr(stat, ')');
	return name_end && name_end[1] && (name_end[2] == 'R' || name_end[2] == 'D');
}
