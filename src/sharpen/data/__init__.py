"""Data in and out: convert foreign files to rows, check rows, build data sets, choose rows.

`importing` and `importers` convert, `check` and `overlap` validate, `generate` and `procedural`
create tasks and dialogs, `sources` reads data sets by name, `coreset` and `replay` choose the rows
to train on.
"""
