"""Sharpen."""
