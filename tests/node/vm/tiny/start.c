/* The processor: Linux's 64-bit boot protocol in, own page tables, one interrupt handler for everything, and sleep. */
#include "tiny.h"

enum { SERIAL = 0x3f8, PIC1 = 0x20, PIC2 = 0xa0, KEYBOARD = 0x64, COMMAND_LINE = 0x228 };

__asm__(".pushsection .head,\"ax\"\n.globl _start\n"
        "_start: lea stack_top(%rip),%rsp; mov %rsi,%rdi; call begin\n.popsection\n"
        ".pushsection .bss\n.balign 16\n.skip 65536\nstack_top:\n.popsection\n");
__asm__(".pushsection .text\n.globl on_interrupt\non_interrupt:\n"
        "push %rax;push %rcx;push %rdx;push %rsi;push %rdi;push %r8;push %r9;push %r10;push %r11\n"
        "call acknowledge\n"
        "pop %r11;pop %r10;pop %r9;pop %r8;pop %rdi;pop %rsi;pop %rdx;pop %rcx;pop %rax\n"
        "iretq\n.popsection\n");
extern void on_interrupt(void);

static u64 level4[512] PAGE_ALIGNED, level3[512] PAGE_ALIGNED, low[512] PAGE_ALIGNED, devices_gib[512] PAGE_ALIGNED;
static u64 segments[5] = {0, 0, 0x00af9b000000ffffUL, 0x00cf93000000ffffUL, 0};
static struct { u16 offset0, selector; u8 stack, kind; u16 offset1; u32 offset2, zero; } PACKED gates[256];
struct table { u16 limit; u64 base; } PACKED;

void say(const char *text) { while (*text) outb(SERIAL, (u8)*text++); }

int starts(const char *text, const char *with) {
    while (*with) if (*text++ != *with++) return 0;
    return 1;
}

u64 number(const char **text) {
    const char *at = *text;
    int hex = starts(at, "0x");
    u64 value = 0;
    for (at += hex ? 2 : 0;; at++) {
        if (*at >= '0' && *at <= '9') value = value * (hex ? 16 : 10) + (u64)(*at - '0');
        else if (hex && *at >= 'a' && *at <= 'f') value = value * 16 + 10 + (u64)(*at - 'a');
        else break;
    }
    *text = at;
    return value;
}

void reset(void) { for (;;) outb(KEYBOARD, 0xfe); }

void acknowledge(void) {
    devices_acknowledge();
    outb(PIC1, 0x20);
    outb(PIC2, 0x20);
}

/* The first GiB, and the one below 4 GiB that holds the devices, in pages of 2 MiB. */
static void map_memory(void) {
    for (u64 i = 0; i < 512; i++) {
        low[i] = (i << 21) | 0x83;
        devices_gib[i] = (0xc0000000UL + (i << 21)) | 0x83;
    }
    level4[0] = (u64)level3 | 3;
    level3[0] = (u64)low | 3;
    level3[3] = (u64)devices_gib | 3;
    __asm__ volatile("mov %0,%%cr3" ::"r"(level4) : "memory");
}

static void catch_interrupts(void) {
    u64 handler = (u64)on_interrupt;
    for (int i = 0; i < 256; i++) {
        gates[i].offset0 = (u16)handler;
        gates[i].selector = 0x10;
        gates[i].kind = 0x8e;
        gates[i].offset1 = (u16)(handler >> 16);
        gates[i].offset2 = (u32)(handler >> 32);
    }
    struct table gate_table = {sizeof gates - 1, (u64)gates}, segment_table = {sizeof segments - 1, (u64)segments};
    __asm__ volatile("lgdt %0; lidt %1; mov $0x18,%%ax; mov %%ax,%%ss; mov %%ax,%%ds; mov %%ax,%%es;"
                     "pushq $0x10; lea 1f(%%rip),%%rax; push %%rax; lretq; 1:" ::"m"(segment_table), "m"(gate_table)
                     : "rax", "memory");
    outb(PIC1, 0x11); outb(PIC2, 0x11);
    outb(PIC1 + 1, 0x20); outb(PIC2 + 1, 0x28); /* vectors */
    outb(PIC1 + 1, 4); outb(PIC2 + 1, 2);
    outb(PIC1 + 1, 1); outb(PIC2 + 1, 1);
    u32 wanted = 4; /* the second controller */
    for (int i = 0; i < device_count; i++) if (devices[i].kind == 19) wanted |= 1u << devices[i].irq;
    outb(PIC1 + 1, (u8)~wanted);
    outb(PIC2 + 1, (u8)~(wanted >> 8));
}

void begin(const u8 *boot_parameters) {
    map_memory();
    const char *command_line = (const char *)(u64)*(const u32 *)(boot_parameters + COMMAND_LINE);
    say("tiny guest: ");
    say(command_line);
    say("\n");
    devices_find(command_line);
    catch_interrupts();
    vsock_start();
    say("tiny guest: ready\n");
    for (;;) {
        vsock_poll();
        __asm__ volatile("sti; hlt; cli");
    }
}
