"""Policies: whatever takes the assistant's next turn."""
