"""CUDA as the rooms above need it: side streams, copies in one call, page-locked memory."""
