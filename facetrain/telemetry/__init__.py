"""Output of a run: console, log.txt, metrics.jsonl, TensorBoard, Weights & Biases and MLflow."""
