"""What ``python -m recipe.runner.plan`` computes: memory, batch arithmetic and time of a run that has not started.

Nothing here imports verl, ray or vllm.
"""
