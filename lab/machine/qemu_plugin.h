/* SPDX-License-Identifier: GPL-2.0-or-later
 * What is used of QEMU's TCG plugin interface, version 7 (QEMU 11.1): written from its documentation, as the header is in no
 * Debian package. https://www.qemu.org/docs/master/devel/tcg-plugins.html */
#ifndef QEMU_PLUGIN_H
#define QEMU_PLUGIN_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { QEMU_PLUGIN_VERSION_USED = 7 };

typedef uint64_t qemu_plugin_id_t;
typedef struct {
	const char *target_name;
	struct {
		int min, cur;
	} version;
	bool system_emulation;
	struct {
		int smp_vcpus, max_vcpus;
	} system;
} qemu_info_t;

struct qemu_plugin_tb;
struct qemu_plugin_insn;
struct qemu_plugin_scoreboard;
struct qemu_plugin_hwaddr;
struct qemu_plugin_register;
typedef struct {
	struct qemu_plugin_scoreboard *score;
	size_t offset;
} qemu_plugin_u64;

enum qemu_plugin_cb_flags { CALL_NO_REGS, CALL_R_REGS, CALL_RW_REGS, CALL_RW_REGS_PC };
enum qemu_plugin_mem_rw { MEMORY_R = 1, MEMORY_W, MEMORY_RW };
enum qemu_plugin_cond { COND_NEVER, COND_ALWAYS, COND_EQ, COND_NE, COND_LT, COND_LE, COND_GT, COND_GE };
enum qemu_plugin_op { INLINE_ADD_U64, INLINE_STORE_U64 };
typedef uint32_t qemu_plugin_meminfo_t;

/* GLib's arrays, as the interface hands them out. */
typedef struct {
	unsigned char *data;
	unsigned len;
} GByteArray;
typedef struct {
	char *data;
	unsigned len;
} GArray;
GByteArray *g_byte_array_new(void);
GByteArray *g_byte_array_set_size(GByteArray *, unsigned);
GByteArray *g_byte_array_append(GByteArray *, const void *, unsigned);

typedef struct {
	struct qemu_plugin_register *handle;
	const char *name;
	const char *feature;
	bool is_readonly;
} qemu_plugin_reg_descriptor;

typedef void (*vcpu_cb)(unsigned vcpu, void *userdata);
typedef void (*vcpu_mem_cb)(unsigned vcpu, qemu_plugin_meminfo_t, uint64_t vaddr, void *userdata);
typedef void (*tb_trans_cb)(struct qemu_plugin_tb *, void *userdata);
typedef void (*plain_cb)(void *userdata);

void qemu_plugin_register_vcpu_init_cb(qemu_plugin_id_t, vcpu_cb, void *);
void qemu_plugin_register_vcpu_idle_cb(qemu_plugin_id_t, vcpu_cb, void *);
void qemu_plugin_register_vcpu_resume_cb(qemu_plugin_id_t, vcpu_cb, void *);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t, plain_cb, void *);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, tb_trans_cb, void *);
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *, vcpu_cb, int flags, void *);
void qemu_plugin_register_vcpu_tb_exec_cond_cb(struct qemu_plugin_tb *, vcpu_cb, int flags, int cond, qemu_plugin_u64,
					       uint64_t imm, void *);
void qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(struct qemu_plugin_tb *, int op, qemu_plugin_u64, uint64_t imm);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *, vcpu_cb, int flags, void *);
void qemu_plugin_register_vcpu_insn_exec_inline_per_vcpu(struct qemu_plugin_insn *, int op, qemu_plugin_u64, uint64_t);
void qemu_plugin_register_vcpu_mem_cb(struct qemu_plugin_insn *, vcpu_mem_cb, int flags, int rw, void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
size_t qemu_plugin_insn_data(const struct qemu_plugin_insn *, void *, size_t);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *);
void *qemu_plugin_insn_haddr(const struct qemu_plugin_insn *);
struct qemu_plugin_hwaddr *qemu_plugin_get_hwaddr(qemu_plugin_meminfo_t, uint64_t);
bool qemu_plugin_mem_is_store(qemu_plugin_meminfo_t);
bool qemu_plugin_hwaddr_is_io(const struct qemu_plugin_hwaddr *);
uint64_t qemu_plugin_hwaddr_phys_addr(const struct qemu_plugin_hwaddr *);
bool qemu_plugin_translate_vaddr(uint64_t vaddr, uint64_t *paddr);
bool qemu_plugin_read_memory_vaddr(uint64_t vaddr, GByteArray *, size_t len);
bool qemu_plugin_write_memory_vaddr(uint64_t vaddr, GByteArray *);
int qemu_plugin_write_memory_hwaddr(uint64_t physical, GByteArray *); /* 0 = done */
GArray *qemu_plugin_get_registers(void);
bool qemu_plugin_read_register(struct qemu_plugin_register *, GByteArray *);
bool qemu_plugin_write_register(struct qemu_plugin_register *, GByteArray *);
void qemu_plugin_set_pc(uint64_t);
struct qemu_plugin_scoreboard *qemu_plugin_scoreboard_new(size_t);
void *qemu_plugin_scoreboard_find(struct qemu_plugin_scoreboard *, unsigned);
#endif
