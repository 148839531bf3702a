"""What grades a text: reading answers, equality of MATH answers, the rules and the judges of stories."""
