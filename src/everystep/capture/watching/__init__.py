"""What changes outside of `step()`, and how it is noticed."""
