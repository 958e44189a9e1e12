"""Reads or writes RecordIO with mxnet.recordio and prints the result as JSON; run in MXNet's environment."""

import hashlib
import json
import sys

import mxnet as mx


def describe(header, payload):
    labels = [float(header.label)] if header.flag == 0 else [float(x) for x in header.label]
    return {
        "flag": header.flag, "labels": labels, "id": header.id, "id2": header.id2,
        "sha256": hashlib.sha256(payload).hexdigest(), "bytes": len(payload),
    }  # fmt: skip


def read_indexed(rec, idx):
    reader = mx.recordio.MXIndexedRecordIO(idx, rec, "r")
    return {key: describe(*mx.recordio.unpack(reader.read_idx(key))) for key in reader.keys}


def read_sequential(rec):
    reader = mx.recordio.MXRecordIO(rec, "r")
    return [describe(*mx.recordio.unpack(item)) for item in iter(reader.read, None)]


def read_as_insightface(rec, idx):
    """Read like arcface_torch: the key range of record 0 or else all keys; label[0] of a vector."""
    reader = mx.recordio.MXIndexedRecordIO(idx, rec, "r")
    header, _ = mx.recordio.unpack(reader.read_idx(0))
    keys = range(1, int(header.label[0])) if header.flag > 0 else list(reader.keys)
    seen = []
    for key in keys:
        header, payload = mx.recordio.unpack(reader.read_idx(key))
        label = header.label if isinstance(header.label, (int, float)) else header.label[0]
        seen.append([int(label), hashlib.sha256(payload).hexdigest()])
    return seen


def write(rec, idx, records):
    writer = mx.recordio.MXIndexedRecordIO(idx, rec, "w")
    for key, flag, labels, payload in records:
        label = labels[0] if flag == 0 else labels
        header = mx.recordio.IRHeader(flag, label, key, 0)
        writer.write_idx(key, mx.recordio.pack(header, bytes.fromhex(payload)))
    writer.close()


if __name__ == "__main__":
    task = json.load(sys.stdin)
    json.dump(globals()[task["do"]](*task["with"]), sys.stdout)
