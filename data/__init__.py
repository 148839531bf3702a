"""The data that the repository carries: word problems, made by a generator, and opening lines of stories."""
