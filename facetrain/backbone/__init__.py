"""The networks that turn a face into an embedding. None of them knows of ranks, devices or precision."""
