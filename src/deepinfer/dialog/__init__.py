"""Conversations through the engine: messages in, answers out (`chat`), protocol bodies in, protocol
bodies out (`protocol`).

`deepinfer.chat` knows the format and no engine; this package joins the two and stays free of torch.
"""
