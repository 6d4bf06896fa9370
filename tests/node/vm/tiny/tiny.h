/* A guest without an operating system, for VMMs on hosts whose KVM cannot run Linux.
 *
 * start.c takes the processor over, virtio.c finds and drives devices, vsock.c keeps one connection, agent.c speaks as
 * much of the guest protocol as an edge needs to believe it talks to an agent, and runs a few commands of its own.
 * Everything a VMM does is real; only what would be Linux is not. It refuses what it does not know, never pretends.
 */
#ifndef TINY_H
#define TINY_H

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

#define PACKED __attribute__((packed))
#define PAGE_ALIGNED __attribute__((aligned(4096)))
#define BARRIER() __asm__ volatile("mfence" ::: "memory")

static inline void outb(u16 port, u8 value) { __asm__ volatile("outb %0,%1" ::"a"(value), "d"(port)); }
static inline void copy(void *to, const void *from, u64 bytes) { __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes)::"memory"); }
static inline void clear(void *to, u64 bytes) { __asm__ volatile("rep stosb" : "+D"(to), "+c"(bytes) : "a"(0) : "memory"); }

/* start.c */
void say(const char *text);
u64 number(const char **text);
int starts(const char *text, const char *with);
void reset(void);

/* virtio.c */
enum { QUEUE_SIZE = 16, DEVICES = 12 };
struct descriptor { u64 address; u32 length; u16 flags, next; };
struct queue {
    struct descriptor descriptors[QUEUE_SIZE];
    struct { u16 flags; volatile u16 index; u16 ring[QUEUE_SIZE]; } available;
    u8 gap[4096 - QUEUE_SIZE * 16 - 4 - 2 * QUEUE_SIZE];
    struct { u16 flags; volatile u16 index; struct { u32 id, length; } ring[QUEUE_SIZE]; } used;
} PAGE_ALIGNED;
struct device { volatile u8 *registers; int irq; u32 kind; };
extern struct device devices[DEVICES];
extern int device_count;
u32 read_register(const struct device *device, u32 offset);
void device_start(const struct device *device, struct queue *queues, int count);
void device_notify(const struct device *device, int queue);
void queue_offer(struct queue *queue, int first);
void devices_acknowledge(void);
void devices_find(const char *command_line);
int disk_transfer(u64 disk, u32 kind, u64 sector, void *data, u32 bytes); /* 0: done */

/* vsock.c */
void vsock_start(void);
void vsock_poll(void);
void vsock_send(const void *data, u32 bytes);

/* agent.c */
void agent_reset(void);
void agent_take(const u8 *data, u32 bytes);

#endif
