"""Python interface: train, evaluate and use models from a script or a notebook.

    import facetrain

    run = facetrain.train("quickstart", dataset="faces", train={"epochs": 2})
    facetrain.evaluate(run, "lfw", data_dir="sets")["lfw"]["accuracy"]

    model = facetrain.load_model(run)
    embedding_ND = model.embed(["a.jpg", "b.jpg"])
    model.compare("a.jpg", "b.jpg").cosine

Images are aligned face crops: files, or arrays uint8 (H, W, 3) in RGB. Every error that has to do with the input is an
exception of `facetrain.errors`. Only the watchdog of a training may end the process (`train`).
"""

from facetrain.api.dataset import Dataset
from facetrain.api.model import Comparison, Model, evaluate, load_map, load_model
from facetrain.api.runs import Run, resume, train
from facetrain.embeddings.embedding_map import EmbeddingMap

__all__ = [
    "Comparison",
    "Dataset",
    "EmbeddingMap",
    "Model",
    "Run",
    "evaluate",
    "load_map",
    "load_model",
    "resume",
    "train",
]
