"""The way of gradients and state into the ring: when they leave, and how long their memory is kept."""
