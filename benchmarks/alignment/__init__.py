"""``python -m benchmarks.alignment``: how far clipping turns a checkpoint's policy gradient."""
