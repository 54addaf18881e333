"""One file for each family of foreign formats; `sharpen.data.importing` finds and runs them."""
