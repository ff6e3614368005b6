"""Reads job directories and reports them as summaries, sentences, tables, figures and one HTML
page."""
