/* User namespaces of sandboxes, kept: one per range of ids. */
#pragma once

#include "launch/sandbox.h"

#include <stdint.h>

/* How many to keep, at most 1024. */
void userns_keep(unsigned limit);

/* The user namespace that maps `count` ids from 0 inside to `outside` on the host, in which no further user namespace can be made. The descriptor stays
 * this file's. -1: errno says why.
 *
 * Making one costs 150 us. A sandbox that comes after another in the same range gets the same one: it has the same rights over the same ids, and nothing
 * of the one before is left in it, because its processes are gone and the filter refuses keyrings. */
int userns_get(const struct host *host, uint32_t outside, uint32_t count);
