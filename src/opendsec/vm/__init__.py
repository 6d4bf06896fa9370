"""Virtual machines: drivers of VMMs, guest kernels, and what every guest is told. Knows nothing of sandboxes."""
