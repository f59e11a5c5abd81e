"""FSPO's trainers and workers in the runner's care: the only part of the trainer that imports the runner.

Importing :mod:`recipe.fspo.in_runner.trainer` replaces the plain trainers in verl's registry.
"""
