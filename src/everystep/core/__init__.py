"""Pure values and decisions. Never imports torch, never touches files, clocks or processes."""
