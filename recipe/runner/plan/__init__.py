"""What the planner computes: memory and batch arithmetic of a run that has not started.

Nothing here imports verl, ray or vllm.
"""
