"""The life of a shadow as a process: how it is started, watched, spared, and ended."""
