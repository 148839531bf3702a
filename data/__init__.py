"""The word problems and opening lines that the repository carries."""
