"""Figures of the chapters: one style, one palette, legible on a light and on a dark page."""
