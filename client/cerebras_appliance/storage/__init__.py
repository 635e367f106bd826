"""Readers, writers and deleters of checkpoints, by path: files only, not S3."""

from cerebras_appliance.storage.base_storage import StorageDeleter, StorageReader, StorageWriter
from cerebras_appliance.storage.h5_storage import H5Deleter, H5Reader, H5Writer
from cerebras_appliance.storage.s3_storage import S3Deleter, S3Reader, S3Writer

__all__ = [
    "H5Deleter",
    "H5Reader",
    "H5Writer",
    "S3Deleter",
    "S3Reader",
    "S3Writer",
    "StorageDeleter",
    "StorageReader",
    "StorageWriter",
]
