"""Checkpoints: what this recipe adds to verl's, whether one can be resumed, and room on the disk for the next."""
