"""Evaluation: tasks → answers → scores by the rewards that train → figures with intervals."""
