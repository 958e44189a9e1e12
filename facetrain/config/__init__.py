"""What a run description may say, and how one is read."""
