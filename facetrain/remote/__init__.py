"""Files beyond the local disk: addresses, file systems of object stores and of the Hugging Face Hub.

Nothing here imports fsspec, s3fs, gcsfs or huggingface_hub before an address is used.
"""
