"""The word problems and opening lines that the repository carries, and the reading of rows."""
