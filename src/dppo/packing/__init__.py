"""Dense prompt packing: ragged rows into bins in which almost every token is a real one."""

from dppo.packing.bins import Packing, bucket, pack

__all__ = ["Packing", "bucket", "pack"]
