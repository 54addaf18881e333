"""Generators: data that is made here, with its answers verified."""
