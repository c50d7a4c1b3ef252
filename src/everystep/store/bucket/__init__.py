"""A bucket behind a run's directory: what is sent there, and what is fetched."""
