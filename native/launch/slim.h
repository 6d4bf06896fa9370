/* The mount namespace that sandboxes' mount namespaces are copied from. */
#pragma once

/* Makes it and returns a descriptor of it, or -1 with errno: one small read-only tmpfs with `none` (a file of mode 0) and `empty` (a directory). Copying a
 * mount namespace costs per mount, and an edge's host has many. */
int slim_make(int host_proc);
