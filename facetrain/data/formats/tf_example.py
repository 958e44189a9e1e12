"""tf.Example messages: the features of a record, read by the package protobuf without TensorFlow.

Messages and field numbers: tensorflow/core/example/example.proto and feature.proto.
"""

from __future__ import annotations

from functools import cache
from typing import Any

Value = bytes | int | float
_SCHEMA = """
name: "facetrain/example.proto" package: "facetrain" syntax: "proto3"
message_type { name: "Bytes" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "Floats" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Integers" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature"
  field { name: "bytes" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".facetrain.Bytes" }
  field { name: "floats" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".facetrain.Floats" }
  field { name: "integers" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".facetrain.Integers" } }
message_type { name: "Entry"
  field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_BYTES }
  field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".facetrain.Feature" } }
message_type { name: "Features"
  field { name: "entries" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".facetrain.Entry" } }
message_type { name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".facetrain.Features" } }
"""


def read_features(message: bytes) -> dict[str, Value | None]:
    """Return the first value of each feature of an Example by its name; None for a feature without a value.

    Raises:
        ValueError: the message is damaged.
    """
    from google.protobuf.message import DecodeError

    try:
        example = _example_type().FromString(message)
    except DecodeError as error:
        raise ValueError(str(error)) from None
    return {entry.key.decode("utf-8", "replace"): _first(entry.value) for entry in example.features.entries}


def _first(feature: Any) -> Value | None:
    for values in (feature.bytes.value, feature.floats.value, feature.integers.value):
        if values:
            return values[0]
    return None


@cache
def _example_type() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    file = text_format.Parse(_SCHEMA, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("facetrain.Example"))
