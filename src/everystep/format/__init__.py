"""Values to bytes and back. Never opens a file. docs/FORMAT.md is the specification."""
