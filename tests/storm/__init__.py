"""Training programs drawn from a seed, run unbroken and broken, compared in every bit."""
