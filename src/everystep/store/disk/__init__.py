"""Bytes of a run on a disk: how they are read, written and made durable."""
