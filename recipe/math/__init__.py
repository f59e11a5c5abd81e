"""Mathematics as a task: answers and their judging, data sets, evaluation, and the reward function that verl calls.

It knows nothing of FSPO or of what runs it: any recipe of verl's can train with it.
"""
