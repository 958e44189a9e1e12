"""Output of a run: console, metrics.jsonl, TensorBoard and log.txt."""
