"""The specification's own names, as thin adapters over the rest of Sharpen.

Users import them from the package: `from sharpen import ModelMerger`. The rest of Sharpen does not
use this folder. `docs/specification.md` lists every part of the specification and its file.
"""
