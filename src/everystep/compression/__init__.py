"""Gradient compression that training and the log share: what the optimizer consumes is what is logged."""
