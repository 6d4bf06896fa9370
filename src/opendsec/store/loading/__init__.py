"""How the bytes of layers get to this node: one interface (`base`), and what implements it."""
