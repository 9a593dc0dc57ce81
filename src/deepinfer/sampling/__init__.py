"""From logits to tokens: filters, seeded draws and logprobs for a whole batch."""
