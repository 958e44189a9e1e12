"""What a run tells about itself: console, metrics.jsonl, TensorBoard, log.txt."""
