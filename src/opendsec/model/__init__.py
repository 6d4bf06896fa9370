"""Plain values shared by every process: frozen dataclasses, no I/O, standard library only."""
