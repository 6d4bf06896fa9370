/* Ports without connections (virtio-serial, a tty) and vsock: what differs from a Unix socket. */
#ifndef OPENDSEC_SERIAL_H
#define OPENDSEC_SERIAL_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/socket.h>

enum { SERIAL_STUCK_MS = 1000 };

bool serial_open(const char *path);
/* The connection on the port has ended; another is awaited on the same descriptor. */
void serial_closed(int fd);
/* How many bytes to skip to where a HELLO may begin (all but an incomplete one, when there is none). */
size_t serial_hunt(const char *bytes, size_t length);

int vsock_listen(unsigned port);
bool serial_is_host(const struct sockaddr_storage *peer);

#endif
