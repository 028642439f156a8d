#include "cpu_features.h"

#include <cpuid.h>
#include <stdatomic.h>
#include <stddef.h>

/* Unset until the first question; detection gives everyone the same answer, so a race is harmless. */
static _Atomic int selected_isa = -1;
static _Atomic int vnni = -1;

typedef struct {
    uint32_t leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_1_eax;
    uint64_t xcr0;
} cpuid_words;

static uint64_t read_xcr0(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t)high << 32) | low;
}

static cpuid_words read_cpuid(void) {
    cpuid_words words = {0};
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return words;
    words.leaf1_ecx = c;
    /* xgetbv faults unless the operating system has said (OSXSAVE) that it saves extended state. */
    if (c & bit_OSXSAVE) words.xcr0 = read_xcr0();
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        words.leaf7_ebx = b;
        words.leaf7_ecx = c;
        if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) words.leaf7_1_eax = a;
    }
    return words;
}

static int has_all(uint64_t word, uint64_t bits) { return (word & bits) == bits; }

enum {
    XCR0_AVX = 0x06,    /* XMM and YMM state are saved */
    XCR0_AVX512 = 0xe6, /* and opmask, upper ZMM halves, ZMM16-31 */
    LEAF7_1_EAX_AVX512_BF16 = 1 << 5,
    LEAF7_ECX_AVX512_VNNI = 1 << 11
};

static int has_avx512(const cpuid_words *words) {
    return has_all(words->xcr0, XCR0_AVX512) &&
           has_all(words->leaf7_ebx, (uint32_t)bit_AVX512F | bit_AVX512BW | bit_AVX512DQ |
                                         (uint32_t)bit_AVX512VL);
}

static uint32_t supported_mask(const cpuid_words *words) {
    uint32_t mask = 1u << ML_ISA_SCALAR;
    if (!has_all(words->xcr0, XCR0_AVX) || !has_all(words->leaf1_ecx, bit_AVX | bit_FMA) ||
        !has_all(words->leaf7_ebx, bit_AVX2))
        return mask;
    mask |= 1u << ML_ISA_AVX2;
    if (!has_avx512(words)) return mask;
    mask |= 1u << ML_ISA_AVX512;
    if (words->leaf7_1_eax & LEAF7_1_EAX_AVX512_BF16) mask |= 1u << ML_ISA_AVX512_BF16;
    return mask;
}

uint32_t ml_isa_supported_mask(void) {
    const cpuid_words words = read_cpuid();
    return supported_mask(&words);
}

static int detect_vnni(void) {
    const cpuid_words words = read_cpuid();
    return has_avx512(&words) && (words.leaf7_ecx & LEAF7_ECX_AVX512_VNNI) != 0;
}

int ml_cpu_has_vnni(void) {
    /* Remembered: under a hypervisor CPUID costs microseconds, and kernels ask at each call. */
    int has = atomic_load_explicit(&vnni, memory_order_relaxed);
    if (has < 0) {
        has = detect_vnni();
        atomic_store_explicit(&vnni, has, memory_order_relaxed);
    }
    return has;
}

void ml_cpu_allow_vnni(int allowed) {
    atomic_store_explicit(&vnni, allowed ? detect_vnni() : 0, memory_order_relaxed);
}

const char *ml_isa_name(int isa) {
    static const char *const names[ML_ISA_COUNT] = {"scalar", "avx2", "avx512", "avx512_bf16"};
    return isa >= 0 && isa < ML_ISA_COUNT ? names[isa] : NULL;
}

int ml_isa_selected(void) {
    int isa = atomic_load_explicit(&selected_isa, memory_order_relaxed);
    if (isa >= 0) return isa;
    const uint32_t mask = ml_isa_supported_mask();
    for (isa = ML_ISA_COUNT - 1; !(mask >> isa & 1u);) isa--;
    atomic_store_explicit(&selected_isa, isa, memory_order_relaxed);
    return isa;
}

int ml_isa_set(int isa) {
    if (isa < 0 || isa >= ML_ISA_COUNT || !(ml_isa_supported_mask() >> isa & 1u)) return -1;
    atomic_store_explicit(&selected_isa, isa, memory_order_relaxed);
    return 0;
}
