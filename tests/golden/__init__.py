"""Small stores of this format, written once and read by every later version."""
