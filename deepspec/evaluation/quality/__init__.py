"""What answers are worth: metrics against references, task completion, repetition, and whether two ways of
decoding give the same distribution."""
