"""``python -m recipe.fspo.alignment``: how far clipping turns a checkpoint's policy gradient."""
