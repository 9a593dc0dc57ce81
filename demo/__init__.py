"""Recipe of the demonstration model: data, tokenizer, training and export."""
