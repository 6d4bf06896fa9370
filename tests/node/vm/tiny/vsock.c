/* virtio-vsock: one connection to port 5000 at a time, with credit; a new one replaces it, a restore cuts it. */
#include "tiny.h"

enum { VSOCK = 19, RECEIVE = 0, SEND = 1, EVENTS = 2, QUEUES = 3, CONFIG = 0x100 };
enum { REQUEST = 1, RESPONSE, RST, SHUTDOWN, RW, CREDIT_UPDATE, CREDIT_REQUEST };
enum { PORT = 5000, BUFFERS = 8, BUFFER_BYTES = 4096, WINDOW = 65536 };
struct header { u64 from, to; u32 from_port, to_port, length; u16 type, operation; u32 flags, window, taken; } PACKED;

static const struct device *device;
static struct queue queues[QUEUES];
static u8 received[BUFFERS][BUFFER_BYTES] PAGE_ALIGNED, sending[BUFFERS][BUFFER_BYTES] PAGE_ALIGNED;
static u32 events[BUFFERS];
static u16 seen[QUEUES];
static u64 own_cid, peer_cid;
static u32 peer_port, peer_window, peer_taken, taken, told, sent;
static int connected;

static void packet(u64 to, u32 to_port, u32 from_port, u16 operation, const void *data, u32 bytes) {
    struct queue *queue = &queues[SEND];
    while ((u16)(queue->available.index - queue->used.index) >= BUFFERS) __asm__ volatile("pause" ::: "memory");
    int at = queue->available.index % BUFFERS;
    struct header *head = (struct header *)sending[at];
    *head = (struct header){own_cid, to, from_port, to_port, bytes, 1, operation, operation == SHUTDOWN ? 3 : 0, WINDOW, taken};
    if (bytes) copy(head + 1, data, bytes);
    queue->descriptors[at] = (struct descriptor){(u64)head, (u32)sizeof *head + bytes, 0, 0};
    queue_offer(queue, at);
    device_notify(device, SEND);
    told = taken;
}

static void answer(u16 operation) { packet(peer_cid, peer_port, PORT, operation, 0, 0); }

/* What has no room at the other end would be lost: the connection is cut instead. */
void vsock_send(const void *data, u32 bytes) {
    const u8 *at = data;
    while (bytes && connected) {
        u32 part = bytes > BUFFER_BYTES - sizeof(struct header) ? BUFFER_BYTES - (u32)sizeof(struct header) : bytes;
        if (sent + part - peer_taken > peer_window) {
            answer(RST);
            connected = 0;
            return;
        }
        sent += part;
        packet(peer_cid, peer_port, PORT, RW, at, part);
        at += part;
        bytes -= part;
    }
}

static void offer_received(int buffer) {
    queues[RECEIVE].descriptors[buffer] = (struct descriptor){(u64)received[buffer], BUFFER_BYTES, 2, 0};
    queue_offer(&queues[RECEIVE], buffer);
}

static void on_request(const struct header *head) {
    if (head->to_port != PORT) {
        packet(head->from, head->from_port, head->to_port, RST, 0, 0);
        return;
    }
    if (connected) answer(RST);
    peer_cid = head->from;
    peer_port = head->from_port;
    taken = told = sent = 0;
    connected = 1;
    agent_reset();
    answer(RESPONSE);
}

static void on_packet(const struct header *head) {
    if (head->operation == REQUEST) {
        peer_window = head->window;
        peer_taken = head->taken;
        on_request(head);
        return;
    }
    if (!connected || head->from_port != peer_port || head->from != peer_cid) {
        if (head->operation != RST) packet(head->from, head->from_port, head->to_port, RST, 0, 0);
        return;
    }
    peer_window = head->window;
    peer_taken = head->taken;
    if (head->operation == RW) {
        taken += head->length;
        agent_take((const u8 *)(head + 1), head->length);
        if (connected && taken - told >= WINDOW / 4) answer(CREDIT_UPDATE);
    } else if (head->operation == CREDIT_REQUEST) {
        answer(CREDIT_UPDATE);
    } else if (head->operation == SHUTDOWN) {
        answer(RST);
        connected = 0;
    } else if (head->operation == RST) {
        connected = 0;
    }
}

void vsock_poll(void) {
    if (!device) return;
    struct queue *queue = &queues[EVENTS];
    for (; seen[EVENTS] != queue->used.index; seen[EVENTS]++) { /* restored: no connection is left */
        connected = 0;
        own_cid = read_register(device, CONFIG);
        queue_offer(queue, (int)queue->used.ring[seen[EVENTS] % QUEUE_SIZE].id);
    }
    queue = &queues[RECEIVE];
    for (; seen[RECEIVE] != queue->used.index; seen[RECEIVE]++) {
        int buffer = (int)queue->used.ring[seen[RECEIVE] % QUEUE_SIZE].id;
        on_packet((const struct header *)received[buffer]);
        offer_received(buffer);
        device_notify(device, RECEIVE);
    }
}

void vsock_start(void) {
    for (int i = 0; i < device_count && !device; i++) if (devices[i].kind == VSOCK) device = &devices[i];
    if (!device) return;
    device_start(device, queues, QUEUES);
    own_cid = read_register(device, CONFIG);
    for (int i = 0; i < BUFFERS; i++) {
        offer_received(i);
        queues[EVENTS].descriptors[i] = (struct descriptor){(u64)&events[i], sizeof events[i], 2, 0};
        queue_offer(&queues[EVENTS], i);
    }
    device_notify(device, RECEIVE);
    device_notify(device, EVENTS);
}
