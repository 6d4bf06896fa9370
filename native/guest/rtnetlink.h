/* Addresses of a link, by rtnetlink(7): ioctl(2) sees only those with the link's own label. */
#ifndef OPENDSEC_RTNETLINK_H
#define OPENDSEC_RTNETLINK_H

#include <netinet/in.h>
#include <stdbool.h>

/* All IPv4 addresses of the link, and with the last one its IPv4 routes. False with errno. */
bool addresses_remove(unsigned link);
bool address_add(unsigned link, struct in_addr address, int prefix);

#endif
