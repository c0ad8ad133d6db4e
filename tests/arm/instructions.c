/* A plugin of QEMU that counts the instructions which a program of one thread runs, and writes the number at its end:
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
extern void qemu_plugin_register_atexit_cb(uint64_t id, void (*ended)(uint64_t id, void *data), void *data);

int qemu_plugin_version = 1;
enum { ADD_U64 = 0 };

static uint64_t count; /* not atomic: a second thread would lose some of it */
static char out[4096];

static void translated(uint64_t id, struct qemu_plugin_tb *block) {
    qemu_plugin_register_vcpu_tb_exec_inline(block, ADD_U64, &count, qemu_plugin_tb_n_insns(block));
}

static void ended(uint64_t id, void *data) {
    FILE *file = fopen(out, "w");
    if (file) {
        fprintf(file, "%llu\n", (unsigned long long)count);
        fclose(file);
    }
}

int qemu_plugin_install(uint64_t id, const struct qemu_plugin_info *info, int argc, char **argv) {
    if (argc != 1 || strncmp(argv[0], "out=", 4) || strlen(argv[0] + 4) >= sizeof out)
        return 1;
    strcpy(out, argv[0] + 4);
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, ended, NULL);
    return 0;
}
