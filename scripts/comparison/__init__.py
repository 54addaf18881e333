"""The jobs of `compare_commits.py`, in the order in which they run.

A job is a function from a `Workplace` to figures. To add one, write a function under
`@job(name, needs)`; `needs` names the jobs whose files it reads. Jobs use the command line only,
because the names of modules and functions differ between commits.
"""
