"""What the planner computes: memory, batch arithmetic and GPU hours of a run that has not started.

Nothing here imports verl, ray or vllm.
"""
