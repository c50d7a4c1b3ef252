"""Runs on a disk: bases, manifests, epochs. Nothing is changed in place. Never imports torch."""
