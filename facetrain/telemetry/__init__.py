"""Output of a run: console, log.txt, metrics.jsonl and sinks such as TensorBoard."""
