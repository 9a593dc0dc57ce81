"""Text and conversations on one side, token ids on the other."""
