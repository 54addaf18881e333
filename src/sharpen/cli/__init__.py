"""The `sharpen` command. One small file a verb; `main` loads a verb's file only when it is used."""
