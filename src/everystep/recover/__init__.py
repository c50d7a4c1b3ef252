"""Finding the newest point that can be brought back, and loading it into live tensors."""
