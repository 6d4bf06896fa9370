/* Devices of virtio's memory-mapped kind, version 2: found on the command line, queues of 16, disks read by polling. */
#include "tiny.h"

enum { MAGIC = 0x00, KIND = 0x08, DEVICE_FEATURES = 0x10, DEVICE_SELECT = 0x14, DRIVER_FEATURES = 0x20, DRIVER_SELECT = 0x24,
       QUEUE_SELECT = 0x30, QUEUE_NUMBER = 0x38, QUEUE_READY = 0x44, NOTIFY = 0x50, INTERRUPT = 0x60, ACKNOWLEDGE = 0x64,
       STATUS = 0x70, DESCRIPTORS = 0x80, AVAILABLE = 0x90, USED = 0xa0 };
enum { VIRTIO_MAGIC = 0x74726976, BLOCK = 2, MAX_DISKS = 4 };

struct device devices[DEVICES];
int device_count;
static struct queue disk_queues[MAX_DISKS];
static const struct device *disks[MAX_DISKS];
static u64 disk_count;

u32 read_register(const struct device *device, u32 offset) { return *(volatile u32 *)(device->registers + offset); }
static void write_register(const struct device *device, u32 offset, u32 value) { *(volatile u32 *)(device->registers + offset) = value; }

static void write_address(const struct device *device, u32 offset, const volatile void *address) {
    write_register(device, offset, (u32)(u64)address);
    write_register(device, offset + 4, (u32)((u64)address >> 32));
}

void device_start(const struct device *device, struct queue *queues, int count) {
    write_register(device, STATUS, 0);
    write_register(device, STATUS, 1);
    write_register(device, STATUS, 3);
    write_register(device, DRIVER_SELECT, 1);
    write_register(device, DRIVER_FEATURES, 1); /* VIRTIO_F_VERSION_1 */
    write_register(device, DRIVER_SELECT, 0);
    write_register(device, DRIVER_FEATURES, 0);
    write_register(device, STATUS, 11);
    for (int i = 0; i < count; i++) {
        write_register(device, QUEUE_SELECT, (u32)i);
        write_register(device, QUEUE_NUMBER, QUEUE_SIZE);
        write_address(device, DESCRIPTORS, queues[i].descriptors);
        write_address(device, AVAILABLE, &queues[i].available);
        write_address(device, USED, &queues[i].used);
        write_register(device, QUEUE_READY, 1);
    }
    write_register(device, STATUS, 15);
}

void device_notify(const struct device *device, int queue) { write_register(device, NOTIFY, (u32)queue); }

void queue_offer(struct queue *queue, int first) {
    queue->available.ring[queue->available.index % QUEUE_SIZE] = (u16)first;
    BARRIER();
    queue->available.index++;
    BARRIER();
}

void devices_acknowledge(void) {
    for (int i = 0; i < device_count; i++) write_register(&devices[i], ACKNOWLEDGE, read_register(&devices[i], INTERRUPT));
}

void devices_find(const char *command_line) {
    for (const char *at = command_line; *at && device_count < DEVICES; at++) {
        if (!starts(at, "virtio_mmio.device=")) continue;
        while (*at && *at != '@') at++;
        if (!*at++) return;
        struct device *device = &devices[device_count];
        device->registers = (volatile u8 *)number(&at);
        at++;
        device->irq = (int)number(&at);
        if (read_register(device, MAGIC) != VIRTIO_MAGIC) continue;
        device->kind = read_register(device, KIND);
        device_count++;
        if (device->kind == BLOCK && disk_count < MAX_DISKS) {
            device_start(device, &disk_queues[disk_count], 1);
            disks[disk_count++] = device;
        }
        if (!*at) return;
    }
}

int disk_transfer(u64 disk, u32 kind, u64 sector, void *data, u32 bytes) {
    static struct { u32 kind, zero; u64 sector; } request;
    static volatile u8 status;
    if (disk >= disk_count) return 255;
    struct queue *queue = &disk_queues[disk];
    request.kind = kind;
    request.sector = sector;
    status = 254;
    u16 into = kind == 1 ? 0 : 2; /* the device writes, unless the disk is written */
    queue->descriptors[0] = (struct descriptor){(u64)&request, sizeof request, 1, 1};
    queue->descriptors[1] = (struct descriptor){(u64)data, bytes, (u16)(1 | into), 2};
    queue->descriptors[2] = (struct descriptor){(u64)&status, 1, 2, 0};
    u16 before = queue->used.index;
    queue_offer(queue, 0);
    device_notify(disks[disk], 0);
    while (queue->used.index == before) __asm__ volatile("pause" ::: "memory");
    return status;
}
