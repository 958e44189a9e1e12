"""Output of a run: console, log.txt, metrics.jsonl, TensorBoard and Weights & Biases."""
