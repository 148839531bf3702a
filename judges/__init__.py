"""Judges that score stories: what they read and say, the endpoint they speak to, the rules below them, their report."""
