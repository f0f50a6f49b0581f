/* Programs of fixed work for the scenario `forecast`: kernels KIND KIB PASSES. Each is recorded on the host, and runs in the
 * guest. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state = 88172645463325252u;
static uint64_t draw(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

/* One cycle through all lines in a random order (Sattolo). */
static uint64_t chase(size_t bytes, int passes)
{
	size_t lines = bytes / 64;
	uint32_t *next = aligned_alloc(64, lines * 64), at = 0;
	for (size_t i = 0; i < lines; i++)
		next[i * 16] = (uint32_t)i;
	for (size_t i = lines - 1; i > 0; i--) {
		size_t j = draw() % i;
		uint32_t t = next[i * 16];
		next[i * 16] = next[j * 16];
		next[j * 16] = t;
	}
	for (size_t i = 0; i < lines * (size_t)passes; i++)
		at = next[at * 16];
	return at;
}

static uint64_t stream(size_t bytes, int passes)
{
	size_t words = bytes / 24;
	uint64_t *a = calloc(words, 8), *b = calloc(words, 8), *c = calloc(words, 8);
	for (int pass = 0; pass < passes; pass++)
		for (size_t i = 0; i < words; i++)
			a[i] = b[i] + 3 * c[i] + (uint64_t)pass;
	return a[words / 2];
}

/* Counts in a hash table of which a tenth gets nine tenths of the updates. */
static uint64_t table(size_t bytes, int passes)
{
	size_t words = bytes / 8;
	uint64_t *counts = calloc(words, 8);
	for (size_t i = 0; i < words * (size_t)passes; i++) {
		uint64_t key = draw();
		counts[key % 10 ? (key >> 8) % (words / 10) : (key >> 8) % words]++;
	}
	return counts[words / 20];
}

/* Binary searches in sorted numbers. */
static uint64_t search(size_t bytes, int passes)
{
	size_t words = bytes / 8, sum = 0;
	uint64_t *sorted = malloc(bytes);
	for (size_t i = 0; i < words; i++)
		sorted[i] = 3 * i;
	for (size_t i = 0; i < words / 8 * (size_t)passes; i++) {
		uint64_t wanted = draw() % (3 * words);
		size_t low = 0, high = words;
		while (high - low > 1) {
			size_t middle = (low + high) / 2;
			if (sorted[middle] <= wanted)
				low = middle;
			else
				high = middle;
		}
		sum += low;
	}
	return sum;
}

/* Product of square matrices, three of them in the bytes. */
static uint64_t matrix(size_t bytes, int passes)
{
	size_t n = 1;
	while (3 * (n + 1) * (n + 1) * 8 <= bytes)
		n++;
	double *a = calloc(n * n, 8), *b = calloc(n * n, 8), *c = calloc(n * n, 8);
	for (int pass = 0; pass < passes; pass++)
		for (size_t i = 0; i < n; i++)
			for (size_t j = 0; j < n; j++) {
				double sum = 0;
				for (size_t k = 0; k < n; k++)
					sum += a[i * n + k] * b[k * n + j];
				c[i * n + j] += sum + (double)pass;
			}
	return (uint64_t)c[n];
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		uint64_t (*run)(size_t, int);
	} kinds[] = { { "chase", chase }, { "stream", stream }, { "table", table }, { "search", search }, { "matrix", matrix } };
	for (size_t i = 0; argc == 4 && i < sizeof kinds / sizeof *kinds; i++)
		if (!strcmp(argv[1], kinds[i].name)) {
			printf("%llu\n", (unsigned long long)kinds[i].run((size_t)atol(argv[2]) * 1024, atoi(argv[3])));
			return 0;
		}
	fprintf(stderr, "kernels: expected chase, stream, table, search or matrix, KiB, passes\n");
	return 2;
}
