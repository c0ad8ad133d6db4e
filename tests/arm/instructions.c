/* A plugin of QEMU that counts the instructions which a program of one thread runs. It writes the number so far, one a
   line, at each getpriority(PRIO_USER, 0), which a program calls to mark a place, and at the program's end:
     gcc -O2 -shared -fPIC -o instructions.so instructions.c
     qemu-aarch64 -plugin instructions.so,out=FILE PROGRAM
   Debian's package of QEMU has no header for plugins; what is declared here is all that this one needs. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

struct qemu_plugin_tb;
struct qemu_plugin_info;
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *block);
extern void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*translated)(uint64_t id, struct qemu_plugin_tb *block));
extern void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *block, int operation, void *where, uint64_t add);
extern void qemu_plugin_register_vcpu_syscall_cb(uint64_t id, void (*called)(uint64_t id, unsigned cpu, int64_t number,
    uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g, uint64_t h));
extern void qemu_plugin_register_atexit_cb(uint64_t id, void (*ended)(uint64_t id, void *data), void *data);

int qemu_plugin_version = 1;
/* the system call is 141 on aarch64 and 140 on x86-64; there 141 is setpriority, which no program here calls */
enum { ADD_U64 = 0, PRIO_USER = 2 };

static uint64_t count; /* not atomic: a second thread would lose some of it */
static FILE *out;

static void translated(uint64_t id, struct qemu_plugin_tb *block) {
    qemu_plugin_register_vcpu_tb_exec_inline(block, ADD_U64, &count, qemu_plugin_tb_n_insns(block));
}

static void write_count(void) {
    fprintf(out, "%llu\n", (unsigned long long)count);
    fflush(out);
}

static void called(uint64_t id, unsigned cpu, int64_t number, uint64_t which, uint64_t who, uint64_t c, uint64_t d,
                   uint64_t e, uint64_t f, uint64_t g, uint64_t h) {
    if ((number == 140 || number == 141) && which == PRIO_USER && who == 0)
        write_count();
}

static void ended(uint64_t id, void *data) { write_count(); }

int qemu_plugin_install(uint64_t id, const struct qemu_plugin_info *info, int argc, char **argv) {
    if (argc != 1 || strncmp(argv[0], "out=", 4) || !(out = fopen(argv[0] + 4, "w")))
        return 1;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_vcpu_syscall_cb(id, called);
    qemu_plugin_register_atexit_cb(id, ended, NULL);
    return 0;
}
