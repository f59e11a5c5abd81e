"""Runs verl's real stack (Ray, FSDP2, vLLM) on CPUs. Nothing here is imported unless ``VERL_PLATFORM=cpu``."""
