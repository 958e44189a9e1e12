"""Face verification: pairs, embeddings, metrics, reports."""
