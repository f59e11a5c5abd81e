"""The task of the recipe: mathematical data sets, answers and their scores, evaluation.

It knows nothing of FSPO, of verl's trainers or of the runner. Of the library it imports what is not of the method:
files, tables of text, intervals and the words of a problem.
"""
