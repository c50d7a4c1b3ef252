"""Replaying steps through torch: optimizers rebuilt from their description, calls applied to tensors."""
