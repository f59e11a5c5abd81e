"""Runs verl's real stack (Ray, FSDP2, vLLM) on CPUs: a platform, an engine registration, a vLLM worker extension.

Nothing here is imported unless ``VERL_PLATFORM=cpu``; a GPU run never touches it.
"""
