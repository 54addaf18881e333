"""The settings of training runs, one file per method.

Nothing here imports torch: recipes and command lines are checked before anything heavy is loaded.
"""
