"""Data: the word problems and opening lines that the repository carries, and the reading of everybody's own."""
