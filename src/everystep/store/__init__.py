"""Runs on a disk: bases, manifests, terms. Nothing is changed in place. Never imports torch."""
