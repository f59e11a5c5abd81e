"""What ``python -m recipe.fspo.plan`` computes: memory, batch arithmetic and time of a run that has not started.

Nothing here imports verl, ray or vllm.
"""
