"""Configuration files of the runner, which Hydra finds as a package."""
