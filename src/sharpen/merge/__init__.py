"""Merging models: methods as pure tensor functions, streamed over safetensors files.

`recipe` reads the YAML, `plan` checks the models and lists the tensors to make, `stream` makes
them, `methods` holds the mathematics on `tiles`.
"""
