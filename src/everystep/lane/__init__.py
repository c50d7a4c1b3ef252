"""How records travel: shared memory, the ring in it, and the control channel. Never imports torch."""
