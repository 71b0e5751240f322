"""What the verbs of the manager do to a sequence: step, rewind, share, load."""
