/* SPDX-License-Identifier: GPL-2.0-or-later
 * A test says what it asks, and what it found where the answer is no. */
#ifndef CHECK_H
#define CHECK_H
#include <stdio.h>
#include <stdlib.h>

static int failures;

#define ASK(question) fprintf(stderr, "%s\n", question)
#define SAME(found, expected)                                                                                                  \
	do {                                                                                                                   \
		unsigned long long f_ = (unsigned long long)(found), e_ = (unsigned long long)(expected);                      \
		if (f_ != e_) {                                                                                                \
			fprintf(stderr, "  %s:%d: %s: found %llu (%#llx), expected %llu (%#llx)\n", __FILE__, __LINE__,        \
				#found, f_, f_, e_, e_);                                                                       \
			failures++;                                                                                            \
		}                                                                                                              \
	} while (0)
#define HOLDS(what)                                                                                                            \
	do {                                                                                                                   \
		if (!(what)) {                                                                                                 \
			fprintf(stderr, "  %s:%d: does not hold: %s\n", __FILE__, __LINE__, #what);                            \
			failures++;                                                                                            \
		}                                                                                                              \
	} while (0)
#endif
