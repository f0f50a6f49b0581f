/* SPDX-License-Identifier: GPL-2.0-or-later
 * Raw traces for the tests: make_trace KIND LINES COUNT SEED FIRST_BYTE, to standard output.
 * Kinds: uniform (over LINES lines), loop, stream (ever on), skewed (nine of ten accesses to an eighth of the lines). */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
	if (argc != 6) {
		fprintf(stderr, "usage: make_trace uniform|loop|stream|skewed LINES COUNT SEED FIRST_BYTE\n");
		return 2;
	}
	uint64_t lines = strtoull(argv[2], NULL, 10), count = strtoull(argv[3], NULL, 10);
	uint64_t state = strtoull(argv[4], NULL, 10) * 2 + 1, first = strtoull(argv[5], NULL, 0);
	for (uint64_t i = 0; i < count; i++) {
		state = state * 6364136223846793005ull + 1442695040888963407ull;
		uint64_t line = 0, draw = state >> 33;
		switch (*argv[1]) {
		case 'u': line = draw % lines; break;
		case 'l': line = i % lines; break;
		case 's': line = argv[1][1] == 't' ? i : draw % 10 ? draw / 10 % (lines / 8) : draw / 10 % lines; break;
		default: return 2;
		}
		uint64_t address = first + line * 64 + (state >> 20 & 56);
		fwrite(&address, sizeof address, 1, stdout);
	}
	return 0;
}
