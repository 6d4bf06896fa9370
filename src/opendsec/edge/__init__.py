"""One process per kernel that runs sandboxes: admission, life, commands, their output, and what survives its death."""
