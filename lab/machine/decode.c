/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "decode.h"

#include <string.h>

enum { REX_B = 1, REX_X = 2 };

static int32_t little32(const uint8_t *p)
{
	int32_t v;
	memcpy(&v, p, sizeof v);
	return v;
}

/* ModRM and what follows it (Intel SDM, volume 2, 2.1.3 and 2.2.1.6). */
static struct operand operand_at(const uint8_t *modrm, unsigned rex, uint64_t next)
{
	struct operand o = { -1, -1, 0, 0 };
	unsigned mod = modrm[0] >> 6, rm = modrm[0] & 7;
	const uint8_t *after = modrm + 1;
	if (rm == 4) {
		uint8_t sib = *after++;
		unsigned index = (sib >> 3 & 7) | (rex & REX_X ? 8 : 0), base = sib & 7;
		o.scale = (int8_t)(sib >> 6);
		if (index != 4)
			o.index = (int8_t)index;
		if (base == 5 && mod == 0)
			o.displacement = little32(after);
		else
			o.base = (int8_t)(base | (rex & REX_B ? 8 : 0));
	} else if (rm == 5 && mod == 0) {
		o.displacement = (int64_t)(next + (uint64_t)(int64_t)little32(after));
	} else {
		o.base = (int8_t)(rm | (rex & REX_B ? 8 : 0));
	}
	if (mod == 1)
		o.displacement = (int8_t)*after;
	else if (mod == 2)
		o.displacement = little32(after);
	return o;
}

static enum instruction two_bytes(const uint8_t *p, size_t size, unsigned prefix, unsigned rex, uint64_t next,
				  struct operand *operand)
{
	uint8_t modrm = size > 1 ? p[1] : 0;
	unsigned field = modrm >> 3 & 7;
	int in_memory = modrm < 0xc0;
	switch (p[0]) {
	case 0x01:
		if (modrm == 0xf9)
			return READ_TSC;
		return field == 7 && in_memory ? TRANSLATION : OTHER_INSTRUCTION;
	case 0x0d:
	case 0x18:
		if (!in_memory || field > 3 || (p[0] == 0x18 && field == 0))
			return OTHER_INSTRUCTION; /* PREFETCHNTA goes past the L2 */
		*operand = operand_at(p + 1, rex, next);
		return PREFETCH;
	case 0x22:
		return TRANSLATION;
	case 0x30:
		return WRITE_MSR;
	case 0x31:
		return READ_TSC;
	case 0x32:
		return READ_MSR;
	case 0x33:
		return READ_PMC;
	case 0x38:
		return modrm == 0x82 ? TRANSLATION : OTHER_INSTRUCTION; /* the third byte of INVPCID */
	case 0xa2:
		return CPUID;
	case 0xae:
		if (field == 7 && in_memory) {
			*operand = operand_at(p + 1, rex, next);
			return FLUSH_LINE;
		}
		return field == 2 && !in_memory && prefix == 0xf3 ? WRITE_FS : OTHER_INSTRUCTION;
	}
	return OTHER_INSTRUCTION;
}

enum instruction decode(const uint8_t *p, size_t size, uint64_t next, struct operand *operand)
{
	unsigned prefix = 0, rex = 0;
	while (size > 1 && (*p == 0x66 || *p == 0xf2 || *p == 0xf3)) {
		prefix = *p++;
		size--;
		if (prefix == 0xf3 && *p == 0x90)
			return SPIN_HINT;
	}
	if (size > 1 && (*p & 0xf0) == 0x40) {
		rex = *p++;
		size--;
	}
	if (size > 1 && *p == 0x0f)
		return two_bytes(p + 1, size - 1, prefix, rex, next, operand);
	if ((*p >= 0xe4 && *p <= 0xe7) || (*p >= 0xec && *p <= 0xef) || (*p >= 0x6c && *p <= 0x6f))
		return PORT;
	return OTHER_INSTRUCTION;
}
