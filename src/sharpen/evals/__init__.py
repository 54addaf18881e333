"""Evaluation: tasks → a policy's answers → scores by the same rewards that train → figures with
intervals."""
