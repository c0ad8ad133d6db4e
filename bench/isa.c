// Hides instructions newer than AVX2 from a process: from all of its libraries alike, whatever switches they have.
//   cc -O2 -shared -fPIC [-DAVX_VNNI] -o isa.so isa.c && LD_PRELOAD=./isa.so PROGRAM
// The kernel lets the CPUID instruction fault (arch_prctl), and the handler of the fault answers in its place.
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { ARCH_SET_CPUID = 0x1012 };

#define BIT(number) (1u << (number))
static const uint32_t avx512_ebx = BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31);
static const uint32_t avx512_ecx = BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14);
static const uint32_t avx512_edx = BIT(2) | BIT(3) | BIT(8) | BIT(23), amx_edx = BIT(22) | BIT(24) | BIT(25);
static const uint32_t avx_vnni_eax = BIT(4), newer_eax = BIT(5) | BIT(21) | BIT(23);
static const uint32_t newer_edx = BIT(4) | BIT(5) | BIT(8) | BIT(10) | BIT(19); // AVX-VNNI-INT8 to AVX10

static void hide(uint32_t leaf, uint32_t part, uint32_t *a, uint32_t *b, uint32_t *c, uint32_t *d) {
    if (leaf == 7 && part == 0) {
        *b &= ~avx512_ebx;
        *c &= ~avx512_ecx;
        *d &= ~(avx512_edx | amx_edx);
    } else if (leaf == 7 && part == 1) {
        *a &= ~newer_eax;
        *d &= ~newer_edx;
#ifndef AVX_VNNI
        *a &= ~avx_vnni_eax;
#endif
    } else if (leaf == 0x1d || leaf == 0x1e || leaf == 0x24) {
        *a = *b = *c = *d = 0;
    }
}

static void answer(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *at = (const unsigned char *)registers[REG_RIP];
    if (info->si_code != SI_KERNEL || at[0] != 0x0f || at[1] != 0xa2) {
        signal(number, SIG_DFL); // a fault of the program: it happens again when this returns
        return;
    }
    uint32_t a, b, c, d, leaf = registers[REG_RAX], part = registers[REG_RCX];
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
    __cpuid_count(leaf, part, a, b, c, d);
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
    hide(leaf, part, &a, &b, &c, &d);
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

// 101 of the process's constructors: before those of all libraries that ask the processor
__attribute__((constructor(101))) static void begin(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = answer;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    // a processor that cannot do this leaves the process as it was, which the bench notices
    if (!sigaction(SIGSEGV, &action, NULL))
        syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
}
