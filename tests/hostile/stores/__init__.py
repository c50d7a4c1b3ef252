"""Stores that are valid in every checksum and say something hostile: whoever opens one is not harmed."""
