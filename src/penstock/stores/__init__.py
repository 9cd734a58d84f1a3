"""Stores: samples that lie in object stores, fetched ahead and kept on a disk of bounded size."""

from penstock.stores.disk_cache import DiskCache as DiskCache
from penstock.stores.fetcher import Fetcher as Fetcher
from penstock.stores.object_store import ObjectPart as ObjectPart
from penstock.stores.object_store import ObjectStore as ObjectStore
from penstock.stores.object_store import StoredObject as StoredObject
from penstock.stores.stored import Stored as Stored
from penstock.stores.stored import stored as stored
