"""Writes or reads datasets with the original libraries and prints the result as JSON; run in their environment."""

import hashlib
import io
import json
import sys


def images():
    """Return (label, name, PNG) of the images that every format is written from."""
    import numpy as np
    from PIL import Image

    rng, found = np.random.default_rng(5), []
    for number in range(60):
        file = io.BytesIO()
        # Of many sizes: small values lie in the pages of LMDB, large ones outside.
        side = 4 + 3 * (number % 20)
        Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file, "PNG")
        found.append((number * 7 % 5, f"{number:03}.png", file.getvalue()))
    return found


def expected():
    return [[label, hashlib.sha256(data).hexdigest()] for label, _, data in images()]


def write_lmdb(path):
    """Write as imagelist2lmdb.py of HaiyuWu's trainers does: several transactions, then the keys."""
    import lmdb
    import msgpack

    database, rows = lmdb.open(path, subdir=False, map_size=1 << 28, meminit=False, map_async=True), images()
    transaction = database.begin(write=True)
    for number, (label, _, data) in enumerate(rows):
        transaction.put(f"{number}".encode("ascii"), msgpack.dumps((data, int(label))))
        if number % 10 == 0:
            transaction.commit()
            transaction = database.begin(write=True)
    transaction.commit()
    with database.begin(write=True) as transaction:
        transaction.put(
            b"__keys__", msgpack.dumps([f"{number}".encode("ascii") for number in range(len(rows))])
        )
        transaction.put(b"__len__", msgpack.dumps(len(rows)))
        transaction.put(b"__classnum__", msgpack.dumps(5))
    database.sync()
    database.close()
    return expected()


def write_webdataset(folder):
    import webdataset

    with webdataset.ShardWriter(f"{folder}/%06d.tar.gz", maxcount=25, verbose=0) as shards:
        for label, name, data in images():
            shards.write({"__key__": f"set/{name[:3]}", "png": data, "cls": label, "json": {"source": name}})
    return expected()


def read_webdataset(folder):
    import glob

    import webdataset

    shards = webdataset.WebDataset(sorted(glob.glob(f"{folder}/*.tar")), shardshuffle=False)
    found = []
    for sample in shards:
        suffix = next(key for key in ("png", "jpg") if key in sample)
        found.append([int(sample["cls"]), hashlib.sha256(sample[suffix]).hexdigest()])
    return found


def write_hub_parquet(folder):
    import datasets

    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list("abcde"))}
    )
    rows = [{"image": {"bytes": data, "path": name}, "label": label} for label, name, data in images()]
    datasets.Dataset.from_list(rows, features=features).to_parquet(f"{folder}/train.parquet", batch_size=7)
    return expected()


def read_hub_parquet(folder):
    import datasets

    found = datasets.load_dataset(
        "parquet", data_files=f"{folder}/*.parquet", split="train", cache_dir=f"{folder}/cache"
    )
    names = found.features["label"].names
    found = found.cast_column("image", datasets.Image(decode=False))
    rows = [[row["label"], hashlib.sha256(row["image"]["bytes"]).hexdigest()] for row in found]
    return [names, rows]


if __name__ == "__main__":
    task = json.load(sys.stdin)
    json.dump(globals()[task["do"]](*task["with"]), sys.stdout)
