"""Every operation of the model: a definition in plain torch, and faster forms behind one table."""
