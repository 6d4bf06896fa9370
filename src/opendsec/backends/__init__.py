"""Kinds of isolation, strangers to each other behind one interface (`base`)."""
