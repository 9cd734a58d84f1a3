"""Stores: samples that lie in object stores, fetched ahead and kept on a disk of bounded size."""

from penstock.stores.disk_cache import DiskCache as DiskCache
from penstock.stores.fetcher import Fetcher as Fetcher
from penstock.stores.measured_speed import measured_speed as measured_speed
from penstock.stores.object_store import ObjectPart as ObjectPart
from penstock.stores.object_store import ObjectStore as ObjectStore
from penstock.stores.object_store import StoredObject as StoredObject
from penstock.stores.predicted import ONE_BY_ONE as ONE_BY_ONE
from penstock.stores.predicted import Reach as Reach
from penstock.stores.predicted import StoreSpeed as StoreSpeed
from penstock.stores.predicted import long_run_s as long_run_s
from penstock.stores.predicted import waits_s as waits_s
from penstock.stores.stored import Stored as Stored
from penstock.stores.stored import stored as stored
